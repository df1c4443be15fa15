r"""The clients of zeroth-order methods: directional derivatives from forward passes only.

.. math:: g_{kp} = \frac{f(x_k + \mu z_{kp}) - f(x_k)}{\mu}, \qquad x_{k+1} = x_k - \frac{\eta}{P} \sum_p g_{kp} z_{kp}

HiSo, arXiv 2506.02370, Algorithm 1; DeComFL, arXiv 2405.15861; FedZO, arXiv 2201.09531. Scalar-only clients catch up with
the journal, measure ``tau x P`` scalars and forget their local steps; FedZO's client sends the model that they lead to.
Every pass of a step sees the same batch, drawn from (seed, round, partition).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from flwr.app import MetricRecord, RecordDict

from fedapps.client_apps.first_order import reply
from fedapps.client_apps.replicas import CaughtUp, NeedMoreError, caught_up, save_journal
from fedapps.client_apps.work import ClientWork
from fedapps.compute import generator
from fedapps.messages.scalars import NEED_FROM, fingerprint_entry, pack_reply, scalar_entries
from fedapps.messages.schema import METRICS, NUM_EXAMPLES, REBUILT, STORE_LOST, Entries
from fedapps.zeroth_order.directions import Distribution
from fedapps.zeroth_order.probing import Difference, Prober, ProbeResult
from fedapps.zeroth_order.quiet import quiet
from fedapps.zeroth_order.scheme import LocalStep, Scheme

if TYPE_CHECKING:
    from fedapps.tasks.torch_task import TorchTask

PROBES_LOST = "probes-lost"
"""Metric of a client: share of its scalars that are exactly 0."""

ELEMENTS_MOVED = "elements-moved"
"""Metric of a client: share of the half-precision elements that its first probes changed."""

_OWN_DIRECTIONS = 4
"""What the draw of a FedZO client's own directions belongs to, beside seed and partition."""


def train(work: ClientWork) -> RecordDict:
    """Catch up with the journal, and measure a round's scalars (HiSo, DeComFL and their relatives).

    Args:
        work: The round.

    Returns:
        The content of the reply: ``tau x P`` scalars, the fingerprint of the replica if that is all that the server asks
        for, or the round from which the client needs the journal.
    """
    try:
        with caught_up(work) as client:
            if client.received.confirm:
                return _answer(work, fingerprint_entry(str(client.fingerprint)), rebuilt=client.rebuilt)
            result = _measure(work, client)
            content = _pack(work, client, result)
            save_journal(work, client.journal)
            return content
    except NeedMoreError as need:
        return _answer(work, {NEED_FROM: need.after})


def evaluate(work: ClientWork) -> dict[str, float] | RecordDict:
    """Measure the replica on the client's own held-out data.

    Args:
        work: The round; its message holds a slice of the journal in place of a model.

    Returns:
        ``validation-...`` and ``test-...``, or the content of a reply that says from which round the client needs the
        journal.
    """
    task: TorchTask = work.task  # type: ignore[assignment]  # the registry admits torch tasks only
    try:
        with caught_up(work) as client, quiet(client.model):
            return {
                f"{split}-{name}": value
                for split, data in (("validation", work.data.validation), ("test", work.data.test))
                for name, value in task.evaluate_module(client.model, data).items()
            }
    except NeedMoreError as need:
        return _answer(work, {NEED_FROM: need.after})


def train_fedzo(work: ClientWork) -> RecordDict:
    """Take local steps along the client's own directions, and send the model (FedZO, arXiv 2201.09531, Algorithm 1).

    Args:
        work: The round.

    Returns:
        The content of the reply: the whole model; buffers are as received.
    """
    task: TorchTask = work.task  # type: ignore[assignment]  # the registry admits torch tasks only
    own = work.settings.own
    seed = int(generator(work.settings.seed, work.node.partition, _OWN_DIRECTIONS).integers(2**63))
    prober = Prober(
        task.module(work.arrays, work.device),
        Scheme(seed, "decomfl", Distribution(own.distribution)),
        threads=work.settings.compute_threads,
    )
    first_step = (work.server_round - 1) * work.num_steps
    result = _probe(work, prober, first_step, own.mu_of(work.server_round))
    steps = [LocalStep(first_step + k, g, work.lr) for k, g in enumerate(result.scalars)]
    moved = {name: tensor.detach().cpu().numpy() for name, tensor in prober.displaced(steps).items()}
    buffers = {name: value for name, value in work.arrays.items() if name not in moved}
    content = reply(moved, buffers, work, _mean(result.losses))
    content[METRICS].update(_rounding(result))  # type: ignore[arg-type]  # it is a MetricRecord
    return content


def _measure(work: ClientWork, client: CaughtUp) -> ProbeResult:
    prober = Prober(client.model, client.header.scheme, client.state, threads=work.settings.compute_threads)
    return _probe(work, prober, client.received.first_step, client.received.mu)


def _probe(work: ClientWork, prober: Prober, first_step: int, mu: float) -> ProbeResult:
    task: TorchTask = work.task  # type: ignore[assignment]
    own, random = work.settings.own, work.augmentation()

    def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        return task.loss(model, *batch)

    batches = [
        task.tensors(task.augment(work.data.train.take(indices), random), work.device) for indices in work.batches()
    ]
    return prober.probe(
        loss, batches, first_step=first_step, num_probes=own.num_probes, mu=mu, lr=work.lr,
        difference=Difference(own.difference),
    )  # fmt: skip


def _pack(work: ClientWork, client: CaughtUp, result: ProbeResult) -> RecordDict:
    metrics = work.metrics(train_loss=_mean(result.losses))
    metrics.update(_rounding(result))
    if client.rebuilt:
        metrics[REBUILT] = 1.0
    if client.lost:
        metrics[STORE_LOST] = 1.0
    return pack_reply(scalar_entries(result.scalars, client.fingerprint), work.server_round, metrics)


def _rounding(result: ProbeResult) -> dict[str, float]:
    """Say what became of the probes in half precision; nothing for float32, so that its replies stay as short."""
    if result.moved is None:
        return {}
    count = sum(len(row) for row in result.scalars)
    return {PROBES_LOST: len(result.lost) / count, ELEMENTS_MOVED: result.moved}


def _answer(work: ClientWork, entries: Entries, *, rebuilt: bool = False) -> RecordDict:
    """Answer without scalars."""
    metrics = MetricRecord({NUM_EXAMPLES: work.num_examples})
    if rebuilt:
        metrics[REBUILT] = 1.0
    return pack_reply(entries, work.server_round, metrics)


def _mean(losses: tuple[float, ...]) -> float:
    return math.fsum(losses) / len(losses)
