r"""FedCLUP (arXiv 2410.08934): a server step on the clients' Moreau envelopes, from one running sum of differences.

.. math:: w \leftarrow w - \gamma \lambda \sum_i p_i (w - w_i)

The mathematics is `fedapps.personalization.fedclup`; this file says who takes part and when. The sum runs over the last
known differences of *all* clients, weighted over all ``N`` by what the handshake told of their examples. ``L`` in the
theory's step is the greatest of the clients' own, each reported once. Where another rule gives ``gamma`` each reports an
estimate from a few gradients instead, for warnings of unstable steps.

With a `ChoiceConfig` the run begins with a round of local fits by every client, from which ``lambda`` is chosen
(`fedapps.personalization.choose_lambda`), repeated from their mean while the choice is not decided: one reply of several
clients decides nothing.

A client that has lost its store cannot take back what the sum holds of it. Then the sum starts anew: the round changes no
personal tensor, and from the next one on every client's reply counts as its first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from logging import getLogger
from typing import Any

import numpy as np
from typing_extensions import override

from fedapps.averaging import TensorSums, add_mean, finish_mean, start_mean
from fedapps.defences import refuse_changed_replies
from fedapps.errors import MessageError
from fedapps.messages.method_facts import tell_method
from fedapps.messages.plans import CURVATURE, AskedCurvature, RoundPlan, read_fit
from fedapps.messages.schema import ARRAYS, CONFIG, STORE_LOST, Arrays, Entries, Records, Reply, check_complete
from fedapps.methods.personalised import FedClupSettings
from fedapps.personalization.choose_lambda import choose_lambda
from fedapps.personalization.fedclup import (
    FedClupConfig,
    ServerState,
    Stale,
    fold,
    gamma_warnings,
    initial_state,
    personal_names,
    restart,
    server_step,
)
from fedapps.personalization.local_fits import LocalFit
from fedapps.personalization.proximal import pulled_step, step_warning
from fedapps.settings import RoundSettings, Settings
from fedapps.strategies.base import RoundStrategy, RunFiles
from fedapps.tasks.base import Task, TaskKind

logger = getLogger("flwr")

MOST_FIT_ROUNDS = 3
"""Rounds of local fits after which an undecided choice falls back on the fixed ``lambda``."""


@dataclass
class _Round:
    """What a round gathers; it becomes the strategy's state only at its end, so that one below quorum changes nothing.

    Attributes:
        names: The personal tensors.
        state: The running sum.
        shared: Sums of the other tensors.
        heard_of: Clients that the running sum holds.
        curvature: Partition -> ``L_i``.
        fits: Partition -> local fit.
        lost: Whether a client has lost what it would need to go on.
    """

    names: tuple[str, ...]
    state: ServerState
    shared: TensorSums
    heard_of: set[int]
    curvature: dict[int, float]
    fits: dict[int, LocalFit] = field(default_factory=dict)
    lost: bool = False


class FedCLUP(RoundStrategy):
    """A server step from the running sum of the clients' differences.

    Args:
        settings: As `RoundStrategy`.
        own: The method's own settings.
        lr: Clients' step on their loss alone, for warnings; 0 if it is not known.
        **rounds: Further arguments of `RoundStrategy`.

    Example:
        >>> FedCLUP(own=FedClupSettings(lambda_=0.3)).lam
        0.3
    """

    takes_newcomers = False

    def __init__(
        self,
        settings: RoundSettings | None = None,
        *,
        own: FedClupSettings | None = None,
        lr: float = 0.0,
        **rounds: Any,
    ) -> None:
        super().__init__(settings, **rounds)
        self.own = own or FedClupSettings()
        self.own.check_gamma()
        if self.own.stale is not Stale.REPLIES:
            refuse_changed_replies(self.settings.defence, "fedclup", expected="multi-krum, or fedclup.stale = replies")
        self.lr = lr
        self.choosing = self.own.choice is not None
        self.lam = self.own.choice.lower if self.own.choice else self.own.lambda_
        self._fit_rounds = 0
        self._state: ServerState | None = None
        self._heard_of: set[int] = set()
        self._curvature: dict[int, float] = {}
        self._round: _Round | None = None

    @override
    @classmethod
    def own_arguments(cls, settings: Settings) -> dict[str, Any]:
        return {"own": settings.own, "lr": settings.lr}

    @override
    def open(self, arrays: Arrays, task: Task, files: RunFiles, *, resumed: bool) -> Arrays:
        """Prepare for a run, and refuse a convex model whose Hessian the clients could not hold."""
        if task.kind is TaskKind.CONVEX:
            self.own.check_hessian(sum(value.size for value in arrays.values()))
        return super().open(arrays, task, files, resumed=resumed)

    # What clients are asked ------------------------------------------------------------------

    @override
    def sample(self, server_round: int) -> list[int]:
        """Choose the clients of a round: all of them while ``lambda`` is being chosen."""
        return list(range(self.roster.num_partitions)) if self.choosing else super().sample(server_round)

    @override
    def records_for(self, partition: int, through: int, model: Arrays) -> Records:
        """Send the model, and the client's part in the round."""
        plan = RoundPlan(
            lam=self.lam,
            generation=self._state.generation if self._state else 0,
            fitting=self.choosing,
            curvature=self._asked_curvature(partition),
        )
        return {ARRAYS: model, CONFIG: plan.to_entries()}

    def _asked_curvature(self, partition: int) -> AskedCurvature:
        if partition in self._curvature:
            return AskedCurvature.NOTHING
        # Some models have no second derivative, and need none where it serves warnings only.
        return AskedCurvature.FOR_GAMMA if self.own.gamma_needs_curvature else AskedCurvature.ROUGHLY

    @override
    def told_clients(self) -> Entries:
        return tell_method("fedclup", self.own)

    # The round -------------------------------------------------------------------------------

    @override
    def begin(self, model: Arrays) -> None:
        """Start a round.

        Raises:
            SettingsError: A pattern of the personal parts names no tensor.
        """
        personal_names(list(model), self.own.patterns)
        self._model = model
        self._round = None

    @override
    def origin(self, reply: Reply) -> Arrays:
        """Say what tensors are measured from: personal ones come as changes already."""
        personal = personal_names(list(reply.arrays), self.own.patterns)
        return {name: value for name, value in self._model.items() if name not in personal}

    @override
    def fold(self, reply: Reply) -> None:
        """Add the change of a client's difference to the running sum, and its other tensors to their mean."""
        check_complete(reply, set(), self._model)
        # In the order of the model, whatever the client's.
        names = personal_names([name for name in self._model if name in reply.arrays], self.own.patterns)
        current = self._round or self._start(names, reply)
        if names != current.names:
            raise MessageError(
                f"{reply.where}, personal tensors",
                expected=f"{list(current.names)} as from the other clients",
                got=str(list(names)),
                do="build the same model on every client",
            )
        fit = read_fit(reply) if self.choosing else None
        add_mean(current.shared, self.settings.weight(reply.num_examples), _others(reply, names), where=reply.where)
        self._round = current
        if fit is not None:
            current.fits[reply.partition] = fit
        if CURVATURE in reply.metrics:
            current.curvature[reply.partition] = reply.metrics.pop(CURVATURE)
        if STORE_LOST in reply.metrics and reply.partition in current.heard_of:
            current.lost = True
            return
        message = {name: reply.arrays[name] for name in names}
        first = reply.partition not in current.heard_of
        current.state = fold(current.state, message, self.share_of_all(reply.partition), first=first)
        if self._stale is not Stale.REPLIES:
            current.heard_of.add(reply.partition)

    def _start(self, names: tuple[str, ...], reply: Reply) -> _Round:
        model = {name: self._model[name] for name in names}
        state = initial_state(model) if self._state is None else replace(self._state, model=model)
        return _Round(names, state, start_mean(_others(reply, names)), set(self._heard_of), dict(self._curvature))

    @property
    def _stale(self) -> Stale:
        return Stale.REPLIES if self.choosing else self.own.stale

    @override
    def finish(self) -> Arrays:
        """Take the server step, and the mean of the tensors that are not personal."""
        current, self._round = self._round, None
        if current is None:
            raise RuntimeError("finish without a folded reply")
        self._curvature, self._heard_of = current.curvature, current.heard_of
        if current.lost:
            self.rounds.note(
                "the sum of differences starts anew: the personal tensors of the global model stay as they are"
            )
            self._state, self._heard_of = restart(current.state), set()
        elif self.choosing:
            self._state = self._choose(current)
        else:
            config = self._config()
            self._warn(config)
            self._state = server_step(current.state, config)
        shared = finish_mean(current.shared) if current.shared.names else {}
        new = {**shared, **self._state.model}
        return {name: new[name] for name in self._model}

    def _choose(self, current: _Round) -> ServerState:
        """Choose ``lambda`` from the local fits, and move the global model to their mean."""
        choice = self.own.choice
        if choice is None:
            raise RuntimeError("a choice of lambda that was not asked for")
        mean = [held / current.state.heard for held in current.state.total.values()]
        report = choose_lambda(
            current.fits,
            {p: self.share_of_all(p) for p in current.fits},
            float(sum(np.sum(d**2) for d in mean)),
            sum(self._model[name].size for name in current.names),
            choice,
            self.roster.num_partitions,
        )
        self._fit_rounds += 1
        self.rounds.report.notes.append(report.describe())
        logger.info("round %d: %s", self.rounds.report.server_round, report.describe())
        self.rounds.report.values["R2"] = report.R2
        # gamma = 1/lambda is plain averaging, whatever lambda.
        state = server_step(current.state, FedClupConfig(self.lam, 1 / self.lam, Stale.REPLIES))
        if report.decided:
            self.lam, self.choosing = report.lam, False
        elif self._fit_rounds == MOST_FIT_ROUNDS:
            self.lam, self.choosing = self.own.lambda_, False
            self.rounds.note(
                f"lambda is not decided after {MOST_FIT_ROUNDS} rounds of local fits: {self.lam:g} is kept"
            )
        self.rounds.report.values["lambda"] = self.lam
        return state

    def _config(self) -> FedClupConfig:
        config = FedClupConfig(self.lam, self._gamma(), self.own.stale)
        self.rounds.report.values |= {"lambda": config.lam, "gamma": config.gamma}
        return config

    def _gamma(self) -> float:
        return self.own.gamma_of(
            self.lam, self._greatest_curvature(), len(self.rounds.report.sampled), self.roster.num_partitions
        )

    def _greatest_curvature(self) -> float:
        return max(self._curvature.values(), default=0.0)

    def _warn(self, config: FedClupConfig) -> None:
        """Warn of unstable steps, each once."""
        L = self._greatest_curvature()
        if not L:
            return
        warnings = gamma_warnings(config, L, len(self.rounds.report.sampled), self.roster.num_partitions)
        if self.lr or self.own.personal_lr:
            step = pulled_step(self.lr, config.lam, self.own.personal_lr)
            warnings += [text for text in [step_warning(step, L, config.lam)] if text]
        for text in warnings:
            self.note_once(text.partition("=")[0], text)

    # Resume ----------------------------------------------------------------------------------

    @override
    def state_arrays(self) -> Arrays:
        """Give the running sum."""
        return {} if self._state is None else dict(self._state.total)

    @override
    def load_state_arrays(self, arrays: Mapping[str, np.ndarray]) -> None:
        if self._state is not None:
            self._state = replace(self._state, total=dict(arrays))

    @override
    def state(self) -> dict[str, Any]:
        held = None if self._state is None else {"heard": self._state.heard, "generation": self._state.generation}
        return {
            **super().state(),
            "sum": held,
            "heard-of": sorted(self._heard_of),
            "curvature": {str(p): L for p, L in self._curvature.items()},
            "lambda": self.lam,
            "choosing": self.choosing,
            "fit-rounds": self._fit_rounds,
            "warned": sorted(self._noted),
        }

    @override
    def load_state(self, state: Mapping[str, Any], last_folded: Mapping[int, int]) -> None:
        super().load_state(state, last_folded)
        held = state["sum"]
        self._state = None if held is None else ServerState({}, {}, heard=held["heard"], generation=held["generation"])
        self._heard_of = set(state["heard-of"])
        self._curvature = {int(p): L for p, L in state["curvature"].items()}
        self.lam, self.choosing = state["lambda"], state["choosing"]
        self._fit_rounds = state["fit-rounds"]
        self._noted = set(state["warned"])


def _others(reply: Reply, names: tuple[str, ...]) -> Arrays:
    shared = {name: value for name, value in reply.arrays.items() if name not in names}
    return {**shared, **reply.buffers}
