"""Replies are folded by partition, whatever order they arrive in and wherever they wait."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Mapping

import numpy as np
import pytest
from flwr.app import MetricRecord, RecordDict

from fedapps.messages import pack_arrays
from fedapps.messages.schema import Reply, read_reply
from fedapps.strategies import folding
from fedapps.strategies.folding import OrderedFold


def reply_of(partition: int) -> Reply:
    return Reply(partition, 1, {}, {"x": np.full(1000, partition, dtype=np.float32)})


@pytest.mark.parametrize("buffer_mb", [0.0, 0.005, 100.0], ids=["all on disk", "some on disk", "all in memory"])
@pytest.mark.parametrize("arrival", list(itertools.permutations([1, 3, 4, 8])))
def test_every_order_of_arrival_folds_in_partition_order(arrival: tuple[int, ...], buffer_mb: float) -> None:
    folded = []
    order = OrderedFold(
        [8, 1, 4, 3], lambda reply: folded.append((reply.partition, float(reply.arrays["x"][0]))), buffer_mb
    )
    for partition in arrival:
        order.add(partition, reply_of(partition))
    order.close()
    assert folded == [(p, float(p)) for p in (1, 3, 4, 8)]
    assert order.missing == []


def test_a_failed_client_holds_nobody_up() -> None:
    folded: list[int] = []
    order = OrderedFold([0, 1, 2], lambda reply: folded.append(reply.partition), 1.0)
    order.add(2, reply_of(2))
    order.add(1, reply_of(1))
    assert folded == []
    assert order.missing == [0]
    order.add(0, None)
    assert folded == [1, 2]


@pytest.mark.parametrize("buffer_mb", [0.0, 100.0], ids=["through the scratch file", "in memory"])
@pytest.mark.slow
def test_replies_that_are_done_with_leave_memory(buffer_mb: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even in a reference cycle, as Flower's own properties make them, and whether folded at once or after waiting."""
    monkeypatch.setattr(folding, "COLLECT_MB", 0)
    alive: list[weakref.ref[Reply | RecordDict]] = []

    def in_a_cycle(value: int) -> Reply:
        arrays = pack_arrays({"x": np.full(1000, value, dtype=np.float32)})
        content = RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": 1})})
        _ = content.array_records
        reply = read_reply(content, value, {"arrays": {"x": np.zeros(1000, dtype=np.float32)}})
        object.__setattr__(reply, "cycle", reply)
        alive.extend([weakref.ref(content), weakref.ref(reply)])
        return reply

    order = OrderedFold([0, 1, 2, 3], lambda reply: alive.append(weakref.ref(reply)), buffer_mb)
    gc.collect()
    gc.disable()
    try:
        for partition in (3, 2):
            order.add(partition, in_a_cycle(partition))
        # The first of them waits on disk while nothing is folded yet.
        assert [reference() is None for reference in alive[:2]] == [buffer_mb == 0] * 2
        for partition in (0, 1):
            order.add(partition, in_a_cycle(partition))
        assert [reference() for reference in alive] == [None] * 12
    finally:
        gc.enable()
        order.close()


def test_waiting_replies_beyond_the_buffer_leave_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    spilled = []
    spill = OrderedFold._spill
    monkeypatch.setattr(OrderedFold, "_spill", lambda self, reply: (spilled.append(1), spill(self, reply))[1])
    order = OrderedFold(range(5), lambda reply: None, 0.009)
    for partition in (4, 3, 2, 1):
        order.add(partition, reply_of(partition))
    # 4 kB a reply: two fit into 9 kB, the other two wait in the scratch file.
    assert len(spilled) == 2


def test_memory_of_a_folded_reply_is_free_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two replies of 4 kB fit: of 2 and 5 the first is folded when 1 has come, so 4 need not go to the scratch file."""
    monkeypatch.setattr(OrderedFold, "_spill", lambda self, reply: pytest.fail("written to the scratch file"))
    folded: list[int] = []
    order = OrderedFold(range(6), lambda reply: folded.append(reply.partition), 0.009)
    for partition in (2, 5, 0, 1, 4, 3):
        order.add(partition, reply_of(partition))
    assert folded == list(range(6))


def test_a_reply_comes_back_from_the_scratch_file_as_it_was() -> None:
    random = np.random.default_rng(0)
    arrays = {
        "float": random.random((3, 5)).astype(np.float32),
        "column order": np.asfortranarray(random.random((2, 4))),
        "number": np.array(7, dtype=np.int64),
        "nothing": np.zeros((0, 3), dtype=np.uint16),
    }
    reply = Reply(
        2,
        3,
        {"train-loss": float("nan"), "step": 0.5},
        arrays=arrays,
        buffers={"count": np.array(4)},
        records={"empty": {}, "more": {"x": np.full(4, 9.0)}},
        entries={"layout": {"layout": "[]", "steps": [0.5, 1.0], "bytes": b"\x00\xff"}},
    )
    found: list[Reply] = []
    order = OrderedFold([0, 1, 2], found.append, 0.0)
    order.add(2, reply)
    order.add(1, reply_of(1))
    order.add(0, None)
    order.close()
    back = found[1]
    assert (back.partition, back.num_examples, back.num_bytes) == (2, 3, reply.num_bytes)
    assert back.metrics is reply.metrics
    assert back.entries == reply.entries
    assert list(back.records) == ["empty", "more"]
    for sent, got in zip(groups_of(reply), groups_of(back), strict=True):
        assert list(got) == list(sent)
        for name, value in sent.items():
            assert got[name] is not value
            assert (got[name].dtype, got[name].shape) == (value.dtype, value.shape)
            assert got[name].flags.f_contiguous == value.flags.f_contiguous
            np.testing.assert_array_equal(got[name], value)


def groups_of(reply: Reply) -> list[Mapping[str, np.ndarray]]:
    return [reply.arrays, reply.buffers, *reply.records.values()]


def test_a_closed_fold_leaves_no_scratch_file() -> None:
    order = OrderedFold([0, 1], lambda reply: None, 0.0)
    order.add(1, reply_of(1))
    scratch = order._scratch
    assert scratch is not None
    order.close()
    assert scratch.closed
    with pytest.raises(RuntimeError, match="scratch file of waiting replies is closed"):
        order.add(0, None)
