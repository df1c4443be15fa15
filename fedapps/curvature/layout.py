"""Which parameters share a curvature block, and a block's parameters as one matrix; NumPy only, for both ends.

The matrix of a block, ``W``, is ``(rows, width)``: one row for each output of the layer, one column for each input that
``P`` ``(width, width)`` knows, and a last column for the bias if the layer has one.

=====================  =================================  ==============================================
layer                  weight                             ``W``
=====================  =================================  ==============================================
linear                 (out, in)                          weight, then the bias as last column
convolution            (out, in / groups, kernel, ...)    weight flattened to (out, in / groups * kernel ...), bias
transposed weight      (in, out)                          weight', bias
parameter vector       (d,)                               one row
=====================  =================================  ==============================================

``P`` is one matrix for the whole of ``W`` in most layers. It is several, one after another, if the layer has groups (the rows
of a group share a ``P`` that knows only the inputs of the group) or if its width is cut (``P`` is block-diagonal): a *tile*
is the part of ``W`` that belongs to one of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedapps.curvature.packing import triangle_size
from fedapps.errors import MessageError

Array = NDArray[Any]


class Tile(NamedTuple):
    """The part of ``W`` that one ``P`` belongs to."""

    rows: slice  # its rows of ``W``
    columns: slice  # its columns of ``W``

    @property
    def width(self) -> int:
        """Width of its ``P``."""
        return int(self.columns.stop - self.columns.start)


LONGEST_REASON = 300
"""Characters of a reason why a parameter has no block: it comes from a client, and goes into log and rows."""


@dataclass(frozen=True)
class BlockSpec:
    """The curvature of one layer: one block, or several if the layer has groups or is cut."""

    layer: str  # name of the layer in the model
    parameters: tuple[str, ...]  # name of the weight, followed by the name of the bias if the block has it
    rows: int  # outputs of the layer
    width: int  # inputs of a group, the bias's column included; ``P`` is ``(width, width)`` if it is not cut
    transposed: bool = False  # the weight is stored as ``(in, out)``
    groups: int = 1  # groups of rows that have a ``P`` of their own each
    cut: int = 0  # largest width of a diagonal block of ``P``; 0 leaves it whole

    def __post_init__(self) -> None:
        if len(self.parameters) not in (1, 2) or self.rows < 1 or self.width < len(self.parameters):
            raise MessageError(
                f"layer '{self.layer}'",
                expected="a weight and at most one bias, with rows >= 1 and a width that holds them",
                got=f"parameters {self.parameters}, {self.rows} rows, width {self.width}",
                do="describe one layer in each block",
            )
        if self.groups < 1 or self.rows % self.groups or self.cut < 0:
            raise MessageError(
                f"layer '{self.layer}'",
                expected="groups that divide the rows, and a cut >= 0",
                got=f"{self.groups} groups of {self.rows} rows, cut {self.cut}",
                do="describe one layer in each block",
            )

    @cached_property
    def columns(self) -> tuple[slice, ...]:
        """The columns of each diagonal block of ``P``, as even as the cut allows; one slice if it is whole."""
        pieces = -(-self.width // self.cut) if self.cut else 1
        edges = [self.width * i // pieces for i in range(pieces + 1)]
        return tuple(slice(a, b) for a, b in pairwise(edges))

    @cached_property
    def tiles(self) -> tuple[Tile, ...]:
        """The parts of ``W`` that have a ``P`` of their own: group by group, and within one from left to right."""
        height = self.rows // self.groups
        rows = [slice(g * height, (g + 1) * height) for g in range(self.groups)]
        return tuple(Tile(of_group, columns) for of_group in rows for columns in self.columns)

    @property
    def curvature_size(self) -> int:
        """Numbers in the upper triangles of all blocks."""
        return sum(triangle_size(tile.width) for tile in self.tiles)

    def where(self, who: str) -> str:
        """Name the block for messages, ``"layer 'fc1', client 3"``; ``who`` may be empty."""
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

    def report(self, model: Mapping[str, Array]) -> str:
        """Say which tensors of a model are preconditioned, averaged and why, or take the maximum; a line for each treatment."""
        names: dict[str, list[str]] = {}
        blocks = {name: f"preconditioned, {describe_tiles(spec)}" for spec in self.blocks for name in spec.parameters}
        for name, value in model.items():
            other = "averaged (buffer)" if np.issubdtype(value.dtype, np.floating) else "maximum (integer buffer)"
            mean = f"averaged ({self.averaged[name]})" if name in self.averaged else other
            names.setdefault(blocks.get(name, mean), []).append(name)
        return "\n".join(f"{how}: {', '.join(tensors)}" for how, tensors in names.items())

    def to_json(self) -> str:
        """Write the layout as JSON for a message; `layout_from_json` reads it."""
        return json.dumps({"blocks": [asdict(spec) for spec in self.blocks], "averaged": dict(self.averaged)})


def describe_tiles(spec: BlockSpec) -> str:
    """Describe the shapes of a layer's blocks, for people: ``"block 5 x 5"`` or ``"2 blocks 19 x 19"``."""
    widths = sorted({tile.width for tile in spec.tiles}, reverse=True)
    shapes = " or ".join(f"{width} x {width}" for width in widths)
    return f"block {shapes}" if len(spec.tiles) == 1 else f"{len(spec.tiles)} blocks {shapes}"


