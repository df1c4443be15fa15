r"""Layer types that have a curvature block, and which parameters of a model they cover.

A layer type is one function: the input of one forward call as rows ``(rows, in)`` such that the layer computes
``rows @ weight' + bias`` for each. Support for another one is a few lines, here for a weight that is stored as ``(in, out)``::

    @register_layer(MyLinear, transposed=True)
    def my_rows(module: MyLinear, x: torch.Tensor) -> torch.Tensor:
        return x.flatten(0, -2)

It belongs in the module that defines the model, such as that of a task of one's own: every client process must import it, and
takes plain gradient steps with the layers of a type that is not registered there. Rows that do not fit the layer's weight are
refused with the layer's name; only whether a square weight is transposed cannot be seen from its shape.

Linear layers, convolutions in one to three dimensions of any geometry and number of groups, and transformers' ``Conv1D`` are
known.

A bias is folded in as a trailing 1 of every row, for all types alike. A parameter has no block, and is averaged, if its
layer has no registered type or an option that the type does not know, if it belongs to two layers (tied weights stay tied),
if its weight is frozen while its bias is not, or if the layer may compute something else than its type does: one that is
compiled, or of which a method behind ``forward`` was replaced.

Positions that hold no data, such as padding, are inputs of a layer like any other. `count_only` leaves them out of the rows.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple, TypeVar

import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from fedapps.curvature.convolutions import Convolution, conv_moment, conv_rows, num_positions
from fedapps.curvature.layout import BlockSpec, Layout
from fedapps.errors import CurvatureError

Rows = Callable[..., torch.Tensor]
"""``(module, input) -> (rows, in)``."""

RowsT = TypeVar("RowsT", bound=Rows)


SHARED = "shared by several layers"
"""Why a tied parameter has no block: it would need one matrix for inputs of different layers."""

COMPILED = "compiled by torch.compile, which need not show what a layer sees"
"""Why a layer in compiled code has no block: hooks that come after the compilation may not be called."""

_counting: ContextVar[torch.Tensor | None] = ContextVar("_counting", default=None)
"""The positions that `count_only` has set, ``(n, ...)``."""


@contextmanager
def count_only(positions: torch.Tensor) -> Iterator[None]:
    """Say, around a forward pass, which positions of its inputs are data; no other becomes a row of a curvature block.

    It belongs where the model is called, such as the ``forward`` of a model or the ``loss`` of a task of one's own::

        with count_only(tokens != PAD):
            hidden = self.encoder(tokens)

    It applies to each layer call whose rows come position by position: input ``(n, length, ..., in)`` or
    ``(n * length, in)``, and convolutions with as many output positions. Of all other calls, as that of a head on
    ``(n, in)``, every row counts.

    Args:
        positions: Whether a position is data, bool ``(n, length)``, or of more dimensions, in the order in which the layers
            see them: ``(length, n)`` for a model whose batch is its second dimension.
    """
    token = _counting.set(positions.detach().bool())
    try:
        yield
    finally:
        _counting.reset(token)


@dataclass(frozen=True)
class LayerType:
    """How layers of one type are preconditioned.

    Attributes:
        rows: Gives the rows of one forward call, ``(rows, in)``, or ``(groups, rows, in)`` for a type with groups. With
            ``num_rows`` it takes the numbers of the rows to give as third argument, or None for all.
        refuse: ``module -> reason`` for modules of the type that have no block all the same, or None.
        transposed: The weight is stored as ``(in, out)``.
        groups: ``module -> number of groups``, for a type whose outputs come in groups with inputs of their own.
        num_rows: ``(module, input) -> number of rows``, where that is known without computing them.
        moment: ``(module, input, bias) -> rows' rows`` ``(groups, width, width)``, where that is cheaper than from the rows;
            ``bias`` says whether the rows end with a 1.
    """

    rows: Rows
    refuse: Callable[..., str | None] | None = None
    transposed: bool = False
    groups: Callable[..., int] | None = None
    num_rows: Callable[..., int] | None = None
    moment: Callable[..., torch.Tensor] | None = None


_LAYER_TYPES: dict[type[nn.Module], LayerType] = {}


def register_layer(
    kind: type[nn.Module],
    *,
    transposed: bool = False,
    refuse: Callable[..., str | None] | None = None,
    groups: Callable[..., int] | None = None,
    num_rows: Callable[..., int] | None = None,
    moment: Callable[..., torch.Tensor] | None = None,
) -> Callable[[RowsT], RowsT]:
    """Register the rows of a layer type; a decorator of its function, to be used in the module that defines the model.

    A subclass of ``kind`` is covered as well unless it has its own ``forward``. The other arguments are `LayerType`'s.
    """

    def register(rows: RowsT) -> RowsT:
        _LAYER_TYPES[kind] = LayerType(rows, refuse, transposed, groups, num_rows, moment)
        return rows

    return register


def _refuse_attention_output(_module: nn.Linear) -> str:
    return "MultiheadAttention reads this layer's weight without calling the layer"


@register_layer(NonDynamicallyQuantizableLinear, refuse=_refuse_attention_output)
@register_layer(nn.Linear)
def linear_rows(module: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """Give the rows ``(rows, in)`` of a linear layer: batch and any sequence positions of ``(..., in)``, flattened."""
    return x.reshape(-1, module.in_features)


def _conv_groups(module: Convolution) -> int:
    return module.groups


for _kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d):
    register_layer(_kind, groups=_conv_groups, num_rows=num_positions, moment=conv_moment)(conv_rows)


def _conv1d_rows(_module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Give the rows of GPT-2's linear layer, whose weight is ``(in, out)``."""
    return x.flatten(0, -2)


