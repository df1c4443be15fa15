r"""FOOF: steps preconditioned by the uncentred covariance of each layer's input.

Benzing 2022, arXiv 2201.12250; FedPM's preconditioner for deep nets, arXiv 2511.09100. For each layer with a block

.. math:: A = \frac{1}{R} \sum_{r} a_r a_r', \qquad P = A + \text{damping} \cdot I, \qquad W \leftarrow W - \eta\, G P^{-1}

================  ================  ====================  ==============================================================
symbol            identifier        shape                 meaning
================  ================  ====================  ==============================================================
``a_r``           ``rows``          (R, width)            inputs of the layer: examples and positions, a trailing 1 for
                                                          the bias (`fedapps.curvature.layers`)
``A``             ``A``             (width, width)        their mean outer product (`fedapps.curvature.gram`)
``P``             ``divisors``      (width, width)        what the step divides by, and what travels
``W``, ``G``      ``W``, ``G``      (out, width)          weight and gradient, bias as last column
``M``             ``product``       (out, width)          ``(W_i - W) P`` of the whole round, which travels
================  ================  ====================  ==============================================================

A layer with groups has one ``P`` for each, and a layer wider than ``max_width`` a block-diagonal one. Rows are the positions
that hold data (`fedapps.curvature.layers.count_only`), by default all. Every parameter without a block takes a plain gradient
step, as does a layer whose inputs were not seen: its gradient came without a call, or it was called inside ``torch.vmap`` or
another of torch's function transforms; it has no block in that round. Blocks are float32, for half-precision models too, or
float64 if the model is.

Departures from the paper, which is ``estimate = last-batch``, ``refresh = 1``, ``max_rows = 0``, ``max_width = 0``: the other
estimates; a ``P`` that is kept for several steps; a sample of the rows; and damping that rises when a factorisation fails,
which is then part of the ``P`` that travels.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from fedapps.curvature.blocks import Block, WireDtype, factor_block, identity_block, triangle_block
from fedapps.curvature.gram import Divisor, Gram, cheaper_through_rows, divide, factorise, widened
from fedapps.curvature.layers import count_rows, counted_rows, input_moment, input_rows, model_layout
from fedapps.curvature.layout import BlockSpec, Layout
from fedapps.curvature.solve import not_finite
from fedapps.curvature.traces import no_traces
from fedapps.errors import explain

NOT_CALLED = "its gradient came without a call of the layer: compiled code, or a use of its weight elsewhere"
"""Why a layer has no block in a round, as `fedapps.curvature.layout.Layout` says it."""

TRANSFORMED = "called inside torch.vmap or another of torch's function transforms"
"""The same."""


class Estimate(StrEnum):
    """From which batches of a round ``A`` is estimated."""

    LAST_BATCH = "last-batch"
    """The batch of the step (arXiv 2511.09100)."""
    AVERAGE = "average"
    """Exponential average over the round's batches, ``A <- d A + (1 - d) A_batch`` with ``d = decay^k`` after ``k`` steps. It
    starts at the first batch's ``A``, so its weights add up to 1 and no bias correction is needed. Every batch counts alike,
    whatever its size."""
    FULL_PASS = "full-pass"
    """All forward passes inside `FoofPreconditioner.full_pass`, before the first step; used in every step."""


@dataclass(eq=False)
class _LayerState:
    """What is known of one layer during a round. Lists have an entry for each piece that its width is cut into.

    Attributes:
        spec: Its block.
        module: The layer.
        initial: Its parameters as they were sent out, ``(out, width)``.
        pending: Sums over the rows since the last estimate; empty without any.
        num_rows: Rows in them.
        A: The estimate that the next step uses; empty before the first batch.
        divisors: What the last step divided by, factorised; empty before the first step with a block.
        estimated_at: Number of the step at which ``A`` was estimated.
        stale: Whether ``A`` is newer than ``divisors``.
        took_plain_step: Whether it took a step without a block.
        called: Whether it was called with gradients since the last step.
        unseen: Why its inputs are not known, from the first step on that had a gradient of unknown inputs; "" while they are.
        added_damping: The largest damping that a step needed beyond the one asked for.
    """

    spec: BlockSpec
    module: nn.Module
    initial: torch.Tensor
    pending: list[Gram] = field(default_factory=list)
    num_rows: int = 0
    A: list[Gram] = field(default_factory=list)
    divisors: list[Divisor] = field(default_factory=list)
    estimated_at: int = 0
    stale: bool = False
    took_plain_step: bool = False
    called: bool = False
    unseen: str = ""
    added_damping: float = 0.0


class FoofPreconditioner:
    """Takes the local steps of one round on a torch model; a context manager.

    On entry the model must hold what the server sent. Inside, each forward pass in training mode with gradients enabled adds
    its rows to the statistics, those of every use of a module and of every pass since the last step; evaluation and no-grad
    passes add nothing. On exit no hook is left on the model.

    Args:
        model: The model, on any device.
        damping: Added to the diagonal of every block, >= 0.
        estimate: From which batches ``A`` is estimated.
        decay: Weight of the past in the exponential average, for each step, in [0, 1).
        refresh: Steps that use one ``A`` and its factorisation; the batches of the steps between are not looked at. During the
            first ``refresh`` steps a layer with fewer rows in a batch than its width is estimated at every step.
        max_rows: Rows of one forward call of a layer that are used, a random sample without replacement; 0 uses all.
        max_width: A wider layer is cut into diagonal blocks of at most this width; 0 leaves every layer whole.
        factor_min_rows: Send a block that comes from fewer rows than its width, and from at least this many, as its triangular
            factor (see `fedapps.curvature.blocks`); 0 sends none so.
        seed: Seed of the sample of rows.
        where: Whose steps, for messages, such as ``"client 3"``.

    Raises:
        ValueError: An argument is out of range.

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
        refresh: int = 1,
        max_rows: int = 0,
        max_width: int = 0,
        factor_min_rows: int = 0,
        seed: int = 0,
        where: str = "",
    ) -> None:
        if not damping >= 0 or not 0 <= decay < 1 or refresh < 1 or min(max_rows, max_width, factor_min_rows) < 0:
            raise ValueError(
                explain(
                    "FOOF",
                    expected="damping >= 0 and decay in [0, 1), refresh >= 1, and limits >= 0",
                    got=f"{damping} and {decay}, {refresh}, and {max_rows}, {max_width}, {factor_min_rows}",
                )
            )
        self._model = model
        self._damping = damping
        self._estimate = estimate
        self._decay = decay
        self._refresh = refresh
        self._max_rows = max_rows
        self._factor_min_rows = factor_min_rows
        # A generator of its own, on the CPU: sampling rows changes neither dropout nor what a GPU draws.
        self._random = torch.Generator().manual_seed(seed)
        self._where = where
        self._layout = model_layout(model, max_width=max_width)
        self._layers: list[_LayerState] = []
        self._hooks: list[RemovableHandle] = []
        self._num_steps = 0
        self._in_full_pass = False

    def __enter__(self) -> Self:
        """Note the model that was sent out, and start to collect."""
        for spec in self._layout.blocks:
            state = _LayerState(spec, self._model.get_submodule(spec.layer), _matrix(spec, self._parameters(spec)))
            self._layers.append(state)
            self._hooks.append(state.module.register_forward_hook(self._collector(state), with_kwargs=True))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove every hook."""
        while self._hooks:
            self._hooks.pop().remove()

    @contextmanager
    def full_pass(self) -> Iterator[None]:
        """Estimate ``A`` from all forward passes inside, for every step of the round (`Estimate.FULL_PASS`).

        The passes run without gradients, in training mode, so that the rows are those of training. Buffers (running
        statistics) and the random generators are put back afterwards.
        """
        self._in_full_pass = True
        try:
            with no_traces(self._model), torch.no_grad():
                yield
        finally:
            self._in_full_pass = False
        for state in self._layers:
            self._estimate_block(state)

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
            if self._step_block(state, lr):
                preconditioned.update(state.spec.parameters)
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad and parameter.grad is not None and name not in preconditioned:
                if not torch.isfinite(parameter.grad).all():
                    raise not_finite(self._place(f"parameter '{name}'"))
                _subtract(parameter, lr * widened(parameter.grad))
        self._num_steps += 1

    # Statistics ------------------------------------------------------------------------------

    def _collector(self, state: _LayerState) -> Any:
        def collect(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], _output: Any) -> None:
            x = args[0] if args else next(iter(kwargs.values()))
            state.called = state.called or torch.is_grad_enabled()
            if torch._C._functorch.maybe_current_level() is not None:
                state.unseen = TRANSFORMED
            if not module.training or state.unseen or not self._collects(state, x):
                return
            # Under autocast the product would be taken in half precision.
            with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
                self._collect(state, x)

        return collect

    def _collects(self, state: _LayerState, x: torch.Tensor) -> bool:
        if self._in_full_pass or self._estimate is Estimate.FULL_PASS:
            return self._in_full_pass
        # A layer that was not used when the others were estimated is estimated at its first use.
        due = self._num_steps % self._refresh == 0 or not state.A
        # A batch of few rows says nothing of most directions, so the next batch would be divided by the damping alone there:
        # a step ten times too long, and clients with few examples diverged. After several batches that is over.
        rows = min(self._count(state, x), self._max_rows or state.spec.width)
        early = self._num_steps < self._refresh and rows < state.spec.width
        return torch.is_grad_enabled() and (due or early)

    def _collect(self, state: _LayerState, x: torch.Tensor) -> None:
        """Add the rows of one forward call."""
        spec, where = state.spec, state.spec.where(self._where)
        count = self._count(state, x)
        if count == 0:
            return
        chosen = counted_rows(state.module, x, where=where)
        if 0 < self._max_rows < count:
            sample = torch.randperm(count, generator=self._random)[: self._max_rows].sort().values.to(x.device)
            chosen = sample if chosen is None else chosen[sample]
        elif chosen is None and not spec.cut and not self._keeps_rows(state, 0, count):
            moment = input_moment(state.module, x, where=where)
            if moment is not None:
                self._add(state, [Gram.of_matrix(moment)], count)
                return
        rows = input_rows(state.module, x, chosen, where=where)
        self._add(state, [Gram.of_rows(rows[:, :, columns]) for columns in spec.columns], rows.shape[1])

    def _count(self, state: _LayerState, x: torch.Tensor) -> int:
        """Count the rows of one forward call that hold data."""
        where = state.spec.where(self._where)
        counted = counted_rows(state.module, x, where=where)
        return count_rows(state.module, x, where=where) if counted is None else len(counted)

    def _add(self, state: _LayerState, sums: list[Gram], count: int) -> None:
        joined = [old.plus(new) for old, new in zip(state.pending, sums, strict=True)] if state.pending else sums
        state.pending = [self._compact(state, piece, gram) for piece, gram in enumerate(joined)]
        state.num_rows += count

    def _keeps_rows(self, state: _LayerState, piece: int, num_rows: int) -> bool:
        """Whether a piece of a layer is kept as rows rather than as matrix."""
        columns = state.spec.columns[piece]
        width, out = columns.stop - columns.start, state.spec.rows // state.spec.groups
        if 0 < self._factor_min_rows <= num_rows < width:
            return True
        return self._damping > 0 and cheaper_through_rows(num_rows, width, out, self._refresh)

    def _compact(self, state: _LayerState, piece: int, gram: Gram) -> Gram:
        if gram.rows is None:
            return gram
        if self._keeps_rows(state, piece, gram.rows.shape[1]):
            # Without a bias the rows may share memory with an activation, which a later layer may overwrite.
            return Gram.of_rows(gram.rows.clone())
        return Gram.of_matrix(gram.dense())

    def _estimate_block(self, state: _LayerState) -> None:
        """Turn the rows since the last estimate into ``A``."""
        if not state.pending:
            return
        batch = [gram.times(1 / state.num_rows) for gram in state.pending]
        state.pending, state.num_rows, state.stale = [], 0, True
        if self._estimate is Estimate.AVERAGE and state.A:
            past = self._decay ** (self._num_steps - state.estimated_at)
            mixed = (a.times(past).plus(b.times(1 - past)) for a, b in zip(state.A, batch, strict=True))
            batch = [self._compact(state, piece, gram) for piece, gram in enumerate(mixed)]
        state.A, state.estimated_at = batch, self._num_steps

    # Steps -----------------------------------------------------------------------------------

    def _step_block(self, state: _LayerState, lr: float) -> bool:
        parameters, spec = self._parameters(state.spec), state.spec
        called, state.called = state.called, False
        if all(p.grad is None for p in parameters):
            return False
        if not called:
            state.unseen = state.unseen or NOT_CALLED
        if state.unseen or not state.A:
            state.took_plain_step = True
            return False
        if state.stale:
            self._factorise(state)
        G = _matrix(spec, [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters])
        grouped = widened(G).view(spec.groups, -1, spec.width)  # (groups, out / groups, width)
        pieces = [
            divide(divisor, grouped[:, :, columns], where=spec.where(self._where))
            for divisor, columns in zip(state.divisors, spec.columns, strict=True)
        ]
        update = torch.cat(pieces, dim=2).flatten(0, 1)
        for parameter, part in zip(parameters, _parts(spec, update, parameters), strict=True):
            _subtract(parameter, lr * part)
        return True

    def _factorise(self, state: _LayerState) -> None:
        # The old factors are of no use any more: two of a wide layer need not be in memory at once.
        state.divisors, state.stale, out = [], False, state.spec.rows // state.spec.groups
        for A, columns in zip(state.A, state.spec.columns, strict=True):
            width = columns.stop - columns.start
            cheaper = A.num_rows is not None and cheaper_through_rows(A.num_rows, width, out, self._refresh)
            divisor = factorise(A, self._damping, through_rows=cheaper, where=state.spec.where(self._where))
            state.divisors.append(divisor)
            state.added_damping = max(state.added_damping, divisor.added_damping)

    # What travels ----------------------------------------------------------------------------

    @property
    def layout(self) -> Layout:
        """Which parameters have a block and which are only averaged; a layer whose inputs were not seen has none."""
        unseen = {name: s.unseen for s in self._layers if s.unseen for name in s.spec.parameters}
        blocks = tuple(spec for spec in self._layout.blocks if not unseen.keys() & spec.parameters)
        return Layout(blocks, {**self._layout.averaged, **unseen})

    @property
    def added_damping(self) -> dict[str, float]:
        """Layer -> the largest damping that a step added beyond the one asked for; only layers that needed some."""
        return {state.spec.layer: state.added_damping for state in self._layers if state.added_damping > 0}

    @property
    def unseen(self) -> tuple[str, ...]:
        """Layers that have no block in this round since their inputs were not seen."""
        return tuple(state.spec.layer for state in self._layers if state.unseen)

    @property
    def without_input(self) -> tuple[str, ...]:
        """Layers that took no step with a block in this round, so that their ``P`` is a multiple of the identity."""
        return tuple(state.spec.layer for state in self._layers if not state.unseen and not state.divisors)

    @torch.no_grad()
    def blocks(self, dtype: WireDtype = WireDtype.FLOAT32) -> tuple[Block, ...]:
        """Give what travels, layer by layer: the last step's ``P``, in such numbers, and ``M = (W_i - W) P``.

        A layer that took no step with a block has no input covariance, ``A = 0``: its ``P`` is ``damping I``; or ``I`` if
        it took plain gradient steps, which divide by that.
        """
        return tuple(self._block(state, dtype) for state in self._layers if not state.unseen)

    def _block(self, state: _LayerState, dtype: WireDtype) -> Block:
        W = widened(_matrix(state.spec, self._parameters(state.spec)))
        if not state.divisors:
            scale = 1.0 if state.took_plain_step else self._damping
            return identity_block(state.spec, scale, _numpy(W - widened(state.initial)))
        delta = _numpy(W.double() - state.initial.double())
        if self._travels_as_factor(state):
            factors = [torch.linalg.qr(A.rows, mode="r").R for A in state.A if A.rows is not None]
            # Tiles go group by group, and within one piece by piece.
            in_order = [_numpy(factor[g]) for g in range(state.spec.groups) for factor in factors]
            dampings = [self._damping] * len(in_order)
            return factor_block(state.spec, in_order, dampings, delta, dtype)
        matrices = [divisor.matrix() for divisor in state.divisors]
        tiles = [_numpy(matrix[g]) for g in range(state.spec.groups) for matrix in matrices]
        return triangle_block(state.spec, tiles, delta, dtype)

    def _travels_as_factor(self, state: _LayerState) -> bool:
        # With raised damping the block is sent as the step used it, which the factor does not say.
        return all(
            A.num_rows is not None and 0 < self._factor_min_rows <= A.num_rows < columns.stop - columns.start
            for A, columns in zip(state.A, state.spec.columns, strict=True)
        ) and not any(divisor.added_damping for divisor in state.divisors)

    def _parameters(self, spec: BlockSpec) -> list[nn.Parameter]:
        return [self._model.get_parameter(name) for name in spec.parameters]

    def _place(self, what: str) -> str:
        return f"{what}, {self._where}" if self._where else what


def _numpy(tensor: torch.Tensor) -> Any:
    return tensor.cpu().numpy()


def _subtract(parameter: torch.Tensor, step: torch.Tensor) -> None:
    """Subtract in float32 or better, and round to the parameter's dtype once."""
    parameter.copy_(widened(parameter) - step)


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
