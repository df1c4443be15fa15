"""Replies are folded by partition, whatever order they arrive in and wherever they wait."""

from __future__ import annotations

import gc
import itertools
import weakref

import numpy as np
import pytest
from flwr.app import ConfigRecord, MetricRecord, RecordDict

from fedapps.messages import pack_arrays
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


def test_memory_of_a_folded_reply_is_free_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two replies of 4 kB fit: of 2 and 5 the first is folded when 1 has come, so 4 need not go to the scratch file."""
    monkeypatch.setattr(OrderedFold, "_spill", lambda self, c: pytest.fail("written to the scratch file"))
    folded: list[int] = []
    order = OrderedFold(range(6), lambda p, c: folded.append(p), 0.009)
    for partition in (2, 5, 0, 1, 4, 3):
        order.add(partition, content(partition))
    assert folded == list(range(6))


def test_a_reply_comes_back_from_the_scratch_file_as_it_was() -> None:
    random = np.random.default_rng(0)
    arrays = {
        "float": random.random((3, 5)).astype(np.float32),
        "column order": np.asfortranarray(random.random((2, 4))),
        "number": np.array(7, dtype=np.int64),
        "nothing": np.zeros((0, 3), dtype=np.uint16),
    }
    reply = RecordDict(
        {
            "arrays": pack_arrays(arrays),
            "layout": ConfigRecord({"layout": "[]", "steps": [0.5, 1.0], "bytes": b"\x00\xff"}),
            "metrics": MetricRecord({"num-examples": 3, "train-loss": float("nan")}),
            "empty": pack_arrays({}),
            "more": pack_arrays({"x": np.full(4, 9.0)}),
        }
    )
    found: list[RecordDict] = []
    order = OrderedFold([0, 1, 2], lambda p, c: found.append(c), 0.0)
    order.add(2, reply)
    order.add(1, content(1))
    order.add(0, None)
    order.close()
    assert list(found[1]) == list(reply)
    assert found[1]["layout"] == reply["layout"]
    assert str(found[1]["metrics"]) == str(reply["metrics"])
    assert list(found[1]["arrays"]) == list(arrays)
    for name, value in (*arrays.items(), ("x", np.full(4, 9.0))):
        record = "more" if name == "x" else "arrays"
        back, sent = found[1][record][name], reply[record][name]
        assert (back.dtype, back.shape, back.stype, back.data) == (sent.dtype, sent.shape, sent.stype, sent.data)
        np.testing.assert_array_equal(back.numpy(), value)