_BY_NAME = {("transformers.pytorch_utils", "Conv1D"): LayerType(_conv1d_rows, transposed=True)}
"""Types of packages that are imported by their users only: (module, class name) -> type."""


def input_rows(
    module: nn.Module, x: torch.Tensor, chosen: torch.Tensor | None = None, *, where: str = ""
) -> torch.Tensor:
    """Give the rows of one forward call of a layer, ``(groups, rows, width)`` in float32 or better, bias folded in as a last 1.

    Args:
        module: A layer with a block.
        x: Its input.
        chosen: Numbers of the rows to give, ``(k,)``; None for all.
        where: Layer and client, for messages; may be empty.

    Raises:
        CurvatureError: The rows that are registered for the type do not fit the layer's weight.
    """
    kind = _known_type(module)
    if kind.num_rows is None:
        rows = _checked_rows(module, kind.rows(module, _widened(x)), where)
        rows = rows if chosen is None else rows[:, chosen]
    else:
        count = kind.num_rows(module, x) if chosen is None else len(chosen)
        rows = _checked_rows(module, kind.rows(module, _widened(x), chosen), where, count)
    if trainable_bias(module) is None:
        return rows
    return torch.cat([rows, rows.new_ones(*rows.shape[:2], 1)], dim=2)


def count_rows(module: nn.Module, x: torch.Tensor, *, where: str = "") -> int:
    """Count the rows of one forward call of a layer; types that do not say without computing the rows compute them.

    Raises:
        CurvatureError: The rows that are registered for the type do not fit the layer's weight.
    """
    kind = _known_type(module)
    if kind.num_rows is not None:
        return kind.num_rows(module, x)
    return int(_checked_rows(module, kind.rows(module, x.detach()), where).shape[1])


