"""Which parameters share a curvature block, and a block's parameters as one matrix; NumPy only, for both ends.

The matrix of a block, ``W``, is ``(rows, width)``: one row for each output of the layer, one column for each input that
``P`` ``(width, width)`` knows, and a last column for the bias if the layer has one.

=====================  =================================  ==============================================
layer                  weight                             ``W``
=====================  =================================  ==============================================
linear                 (out, in)                          weight, then the bias as last column
convolution            (out, in, kernel, kernel)          weight flattened to (out, in kernel kernel), bias
transposed weight      (in, out)                          weight', bias
parameter vector       (d,)                               one row
=====================  =================================  ==============================================
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedapps.curvature.packing import triangle_size, triangle_width
from fedapps.errors import CurvatureError, MessageError, explain

Array = NDArray[Any]


@dataclass(frozen=True)
class BlockSpec:
    """One curvature block: the parameters of one layer.

    Attributes:
        layer: Name of the layer in the model.
        parameters: Name of the weight, followed by the name of the bias if the block has it.
        rows: Outputs of the layer.
        width: Inputs, the bias's column included; ``P`` is ``(width, width)``.
        transposed: The weight is stored as ``(in, out)``.
    """

    layer: str
    parameters: tuple[str, ...]
    rows: int
    width: int
    transposed: bool = False

    def __post_init__(self) -> None:
        if len(self.parameters) not in (1, 2) or self.rows < 1 or self.width < len(self.parameters):
            raise MessageError(
                explain(
                    f"layer '{self.layer}'",
                    expected="a weight and at most one bias, with rows >= 1 and a width that holds them",
                    got=f"parameters {self.parameters}, {self.rows} rows, width {self.width}",
                    do="describe one layer in each block",
                )
            )

    def where(self, who: str) -> str:
        """Name the block for messages.

        Args:
            who: Whose block, such as ``"client 3"``; may be empty.

        Returns:
            ``"layer 'fc1', client 3"``.
        """
        return f"layer '{self.layer}', {who}" if who else f"layer '{self.layer}'"


@dataclass(frozen=True)
class Layout:
    """Which trainable parameters of a model are preconditioned, and which averaged.

    Attributes:
        blocks: The curvature blocks, in the order of the model.
        averaged: Name of every other trainable parameter -> why it has no block.
    """

    blocks: tuple[BlockSpec, ...]
    averaged: Mapping[str, str] = field(default_factory=dict)

    @property
    def preconditioned(self) -> tuple[str, ...]:
        """Names of the parameters that have a block."""
        return tuple(name for spec in self.blocks for name in spec.parameters)

    def report(self) -> str:
        """Say which parameters are preconditioned and which averaged.

        Returns:
            A line for each parameter.
        """
        lines = [
            f"{name}: preconditioned, block {spec.width} x {spec.width}"
            for spec in self.blocks
            for name in spec.parameters
        ]
        return "\n".join(lines + [f"{name}: averaged ({reason})" for name, reason in self.averaged.items()])

    def to_json(self) -> str:
        """Write the layout as text for a message; `layout_from_json` reads it.

        Returns:
            JSON.
        """
        return json.dumps({"blocks": [asdict(spec) for spec in self.blocks], "averaged": dict(self.averaged)})


@dataclass(frozen=True, eq=False)
class Block:
    """What a client sends for one block.

    Attributes:
        spec: The block.
        curvature: ``P`` that the last local step divided by, packed, ``(width (width + 1) / 2,)``.
        product: ``M = (W_i - W) P``, ``(rows, width)``.
    """

    spec: BlockSpec
    curvature: Array
    product: Array


def layout_from_json(text: str, who: str) -> Layout:
    """Read a layout that `Layout.to_json` wrote.

    Args:
        text: JSON from a message.
        who: Whose message, for the error.

    Returns:
        The layout.

    Raises:
        MessageError: The text is not a layout.
    """
    try:
        content = json.loads(text)
        blocks = tuple(_spec_from_json(entry) for entry in content["blocks"])
        averaged = {str(name): str(reason) for name, reason in content["averaged"].items()}
    except (ValueError, TypeError, KeyError, AttributeError) as problem:
        raise MessageError(
            explain(
                f"{who}, layout",
                expected="what Layout.to_json writes",
                got=f"{text[:80]!r} ({type(problem).__name__}: {problem})",
                do="run the same fedapps version on both ends",
            )
        ) from problem
    return Layout(blocks, averaged)


def _spec_from_json(entry: Mapping[str, Any]) -> BlockSpec:
    for name, kind in {"layer": str, "parameters": list, "rows": int, "width": int, "transposed": bool}.items():
        # `type`, not `isinstance`: True is an int.
        if type(entry[name]) is not kind:
            raise TypeError(f"{name} = {entry[name]!r}")
    if not all(isinstance(name, str) for name in entry["parameters"]):
        raise TypeError(f"parameters = {entry['parameters']!r}")
    return BlockSpec(**{**entry, "parameters": tuple(entry["parameters"])})


def check_block(block: Block, who: str) -> None:
    """Check what a client sent for a block: shapes and finite numbers.

    Args:
        block: The block, with the spec that the receiver expects.
        who: Whose block, for messages.

    Raises:
        MessageError: ``P`` or ``M`` has another shape, or a number is not finite.
    """
    spec = block.spec
    if block.curvature.shape != (triangle_size(spec.width),):
        raise _misshapen(spec, who, "P", (spec.width, spec.width), _unpacked_shape(block.curvature))
    if block.product.shape != (spec.rows, spec.width):
        raise _misshapen(spec, who, "M", (spec.rows, spec.width), f"{block.product.shape}")
    for name, values in (("P", block.curvature), ("M", block.product)):
        if not np.isfinite(values).all():
            raise MessageError(
                explain(
                    spec.where(who),
                    expected=f"finite numbers in {name}",
                    got=f"{int(values.size - np.isfinite(values).sum())} of {values.size} that are NaN or infinite",
                    do="lower the learning rate or raise the damping on that client",
                )
            )


def to_matrix(arrays: Mapping[str, Array], spec: BlockSpec, who: str = "") -> Array:
    """Lay a block's parameters out as its matrix.

    Args:
        arrays: Parameters by name, at least those of the block.
        spec: The block.
        who: Whose parameters, for messages.

    Returns:
        ``W`` ``(rows, width)``, a copy.

    Raises:
        MessageError: A parameter is missing or its shape does not fit the block.
    """
    weight, bias = _parameters(arrays, spec, who)
    return np.concatenate([weight.reshape(spec.rows, -1), *bias], axis=1)


def from_matrix(W: Array, spec: BlockSpec, like: Mapping[str, Array]) -> dict[str, Array]:
    """Cut a block's matrix into its parameters; the inverse of `to_matrix`.

    Args:
        W: ``(rows, width)``.
        spec: The block.
        like: Tensors of the model by name, for the shapes and dtypes.

    Returns:
        Name -> parameter, in the shape and dtype of ``like``.

    Raises:
        MessageError: ``W`` or a tensor of ``like`` does not fit the block.
    """
    weight, bias = _parameters(like, spec, "")
    if W.shape != (spec.rows, spec.width):
        raise _misshapen(spec, "", "W", (spec.rows, spec.width), f"{W.shape}")
    new_weight = W[:, : spec.width - len(bias)].reshape(weight.shape)
    parts = [new_weight.T if spec.transposed else new_weight, *([W[:, -1]] if bias else [])]
    # In C order: a view of W with its last column cut off would travel as a strided array.
    return {name: part.astype(like[name].dtype, order="C") for name, part in zip(spec.parameters, parts, strict=True)}


def _parameters(arrays: Mapping[str, Array], spec: BlockSpec, who: str) -> tuple[Array, list[Array]]:
    """Give the weight, rows first, and the bias, if any, as a column ``(rows, 1)``."""
    for name in spec.parameters:
        if name not in arrays:
            raise MessageError(
                explain(
                    spec.where(who),
                    expected=f"a parameter '{name}'",
                    got=f"a model without it ({len(arrays)} tensors)",
                    do="build the same model on both ends",
                )
            )
    tensors = [arrays[name] for name in spec.parameters]
    weight, bias = tensors[0].T if spec.transposed else tensors[0], tensors[1:]
    fits = weight.size == spec.rows * (spec.width - len(bias)) and (weight.ndim == 1 or len(weight) == spec.rows)
    if not fits or any(tensor.shape != (spec.rows,) for tensor in bias):
        got = " and ".join(f"'{name}' {tensor.shape}" for name, tensor in zip(spec.parameters, tensors, strict=True))
        raise _misshapen(spec, who, "parameters that make a matrix", (spec.rows, spec.width), got)
    return weight, [tensor[:, None] for tensor in bias]


def _unpacked_shape(packed: Array) -> str:
    if packed.ndim == 1:
        try:
            width = triangle_width(packed.size)
        except CurvatureError:
            return f"{packed.size} numbers, which are no triangle"
        return f"{(width, width)}"
    return f"an array of shape {packed.shape} that is not packed"


def _misshapen(spec: BlockSpec, who: str, what: str, expected: tuple[int, int], got: str) -> MessageError:
    return MessageError(
        explain(
            spec.where(who),
            expected=f"{what} of shape {expected}",
            got=got,
            do="fold the bias on both ends or on neither",
        )
    )
