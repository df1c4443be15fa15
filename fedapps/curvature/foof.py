r"""FOOF: steps preconditioned by the uncentred covariance of each layer's input.

Benzing 2022, arXiv 2201.12250; FedPM's preconditioner for deep nets, arXiv 2511.09100. For each layer with a block

.. math:: A = \frac{1}{R} \sum_{r} a_r a_r', \qquad P = A + \text{damping} \cdot I, \qquad W \leftarrow W - \eta\, G P^{-1}

================  ================  ====================  ==============================================================
symbol            identifier        shape                 meaning
================  ================  ====================  ==============================================================
``a_r``           ``rows``          (R, width)            inputs of the layer: examples and positions, a trailing 1 for
                                                          the bias (`fedapps.curvature.layers`)
``A``             ``A``             (width, width)        their mean outer product
``P``             ``P``             (width, width)        what the step divides by, and what travels
``W``, ``G``      ``W``, ``G``      (out, width)          weight and gradient, bias as last column
``M``             ``product``       (out, width)          ``(W_i - W) P`` of the whole round, which travels
================  ================  ====================  ==============================================================

Every parameter without a block takes a plain gradient step. Blocks are float32, for half-precision models too, or float64 if
the model is.

Departures from the paper: the exponential average `Estimate.AVERAGE`, and damping that rises when a factorisation fails;
it is then part of the ``P`` that travels.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from fedapps.curvature.layers import input_rows, model_layout
from fedapps.curvature.layout import Block, BlockSpec, Layout
from fedapps.curvature.packing import pack_upper
from fedapps.curvature.solve import PIVOT_MARGIN, damping_ladder, not_definite, not_finite
from fedapps.errors import explain


class Estimate(StrEnum):
    """From which batches of a round ``A`` is estimated."""

    LAST_BATCH = "last-batch"
    """The batch of the step (arXiv 2511.09100)."""
    AVERAGE = "average"
    """Exponential average over the round's batches, ``A <- decay A + (1 - decay) A_batch``. It starts at the first batch's
    ``A``, so its weights add up to 1 and no bias correction is needed. Every batch counts alike, whatever its size."""


class Preconditioned(NamedTuple):
    """What `precondition` gives.

    Attributes:
        update: ``G (P + d I)^-1``, ``(out, width)``.
        P: ``P + d I``, ``(width, width)``.
        added_damping: ``d``; 0 almost always.
    """

    update: torch.Tensor
    P: torch.Tensor
    added_damping: float


def covariance(rows: torch.Tensor) -> torch.Tensor:
    r"""Compute the uncentred covariance :math:`A = \frac1R \sum_r a_r a_r'`.

    Args:
        rows: ``(R, width)``, at least one.

    Returns:
        ``(width, width)``, symmetric, in float32 or better.
    """
    rows = _widened(rows)
    return rows.T @ rows / len(rows)


def precondition(G: torch.Tensor, P: torch.Tensor, *, where: str) -> Preconditioned:
    """Divide a gradient by a block: ``G (P + d I)^-1`` with the smallest ``d`` of `damping_ladder` that can be factorised.

    Args:
        G: ``(out, width)``.
        P: ``(width, width)``; symmetrised before use.
        where: Layer and client, for messages.

    Returns:
        The update, and the matrix that it was divided by, in float32 or better.

    Raises:
        CurvatureError: An input is not finite, or ``P`` is not positive definite even with the last damping of the ladder.
    """
    G, P = _widened(G), _widened(P)
    if not (torch.isfinite(G).all() and torch.isfinite(P).all()):
        raise not_finite(where)
    P = (P + P.T) / 2
    mean_diagonal = float(P.diagonal().mean())
    for damping in damping_ladder(mean_diagonal, torch.finfo(P.dtype).eps):
        damped = _add_to_diagonal(P, damping)
        factor = _cholesky(damped)
        if factor is not None:
            update = torch.cholesky_solve(G.T.to(P.dtype), factor).T
            if torch.isfinite(update).all():
                return Preconditioned(update, damped, damping)
    raise not_definite(where, mean_diagonal, is_zero=not P.any())


def _cholesky(P: torch.Tensor) -> torch.Tensor | None:
    """Give the lower factor, or None for a block that counts as singular, as in `fedapps.curvature.solve`."""
    factor, failed = torch.linalg.cholesky_ex(P)
    if failed:
        return None
    scale = P.diagonal().rsqrt()
    rounding = PIVOT_MARGIN * torch.finfo(P.dtype).eps * torch.linalg.norm(scale[:, None] * P * scale)
    return factor if (factor.diagonal() * scale).min().square() > rounding else None


@dataclass(eq=False)
class _LayerState:
    """What is known of one layer during a round.

    Attributes:
        spec: Its block.
        module: The layer.
        initial: Its parameters as they were sent out, ``(out, width)``.
        moment: Sum over the rows since the last step of their outer products, ``(width, width)``, or None.
        num_rows: Rows since the last step.
        A: The estimate that the next step uses, or None before the first batch.
        P: What the last step divided by, or None before the first step.
        added_damping: The largest damping that a step needed beyond the one asked for.
    """

    spec: BlockSpec
    module: nn.Module
    initial: torch.Tensor
    moment: torch.Tensor | None = None
    num_rows: int = 0
    A: torch.Tensor | None = None
    P: torch.Tensor | None = None
    added_damping: float = 0.0


class FoofPreconditioner:
    """Takes the local steps of one round on a torch model; a context manager.

    On entry the model must hold what the server sent. Inside, each forward pass in training mode with gradients enabled adds
    its rows to the statistics, those of every use of a module and of every pass since the last step; evaluation and no-grad
    passes add nothing. On exit no hook is left on the model.

    Args:
        model: The model.
        damping: Added to the diagonal of every block, >= 0.
        estimate: From which batches ``A`` is estimated.
        decay: Weight of the past in the exponential average, in [0, 1).
        where: Whose steps, for messages, such as ``"client 3"``.

    Raises:
        ValueError: ``damping`` or ``decay`` is out of range.

    Example:
        >>> model = nn.Linear(3, 2)
        >>> with FoofPreconditioner(model, damping=0.1) as foof:
        ...     for x in torch.randn(4, 8, 3):
        ...         model.zero_grad()
        ...         model(x).square().mean().backward()
        ...         foof.step(lr=0.1)
        >>> [block.product.shape for block in foof.blocks()]
        [(2, 4)]
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        damping: float,
        estimate: Estimate = Estimate.LAST_BATCH,
        decay: float = 0.9,
        where: str = "",
    ) -> None:
        if not damping >= 0 or not 0 <= decay < 1:
            raise ValueError(
                explain(
                    "FOOF",
                    expected="damping >= 0 and decay in [0, 1)",
                    got=f"{damping} and {decay}",
                    do="correct the settings",
                )
            )
        self._model = model
        self._damping = damping
        self._estimate = estimate
        self._decay = decay
        self._where = where
        self._layout = model_layout(model)
        self._layers: list[_LayerState] = []
        self._hooks: list[RemovableHandle] = []

    def __enter__(self) -> Self:
        """Note the model that was sent out, and start to collect."""
        for spec in self._layout.blocks:
            state = _LayerState(spec, self._model.get_submodule(spec.layer), _matrix(spec, self._parameters(spec)))
            self._layers.append(state)
            self._hooks.append(state.module.register_forward_hook(_collector(state), with_kwargs=True))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove every hook."""
        while self._hooks:
            self._hooks.pop().remove()

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Take one step from the gradients that are in the model.

        Blocks take ``W <- W - lr G P^-1``, all other trainable parameters (and a layer before its first rows)
        ``theta <- theta - lr g``. Parameters without a gradient stay.

        Args:
            lr: ``eta``.

        Raises:
            CurvatureError: A gradient or a block is not finite, or a block cannot be solved; the layer is named.
        """
        preconditioned: set[str] = set()
        for state in self._layers:
            self._estimate_block(state)
            if state.A is not None and self._step_block(state, lr):
                preconditioned.update(state.spec.parameters)
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad and parameter.grad is not None and name not in preconditioned:
                if not torch.isfinite(parameter.grad).all():
                    raise not_finite(self._place(f"parameter '{name}'"))
                _subtract(parameter, lr * _widened(parameter.grad))

    def _estimate_block(self, state: _LayerState) -> None:
        """Turn the rows since the last step into ``A``."""
        if state.moment is None:
            return
        batch = state.moment / state.num_rows
        state.moment, state.num_rows = None, 0
        if self._estimate is Estimate.LAST_BATCH or state.A is None:
            state.A = batch
        else:
            state.A = self._decay * state.A + (1 - self._decay) * batch

    def _step_block(self, state: _LayerState, lr: float) -> bool:
        parameters = self._parameters(state.spec)
        if state.A is None or all(p.grad is None for p in parameters):
            return False
        G = _matrix(state.spec, [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters])
        P = _add_to_diagonal(state.A, self._damping)
        update, state.P, added = precondition(G, P, where=state.spec.where(self._where))
        state.added_damping = max(state.added_damping, added)
        for parameter, part in zip(parameters, _parts(state.spec, update, parameters), strict=True):
            _subtract(parameter, lr * part)
        return True

    @property
    def layout(self) -> Layout:
        """What was preconditioned so far and what only averaged: a layer that took no step with a block is averaged."""
        idle = [state.spec for state in self._layers if state.P is None]
        averaged = {name: "its layer had no input in training" for spec in idle for name in spec.parameters}
        blocks = tuple(state.spec for state in self._layers if state.P is not None)
        return Layout(blocks, {**self._layout.averaged, **averaged})

    @property
    def added_damping(self) -> dict[str, float]:
        """Layer -> the largest damping that a step added beyond the one asked for; only layers that needed some."""
        return {state.spec.layer: state.added_damping for state in self._layers if state.added_damping > 0}

    @torch.no_grad()
    def blocks(self) -> tuple[Block, ...]:
        """Give what travels: for each block of `layout` the last step's ``P`` and ``M = (W_i - W) P``.

        Returns:
            The blocks, in the order of the model. ``M`` is computed in float64; both are stored in the precision of the blocks.
        """
        return tuple(self._block(state, state.P) for state in self._layers if state.P is not None)

    def _block(self, state: _LayerState, P: torch.Tensor) -> Block:
        W = _matrix(state.spec, self._parameters(state.spec))
        product = (W.double() - state.initial.double()) @ P.double()
        return Block(state.spec, pack_upper(P.cpu().numpy()), product.to(P.dtype).cpu().numpy())

    def _parameters(self, spec: BlockSpec) -> list[nn.Parameter]:
        return [self._model.get_parameter(name) for name in spec.parameters]

    def _place(self, what: str) -> str:
        return f"{what}, {self._where}" if self._where else what


