"""A project's own ClientApp around the zeroth-order helpers; data and batches as in the task ``Sites``."""

from __future__ import annotations

from typing import Any

import torch
from fedapps_own_client import load, query
from fedapps_testing import Sites
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from torch.nn.functional import cross_entropy

from fedapps.client_apps.own_probes import probed_reply, replica_reply, scalar_reply
from fedapps.tasks import TaskConfig

app = ClientApp()


def build() -> torch.nn.Module:
    """The project's model; whoever calls it has seeded torch."""
    return Sites(TaskConfig()).build_model()


def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    """The project's loss."""
    x, y = batch
    return cross_entropy(model(x), y)


@app.train()
def train(message: Message, context: Context) -> Message:
    model, batches, n = load(context, int(message.content["config"]["server-round"]))
    if context.run_config["method"] == "fedzo":
        content = probed_reply(message, context, model, loss, batches, num_examples=n, local_steps=2, num_probes=3)
    else:
        content = scalar_reply(message, context, build, loss, batches, num_examples=n)
    return Message(content, reply_to=message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    def measure(model: torch.nn.Module) -> dict[str, float]:
        return {"num-examples": 6, "total": sum(float(p.detach().double().sum()) for p in model.parameters())}

    return Message(replica_reply(message, context, build, measure), reply_to=message)


named = ClientApp()
"""The same, whose nodes say which partition each is: FedZO's directions are those of the package's own run."""

named.train()(train)
named.query()(query)
