r"""A client's local problem: what a method can do with the client's own data, whatever the model.

Clients are written against `LocalProblem`: unpack the message, call, pack the reply. Convex tasks fulfil it in float64 NumPy
(`fedapps.client_apps.convex_problem`), torch models in `fedapps.client_apps.torch_problem`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from logging import getLogger
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

from fedapps.client_apps.work import ClientWork
from fedapps.messages.schema import Arrays
from fedapps.methods import load_object
from fedapps.personalization.local_fits import LocalFit
from fedapps.personalization.pfedme import PFedMeConfig
from fedapps.settings import Settings
from fedapps.tasks.base import Task, TaskKind

if TYPE_CHECKING:
    from fedapps.curvature.blocks import Block, WireDtype
    from fedapps.curvature.layout import Layout
    from fedapps.curvature.newton import Objective

logger = getLogger("flwr")

PROBLEMS = {
    TaskKind.CONVEX: "fedapps.client_apps.convex_problem:ConvexProblem",
    TaskKind.TORCH: "fedapps.client_apps.torch_problem:TorchProblem",
}
"""Kind of task -> its problem; by name, since a convex run imports no torch."""


@dataclass(frozen=True)
class Pull:
    r"""A pull :math:`\frac{\lambda}{2} |w_i - w|^2` that is added to the client's loss.

    Attributes:
        anchor: ``w``, by name; trainable tensors that it leaves out are not pulled. Never modified.
        lam: ``lambda``; 0 for none.
        step: Step of the pulled tensors; all others take that in force.
    """

    anchor: Arrays
    lam: float
    step: float


NO_PULL = Pull({}, 0.0, 0.0)


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


@dataclass(frozen=True)
class Preconditioned(Trained):
    """A model after steps that were divided by curvature.

    Attributes:
        layout: Which tensors share a block, and why the others have none.
        unseen: Layers that would have a block by the model alone, but whose inputs were not seen in this round.
        blocks: Gives ``P`` of the last step and ``M = (W_i - W) P`` of every block, in the numbers that are asked for.
    """

    layout: Layout
    unseen: tuple[str, ...]
    blocks: Callable[[WireDtype], Sequence[Block]]


Tensors: TypeAlias = Mapping[str, Any]
"""Name -> float64 array (convex) or torch tensor on the client's device (torch), in the order of `LocalProblem.names`."""

State: TypeAlias = Mapping[str, Tensors]
"""What a rule keeps from step to step, such as moments: name -> tensors like those of the model."""


class Batch(Protocol):
    """What a rule can know of the batch of a local step, at the model before that step.

    Attributes:
        step: Which of the round's steps it is, from 0.
        num_examples: ``B``.
        gradient: Gradient of the batch's objective.
    """

    step: int
    num_examples: int
    gradient: Tensors

    def hessian_row(self) -> Tensors:
        """Compute the first row of the Hessian of the batch's objective, one Hessian-vector product with ``e_1``.

        Raises:
            TaskError: The model cannot be differentiated twice.
            CurvatureError: The objective has its Hessian as a whole only, which is too large.
        """

    def sampled_gradient(self) -> Tensors:
        """Compute the gradient of the batch's loss, without regularisation, at labels that are drawn from the model.

        The task must pass `fedapps.tasks.base.Task.check_sampling`.
        """


Rule: TypeAlias = Callable[[Tensors, State, Batch], "tuple[Tensors, State]"]
"""A local step: model, state and batch -> the new model and state, none of them changed in place."""


@dataclass(frozen=True)
class Stepped(Trained):
    """A model after the steps of a rule.

    Attributes:
        state: What the rule keeps, as arrays.
    """

    state: Mapping[str, Arrays]


