"""A project's own ClientApp around the helpers: its model, loader and loop; data and batches as in the task ``Sites``."""

from __future__ import annotations

from typing import Any

import torch
from fedapps_testing import Sites
from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch.nn.functional import cross_entropy

import fedapps
from fedapps.client_apps.personal import personal, personal_model
from fedapps.compute import generator
from fedapps.messages.node_facts import NODE, NodeFacts
from fedapps.tasks import TaskConfig
from fedapps.tasks.partitioning import PartitionConfig, PartitionKind

app = ClientApp()

Batches = list[tuple[torch.Tensor, torch.Tensor]]


def load(context: Context, server_round: int) -> tuple[torch.nn.Module, Batches, int]:
    """Build a model, and cut this client's six examples into batches of four and two, in an order of the round's."""
    partition = int(context.node_config["partition-id"])
    task = Sites(TaskConfig(partition=PartitionConfig(PartitionKind.COLUMN, column="site")))
    data = task.client_data(partition, 3).train
    order = generator(0, server_round, partition, 0).permutation(len(data))
    batches = [task.tensors(data.take(part)) for part in (order[:4], order[4:])]
    return task.initial_module(), batches, len(data)


def fit(model: torch.nn.Module, batches: Any, lr: float, *, closure: bool = False) -> float:
    """The project's loop."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for x, y in batches:

        def backward(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            loss.backward()
            return loss

        if closure:
            loss = optimizer.step(backward)
        else:
            loss = backward()
            optimizer.step()
    return float(loss.detach())


@app.train()
def train(message: Message, context: Context) -> Message:
    config = context.run_config
    method = str(config["method"])
    own: dict[str, Any] = {"lambda_": 0.3} if method in ("pfedme", "ditto") else {}
    if method == "pfedme":
        own |= {"inner_steps": 2}
    model, batches, n = load(context, int(message.content["config"]["server-round"]))
    x, y = (torch.cat(parts) for parts in zip(*sorted(batches, key=len), strict=True))
    with personal(message, context, model, method, curvature_loss=lambda: cross_entropy(model(x), y), **own) as p:
        for trained in p:
            loss = fit(trained, p.batches(batches), p.lr, closure=bool(config.get("closure", False)))
    return Message(p.reply(num_examples=n, train_loss=loss), reply_to=message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    model, _, n = load(context, 1)
    model = personal_model(message, context, model, str(context.run_config["method"]))
    total = sum(float(p.detach().double().sum()) for p in model.parameters())
    return Message(RecordDict({"metrics": MetricRecord({"num-examples": n, "total": total})}), reply_to=message)


named = ClientApp()
"""The same, whose nodes say which partition each is: the server then sums in the order of the package's own run."""

named.train()(train)
named.evaluate()(evaluate)


@named.query()
def query(message: Message, context: Context) -> Message:
    facts = NodeFacts(
        partition=int(context.node_config["partition-id"]), num_partitions=3, num_examples=6,
        version=fedapps.__version__, method="", device="cpu", layout="", kernel="",
    )  # fmt: skip
    return Message(RecordDict({NODE: facts.to_record()}), reply_to=message)