def _collector(state: _LayerState) -> Any:
    def collect(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], _output: Any) -> None:
        if not (module.training and torch.is_grad_enabled()):
            return
        x = args[0] if args else next(iter(kwargs.values()))
        # Under autocast the product would be taken in half precision.
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            rows = input_rows(module, x)
            if len(rows) > 0:
                moment = covariance(rows) * len(rows)
                state.moment = moment if state.moment is None else state.moment + moment
                state.num_rows += len(rows)

    return collect


def _widened(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _add_to_diagonal(P: torch.Tensor, damping: float) -> torch.Tensor:
    damped = P.clone()
    damped.diagonal().add_(damping)
    return damped


def _subtract(parameter: torch.Tensor, step: torch.Tensor) -> None:
    """Subtract in float32 or better, and round to the parameter's dtype once."""
    parameter.copy_(_widened(parameter) - step)


def _matrix(spec: BlockSpec, tensors: list[Any]) -> torch.Tensor:
    """Copy weight and bias, or their gradients, into ``(out, width)``, as `fedapps.curvature.layout.to_matrix` does."""
    weight, bias = tensors[0].detach(), tensors[1:]
    weight = weight.T if spec.transposed else weight
    return torch.cat([weight.reshape(spec.rows, -1), *(b.detach()[:, None] for b in bias)], dim=1)


def _parts(spec: BlockSpec, matrix: torch.Tensor, parameters: list[nn.Parameter]) -> list[torch.Tensor]:
    """Cut ``(out, width)`` into the shapes of weight and bias."""
    weight = matrix[:, :-1] if len(parameters) == 2 else matrix
    shaped = weight.T if spec.transposed else weight.reshape(parameters[0].shape)
    return [shaped, matrix[:, -1]][: len(parameters)]
