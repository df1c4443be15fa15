r"""Layer types that have a curvature block, and which parameters of a model they cover.

A layer type is one function: the input of one forward call as rows ``(rows, in)`` such that the layer computes
``rows @ weight' + bias`` for each. Support for another one is a few lines, here for GPT-2's ``Conv1D`` ``(in, out)``::

    @register_layer(Conv1D, transposed=True)
    def conv1d_rows(module: Conv1D, x: torch.Tensor) -> torch.Tensor:
        return x.flatten(0, -2)

A bias is folded in as a trailing 1 of every row, for all types alike. A parameter has no block, and is averaged, if its
layer has no registered type or an option that the type does not know, if it belongs to two layers (tied weights stay tied),
or if its weight is frozen while its bias is not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from fedapps.curvature.layout import BlockSpec, Layout

Rows = Callable[..., torch.Tensor]
"""``(module, input) -> (rows, in)``."""

RowsT = TypeVar("RowsT", bound=Rows)


SHARED = "shared by several layers"
"""Why a tied parameter has no block: it would need one matrix for inputs of different layers."""


@dataclass(frozen=True)
class LayerType:
    """How layers of one type are preconditioned.

    Attributes:
        rows: Gives the rows ``(rows, in)`` of one forward call.
        refuse: ``module -> reason`` for modules of the type that have no block all the same, or None.
        transposed: The weight is stored as ``(in, out)``.
    """

    rows: Rows
    refuse: Callable[..., str | None] | None
    transposed: bool


_LAYER_TYPES: dict[type[nn.Module], LayerType] = {}


def register_layer(
    kind: type[nn.Module], *, transposed: bool = False, refuse: Callable[..., str | None] | None = None
) -> Callable[[RowsT], RowsT]:
    """Register the rows of a layer type; a decorator.

    Args:
        kind: The type. A subclass is covered as well unless it has its own ``forward``.
        transposed: The weight is stored as ``(in, out)``.
        refuse: ``module -> reason`` for options that the rows do not cover; None for a module that they cover.

    Returns:
        The decorator of a function ``(module, input) -> (rows, in)``.
    """

    def register(rows: RowsT) -> RowsT:
        _LAYER_TYPES[kind] = LayerType(rows, refuse, transposed)
        return rows

    return register


def _refuse_attention_output(_module: nn.Linear) -> str:
    return "MultiheadAttention reads this layer's weight without calling the layer"


@register_layer(NonDynamicallyQuantizableLinear, refuse=_refuse_attention_output)
@register_layer(nn.Linear)
def linear_rows(module: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """Give the rows of a linear layer: batch and any sequence positions, flattened.

    Args:
        module: The layer.
        x: ``(..., in)``.

    Returns:
        ``(rows, in)``.
    """
    return x.reshape(-1, module.in_features)


def _refuse_conv2d(module: nn.Conv2d) -> str | None:
    return None if module.groups == 1 else f"Conv2d with groups={module.groups}"


@register_layer(nn.Conv2d, refuse=_refuse_conv2d)
def conv2d_rows(module: nn.Conv2d, x: torch.Tensor) -> torch.Tensor:
    """Give the rows of a convolution: the patch under the kernel at every output position.

    Args:
        module: The layer, of any stride, padding, padding mode and dilation, in one group.
        x: ``(batch, in, height, width)``, or one image without the batch.

    Returns:
        ``(batch * output positions, in * kernel height * kernel width)``.
    """
    images = x if x.dim() == 4 else x[None]
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    padded = functional.pad(images, _padding(module), mode)
    patches = functional.unfold(padded, module.kernel_size, dilation=module.dilation, stride=module.stride)
    return patches.transpose(1, 2).flatten(0, 1)  # from (batch, in * kernel, positions)


def _padding(module: nn.Conv2d) -> list[int]:
    """Give the padding in the order of `functional.pad`: left, right, top, bottom."""
    if module.padding == "same":
        totals = [d * (k - 1) for d, k in zip(module.dilation, module.kernel_size, strict=True)]
    elif module.padding == "valid":
        totals = [0, 0]
    else:
        totals = [2 * int(p) for p in module.padding]
    # Of an odd total the greater half goes to the right and the bottom, as in torch.
    return [side for total in reversed(totals) for side in (total // 2, total - total // 2)]


def input_rows(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Give the rows of one forward call of a layer, bias folded in.

    Args:
        module: A layer with a block.
        x: Its input.

    Returns:
        ``(rows, width)`` in float32 or better, the last column 1 if the layer has a trainable bias.
    """
    kind = layer_type(module)
    if kind is None:
        raise TypeError(f"{type(module).__name__} has no registered rows; see register_layer")
    # Half precision would lose the digits that the solve needs.
    wide = x.detach().to(torch.promote_types(x.dtype, torch.float32))
    rows = kind.rows(module, wide)
    return torch.cat([rows, rows.new_ones(len(rows), 1)], dim=1) if trainable_bias(module) is not None else rows


def layer_type(module: nn.Module) -> LayerType | None:
    """Find the registered type of a layer.

    Args:
        module: Any module.

    Returns:
        The type, or None. A subclass with its own ``forward`` computes something else and has none.
    """
    for base in type(module).__mro__:
        if base in _LAYER_TYPES:
            return _LAYER_TYPES[base] if type(module).forward is base.forward else None
    return None


def trainable_bias(module: nn.Module) -> nn.Parameter | None:
    """Give the bias that the layer's block includes.

    Args:
        module: A layer with a block.

    Returns:
        Its bias, if it has one that is trained.
    """
    bias = module._parameters.get("bias")
    return bias if bias is not None and bias.requires_grad else None


def model_layout(model: nn.Module) -> Layout:
    """Say which trainable parameters of a model are preconditioned and which averaged, and why. Needs no data.

    Args:
        model: The model.

    Returns:
        The layout, in the order of ``named_parameters()``.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    uses = Counter(p for module in model.modules() for p in module._parameters.values() if p is not None)
    blocks: list[BlockSpec] = []
    averaged: dict[str, str] = {}
    for layer, module in model.named_modules():
        reason = _why_averaged(module, uses)
        if reason is None:
            blocks.append(_spec(layer, module, names))
        covered = blocks[-1].parameters if reason is None else ()
        for parameter in module._parameters.values():
            if parameter is not None and parameter.requires_grad and names[parameter] not in covered:
                why = SHARED if uses[parameter] > 1 else reason
                averaged.setdefault(names[parameter], why or "neither weight nor bias of its layer")
    return Layout(tuple(blocks), averaged)


def _why_averaged(module: nn.Module, uses: Counter[nn.Parameter]) -> str | None:
    kind = layer_type(module)
    if kind is None:
        return f"{type(module).__name__} has no block"
    weight = module._parameters.get("weight")
    if weight is None:
        return "its layer's weight is computed from other parameters"
    if not weight.requires_grad:
        return "its layer's weight is frozen"
    if any(uses[p] > 1 for p in (weight, trainable_bias(module)) if p is not None):
        return SHARED
    return kind.refuse(module) if kind.refuse is not None else None


def _spec(layer: str, module: nn.Module, names: dict[nn.Parameter, str]) -> BlockSpec:
    kind, weight, bias = layer_type(module), module._parameters["weight"], trainable_bias(module)
    if kind is None or weight is None:
        raise TypeError(f"layer '{layer}' has no block")
    rows = weight.shape[1] if kind.transposed else weight.shape[0]
    parameters = (names[weight],) if bias is None else (names[weight], names[bias])
    return BlockSpec(layer, parameters, rows, weight.numel() // rows + len(parameters) - 1, kind.transposed)
