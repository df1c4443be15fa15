r"""The proximal objective on torch modules, over all trainable parameters or only the personal ones.

.. math:: \texttt{p.grad} \leftarrow \texttt{p.grad} + \lambda\,(p - p_\text{anchor})

The anchor is a detached copy taken once, before the first step (`take_anchor`). The gradient is added in place after a
backward pass, so that any optimiser and any loss can be used; nothing is added to the graph.

This module imports torch; nothing else in the package does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from fedapps.errors import FedAppsError, TaskError, explain
from fedapps.personalization.proximal import check_lambda

Anchor = Mapping[str, Tensor]
"""Parameter name -> detached copy, on the parameter's device and of its dtype."""


def take_anchor(model: nn.Module, names: Sequence[str] | None = None) -> dict[str, Tensor]:
    """Copy the parameters that a model is to be pulled to, by name, detached: those that are named, or all trainable ones.

    Raises:
        TaskError: A name is not a trainable parameter.
    """
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    wanted = list(parameters) if names is None else list(names)
    for name in wanted:
        if name not in parameters:
            raise TaskError(_no_such_parameter(name, parameters))
    return {name: parameters[name].detach().clone() for name in wanted}


def add_proximal_gradient(model: nn.Module, anchor: Anchor, lam: float) -> None:
    r"""Add :math:`\lambda (p - p_\text{anchor})` to the gradient of each anchored parameter, in place, after a backward pass.

    A parameter without a gradient gets one. Parameters that the anchor leaves out are shared, and keep their gradient.

    Raises:
        FedAppsError: An anchor is the model's own tensor, which would make the pull always zero.
        TaskError: An anchor has no parameter of its name and shape.
    """
    check_lambda(lam)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for name, fixed in anchor.items():
        parameter = parameters.get(name)
        if parameter is None:
            raise TaskError(_no_such_parameter(name, parameters))
        _check_pair(name, parameter, fixed)
        pull = (parameter.detach() - fixed).mul_(lam)
        parameter.grad = pull if parameter.grad is None else parameter.grad.add_(pull)


def squared_gradient(model: nn.Module) -> float:
    """Compute the squared norm of the gradients that are in a model, in float64."""
    return float(sum(p.grad.double().square().sum().item() for p in model.parameters() if p.grad is not None))


def proximal_penalty(model: nn.Module, anchor: Anchor, lam: float) -> float:
    r"""Compute :math:`\frac{\lambda}{2}\sum |p - p_\text{anchor}|^2`, in float64, for reports."""
    parameters = dict(model.named_parameters())
    squares = (
        (parameters[name].detach().double() - fixed.double()).square().sum().item() for name, fixed in anchor.items()
    )
    return 0.5 * lam * float(sum(squares))


