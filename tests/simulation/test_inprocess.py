"""The in-process grid and clients that do not answer."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from flwr.app import ConfigRecord, Message, RecordDict

from fedapps.simulation.inprocess import FIRST_NODE, InProcessGrid
from fedapps.strategies.exchange import exchange

APP = """
import os, time

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()

@app.query()
def query(message, context):
    time.sleep(message.content["config"]["seconds"])
    return Message(RecordDict({"reply": ConfigRecord({"process": os.getpid()})}), reply_to=message)
"""


@pytest.fixture
def grid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[InProcessGrid]:
    (tmp_path / "sleepers.py").write_text(APP)
    monkeypatch.syspath_prepend(str(tmp_path))
    grid = InProcessGrid(3, {}, client_app="sleepers:app", workers=1)
    yield grid
    grid.close()


def asked(grid: InProcessGrid, seconds: list[float], timeout: float) -> dict[int, int]:
    """Let client ``i`` sleep for ``seconds[i]``; gives the process of each that answered in time."""
    messages = [
        Message(RecordDict({"config": ConfigRecord({"seconds": s})}), FIRST_NODE + 2 - i, "query")
        for i, s in enumerate(seconds)
    ]
    replies = list(exchange(grid, messages, timeout))
    return {grid.partitions[reply.metadata.src_node_id]: int(reply.content["reply"]["process"]) for reply in replies}


@pytest.mark.slow
def test_the_worker_of_a_client_that_hangs_is_replaced_for_the_next_exchange(grid: InProcessGrid) -> None:
    first = asked(grid, [0.0, 600.0, 0.0], 2.0)
    assert set(first) == {0}
    second = asked(grid, [0.0, 0.0, 0.0], 30.0)
    assert set(second) == {0, 1, 2}
    assert set(second.values()).isdisjoint(first.values())
    assert grid.close() == []


@pytest.mark.slow
def test_the_end_does_not_wait_for_a_client_and_names_it(grid: InProcessGrid) -> None:
    assert asked(grid, [600.0], 1.0) == {}
    started = time.monotonic()
    assert grid.close() == [0]
    assert time.monotonic() - started < 30
