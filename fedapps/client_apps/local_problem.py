r"""A client's local problem with a pull, :math:`L_i(w_i) + \frac{\lambda}{2} |w_i - w|^2`, whatever the model.

The clients of personalised methods are written against `LocalProblem`, which convex tasks fulfil here, in float64 NumPy by
the functions of `fedapps.personalization`, and torch models in `fedapps.client_apps.torch_problem`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from fedapps.client_apps.work import ClientWork
from fedapps.curvature.newton import Objective, minimise
from fedapps.errors import TaskError
from fedapps.messages.schema import Arrays
from fedapps.personalization import pfedme
from fedapps.personalization.local_fits import LocalFit
from fedapps.personalization.pfedme import PFedMeConfig
from fedapps.personalization.proximal import Proximal, curvature_by_differences, curvature_range, descend
from fedapps.tasks.convex_task import WEIGHTS, ConvexTask


@dataclass(frozen=True)
class Pull:
    """What the personal tensors are pulled to.

    Attributes:
        anchor: Name of each personal tensor -> where it is pulled to; never modified.
        lam: ``lambda``; 0 for none.
    """

    anchor: Arrays
    lam: float


@dataclass(frozen=True)
class Trained:
    """A model after local training.

    Attributes:
        arrays: Trainable tensors, by name.
        buffers: Buffers, by name.
        loss: Mean loss over the round's batches, without the pull (convex: loss at the end).
    """

    arrays: Arrays
    buffers: Arrays
    loss: float


class LocalProblem(Protocol):
    """What a client can do with its own data.

    Attributes:
        names: The trainable tensors.
    """

    names: tuple[str, ...]

    def descend(self, start: Arrays, pull: Pull, step: float) -> Trained:
        """Take the round's ``K`` steps.

        Args:
            start: The model to start from.
            pull: The pull on the personal tensors; the others take plain steps of the learning rate in force.
            step: Step of the personal tensors.

        Returns:
            The model after the steps.
        """

    def move_with_copy(self, received: Arrays, theta: Arrays, config: PFedMeConfig) -> tuple[Trained, Trained]:
        """Take pFedMe's local rounds: the personal model by inner steps, the local copy towards it, for each batch.

        Args:
            received: The global model.
            theta: The personal model to start from.
            config: pFedMe's numbers.

        Returns:
            The local copy, and the personal model.
        """

    def largest_curvature(self, arrays: Arrays, names: tuple[str, ...]) -> float:
        """Give the greatest curvature ``L`` of the client's loss.

        Args:
            arrays: The model at which it is estimated (convex: a bound for every model).
            names: The tensors that it is about.

        Returns:
            ``L``.
        """

    def rough_curvature(self, arrays: Arrays, names: tuple[str, ...]) -> float:
        """Estimate ``L`` from below by a few gradients on the round's first batch, for warnings.

        Args:
            arrays: The model at which it is estimated.
            names: The tensors that it is about.

        Returns:
            The estimate; 0 if nothing is known.
        """

    def fit(self, received: Arrays, pull: Pull, step: float) -> tuple[Trained, LocalFit]:
        """Fit the client's own data, for the choice of ``lambda``.

        Args:
            received: The model to start from.
            pull: A weak pull to it.
            step: Step of the personal tensors.

        Returns:
            The fit, and the scalars that say how uncertain it is.
        """


def local_problem(work: ClientWork, arrays: Arrays) -> LocalProblem:
    """Give the local problem of a client.

    Args:
        work: The round.
        arrays: A model of the task, for the names of its tensors.

    Returns:
        The problem.
    """
    if isinstance(work.task, ConvexTask):
        return ConvexProblem(work, work.task)
    from fedapps.client_apps.torch_problem import TorchProblem

    return TorchProblem(work, work.task, arrays)  # type: ignore[arg-type]


class ConvexProblem:
    """The local problem of a convex task.

    Args:
        work: The round.
        task: Its task.
    """

    def __init__(self, work: ClientWork, task: ConvexTask) -> None:
        self.names: tuple[str, ...] = (WEIGHTS,)
        self._work = work
        self._task = task

    @cached_property
    def _whole(self) -> Objective:
        return self._task.objective(self._work.data.train)

    def _batches(self) -> Iterator[Objective]:
        for batch in self._work.batches():
            whole = len(batch) == self._work.num_examples
            yield self._whole if whole else self._task.objective(self._work.data.train.take(batch))

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

    def descend(self, start: Arrays, pull: Pull, step: float) -> Trained:
        """Take gradient steps, as `LocalProblem.descend` says."""
        batches = (Proximal(batch, pull.anchor[WEIGHTS], pull.lam) for batch in self._batches())
        return self._trained(descend(batches, start[WEIGHTS], step))

    def move_with_copy(self, received: Arrays, theta: Arrays, config: PFedMeConfig) -> tuple[Trained, Trained]:
        """Take pFedMe's local rounds, as `LocalProblem.move_with_copy` says."""
        result = pfedme.train_client(list(self._batches()), received[WEIGHTS], theta[WEIGHTS], config)
        return self._trained(result.local), self._trained(result.theta)

    def largest_curvature(self, arrays: Arrays, names: tuple[str, ...]) -> float:
        """Compute the curvature at zero, where that of logistic regression is greatest."""
        return curvature_range(self._whole, np.zeros_like(arrays[WEIGHTS]))[1]

    def rough_curvature(self, arrays: Arrays, names: tuple[str, ...]) -> float:
        """Estimate ``L`` by differences of gradients, as `LocalProblem.rough_curvature` says."""
        return curvature_by_differences(next(self._batches()).gradient, arrays[WEIGHTS])

    def fit(self, received: Arrays, pull: Pull, step: float) -> tuple[Trained, LocalFit]:
        """Find the minimiser by Newton's method, and measure it as the task can."""
        w = pull.anchor[WEIGHTS]
        v = minimise(Proximal(self._whole, w, pull.lam), w.astype(np.float64))
        return self._trained(v), self._task.local_fit(self._work.data.train, v, w, pull.lam)
