r"""FedNL (Safaryan et al., ICML 2022, arXiv 2106.02969): Newton steps with a learned Hessian.

.. math:: \theta' = \theta - \eta\, [H]_\mu^{-1} g \ \text{(option 1)}, \qquad
          \theta' = \theta - \eta\, [H + l I]^{-1} g \ \text{(option 2)}, \qquad H \leftarrow H + \alpha \sum_i p_i S_i

Algorithm 1, with Algorithm 2 where only some clients take part and Algorithm 3 with a line search; the mathematics is
`fedapps.curvature.fednl`. ``H`` is the mean of the last known :math:`H_i` of *all* clients heard of, weighted over all ``N``
by what the handshake told of their examples; ``g`` and ``l`` are means over the replies of the round. A client that is heard
of for the first time sends its Hessian in full, which is its :math:`H_i^0`. The client is in `fedapps.client_apps.fednl`.

In a round in which a client has lost its store no step is taken, and the sums start anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from typing_extensions import override

from fedapps.curvature.compressors import Triangle
from fedapps.curvature.fednl import (
    RoundSums,
    ServerState,
    cut_solve,
    empty_state,
    end_round,
    norm,
    product,
    start_round,
)
from fedapps.curvature.flat import flatten, unflatten
from fedapps.curvature.line_search import backtrack
from fedapps.curvature.newton import Vector
from fedapps.defences import refuse_changed_replies
from fedapps.errors import CurvatureError
from fedapps.messages.hessians import CHANGE, HESSIAN, announced_hessians, read_error, read_hessian
from fedapps.messages.schema import ARRAYS, CONFIG, Announced, Arrays, Records, Reply
from fedapps.methods.second_order import FedNLSettings
from fedapps.settings import RoundSettings, Settings
from fedapps.strategies.base import RunFiles
from fedapps.strategies.line_search import ONE_EXCHANGE, LineSearch
from fedapps.strategies.rounds import FollowUp
from fedapps.strategies.vector import VectorStrategy
from fedapps.tasks.base import Task

ROUNDING = 1e-10
"""Share of a sum below which a change of it counts as this large: near convergence what clients send tends to zero, and the
ratio of two such changes says nothing."""


class _Step(NamedTuple):
    """What a round leads to: the state after it, and the step."""

    state: ServerState
    step: Vector
    gradient: Vector


class FedNL(VectorStrategy):
    """Newton steps with the mean of the clients' learned Hessians.

    Args:
        settings: As `RoundStrategy`.
        own: The method's own settings.
        **rounds: Further arguments of `RoundStrategy`.

    Attributes:
        mu: Bound of the eigenvalues from below; where the settings give none, the penalty of a convex task.

    Example:
        >>> FedNL(own=FedNLSettings(option=1, mu=1e-3)).mu
        0.001
    """

    takes_newcomers = False

    def __init__(
        self, settings: RoundSettings | None = None, *, own: FedNLSettings | None = None, **rounds: Any
    ) -> None:
        super().__init__(settings, **rounds)
        self.own = own or FedNLSettings()
        self.own.check_with(self.settings)
        refuse_changed_replies(self.settings.defence, "fednl")
        self.partial = self.settings.fraction_train < 1
        self.mu = self.own.mu
        self._state: ServerState | None = None
        self._errors: dict[int, float] = {}
        self._search: LineSearch | None = None
        self._read: tuple[Reply, Triangle] | None = None

    @override
    @classmethod
    def own_arguments(cls, settings: Settings) -> dict[str, Any]:
        return {"own": settings.own}

    @override
    def open(self, arrays: Arrays, task: Task, files: RunFiles, *, resumed: bool) -> Arrays:
        """Prepare for a run: the penalty of a convex task bounds its curvature from below."""
        self.mu = self.own.mu or float(getattr(task.options, "regularisation", 0.0))
        return super().open(arrays, task, files, resumed=resumed)

    @override
    def announced(self, model: Arrays) -> Announced:
        d = len(self.theta)
        return {**super().announced(model), **announced_hessians(d, self.own.compressor_of(d))}

    @override
    def records_for(self, partition: int, through: int, model: Arrays) -> Records:
        return {ARRAYS: model, CONFIG: self.remembered.entries}

    # The round -------------------------------------------------------------------------------

    @override
    def begin(self, model: Arrays) -> None:
        super().begin(model)
        d = len(self.theta)
        self._state = self._state or empty_state(d)
        self._gains: RoundSums = start_round(d)
        self._weights: dict[int, float] = {}
        self._search = self._read = None

    def _record(self, reply: Reply) -> str:
        return HESSIAN if self.own.initial == "exact" and self.remembered.is_first(reply) else CHANGE

    def _hessian(self, reply: Reply) -> Triangle:
        """Read ``H_i^0`` or ``S_i``, once for all who ask in a row."""
        if self._read is None or self._read[0] is not reply:
            d, first = len(self.theta), self._record(reply) == HESSIAN
            self._read = reply, read_hessian(reply, d, self.own.compressor_of(d), first=first)
        return self._read[1]

    @override
    def plain(self, reply: Reply) -> Reply:
        """Decompress what came, so that replies can be compared."""
        return replace(reply, records={self._record(reply): {"triangle": self._hessian(reply)}})

    @override
    def norms(self, reply: Reply) -> Mapping[str, float]:
        """Measure a reply. Of what tends to zero when all is learned, the first is no measure of those to come."""
        error, state = read_error(reply), self._state
        first = "first " if self.remembered.is_first(reply) else ""
        found = dict(super().norms(reply))
        if self.partial:
            found[f"{first}change of q_i"] = found.pop("update")
        sizes = {"change of q_i": 0.0, "Hessian": 0.0}
        if state is not None and state.weight:
            sizes = {
                "change of q_i": float(np.linalg.norm(state.q)) / state.weight,
                "Hessian": norm(state.H) / state.weight,
            }
        found |= {f"{first}Hessian": norm(self._hessian(reply)), f"{first}Hessian error": error}
        return {
            name: max(value, *(ROUNDING * size for what, size in sizes.items() if name.startswith(what)), 0.0)
            for name, value in found.items()
        }

    @override
    def fold(self, reply: Reply) -> None:
        """Add what a client's ``H_i`` gained to the sum over all clients, and its gradient (``q_i``) likewise."""
        hessian, error, sent = self._hessian(reply), read_error(reply), self.sent(reply)
        self._read = None
        share, first = self.share_of_all(reply.partition), self.remembered.is_first(reply)
        super().fold(reply)
        if not self.remembered.fold(reply):
            return
        gains = self._gains
        gains.weight += share if first else 0.0
        total = gains.initial if self._record(reply) == HESSIAN else gains.learned
        total += share * hessian
        if self.partial:
            gains.q += share * sent
        gains.errors[reply.partition] = error
        self._weights[reply.partition] = self.settings.weight(reply.num_examples)

    def _step(self) -> _Step:
        """Compute the round's step.

        Raises:
            CurvatureError: The Hessian cannot be solved with.
        """
        if self._state is None:
            raise RuntimeError("a step without a round")
        before, after = end_round(self._state, self._gains, self.own.alpha)
        g = flatten(self.mean(), self.names)
        if self.partial:
            H, errors = after.H / after.weight, {**self._errors, **self._gains.errors}
            error = sum(self.share_of_all(p) * errors[p] for p in sorted(errors)) / after.weight
            rhs = after.q / after.weight - product(H, error, self.theta)
        else:
            used = after if self.own.hessian == "latest" else before
            H, rhs = used.H / used.weight, -g
            error = sum(w * self._gains.errors[p] for p, w in self._weights.items()) / sum(self._weights.values())
        shift = error if self.own.option == 2 else 0.0
        found = cut_solve(H, shift, rhs, self.mu, where="FedNL, the server's Hessian")
        self.rounds.report.values |= {"hessian-shift": shift, "eigenvalues-cut": float(found.num_cut)}
        return _Step(after, self.lr * found.x, g)

    @override
    def follow_up(self, *, enough: bool) -> FollowUp | None:
        """Ask for the losses along the step, if a line search is wanted."""
        if not self.own.line_search or not enough or self._search is not None or self.remembered.lost:
            return None
        try:
            step = self._step().step
        except CurvatureError:  # As it will be in `finish`, which says so.
            return None
        self._search = LineSearch(
            start=self.stepped(np.zeros_like(step)),
            direction=unflatten(step, self._model, self.names),
            steps=self.own.steps,
        )
        return self._search.ask(self._weights)

    @override
    def answer(self, reply: Reply) -> None:
        if self._search is not None:
            self._search.take(reply)

    @override
    def finish(self) -> Arrays:
        """Take the step, and keep what was learned."""
        if self.remembered.lost:
            self.rounds.note("the sum of Hessians starts anew: no step is taken")
            self._state, self._errors = None, {}
            self.remembered.end()
            return self.stepped(np.zeros_like(self.theta))
        self._state, step, g = self._step()
        self._errors = {**self._errors, **self._gains.errors}
        self.remembered.end()
        search, self._search = self._search, None
        if search is None:
            if self.own.line_search:
                self.rounds.note(ONE_EXCHANGE)
            return self.stepped(step)
        slope = float(g @ step)
        return search.moved(lambda losses: backtrack(search.steps, losses, self._weights, slope), self.rounds)

    # Resume ----------------------------------------------------------------------------------

    @override
    def state_arrays(self) -> Arrays:
        """Give the sums over all clients."""
        return {} if self._state is None else {"H": self._state.H, "q": self._state.q}

    @override
    def load_state_arrays(self, arrays: Mapping[str, np.ndarray]) -> None:
        if self._state is not None:
            self._state = replace(self._state, H=arrays["H"], q=arrays["q"])

    @override
    def state(self) -> dict[str, Any]:
        return {
            **super().state(),
            "weight": None if self._state is None else self._state.weight,
            "errors": {str(p): error for p, error in self._errors.items()},
        }

    @override
    def load_state(self, state: Mapping[str, Any], last_folded: Mapping[int, int]) -> None:
        super().load_state(state, last_folded)
        nothing = np.zeros(0)
        self._state = None if state["weight"] is None else ServerState(nothing, nothing, state["weight"])
        self._errors = {int(p): error for p, error in state["errors"].items()}