def counted_rows(module: nn.Module, x: torch.Tensor, *, where: str = "") -> torch.Tensor | None:
    """Give the numbers of the rows of one forward call that hold data, ``(k,)``, by `count_only`; None if all do.

    Raises:
        CurvatureError: The positions are stated in another order than that of the layer's input.
    """
    positions = _counting.get()
    if positions is None:
        return None
    shape, count = tuple(positions.shape), count_rows(module, x, where=where)
    by_position = _known_type(module).num_rows is None  # rows are the leading dimensions of the input
    leading = tuple(x.shape[: len(shape)])
    if not by_position or leading != shape:
        if by_position and len(shape) == 2 and leading == shape[::-1] and x.dim() > 2:
            raise CurvatureError(
                f"{where}, count_only" if where else "count_only",
                expected=f"positions of shape {leading}, as the layer's input has them",
                got=f"{shape}",
                do="give them transposed: the batch is the second dimension of this model",
            )
        if count != positions.numel() or x.shape[0] not in (shape[0], count):
            return None
    every = positions.flatten().repeat_interleave(count // positions.numel())
    return every.to(x.device).nonzero()[:, 0]


def input_moment(module: nn.Module, x: torch.Tensor, *, where: str = "") -> torch.Tensor | None:
    """Sum the outer products of the rows of one forward call, ``(groups, width, width)``; None if its type has no fast way.

    Raises:
        CurvatureError: The moment that is registered for the type does not fit the layer's weight.
    """
    kind = _known_type(module)
    if kind.moment is None:
        return None
    has_bias = trainable_bias(module) is not None
    moment = kind.moment(module, _widened(x), has_bias)
    shape = _weight_shape(module, where)
    width = shape.inputs + has_bias
    if moment.shape != (shape.groups, width, width):
        raise _unfit(module, where, f"a moment of shape {(shape.groups, width, width)}", f"{tuple(moment.shape)}")
    return moment


class _WeightShape(NamedTuple):
    """A layer's weight as matrix: ``outputs`` rows in ``groups``, each with the ``inputs`` of its group, bias not counted."""

    outputs: int
    groups: int
    inputs: int


def _weight_shape(module: nn.Module, where: str) -> _WeightShape:
    """Read a layer's weight by what is registered for its type, and check that bias and groups fit it."""
    kind, weight, bias = _known_type(module), module._parameters["weight"], trainable_bias(module)
    if weight is None or (kind.transposed and weight.dim() != 2):
        got = "none" if weight is None else f"{tuple(weight.shape)} with transposed=True"
        raise _unfit(module, where, "a weight, (in, out) if it is transposed", got)
    outputs = weight.shape[1] if kind.transposed else weight.shape[0]
    if bias is not None and bias.shape != (outputs,):
        stored = "weight (in, out), as transposed=True says," if kind.transposed else "weight (out, ...)"
        got = f"weight {tuple(weight.shape)} and bias {tuple(bias.shape)}"
        raise _unfit(module, where, f"a {stored} and bias (out,)", got)
    groups = 1 if kind.groups is None else kind.groups(module)
    if groups < 1 or outputs % groups:
        raise _unfit(module, where, f"groups that divide its {outputs} outputs", f"{groups} groups")
    return _WeightShape(outputs, groups, weight.numel() // outputs)


def _checked_rows(module: nn.Module, rows: torch.Tensor, where: str, count: int | None = None) -> torch.Tensor:
    """Give the rows that a type's function made as ``(groups, rows, in)``, if they fit the layer's weight."""
    shape = _weight_shape(module, where)
    got = tuple(rows.shape) if isinstance(rows, torch.Tensor) else ()
    sizes = (1, *got) if len(got) == 2 else got
    n = sizes[1] if count is None and len(sizes) == 3 else count
    if sizes != (shape.groups, n, shape.inputs):
        dims = ["n" if count is None else str(count), str(shape.inputs)]
        expected = f"rows of shape ({', '.join(dims if shape.groups == 1 else [str(shape.groups), *dims])})"
        raise _unfit(module, where, expected, str(got) if isinstance(rows, torch.Tensor) else type(rows).__name__)
    return rows.reshape(sizes)


def _unfit(module: nn.Module, where: str, expected: str, got: str) -> CurvatureError:
    name = type(module).__name__
    return CurvatureError(
        f"{where}, {name}" if where else name,
        expected=expected,
        got=got,
        do=f"in what register_layer has for {name}, give a row for each use of the weight, as x.flatten(0, -2) does, "
        "without the bias's 1; set transposed only for a weight stored as (in, out), and groups only for grouped outputs",
    )


def _known_type(module: nn.Module) -> LayerType:
    kind = layer_type(module)
    if kind is None:
        raise TypeError(f"{type(module).__name__} has no registered rows; see register_layer")
    return kind


def _widened(x: torch.Tensor) -> torch.Tensor:
    # Half precision would lose the digits that the solve needs.
    return x.detach().to(torch.promote_types(x.dtype, torch.float32))


def layer_type(module: nn.Module) -> LayerType | None:
    """Find the registered type of a layer; None if it has none, or need not compute what its type does."""
    base = _registered_base(module)
    return None if base is None or _replaced_method(module, base) is not None else _type_of(base)


def _registered_base(module: nn.Module) -> type[nn.Module] | None:
    bases = (base for base in type(module).__mro__ if issubclass(base, nn.Module))
    return next((base for base in bases if _type_of(base) is not None), None)


def _type_of(base: type[nn.Module]) -> LayerType | None:
    return _LAYER_TYPES.get(base) or _BY_NAME.get((base.__module__, base.__name__))


def _replaced_method(module: nn.Module, base: type[nn.Module]) -> str | None:
    """Name the first method behind a call of the layer that is not its type's own; None if all are."""
    for name in _methods_behind_call(base):  # type: ignore[arg-type]  # typeshed: a class would not be hashable
        if name in module.__dict__ or getattr(type(module), name) is not getattr(base, name):
            return name
    return None


@cache
def _methods_behind_call(base: type[nn.Module]) -> tuple[str, ...]:
    """List ``forward`` and the methods of the class that it calls, directly or not, by the names in their code."""
    found, left = ["__call__"], ["forward"]
    while left:
        name = left.pop()
        found.append(name)
        code = getattr(inspect.unwrap(getattr(base, name)), "__code__", None)
        for used in code.co_names if code is not None else ():
            if used not in found + left and inspect.isfunction(getattr(base, used, None)):
                left.append(used)
    return tuple(found)


def trainable_bias(module: nn.Module) -> nn.Parameter | None:
    """Give the bias that the layer's block includes: one that is trained."""
    bias = module._parameters.get("bias")
    return bias if bias is not None and bias.requires_grad else None


def model_layout(model: nn.Module, *, max_width: int = 0) -> Layout:
    """Say which trainable parameters of a model are preconditioned and which averaged, and why. Needs no data.

    Args:
        model: The model.
        max_width: A wider layer is cut into diagonal blocks of at most this width; 0 leaves every layer whole.

    Raises:
        CurvatureError: What is registered for a layer's type does not fit its weight.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    uses = Counter(p for module in model.modules() for p in module._parameters.values() if p is not None)
    blocks: list[BlockSpec] = []
    averaged: dict[str, str] = {}
    compiled = [f"{layer}." if layer else "" for layer, module in model.named_modules() if _is_compiled(module)]
    for layer, module in model.named_modules():
        reason = _why_averaged(module, uses)
        if reason is None and f"{layer}.".startswith(tuple(compiled)):
            reason = COMPILED
        if reason is None:
            blocks.append(_spec(layer, module, names, max_width))
        covered = blocks[-1].parameters if reason is None else ()
        for parameter in module._parameters.values():
            if parameter is not None and parameter.requires_grad and names[parameter] not in covered:
                why = SHARED if uses[parameter] > 1 else reason
                averaged.setdefault(names[parameter], why or "neither weight nor bias of its layer")
    return Layout(tuple(blocks), averaged)


def _is_compiled(module: nn.Module) -> bool:
    """Whether a module was wrapped by ``torch.compile(module)``, or compiled in place by ``module.compile()``."""
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


def _why_averaged(module: nn.Module, uses: Counter[nn.Parameter]) -> str | None:
    base = _registered_base(module)
    kind = None if base is None else _type_of(base)
    if base is None or kind is None or type(module).forward is not base.forward:
        return f"{type(module).__name__} has no block"
    replaced = _replaced_method(module, base)
    if replaced is not None:
        return f"its {replaced} is not that of {base.__name__}"
    weight = module._parameters.get("weight")
    if weight is None:
        return "its layer's weight is computed from other parameters"
    if not weight.requires_grad:
        return "its layer's weight is frozen"
    if any(uses[p] > 1 for p in (weight, trainable_bias(module)) if p is not None):
        return SHARED
    return kind.refuse(module) if kind.refuse is not None else None


def _spec(layer: str, module: nn.Module, names: dict[nn.Parameter, str], max_width: int) -> BlockSpec:
    outputs, groups, inputs = _weight_shape(module, f"layer '{layer}'")
    parameters = [names[p] for p in (module._parameters["weight"], trainable_bias(module)) if p is not None]
    width = inputs + len(parameters) - 1
    return BlockSpec(
        layer,
        tuple(parameters),
        outputs,
        width,
        _known_type(module).transposed,
        groups=groups,
        cut=max_width if 0 < max_width < width else 0,
    )
