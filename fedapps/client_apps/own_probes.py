r"""HiSo, DeComFL and FedZO in a ClientApp of one's own: model, data and loss are the project's, only forward passes are made.

Example:
    ::

        def loss(model, batch):
            return cross_entropy(model(batch["image"]), batch["label"])

        @app.train()
        def train(message, context):
            loader = load_data(context)
            content = scalar_reply(message, context, Net, loss, loader, num_examples=len(loader.dataset))  # changed
            return Message(content, reply_to=message)

        @app.evaluate()
        def evaluate(message, context):
            content = replica_reply(message, context, Net, lambda model: test(model, load_data(context)))  # changed
            return Message(content, reply_to=message)

No parameter travels, so both ends build the same model before round 1: `first_model` does, on the server, and so do these
helpers. A model that is loaded from files, such as a published one, is the same in any case.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import Any

from flwr.app import Context, Message, MetricRecord, RecordDict
from torch import nn

from fedapps.client_apps import fedzo, hiso
from fedapps.client_apps.own_app import ModelAtHand, OwnModel, entries_of, own_work
from fedapps.client_apps.probes import Measured
from fedapps.client_apps.replicas import NeedMoreError, caught_up
from fedapps.compute import pinned
from fedapps.errors import TaskError
from fedapps.messages.method_facts import LOCAL_STEPS, check_method
from fedapps.messages.schema import METRICS, NUM_EXAMPLES
from fedapps.zeroth_order.probing import Loss
from fedapps.zeroth_order.quiet import quiet
from fedapps.zeroth_order.rules import RULES


def first_model(build: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """Build the model before round 1 as every client does.

    Args:
        build: Builds the model.
        seed: The strategy's.

    Returns:
        The model; torch's generator is as it was.
    """
    return OwnModel(build, seed).initial_module()


def scalar_reply(
    message: Message,
    context: Context,
    build: Callable[[], nn.Module],
    loss: Loss,
    batches: Iterable[Any],
    *,
    num_examples: int,
) -> RecordDict:
    r"""Catch up with the journal, and measure a round's directional derivatives.

    .. math:: g_{kp} = \frac{f(x_k + \mu z_{kp}) - f(x_k)}{\mu}

    by forward passes; HiSo, arXiv 2506.02370, Algorithm 1; DeComFL, arXiv 2405.15861.

    Args:
        message: The train message.
        context: Flower's context of the node. Journal and replica are kept as `fedapps.client_apps.own_app` says.
        build: Builds the project's model; its random numbers are drawn from the strategy's seed.
        loss: Computes the mean loss of a model on a batch, without a backward pass. The model is on a GPU where there is one.
        batches: The project's loader: one batch for each of the strategy's ``tau`` local steps; from its start again where it
            ends before.
        num_examples: Examples that the client trains on.

    Returns:
        The content of the reply: ``tau x P`` scalars.

    Raises:
        MessageError: The server's strategy is of another method, or of another version of this package.
        JournalError: The model is not the server's.
        TaskError: There is no batch.
    """
    entries = entries_of(message)
    method = check_method(entries, *RULES)
    work = own_work(message, context, lambda seed: OwnModel(build, seed), method, num_examples=num_examples, given={})
    with pinned(work.settings.compute_threads):
        return hiso.train_on(work, lambda _: Measured(loss, _taken(batches, int(entries[LOCAL_STEPS]))))


def replica_reply(
    message: Message,
    context: Context,
    build: Callable[[], nn.Module],
    measure: Callable[[nn.Module], Mapping[str, float]],
) -> RecordDict:
    """Catch up with the journal, and measure the replica: the twin of `scalar_reply` for ``@app.evaluate``.

    Args:
        message: The evaluate message, which holds rounds of the journal in place of a model.
        context: Flower's context of the node.
        build: As for `scalar_reply`.
        measure: Gives metrics of the model, ``num-examples`` among them; it leaves the parameters alone.

    Returns:
        The content of the reply; a client that lost its journal asks for it.

    Raises:
        MessageError: As `scalar_reply`.
        JournalError: As `scalar_reply`.
        TaskError: The metrics lack ``num-examples``.
    """
    method = check_method(entries_of(message), *RULES)
    work = own_work(message, context, lambda seed: OwnModel(build, seed), method, given={})
    try:
        with pinned(work.settings.compute_threads), caught_up(work) as client, quiet(client.model):
            metrics = {name: float(value) for name, value in measure(client.model).items()}
    except NeedMoreError as need:
        return hiso.ask_for_journal(work, need)
    if NUM_EXAMPLES not in metrics:
        raise TaskError(
            "measure of replica_reply", expected=f"metrics with '{NUM_EXAMPLES}'", got=", ".join(metrics) or "none"
        )
    count = int(metrics.pop(NUM_EXAMPLES))
    return RecordDict({METRICS: MetricRecord({NUM_EXAMPLES: count, **metrics})})


def probed_reply(
    message: Message,
    context: Context,
    model: nn.Module,
    loss: Loss,
    batches: Iterable[Any],
    *,
    num_examples: int,
    local_steps: int = 1,
    **own: Any,
) -> RecordDict:
    """Train for a round of FedZO, arXiv 2201.09531, Algorithm 1: a model comes and goes, but no gradient is computed.

    Args:
        message: The train message of a strategy that averages, such as `FedAvg`, with ``lr`` in its config.
        context: Flower's context of the node.
        model: The project's model.
        loss: As for `scalar_reply`.
        batches: As for `scalar_reply`, one for each local step.
        num_examples: Examples that the client trains on.
        local_steps: Number of local steps.
        **own: FedZO's own settings, such as ``num_probes`` and ``mu``.

    Returns:
        The content of the reply: the whole model.

    Raises:
        MessageError: A record or an entry of the message is absent.
        SettingsError: A setting is wrong.
        TaskError: There is no batch, or the model is not the server's.
    """
    work = own_work(
        message, context, lambda seed: ModelAtHand(lambda: model, seed), "fedzo", num_examples=num_examples, given=own
    )
    with pinned(work.settings.compute_threads):
        return fedzo.train_on(work, Measured(loss, _taken(batches, local_steps)))


def _taken(batches: Iterable[Any], count: int) -> list[Any]:
    """Take so many batches, from the start again where there are fewer."""
    taken = list(islice(batches, count))
    while taken and len(taken) < count:
        more = list(islice(batches, count - len(taken)))
        taken += more or taken[: count - len(taken)]  # An iterator has only one pass.
    if not taken:
        raise TaskError("batches of the client", expected="at least one batch", got="none", do="check the loader")
    return taken