def largest_curvature(
    loss: Callable[[], Tensor], parameters: Sequence[Tensor], *, num_iterations: int = 10, seed: int = 0
) -> float:
    r"""Estimate the greatest curvature ``L`` of a loss by power iterations on Hessian-vector products.

    .. math:: u \leftarrow H u / |H u|, \qquad L \approx |H u|

    The estimate approaches the greatest absolute eigenvalue from below. For losses that are not convex it holds at the
    present parameters only. Where the model has no second derivative (fused attention, ``EmbeddingBag``), the products are
    central differences of gradients, :math:`H u \approx (g(\theta + h u) - g(\theta - h u)) / 2h`, with ``h`` a thousandth of
    the length of ``theta`` (in float64 the cube root of its epsilon), which counts as 1 at least.

    Args:
        loss: Computes the loss at the present parameters, on the same batch at every call.
        parameters: The trainable (personal) parameters; moved and put back where differences are taken.
        num_iterations: Hessian-vector products, at least 1; each costs about two backward passes.
        seed: Seed of the first vector; torch's global generator is left alone.

    Raises:
        TaskError: A product is not finite.
        RuntimeError: There is no second derivative, and parameters in half precision, where differences are lost in rounding.
    """

    def start() -> list[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return [torch.randn(p.shape, generator=generator).to(p) for p in parameters]

    try:
        gradients = torch.autograd.grad(loss(), parameters, create_graph=True, allow_unused=True)
        return _power_iterations(lambda u: _hessian_product(gradients, parameters, u), start(), num_iterations)
    except RuntimeError:
        if any(p.dtype in (torch.bfloat16, torch.float16) for p in parameters):
            raise
    return _power_iterations(lambda u: _difference_product(loss, parameters, u), start(), num_iterations)


def _power_iterations(
    product: Callable[[Sequence[Tensor]], list[Tensor]], vectors: list[Tensor], num_iterations: int
) -> float:
    curvature = 0.0
    for _ in range(num_iterations):
        length = _length(vectors)
        vectors = product([u / length for u in vectors])
        curvature = _length(vectors)
        if curvature == 0.0:
            return 0.0
        if not curvature < float("inf"):
            raise TaskError(
                "curvature of the loss",
                expected="finite Hessian-vector products",
                got=str(curvature),
                do="check the data and the model's parameters, or give the server step gamma by hand",
            )
    return curvature


def _difference_product(
    loss: Callable[[], Tensor], parameters: Sequence[Tensor], vectors: Sequence[Tensor]
) -> list[Tensor]:
    """Compute ``H u`` by central differences of gradients; the parameters are bitwise as before."""
    before = [p.detach().clone() for p in parameters]
    # The error of the quotient grows with h squared, that of rounding with epsilon / h.
    h = min(1e-3, torch.finfo(before[0].dtype).eps ** (1 / 3)) * max(1.0, _length(before))

    def gradient(distance: float) -> list[Tensor]:
        with torch.no_grad():
            for p, fixed, u in zip(parameters, before, vectors, strict=True):
                p.copy_(fixed + distance * u)
        found = torch.autograd.grad(loss(), parameters, allow_unused=True)
        return [torch.zeros_like(p) if g is None else g for g, p in zip(found, parameters, strict=True)]

    try:
        return [(plus - minus) / (2 * h) for plus, minus in zip(gradient(h), gradient(-h), strict=True)]
    finally:
        with torch.no_grad():
            for p, fixed in zip(parameters, before, strict=True):
                p.copy_(fixed)


def _hessian_product(
    gradients: Sequence[Tensor | None], parameters: Sequence[Tensor], vectors: Sequence[Tensor]
) -> list[Tensor]:
    pairs = [(g, u) for g, u in zip(gradients, vectors, strict=True) if g is not None and g.requires_grad]
    if not pairs:
        return [torch.zeros_like(p) for p in parameters]
    products = torch.autograd.grad(
        [g for g, _ in pairs], parameters, [u for _, u in pairs], retain_graph=True, allow_unused=True
    )
    return [torch.zeros_like(p) if h is None else h for h, p in zip(products, parameters, strict=True)]


def _length(vectors: Sequence[Tensor]) -> float:
    return math.sqrt(sum(u.double().square().sum().item() for u in vectors))


def _check_pair(name: str, parameter: Tensor, fixed: Tensor) -> None:
    if fixed.data_ptr() == parameter.data_ptr() and parameter.numel() > 0:
        raise FedAppsError(
            f"anchor of parameter '{name}'",
            expected="a copy",
            got="the model's own tensor, which makes the proximal term always zero",
            do="take the anchor with take_anchor before training",
        )
    if fixed.shape != parameter.shape:
        raise TaskError(
            f"anchor of parameter '{name}'",
            expected=f"shape {tuple(parameter.shape)}",
            got=f"{tuple(fixed.shape)}",
            do="use the anchor of the same architecture",
        )


def _no_such_parameter(name: str, parameters: Mapping[str, Tensor]) -> str:
    return explain(
        f"proximal term, parameter '{name}'",
        expected="one of the trainable parameters " + ", ".join(parameters),
        got="no parameter of that name",
        do="check the names of the personal parts and the stored model",
    )
