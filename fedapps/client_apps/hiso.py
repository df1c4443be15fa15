r"""The scalar-only client of HiSo, DeComFL and their relatives: directional derivatives from forward passes only.

.. math:: g_{kp} = \frac{f(x_k + \mu z_{kp}) - f(x_k)}{\mu}, \qquad x_{k+1} = x_k - \frac{\eta}{P} \sum_p g_{kp} z_{kp}

HiSo, arXiv 2506.02370, Algorithm 1; DeComFL, arXiv 2405.15861. A client catches up with the journal, measures ``tau x P``
scalars and forgets its local steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from fedapps.client_apps.probes import mean_loss, probe, rounding
from fedapps.client_apps.replicas import CaughtUp, NeedMoreError, caught_up, save_journal
from fedapps.client_apps.work import ClientWork
from fedapps.records import (
    ARRAYS,
    CONFIRM,
    JOURNAL,
    METRICS,
    NEED_FROM,
    NUM_EXAMPLES,
    REBUILT,
    SCALARS,
    SERVER_ROUND,
    STORE_LOST,
)
from fedapps.zeroth_order.probing import Prober, ProbeResult
from fedapps.zeroth_order.quiet import quiet
from fedapps.zeroth_order.wire import pack_scalars

if TYPE_CHECKING:
    from fedapps.tasks.torch_task import TorchTask


def train(work: ClientWork) -> RecordDict:
    """Catch up with the journal, and measure a round's scalars.

    Args:
        work: The round.

    Returns:
        The content of the reply: ``tau x P`` scalars, the fingerprint of the replica if that is all that the server asks
        for, or the round from which the client needs the journal.
    """
    try:
        with caught_up(work) as client:
            if work.records[JOURNAL].get(CONFIRM):
                return _answer(work, {"fingerprint": bytes.fromhex(str(client.fingerprint))}, rebuilt=client.rebuilt)
            content = _pack(work, client, _measure(work, client))
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
    task = cast("TorchTask", work.task)
    try:
        with caught_up(work) as client, quiet(client.model):
            return {
                f"{split}-{name}": value
                for split, data in (("validation", work.data.validation), ("test", work.data.test))
                for name, value in task.evaluate_module(client.model, data).items()
            }
    except NeedMoreError as need:
        return _answer(work, {NEED_FROM: need.after})


def _measure(work: ClientWork, client: CaughtUp) -> ProbeResult:
    record = work.records[JOURNAL]
    prober = Prober(client.model, client.header.scheme, client.state, threads=work.settings.compute_threads)
    return probe(work, prober, int(record["next-first-step"]), float(record["next-mu"]))


def _pack(work: ClientWork, client: CaughtUp, result: ProbeResult) -> RecordDict:
    values = pack_scalars([value for row in result.scalars for value in row])
    scalars = ConfigRecord({SERVER_ROUND: work.server_round, "values": values})
    if client.fingerprint is not None:
        scalars["fingerprint"] = bytes.fromhex(client.fingerprint)
    metrics = work.metrics(train_loss=mean_loss(result))
    metrics.update(rounding(result))
    if client.rebuilt:
        metrics[REBUILT] = 1.0
    if client.lost:
        metrics[STORE_LOST] = 1.0
    return RecordDict({ARRAYS: ArrayRecord({}), SCALARS: scalars, METRICS: metrics})


def _answer(work: ClientWork, values: dict[str, Any], *, rebuilt: bool = False) -> RecordDict:
    """Answer without scalars."""
    record = ConfigRecord({SERVER_ROUND: work.server_round, **values})
    metrics = MetricRecord({NUM_EXAMPLES: work.num_examples})
    if rebuilt:
        metrics[REBUILT] = 1.0
    return RecordDict({ARRAYS: ArrayRecord({}), SCALARS: record, METRICS: metrics})
