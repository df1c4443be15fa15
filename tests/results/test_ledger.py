from __future__ import annotations

import pickle
import tracemalloc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.supercore.inflatable import inflatable_object
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.task_identity import TaskIdentity

from fedapps.messages.schema import record_bytes
from fedapps.results.ledger import message_row, sum_bytes


@pytest.fixture(autouse=True)
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Flower lets only a running server create messages."""
    for name, value in (("_run_id", 12345678901234567890), ("_node_id", 1), ("_task_id", 5)):
        monkeypatch.setattr(TaskIdentity, name, value)
    return


def message_of(**records: ArrayRecord | ConfigRecord | MetricRecord) -> Message:
    return Message(RecordDict(records), dst_node_id=9876543210987654321, message_type="train")


def row_of(message: Message, **changes: Any) -> dict[str, Any]:
    return message_row(message, **{"server_round": 3, "partition": 4, "direction": "down", "kind": "train", **changes})


def arrays(**values: Any) -> ArrayRecord:
    return ArrayRecord({name: Array(np.asarray(value)) for name, value in values.items()})


def test_a_row_says_where_it_belongs() -> None:
    row = row_of(message_of(), server_round=7, partition=None, direction="up", kind="query")
    assert (row["round"], row["partition"], row["direction"], row["kind"]) == (7, None, "up", "query")
    assert row["payload"] == {}
    assert "error" not in row


def test_a_linear_layer_with_bias_is_60_bytes_down_and_its_block_60_more_up() -> None:
    """What travels is counted: (4 * 3 + 3) float32 = 60 B; the upper triangle of a 5 x 5 block is 15 float32 = 60 B."""
    model = arrays(weight=np.zeros((3, 4), np.float32), bias=np.zeros(3, np.float32))
    down = row_of(message_of(arrays=model))
    assert down["payload"] == {"arrays": 60}
    up = row_of(message_of(products=arrays(fc=np.zeros((3, 5), np.float32)), curvature=arrays(fc=np.zeros(15, "f4"))))
    assert up["payload"] == {"products": 60, "curvature": 60}


@pytest.mark.parametrize(
    "array",
    [
        np.array(7, np.int64),
        np.zeros((0, 3)),
        np.ones((3, 5), np.float16).T,
        np.array([True, False]),
        np.array([1 + 2j]),
        np.zeros(2, [("a_field_with_a_long_name", "<f4"), ("b", "<i8")]),
    ],
    ids=["0-d integer", "empty", "Fortran order", "bool", "complex", "structured"],
)
def test_payload_of_an_array_is_its_data(array: np.ndarray) -> None:
    assert record_bytes(ArrayRecord({"x": Array(array)})) == array.nbytes


def test_payload_of_an_array_in_a_long_npy_header() -> None:
    """From 64 KiB of header on, NumPy writes version 2, whose length field has 4 bytes."""
    array = np.zeros(3, [(f"field_{number}_{'x' * 100}", "<f4") for number in range(700)])
    with pytest.warns(UserWarning, match=r"format 2\.0"):
        record = ArrayRecord({"x": Array(array)})
    assert record_bytes(record) == array.nbytes


def test_payload_of_arrays_in_another_serialisation_is_all_of_it() -> None:
    record = ArrayRecord({"x": Array(dtype="float32", shape=(2,), stype="my.format", data=b"12345")})
    assert record_bytes(record) == 5


def test_payload_of_scalars_is_the_serialised_record() -> None:
    """Each double takes 8 bytes in the record, each 62-bit integer 9 (7 bits a byte), beside keys and framing."""
    one, ten = (record_bytes(MetricRecord({"probes": [0.5] * n})) for n in (1, 10))
    # Below 128 bytes a length field of the framing is one byte, so only the values differ.
    assert ten - one == 9 * 8
    small, large = (record_bytes(ConfigRecord({"seeds": [seed] * 8})) for seed in (1, 2**62 - 1))
    assert large - small == 8 * (9 - 1)
    assert record_bytes(ConfigRecord({"blob": b"x" * 60})) - record_bytes(ConfigRecord({"blob": b""})) == 60
    assert record_bytes(MetricRecord()) == 0


MEASURED = [
    ("empty", {}, 145, 134),
    ("MetricRecord with 1 float", {"metrics": MetricRecord({"m": 1.0})}, 314, 203),
    ("MetricRecord with 10 floats", {"metrics": MetricRecord({"m": [0.5] * 10})}, 390, 203),
    ("ConfigRecord 10 floats + 10 small ints", {"config": ConfigRecord({"f": [0.5] * 10, "i": [1] * 10})}, 413, 203),
    ("10 62-bit ints", {"config": ConfigRecord({"f": [0.5] * 10, "i": [2**62 - 1] * 10})}, 492, 203),
    ("ConfigRecord with 160 bytes", {"config": ConfigRecord({"b": b"x" * 160})}, 471, 203),
    ("ArrayRecord with 10 float32", {"arrays": arrays(a=np.arange(10, dtype=np.float32))}, 776, 341),
]


@pytest.mark.parametrize(("records", "objects", "tree"), [case[1:] for case in MEASURED], ids=[c[0] for c in MEASURED])
def test_serialised_bytes_are_those_measured_on_flower_1_42(records: dict[str, Any], objects: int, tree: int) -> None:
    """The tree holds ids only and must agree; names of records and the width of ids move objects by a few bytes."""
    row = row_of(message_of(**records))
    assert row["object-tree"] == tree
    assert row["objects"] == pytest.approx(objects, abs=16)
    assert row["serialised"] == row["objects"] + row["object-tree"]


def test_serialised_bytes_are_those_of_flowers_own_objects() -> None:
    shared = np.arange(2_000_000, dtype=np.float32)  # two chunks
    message = message_of(
        arrays=arrays(a=shared, b=np.ones(3), c=shared, d=np.ones(3)), metrics=MetricRecord({"num-examples": 3})
    )
    row = row_of(message)
    objects = get_all_nested_objects(message)
    assert row["objects"] == sum(len(item.deflate()) for item in objects.values())
    assert row["object-tree"] == len(get_object_tree(message).SerializeToString())
    assert row["payload"]["arrays"] == 2 * shared.nbytes + 48
    assert row["objects"] < 1.01 * shared.nbytes, "equal content travels once"


def test_an_error_reply_has_no_payload() -> None:
    reply = Message(Error(code=2, reason="boom " * 50), reply_to=message_of())
    row = row_of(reply, direction="up")
    assert row["payload"] == {}
    assert row["error"] == 2
    assert row["objects"] > 250, "the reason travels"


def test_the_message_is_left_as_it_was() -> None:
    """Flower caches slices as memory views in an array: such a message can be neither pickled nor spilled."""
    message = message_of(arrays=arrays(a=np.arange(5.0)))
    before = pickle.dumps(message)
    row_of(message)
    assert pickle.dumps(message) == before


def test_measuring_hashes_each_byte_once_and_copies_one_object_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = np.random.default_rng(0)
    message = message_of(arrays=arrays(**{f"w{i}": generator.standard_normal(500_000) for i in range(8)}))
    hashed = []
    original = inflatable_object.get_object_id

    def count(content: bytes) -> str:
        hashed.append(len(content))
        return original(content)

    monkeypatch.setattr(inflatable_object, "get_object_id", count)
    tracemalloc.start()
    try:
        row = row_of(message)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert row["payload"]["arrays"] == 32_000_000
    assert sum(hashed) < 1.001 * row["objects"]
    assert peak < 10_000_000, "two copies of one 4 MB object"


def test_rows_add_up_by_direction() -> None:
    rows = [
        {"direction": "down", "payload": {"arrays": 60, "config": 5}, "serialised": 700},
        {"direction": "up", "payload": {}, "serialised": 300},
        {"direction": "up", "payload": {"arrays": 60}, "serialised": 701},
    ]
    assert sum_bytes(rows) == {"payload-down": 65, "payload-up": 60, "wire-down": 700, "wire-up": 1001}
    assert sum_bytes([]) == dict.fromkeys(("payload-down", "payload-up", "wire-down", "wire-up"), 0)
