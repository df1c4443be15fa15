"""The in-process grid: addresses, what a client's error becomes, order of replies, and faults put into them."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedapps.simulation.inprocess import CLIENT_RAISED, WORKER_DIED, FaultyGrid, InProcessGrid

app = ClientApp()


@app.train()
def train(message: Message, context: Any) -> Message:
    """Count the messages of a node in its state; partition 2 raises, partition 3 kills its process."""
    partition = int(context.node_config["partition-id"])
    if partition == 2:
        raise RuntimeError("sensor offline")
    if partition == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    seen = int(context.state["seen"]["count"]) if "seen" in context.state else 0
    context.state["seen"] = MetricRecord({"count": seen + 1})
    content = {"partition": partition, "count": seen + 1, "process": os.getpid()}
    return Message(RecordDict({"metrics": MetricRecord(content)}), reply_to=message)


@pytest.fixture
def client_app(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    return f"{Path(__file__).stem}:app"


@pytest.fixture
def grid(client_app: str) -> Iterator[InProcessGrid]:
    grid = InProcessGrid(4, {}, client_app=client_app)
    yield grid
    grid.close()
    sys.modules.pop(Path(__file__).stem, None)


def asked(grid: InProcessGrid | FaultyGrid, partitions: list[int], server_round: int = 1) -> dict[int, Message]:
    """Ask nodes by their partitions, and give the replies by partition, in the order in which they came."""
    inner = grid.inner if isinstance(grid, FaultyGrid) else grid
    nodes = {partition: node for node, partition in inner.partitions.items()}
    messages = [grid.create_message(RecordDict(), "train", nodes[p], str(server_round)) for p in partitions]
    replies = grid.send_and_receive(messages, timeout=60)
    return {inner.partitions[reply.metadata.src_node_id]: reply for reply in replies}


def test_every_node_answers_as_its_partition_and_keeps_its_state(grid: InProcessGrid) -> None:
    assert sorted(grid.partitions.values()) == [0, 1, 2, 3]
    assert set(grid.get_node_ids()) == {node.node_id for node in grid.get_nodes()} == set(grid.partitions)
    assert sorted(grid.partitions) != [node for node, _ in sorted(grid.partitions.items(), key=lambda item: item[1])]
    for count, partitions in enumerate(([0, 1], [0, 1], [0]), start=1):
        for partition, reply in asked(grid, partitions).items():
            metrics = reply.content["metrics"]
            assert (metrics["partition"], metrics["count"], metrics["process"]) == (partition, count, os.getpid())
    assert asked(grid, [1])[1].content["metrics"]["count"] == 3


def test_what_a_client_raises_comes_back_with_its_traceback(grid: InProcessGrid) -> None:
    replies = asked(grid, [0, 2])
    assert not replies[0].has_error()
    assert replies[2].error.code == CLIENT_RAISED
    assert "RuntimeError: sensor offline" in replies[2].error.reason


def test_a_worker_that_dies_is_an_error_of_its_client(client_app: str) -> None:
    grid = InProcessGrid(4, {}, client_app=client_app, workers=1)
    try:
        reply = asked(grid, [3])[3]
    finally:
        grid.close()
    assert reply.error.code == WORKER_DIED
    assert "worker process died" in reply.error.reason


def test_late_partitions_come_last_and_faults_hit_their_round_alone(grid: InProcessGrid) -> None:
    def changed(reply: Message) -> Message:
        reply.content["metrics"]["count"] = -1
        return reply

    faulty = FaultyGrid(grid, {(2, 0): changed, (3, 0): lambda reply: None}, late=[0])
    assert list(asked(faulty, [0, 1], 1)) == [1, 0]
    counts = {p: reply.content["metrics"]["count"] for p, reply in asked(faulty, [0, 1], 2).items()}
    assert counts == {1: 2, 0: -1}
    nodes = {partition: node for node, partition in grid.partitions.items()}
    started = time.monotonic()
    lost = faulty.send_and_receive([faulty.create_message(RecordDict(), "train", nodes[0], "3")], timeout=0.2)
    assert list(lost) == []
    assert time.monotonic() - started < 30