def layout_from_json(text: str, who: str) -> Layout:
    """Read a layout that `Layout.to_json` wrote, from a message of ``who``, or raise a MessageError."""
    try:
        content = json.loads(text)
        blocks = tuple(_spec_from_json(entry) for entry in content["blocks"])
        averaged = {str(name): str(reason)[:LONGEST_REASON] for name, reason in content["averaged"].items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as problem:
        raise MessageError(
            f"{who}, layout",
            expected="what Layout.to_json writes",
            got=f"{text[:80]!r} ({type(problem).__name__}: {problem})",
            do="run the same fedapps version on both ends",
        ) from problem
    return Layout(blocks, averaged)


def _spec_from_json(entry: Mapping[str, Any]) -> BlockSpec:
    kinds = {"layer": str, "parameters": list, "rows": int, "width": int, "transposed": bool, "groups": int, "cut": int}
    for name, kind in kinds.items():
        # `type`, not `isinstance`: True is an int.
        if type(entry[name]) is not kind:
            raise TypeError(f"{name} = {entry[name]!r}")
    if not all(isinstance(name, str) for name in entry["parameters"]):
        raise TypeError(f"parameters = {entry['parameters']!r}")
    return BlockSpec(**{**entry, "parameters": tuple(entry["parameters"])})


def check_fits(arrays: Mapping[str, Array], spec: BlockSpec, who: str) -> None:
    """Check that a block fits a model, before anything of the block's size is made; ``who`` says whose block, for the error."""
    _parameters(arrays, spec, who)


def to_matrix(arrays: Mapping[str, Array], spec: BlockSpec, who: str = "") -> Array:
    """Lay a block's parameters out as its matrix ``W``, ``(rows, width)``, a copy; ``who`` says whose, for the error."""
    weight, bias = _parameters(arrays, spec, who)
    return np.concatenate([weight.reshape(spec.rows, -1), *bias], axis=1)


def from_matrix(W: Array, spec: BlockSpec, like: Mapping[str, Array]) -> dict[str, Array]:
    """Cut a block's matrix ``W`` into its parameters, in the shapes and dtypes of ``like``; the inverse of `to_matrix`.

    Raises:
        MessageError: ``W`` or a tensor of ``like`` does not fit the block.
    """
    weight, bias = _parameters(like, spec, "")
    if W.shape != (spec.rows, spec.width):
        raise misshapen(spec, "", f"W of shape {(spec.rows, spec.width)}", f"{W.shape}")
    new_weight = W[:, : spec.width - len(bias)].reshape(weight.shape)
    parts = [new_weight.T if spec.transposed else new_weight, *([W[:, -1]] if bias else [])]
    # In C order: a view of W with its last column cut off would travel as a strided array.
    return {name: part.astype(like[name].dtype, order="C") for name, part in zip(spec.parameters, parts, strict=True)}


def _parameters(arrays: Mapping[str, Array], spec: BlockSpec, who: str) -> tuple[Array, list[Array]]:
    """Give the weight, rows first, and the bias, if any, as a column ``(rows, 1)``."""
    for name in spec.parameters:
        if name not in arrays:
            raise MessageError(
                spec.where(who),
                expected=f"a parameter '{name}'",
                got=f"a model without it ({len(arrays)} tensors)",
                do="build the same model on both ends",
            )
    tensors = [arrays[name] for name in spec.parameters]
    weight, bias = tensors[0].T if spec.transposed else tensors[0], tensors[1:]
    fits = weight.size == spec.rows * (spec.width - len(bias)) and (weight.ndim == 1 or len(weight) == spec.rows)
    if not fits or any(tensor.shape != (spec.rows,) for tensor in bias):
        got = " and ".join(f"'{name}' {tensor.shape}" for name, tensor in zip(spec.parameters, tensors, strict=True))
        raise misshapen(spec, who, f"parameters that make a matrix of shape {(spec.rows, spec.width)}", got)
    return weight, [tensor[:, None] for tensor in bias]


def misshapen(spec: BlockSpec, who: str, expected: str, got: str) -> MessageError:
    """Compose the error for an array that does not fit its block."""
    return MessageError(spec.where(who), expected=expected, got=got, do="fold the bias on both ends or on neither")
