"""What zeroth-order clients share: probing a round's batches, and what they say of the probes.

Every pass of a step sees the same batch, drawn from (seed, round, partition).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self, cast

from fedapps.client_apps.work import ClientWork
from fedapps.zeroth_order.probing import Difference, Loss, Prober, ProbeResult

if TYPE_CHECKING:
    from fedapps.tasks.torch_task import TorchTask

PROBES_LOST = "probes-lost"
"""Metric of a client: share of its scalars that are exactly 0."""

ELEMENTS_MOVED = "elements-moved"
"""Metric of a client: share of the half-precision elements that its first probes changed."""


@dataclass(frozen=True)
class Measured:
    """What the probes of a round measure.

    Attributes:
        loss: The mean loss of a model on a batch.
        batches: One for each local step.
    """

    loss: Loss
    batches: Sequence[Any]

    @classmethod
    def of_task(cls, work: ClientWork) -> Self:
        """Take the loss of the task, and the round's batches of the client's data."""
        task, random = cast("TorchTask", work.task), work.augmentation()
        return cls(
            lambda model, batch: task.loss(model, *batch),
            [
                task.tensors(task.augment(work.data.train.take(indices), random), work.device)
                for indices in work.batches()
            ],
        )


def probe(
    work: ClientWork, prober: Prober, measured: Measured, first_step: int, mu: float, *, sphere: bool = False
) -> ProbeResult:
    """Measure the directional derivatives of the round's local steps.

    Args:
        work: The round.
        prober: Holds the model and its directions; the model is put back.
        measured: The loss and the batches.
        first_step: Number of the round's first local step over all rounds.
        mu: Radius of the probes.
        sphere: Whether it is their length; see `fedapps.zeroth_order.probing`.

    Returns:
        ``tau x P`` scalars and the losses.
    """
    own = work.settings.own
    return prober.probe(
        measured.loss, measured.batches, first_step=first_step, num_probes=own.num_probes, mu=mu, lr=work.lr,
        difference=Difference(own.difference), sphere=sphere,
    )  # fmt: skip


def mean_loss(result: ProbeResult) -> float:
    """Give the mean of the losses at the unperturbed points.

    Args:
        result: What `probe` gave.

    Returns:
        The mean.
    """
    return math.fsum(result.losses) / len(result.losses)


def rounding(result: ProbeResult) -> dict[str, float]:
    """Say what became of the probes in half precision.

    Args:
        result: What `probe` gave.

    Returns:
        Metrics; none for float32, so that its replies stay as short.
    """
    if result.moved is None:
        return {}
    count = sum(len(row) for row in result.scalars)
    return {PROBES_LOST: len(result.lost) / count, ELEMENTS_MOVED: result.moved}
