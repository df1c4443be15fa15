"""Replies are folded by partition, whatever order they arrive in and wherever they wait."""

from __future__ import annotations

import gc
import itertools
import weakref

import numpy as np
import pytest
from flwr.app import RecordDict

from fedapps.records import pack_arrays
from fedapps.strategies import folding
from fedapps.strategies.folding import OrderedFold


def content(value: int) -> RecordDict:
    return RecordDict({"arrays": pack_arrays({"x": np.full(1000, value, dtype=np.float32)})})


@pytest.mark.parametrize("buffer_mb", [0.0, 0.005, 100.0], ids=["all on disk", "some on disk", "all in memory"])
@pytest.mark.parametrize("arrival", list(itertools.permutations([1, 3, 4, 8])))
def test_every_order_of_arrival_folds_in_partition_order(arrival: tuple[int, ...], buffer_mb: float) -> None:
    folded = []
    order = OrderedFold([8, 1, 4, 3], lambda p, c: folded.append((p, float(c["arrays"]["x"].numpy()[0]))), buffer_mb)
    for partition in arrival:
        order.add(partition, content(partition))
    order.close()
    assert folded == [(p, float(p)) for p in (1, 3, 4, 8)]
    assert order.missing == []


def test_a_failed_client_holds_nobody_up() -> None:
    folded: list[int] = []
    order = OrderedFold([0, 1, 2], lambda p, c: folded.append(p), 1.0)
    order.add(2, content(2))
    order.add(1, content(1))
    assert folded == []
    assert order.missing == [0]
    order.add(0, None)
    assert folded == [1, 2]


@pytest.mark.parametrize("buffer_mb", [0.0, 100.0], ids=["through the scratch file", "in memory"])
def test_replies_that_are_done_with_leave_memory(buffer_mb: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even in a reference cycle, as Flower's own properties make them, and whether folded at once or after waiting."""
    monkeypatch.setattr(folding, "COLLECT_MB", 0)
    alive: list[weakref.ref[RecordDict]] = []

    def in_a_cycle(value: int) -> RecordDict:
        reply = content(value)
        _ = reply.array_records
        alive.append(weakref.ref(reply))
        return reply

    order = OrderedFold([0, 1, 2, 3], lambda p, c: alive.append(weakref.ref(c)), buffer_mb)
    gc.collect()
    gc.disable()
    try:
        for partition in (3, 2):
            order.add(partition, in_a_cycle(partition))
        assert (alive[0]() is None) == (buffer_mb == 0)  # It waits on disk while nothing is folded yet.
        for partition in (0, 1):
            order.add(partition, in_a_cycle(partition))
        assert [reference() for reference in alive] == [None] * 8
    finally:
        gc.enable()
        order.close()


def test_waiting_replies_beyond_the_buffer_leave_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    spilled = []
    spill = OrderedFold._spill
    monkeypatch.setattr(OrderedFold, "_spill", lambda self, c: (spilled.append(1), spill(self, c))[1])
    order = OrderedFold(range(5), lambda p, c: None, 0.009)
    for partition in (4, 3, 2, 1):
        order.add(partition, content(partition))
    # 4 kB a reply: two fit into 9 kB, the other two wait in the scratch file.
    assert len(spilled) == 2
