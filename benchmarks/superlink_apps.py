"""Apps of Flower alone for `superlink_rounds.py`: its FedAvg on the digits, and clients that answer at once.

They import nothing of fedapps, so that a client process of theirs costs what Flower costs. Each server writes the times of
day of its start and of the ends of its rounds to ``<run-dir>/stamps.json``.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

if TYPE_CHECKING:
    import torch

NODES = 2
PAUSE = 0.02, 0.2
"""First and longest pause between two looks for replies, as in `fedapps.strategies.exchange`."""

fedavg_server = ServerApp()
fedavg_client = ClientApp()
idle_server = ServerApp()
idle_client = ClientApp()


def write_stamps(context: Context, stamps: Sequence[float]) -> None:
    """Write the times of a run."""
    folder = Path(str(context.run_config["run-dir"]))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "stamps.json").write_text(json.dumps(stamps))


def digits_model() -> torch.nn.Module:
    """Build the CNN of the task ``digits``."""
    from torch import nn

    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip


@fedavg_server.main()
def _fedavg(grid: Grid, context: Context) -> None:
    stamps = [time.time()]
    from flwr.app import ArrayRecord
    from flwr.serverapp.strategy import FedAvg

    def note(server_round: int, _: Any) -> MetricRecord:
        if server_round:
            stamps.append(time.time())
        return MetricRecord({})

    strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=NODES, min_available_nodes=NODES)
    strategy.start(
        grid,
        initial_arrays=ArrayRecord(digits_model().state_dict()),
        num_rounds=int(context.run_config["num-server-rounds"]),
        evaluate_fn=note,
    )
    write_stamps(context, stamps)


@fedavg_client.train()
def _train(message: Message, context: Context) -> Message:
    import torch
    from flwr.app import ArrayRecord
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    mine = slice(int(context.node_config["partition-id"]), None, int(context.node_config["num-partitions"]))
    data = torch.utils.data.TensorDataset(
        torch.tensor(images[mine] / 16, dtype=torch.float32).reshape(-1, 1, 8, 8), torch.tensor(labels[mine])
    )
    model = digits_model()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    steps = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs, targets in torch.utils.data.DataLoader(data, batch_size=32, shuffle=True):
        steps.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), targets).backward()
        steps.step()
    metrics = MetricRecord({"num-examples": len(data)})
    return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=message)


@idle_server.main()
def _idle(grid: Grid, context: Context) -> None:
    stamps = [time.time()]
    while len(nodes := list(grid.get_node_ids())) < NODES:
        time.sleep(PAUSE[1])
    for _ in range(int(context.run_config["num-server-rounds"])):
        content = RecordDict({"config": ConfigRecord({"lr": 0.1})})
        waiting = set(grid.push_messages([Message(content, node, "train") for node in nodes]))
        pause = PAUSE[0]
        while waiting:
            waiting -= {reply.metadata.reply_to_message_id for reply in grid.pull_messages(list(waiting))}
            time.sleep(pause)
            pause = min(PAUSE[1], pause * 1.5)
        stamps.append(time.time())
    write_stamps(context, stamps)


@idle_client.train()
def _answer(message: Message, context: Context) -> Message:  # noqa: ARG001 - Flower's signature
    return Message(RecordDict({"metrics": MetricRecord({"num-examples": 1})}), reply_to=message)
