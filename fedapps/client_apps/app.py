"""The ClientApp of every method: it answers queries, trains and evaluates."""

from __future__ import annotations

from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

import fedapps
from fedapps.client_apps.personal_models import evaluate_model
from fedapps.client_apps.resident import in_resident_worker
from fedapps.client_apps.rules import NodeRules, errors_hold_no_content
from fedapps.client_apps.work import Node, unpack_work
from fedapps.compute import choose_device, pinned
from fedapps.messages.node_facts import NODE, NodeFacts
from fedapps.messages.schema import METRICS, NUM_EXAMPLES
from fedapps.methods import get_method

app = ClientApp(mods=[in_resident_worker, errors_hold_no_content])


@app.query()
def query(message: Message, context: Context) -> Message:
    """Answer who this node is.

    Args:
        message: The server's query.
        context: Flower's context of the node.

    Returns:
        The facts of the node, which the server checks before training.
    """
    return Message(RecordDict({NODE: facts_of_node(context).to_record()}), reply_to=message)


def facts_of_node(context: Context) -> NodeFacts:
    """Look at a node's data, rules and software, for the handshake.

    Args:
        context: Flower's context of the node.

    Returns:
        The facts.

    Raises:
        FedAppsError: The node does not allow what the settings ask for, or its data cannot be used.
    """
    rules = NodeRules.of_node(context)
    settings = rules.resolve(context.run_config)
    node = Node.of(context, settings, rules)
    with pinned(settings.compute_threads):
        task = rules.load_task(settings)
        method = get_method(settings.method)
        return NodeFacts(
            partition=node.partition,
            num_partitions=node.num_partitions,
            num_examples=len(task.client_data(node.partition, node.num_partitions).train),
            version=fedapps.__version__,
            method=settings.method,
            device="cpu" if task.kind == "convex" else choose_device(settings.device),
            # Of a model whose shape the nodes have yet to agree on, the server says it.
            layout="" if settings.partition == "local" else method.layout_of(task, settings),
            kernel=_kernel(settings.device) if method.replicas else "",
            name=node.name,
            told=task.tell() if settings.partition == "local" else {},
        )


def _kernel(device: str) -> str:
    from fedapps.zeroth_order.dispatch import kernel_checksum  # other methods need no kernels

    return kernel_checksum(choose_device(device))


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train this client for one round, as the method says.

    Args:
        message: The model and the round's config.
        context: Flower's context of the node.

    Returns:
        The method's reply.
    """
    settings = NodeRules.of_node(context).resolve(context.run_config)
    client = get_method(settings.method).load_client()
    with pinned(settings.compute_threads):
        content = client(unpack_work(message, context))
    return Message(content, reply_to=message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Evaluate the global model, and the personal one of methods that have it, on this client's own held-out data.

    Args:
        message: The model and the round's config.
        context: Flower's context of the node.

    Returns:
        Metrics; ``num-examples`` is the number of test examples, and 0 leaves the client out of the means.
    """
    work = unpack_work(message, context)
    evaluate_with = get_method(work.settings.method).load_evaluate() or evaluate_model
    with pinned(work.settings.compute_threads):
        metrics = evaluate_with(work)
    if isinstance(metrics, RecordDict):
        return Message(metrics, reply_to=message)
    record = MetricRecord({NUM_EXAMPLES: len(work.data.test), **metrics})
    return Message(RecordDict({METRICS: record}), reply_to=message)