class LocalProblem(Protocol):
    """What a client can do with its own data. ``K``, ``eta``, batches and random draws are those of the round."""

    def __init__(self, work: ClientWork, task: Any) -> None: ...

    @staticmethod
    def layout(task: Any, settings: Settings) -> Layout:
        """Say which tensors of a task's model have a curvature block."""

    @property
    def names(self) -> tuple[str, ...]:
        """The trainable tensors."""

    def objective(self, arrays: Arrays) -> Objective:
        """Give the loss of all the client's examples as a function of one vector, `names` end to end, with its Hessian.

        Args:
            arrays: The model, whose buffers stay as they are (torch: in evaluation mode).
        """

    def gradient(self, arrays: Arrays, batches: Iterable[np.ndarray] | None = None) -> Trained:
        r"""Compute the gradient at one model, :math:`\sum_k n_k g_{ik}(\theta) / \sum_k n_k` over batches of ``n_k`` examples.

        Args:
            arrays: The model, ``theta``.
            batches: Indices of each batch's examples; None for the ``K`` of the round.

        Returns:
            The gradient in place of the trainable tensors; the buffers that the batches leave, and the mean loss.

        Raises:
            TaskError: The loss is not finite.
        """

    def descend(
        self,
        start: Arrays,
        pull: Pull = NO_PULL,
        batches: Iterable[np.ndarray] | None = None,
        shift: Arrays | None = None,
    ) -> Trained:
        r"""Take ``K`` gradient steps, :math:`w_i \leftarrow w_i - \eta\,(g_i(w_i) + \lambda (w_i - w) + s)`.

        With the settings ``local-momentum`` and ``weight-decay`` as in `fedapps.personalization.proximal.descend`.

        Args:
            start: The model to start from.
            pull: The pull, with its own ``eta``.
            batches: Indices of each step's examples; None for the round's (convex: a batch of all examples is then summed in
                the order of the data).
            shift: ``s``, by name: a constant that is added to every gradient of the trainable tensors that it names.

        Returns:
            The model after the steps.

        Raises:
            TaskError: The loss is not finite.
        """

    def descend_by(self, start: Arrays, rule: Rule, state: Mapping[str, Arrays] | None = None) -> Stepped:
        """Take ``K`` steps of a rule on the round's batches.

        Args:
            start: The model to start from.
            rule: The step.
            state: What the rule finds at the first of them; None for nothing.

        Returns:
            The model and the state after the steps.

        Raises:
            TaskError: The loss is not finite, or the rule asks the batch for what it cannot give.
        """

    def descend_preconditioned(
        self, start: Arrays, *, factor_min_rows: int = 0, search: bool = False, hessian_share: float = 1.0
    ) -> Preconditioned:
        r"""Take ``K`` steps :math:`w_i \leftarrow w_i - \eta\, P_i^{-1} g_i(w_i)`, as the method's own settings say.

        Args:
            start: The model to start from.
            factor_min_rows: As in `fedapps.curvature.foof.FoofPreconditioner` (convex: without effect).
            search: Convex only: whether steps are shortened until the client's loss falls enough.
            hessian_share: Convex only: share of the examples, a new sample for each step, whose Hessian is taken.

        Returns:
            The model after the steps, and its curvature.

        Raises:
            CurvatureError: A block cannot be solved.
        """

    def move_with_copy(self, received: Arrays, theta: Arrays, config: PFedMeConfig) -> tuple[Trained, Trained]:
        """Take pFedMe's local rounds: the personal model by inner steps, the local copy towards it, for each batch.

        Args:
            received: The global model.
            theta: The personal model to start from.
            config: pFedMe's numbers.

        Returns:
            The local copy (with the buffers of the personal model, which alone sees data), and the personal model.
        """

    def fit(self, received: Arrays, pull: Pull) -> tuple[Trained, LocalFit]:
        """Fit the client's own data, for the choice of ``lambda``.

        Args:
            received: The model to start from.
            pull: A weak pull to it.

        Returns:
            The fit, and the scalars that say how uncertain it is.
        """

    def largest_curvature(self, arrays: Arrays, names: Sequence[str]) -> float:
        """Give the greatest curvature ``L`` of the client's loss.

        Args:
            arrays: The model at which it is estimated (convex: a bound for every model).
            names: The tensors that it is about.

        Returns:
            ``L``.

        Raises:
            TaskError: The model cannot be differentiated twice.
        """

    def least_curvature(self, arrays: Arrays) -> float | None:
        """Give the least curvature ``mu`` of the client's loss.

        Args:
            arrays: The model at which it is computed.

        Returns:
            ``mu``; None if the loss need not be convex.
        """

    def rough_curvature(self, arrays: Arrays, names: Sequence[str]) -> float:
        """Estimate ``L`` from below by a few gradients on the round's first batch, for warnings.

        Args:
            arrays: The model at which it is estimated.
            names: The tensors that it is about.

        Returns:
            The estimate; 0 if nothing is known.
        """


def local_problem(work: ClientWork) -> LocalProblem:
    """Give the local problem of a client.

    Args:
        work: The round.

    Returns:
        The problem.
    """
    return _problem_class(work.task)(work, work.task)


def layout_of(task: Task, settings: Settings) -> Layout:
    """Say which tensors of a task's model have a curvature block, without any data of a client.

    Args:
        task: The task.
        settings: The settings of the run.

    Returns:
        The layout.
    """
    return _problem_class(task).layout(task, settings)


def _problem_class(task: Task) -> type[LocalProblem]:
    found: type[LocalProblem] = load_object(PROBLEMS[task.kind], what=f"local problem of a {task.kind} task")
    return found


def warn_of_damping(work: ClientWork, added: Mapping[str, float]) -> None:
    """Log which blocks could not be factorised as they were.

    Args:
        work: The round.
        added: Layer -> the damping that was added; only layers that needed some.
    """
    for layer, damping in added.items():
        logger.warning(
            "round %d, %s, layer '%s': its block could not be factorised; damping was raised by %.1e",
            work.server_round, work.where, layer, damping,
        )  # fmt: skip
