"""The local problem of a convex task: float64 NumPy, with the full Hessian."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import numpy as np
from typing_extensions import override

from fedapps.client_apps.problem import (
    NO_PULL,
    Batch,
    LocalProblem,
    Preconditioned,
    Pull,
    Rule,
    State,
    Stepped,
    Tensors,
    Trained,
    warn_of_damping,
)
from fedapps.client_apps.work import ClientWork
from fedapps.curvature.blocks import Block, WireDtype, triangle_block
from fedapps.curvature.layout import BlockSpec, Layout
from fedapps.curvature.newton import Labelled, Objective, check_dense, hessian_product, minimise, newton_steps
from fedapps.errors import TaskError
from fedapps.messages.schema import Arrays
from fedapps.methods.personalised import GIVEN_GAMMA, GIVEN_LAMBDA
from fedapps.personalization import pfedme
from fedapps.personalization.local_fits import LocalFit
from fedapps.personalization.pfedme import PFedMeConfig
from fedapps.personalization.proximal import Proximal, curvature_by_differences, curvature_range, descend
from fedapps.settings import Settings
from fedapps.tasks.convex_task import WEIGHTS, ConvexTask

FIRST_ORDER = (
    "take a first-order method (fedavg, fedadam), or write the task as a torch model: a linear layer has a FOOF block, cut by"
    " max-width into blocks that fit"
)
"""What to do instead of full Newton steps."""


@dataclass(frozen=True)
class ConvexBatch(Batch):
    """The examples of a step, as an objective."""

    step: int
    num_examples: int
    objective: Objective
    theta: np.ndarray
    labels: np.random.Generator
    where: str

    @property
    def gradient(self) -> Tensors:  # type: ignore[override]
        """Compute the gradient of the objective."""
        return {WEIGHTS: self.objective.gradient(self.theta)}

    @override
    def hessian_row(self) -> Tensors:
        e_1 = np.zeros_like(self.theta)
        e_1[0] = 1.0
        return {WEIGHTS: hessian_product(self.objective, self.theta, e_1, self.where, do=FIRST_ORDER)}

    @override
    def sampled_gradient(self) -> Tensors:
        return {WEIGHTS: cast("Labelled", self.objective).sampled_gradient(self.theta, self.labels)}


class ConvexProblem(LocalProblem):
    """The local problem of a convex task, whose model is one vector.

    Args:
        work: The round.
        task: Its task.
    """

    names = (WEIGHTS,)

    def __init__(self, work: ClientWork, task: ConvexTask) -> None:
        self._work = work
        self._task = task

    @staticmethod
    @override
    def layout(task: ConvexTask, settings: Settings) -> Layout:
        width = len(task.initial_arrays(settings.seed)[WEIGHTS])
        check_dense(width, f"task '{task.name}', method '{settings.method}'", do=FIRST_ORDER)
        return Layout((BlockSpec(WEIGHTS, (WEIGHTS,), 1, width),))

    @override
    def objective(self, arrays: Arrays) -> Objective:
        return self._whole

    @override
    def gradient(self, arrays: Arrays, batches: Iterable[np.ndarray] | None = None) -> Trained:
        theta = arrays[WEIGHTS]
        total, seen = np.zeros(theta.shape), 0
        for batch in self._work.batches() if batches is None else batches:
            total += len(batch) * self._part(batch).gradient(theta)
            seen += len(batch)
        return Trained({WEIGHTS: total / seen}, {}, self._trained(theta).loss)

    @override
    def descend(
        self,
        start: Arrays,
        pull: Pull = NO_PULL,
        batches: Iterable[np.ndarray] | None = None,
        shift: Arrays | None = None,
    ) -> Trained:
        objectives: Iterable[Objective] = self._batches() if batches is None else map(self._objective, batches)
        step = self._work.lr
        if pull.anchor:
            objectives = (Proximal(objective, pull.anchor[WEIGHTS], pull.lam) for objective in objectives)
            step = pull.step
        theta = descend(
            objectives,
            start[WEIGHTS],
            step,
            shift=shift[WEIGHTS] if shift else 0.0,
            momentum=self._work.settings.local_momentum,
            weight_decay=self._work.settings.weight_decay,
        )
        return self._trained(theta)

    @override
    def descend_by(self, start: Arrays, rule: Rule, state: Mapping[str, Arrays] | None = None) -> Stepped:
        theta: Tensors = {WEIGHTS: start[WEIGHTS]}
        held: State = state or {}
        labels = self._work.labels()
        for k, indices in enumerate(self._work.batches()):
            batch = ConvexBatch(k, len(indices), self._part(indices), theta[WEIGHTS], labels, self._work.where)
            theta, held = rule(theta, held, batch)
        trained = self._trained(theta[WEIGHTS])
        return Stepped(trained.arrays, {}, trained.loss, {name: dict(tensors) for name, tensors in held.items()})

    @override
    def descend_preconditioned(
        self, start: Arrays, *, factor_min_rows: int = 0, search: bool = False, hessian_share: float = 1.0
    ) -> Preconditioned:
        """Take ``K`` steps with the full Hessian of all the client's examples, or of a share: an epoch is one step."""
        settings, w = self._work.settings, start[WEIGHTS]
        check_dense(len(w), self._work.where, do=FIRST_ORDER)
        theta, P, added = newton_steps(
            self._whole, w, num_steps=settings.local_steps or settings.local_epochs, lr=self._work.lr,
            damping=settings.own.damping, where=self._work.where, search=search,
            curvatures=None if hessian_share == 1 else map(self._objective, self._work.samples(hessian_share)),
        )  # fmt: skip
        warn_of_damping(self._work, {WEIGHTS: added} if added else {})
        spec = BlockSpec(WEIGHTS, (WEIGHTS,), 1, len(theta))

        def blocks(wire: WireDtype) -> tuple[Block, ...]:
            return (triangle_block(spec, [P], (theta - w)[None], wire),)

        return Preconditioned({WEIGHTS: theta}, {}, self._whole.loss(theta), Layout((spec,)), (), blocks)

    @override
    def move_with_copy(self, received: Arrays, theta: Arrays, config: PFedMeConfig) -> tuple[Trained, Trained]:
        result = pfedme.train_client(list(self._batches()), received[WEIGHTS], theta[WEIGHTS], config)
        return self._trained(result.local), self._trained(result.theta)

    @override
    def fit(self, received: Arrays, pull: Pull) -> tuple[Trained, LocalFit]:
        """Find the minimiser by Newton's method, and measure it as the task can."""
        w = pull.anchor[WEIGHTS]
        check_dense(len(w), f"{self._work.where}, fit for the choice of lambda", do=GIVEN_LAMBDA)
        v = minimise(Proximal(self._whole, w, pull.lam), w.astype(np.float64))
        return self._trained(v), self._task.local_fit(self._work.data.train, v, w, pull.lam)

    @override
    def largest_curvature(self, arrays: Arrays, names: Sequence[str]) -> float:
        """Compute the curvature at zero, where that of logistic regression is greatest."""
        check_dense(len(arrays[WEIGHTS]), f"{self._work.where}, greatest curvature", do=GIVEN_GAMMA)
        return curvature_range(self._whole, np.zeros_like(arrays[WEIGHTS]))[1]

    @override
    def least_curvature(self, arrays: Arrays) -> float:
        check_dense(len(arrays[WEIGHTS]), f"{self._work.where}, least curvature", do=GIVEN_GAMMA)
        return curvature_range(self._whole, arrays[WEIGHTS])[0]

    @override
    def rough_curvature(self, arrays: Arrays, names: Sequence[str]) -> float:
        return curvature_by_differences(next(self._batches()).gradient, arrays[WEIGHTS])

    @cached_property
    def _whole(self) -> Objective:
        return self._task.objective(self._work.data.train)

    def _objective(self, batch: np.ndarray) -> Objective:
        return self._task.objective(self._work.data.train.take(batch))

    def _batches(self) -> Iterator[Objective]:
        return map(self._part, self._work.batches())

    def _part(self, batch: np.ndarray) -> Objective:
        return self._whole if len(batch) == self._work.num_examples else self._objective(batch)

    def _trained(self, theta: np.ndarray) -> Trained:
        loss = float(self._whole.loss(theta))
        if not np.isfinite(loss):
            raise TaskError(
                f"{self._work.where}, round {self._work.server_round}, after the local steps",
                expected="a finite loss",
                got=str(loss),
                do="lower the learning rate, or check the client's data",
            )
        return Trained({WEIGHTS: theta}, {}, loss)
