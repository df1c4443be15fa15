"""What zeroth-order clients share: probing a round's batches, and what they say of the probes.

Every pass of a step sees the same batch, drawn from (seed, round, partition).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, cast

import torch

from fedapps.client_apps.work import ClientWork
from fedapps.zeroth_order.probing import Difference, Prober, ProbeResult

if TYPE_CHECKING:
    from fedapps.tasks.torch_task import TorchTask

PROBES_LOST = "probes-lost"
"""Metric of a client: share of its scalars that are exactly 0."""

ELEMENTS_MOVED = "elements-moved"
"""Metric of a client: share of the half-precision elements that its first probes changed."""


def probe(work: ClientWork, prober: Prober, first_step: int, mu: float, *, sphere: bool = False) -> ProbeResult:
    """Measure the directional derivatives of the round's local steps.

    Args:
        work: The round.
        prober: Holds the model and its directions; the model is put back.
        first_step: Number of the round's first local step over all rounds.
        mu: Radius of the probes.
        sphere: Whether it is their length; see `fedapps.zeroth_order.probing`.

    Returns:
        ``tau x P`` scalars and the losses.
    """
    task, own, random = cast("TorchTask", work.task), work.settings.own, work.augmentation()

    def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        return task.loss(model, *batch)

    batches = [
        task.tensors(task.augment(work.data.train.take(indices), random), work.device) for indices in work.batches()
    ]
    return prober.probe(
        loss, batches, first_step=first_step, num_probes=own.num_probes, mu=mu, lr=work.lr,
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
