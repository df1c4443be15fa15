r"""The scalar-only client of HiSo, DeComFL and their relatives: directional derivatives from forward passes only.

.. math:: g_{kp} = \frac{f(x_k + \mu z_{kp}) - f(x_k)}{\mu}, \qquad x_{k+1} = x_k - \frac{\eta}{P} \sum_p g_{kp} z_{kp}

HiSo, arXiv 2506.02370, Algorithm 1; DeComFL, arXiv 2405.15861. A client catches up with the journal, measures ``tau x P``
scalars and forgets its local steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from flwr.app import MetricRecord, RecordDict

from fedapps.client_apps.probes import Measured, mean_loss, probe, rounding
from fedapps.client_apps.replicas import CaughtUp, NeedMoreError, caught_up, save_journal
from fedapps.client_apps.work import ClientWork
from fedapps.messages.scalars import NEED_FROM, fingerprint_entry, pack_reply, scalar_entries
from fedapps.messages.schema import NUM_EXAMPLES, REBUILT, STORE_LOST, Entries
from fedapps.zeroth_order.probing import Prober, ProbeResult
from fedapps.zeroth_order.quiet import quiet

if TYPE_CHECKING:
    from fedapps.tasks.torch_task import TorchTask


def train(work: ClientWork) -> RecordDict:
    """Catch up with the journal, and measure a round's scalars with the task's loss on the round's batches.

    Args:
        work: The round.

    Returns:
        As `train_on`.
    """
    return train_on(work, Measured.of_task)


def train_on(work: ClientWork, measured: Callable[[ClientWork], Measured]) -> RecordDict:
    """Catch up with the journal, and measure a round's scalars.

    Args:
        work: The round.
        measured: Gives what is measured; asked only once the replica is there.

    Returns:
        The content of the reply: ``tau x P`` scalars, the fingerprint of the replica if that is all that the server asks
        for, or the round from which the client needs the journal.
    """
    try:
        with caught_up(work) as client:
            if client.received.confirm:
                return _answer(work, fingerprint_entry(str(client.fingerprint)), rebuilt=client.rebuilt)
            content = _pack(work, client, _measure(work, client, measured(work)))
            save_journal(work, client.journal)
            return content
    except NeedMoreError as need:
        return ask_for_journal(work, need)


def evaluate(work: ClientWork) -> dict[str, float] | RecordDict:
    """Measure the replica on the client's own held-out data.

    Args:
        work: The round; its message holds a slice of the journal in place of a model.

    Returns:
        ``validation-...`` and ``test-...``, or the content of a reply that says from which round the client needs the
        journal.
    """
    task = cast("TorchTask", work.task)
    try:
        with caught_up(work) as client, quiet(client.model):
            return {
                f"{split}-{name}": value
                for split, data in (("validation", work.data.validation), ("test", work.data.test))
                for name, value in task.evaluate_module(client.model, data).items()
            }
    except NeedMoreError as need:
        return ask_for_journal(work, need)


def ask_for_journal(work: ClientWork, need: NeedMoreError) -> RecordDict:
    """Answer that the client's journal ends before the message's slice begins."""
    return _answer(work, {NEED_FROM: need.after})


def _measure(work: ClientWork, client: CaughtUp, measured: Measured) -> ProbeResult:
    header, threads = client.header, work.settings.compute_threads
    prober = Prober(client.model, header.scheme, client.state, fixed=header.layout.fixed, threads=threads)
    return probe(work, prober, measured, client.received.first_step, client.received.mu)


def _pack(work: ClientWork, client: CaughtUp, result: ProbeResult) -> RecordDict:
    metrics = work.metrics(train_loss=mean_loss(result))
    metrics.update(rounding(result))
    if client.rebuilt:
        metrics[REBUILT] = 1.0
    if client.lost:
        metrics[STORE_LOST] = 1.0
    return pack_reply(scalar_entries(result.scalars, client.fingerprint), work.server_round, metrics)


def _answer(work: ClientWork, entries: Entries, *, rebuilt: bool = False) -> RecordDict:
    """Answer without scalars."""
    metrics = MetricRecord({NUM_EXAMPLES: work.num_examples})
    if rebuilt:
        metrics[REBUILT] = 1.0
    return pack_reply(entries, work.server_round, metrics)
