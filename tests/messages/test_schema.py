"""The message schema: round trips, and one table of malformed replies."""

from __future__ import annotations

import io
import pickle
import re
import tracemalloc
import zipfile
from collections.abc import Callable

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.proto.recorddict_pb2 import RecordDict as ProtoRecordDict

from fedapps.errors import MessageError
from fedapps.messages.schema import (
    Announced,
    Packed,
    check_complete,
    check_size,
    pack,
    pack_arrays,
    payload_bytes,
    read_reply,
    unpack,
    unpack_arrays,
)

SENT = {
    "fc.weight": np.zeros((2, 3), dtype=np.float32),
    "bn.running_mean": np.zeros(2, dtype=np.float32),
    "bn.num_batches_tracked": np.array(0),
}
ANNOUNCED: Announced = {"arrays": SENT, "buffers": SENT}


def good() -> RecordDict:
    return RecordDict(
        {
            "arrays": pack_arrays({"fc.weight": np.ones((2, 3), dtype=np.float32)}),
            "buffers": pack_arrays(
                {"bn.running_mean": np.ones(2, dtype=np.float32), "bn.num_batches_tracked": np.array(5)}
            ),
            "metrics": MetricRecord({"num-examples": 7, "train-loss": 0.5, "history": [1.0, 2.0]}),
        }
    )


def through_bytes(content: RecordDict) -> RecordDict:
    data = recorddict_to_proto(content).SerializeToString()
    return recorddict_from_proto(ProtoRecordDict.FromString(data))


def test_arrays_keep_name_order_shape_dtype_and_value_through_bytes() -> None:
    """Nothing changes shape, dtype or value on the way: a batch-normalised net, its 0-dimensional integer included."""
    arrays = {
        **SENT,
        "columns": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "half": np.arange(3, dtype=np.float16),
        "flag": np.array(True),
        "empty": np.zeros((0, 4)),
    }
    back = unpack_arrays(through_bytes(RecordDict({"arrays": pack_arrays(arrays)})), "arrays", "test")
    assert list(back) == list(arrays)
    for name, value in arrays.items():
        assert back[name].dtype == value.dtype
        assert back[name].shape == value.shape
        np.testing.assert_array_equal(back[name], value)
        assert not back[name].flags.writeable


def test_named_records_survive_the_message_and_shared_arrays_are_packed_once() -> None:
    """Entries come back as they went, an empty record as one of arrays; what goes to every client is one object."""
    entries = {
        "round": 3,
        "lr": 0.5,
        "on": True,
        "name": "x",
        "data": b"\0\xff",
        "steps": [1.0, 0.5],
        "none": list[int](),
    }
    packed: Packed = {}
    first, second = (pack({"arrays": SENT, "empty": {}, "config": {**entries, "client": i}}, packed) for i in (1, 2))
    assert first["arrays"] is second["arrays"]
    assert isinstance(first["empty"], ArrayRecord)
    assert pack({"arrays": SENT})["arrays"] is not first["arrays"]
    back = unpack(through_bytes(first), "server's message")
    assert list(back) == ["arrays", "empty", "config"]
    assert list(back["arrays"]) == list(SENT)
    assert all(back["arrays"][name].tobytes() == value.tobytes() for name, value in SENT.items())
    assert (back["empty"], back["config"]) == ({}, {**entries, "client": 1})


def test_a_good_reply_is_taken_apart() -> None:
    reply = read_reply(good(), 3, ANNOUNCED)
    assert (reply.partition, reply.num_examples, reply.where) == (3, 7, "client 3")
    assert reply.metrics == {"train-loss": 0.5}
    assert list(reply.arrays) == ["fc.weight"]
    assert list(reply.buffers) == ["bn.running_mean", "bn.num_batches_tracked"]
    assert reply.num_bytes == 24 + 8 + 8
    check_complete(reply, set(), SENT)


def _set(record: str, name: str, value: object) -> Callable[[RecordDict], None]:
    def change(content: RecordDict) -> None:
        if record == "metrics":
            content[record] = MetricRecord({**dict(content[record]), name: value})
        else:
            content[record] = pack_arrays({**unpack_arrays(content, record, ""), name: value})

    return change


def _drop(record: str) -> Callable[[RecordDict], None]:
    return lambda content: content.pop(record)


MALFORMED = {
    "nothing at all": (lambda c: c.clear(), "expected a record 'metrics' of type MetricRecord, got no record at all"),
    "no arrays": (_drop("arrays"), "expected a record 'arrays' of type ArrayRecord"),
    "no metrics": (_drop("metrics"), "expected a record 'metrics' of type MetricRecord"),
    "metrics of another type": (
        lambda c: c.__setitem__("metrics", ConfigRecord({"num-examples": 7})),
        "metrics (ConfigRecord)",
    ),
    "zero examples": (_set("metrics", "num-examples", 0), "expected a positive integer, got 0"),
    "negative examples": (_set("metrics", "num-examples", -3), "expected a positive integer, got -3"),
    "a fraction of examples": (_set("metrics", "num-examples", 2.5), "expected a positive integer, got 2.5"),
    "many metrics": (
        lambda c: c.__setitem__("metrics", MetricRecord({"num-examples": 7} | {f"m{i}": 1.0 for i in range(200)})),
        "expected at most 200 metrics",
    ),
    "an unknown tensor": (
        _set("arrays", "fc.wieght", np.zeros(1)),
        "record 'arrays', tensor 'fc.wieght': expected a tensor of the model that was sent out, got an unknown name",
    ),
    "another shape": (
        _set("arrays", "fc.weight", np.zeros((3, 2), dtype=np.float32)),
        "expected shape (2, 3) and dtype float32, got shape (3, 2) and dtype float32",
    ),
    "another dtype": (_set("arrays", "fc.weight", np.zeros((2, 3))), "got shape (2, 3) and dtype float64"),
    "not a number": (
        _set("arrays", "fc.weight", np.array([[1, np.nan, 1], [np.inf, 1, 1]], dtype=np.float32)),
        "expected finite numbers, got 2 of 6 that are NaN or infinite",
    ),
    "infinite buffer": (
        _set("buffers", "bn.running_mean", np.full(2, np.inf, dtype=np.float32)),
        "record 'buffers', tensor 'bn.running_mean': expected finite numbers, got 2 of 2",
    ),
    "float counter": (_set("buffers", "bn.num_batches_tracked", np.array(5.0)), "dtype int64, got shape () and dtype float64"),
    "a tensor in two records": (
        _set("buffers", "fc.weight", np.ones((2, 3), dtype=np.float32)),
        "either in 'arrays' or in 'buffers'",
    ),
    "a record that nobody announced": (
        lambda c: c.__setitem__("direction", pack_arrays({"fc.weight": np.zeros(1)})),
        "expected records of arrays among arrays, buffers, got one called 'direction'",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("change", "match"), MALFORMED.values(), ids=MALFORMED.keys())
def test_a_malformed_reply_is_refused_with_client_and_reason(change: Callable[[RecordDict], None], match: str) -> None:
    content = good()
    change(content)
    with pytest.raises(MessageError, match=re.escape(match)) as caught:
        read_reply(content, 12, ANNOUNCED)
    assert "client 12" in str(caught.value)


def test_an_incomplete_or_repeated_model_is_refused() -> None:
    content = good()
    content["buffers"] = pack_arrays({"bn.running_mean": np.ones(2, dtype=np.float32)})
    reply = read_reply(content, 1, ANNOUNCED)
    with pytest.raises(MessageError, match=r"all 3 tensors of the model, got a reply without bn\.num_batches_tracked"):
        check_complete(reply, set(), SENT)
    with pytest.raises(MessageError, match=r"'fc\.weight': expected it once"):
        check_complete(read_reply(good(), 1, ANNOUNCED), {"fc.weight"}, SENT)


def test_an_answer_to_a_follow_up_needs_neither_metrics_nor_tensors() -> None:
    """What it has is checked as in any reply."""
    answer = RecordDict({"line-search": ConfigRecord({"losses": [1.0, 0.5]})})
    reply = read_reply(answer, 4, ANNOUNCED, follow_up=True)
    assert (reply.num_examples, reply.metrics, reply.arrays) == (0, {}, {})
    assert reply.entries == {"line-search": {"losses": [1.0, 0.5]}}
    answer["arrays"] = pack_arrays({"fc.weight": np.zeros(2)})
    with pytest.raises(MessageError, match=r"client 4, record 'arrays', tensor 'fc\.weight': expected shape"):
        read_reply(answer, 4, ANNOUNCED, follow_up=True)


def test_records_without_announced_shapes_are_read_as_they_are() -> None:
    """Curvature blocks: the method checks their shapes and numbers itself."""
    content = good()
    content["products"] = pack_arrays({"fc": np.full((2, 4), np.nan)})
    reply = read_reply(content, 1, {**ANNOUNCED, "products": None})
    assert list(reply.records) == ["products"]
    assert reply.records["products"]["fc"].shape == (2, 4)
    assert reply.num_bytes == 40 + 64


def test_a_record_that_is_missing_or_of_another_type_is_refused() -> None:
    with pytest.raises(MessageError, match=r"server: expected a record 'direction' of type ArrayRecord, got arrays \("):
        unpack_arrays(good(), "direction", "server")
    with pytest.raises(MessageError, match=r"'metrics' of type ArrayRecord, .* metrics \(MetricRecord\)"):
        unpack_arrays(good(), "metrics", "server")


def test_payload_counts_every_record_and_a_limit_names_the_largest() -> None:
    """Traffic is measured, not derived: bytes of the arrays, and of the serialised entries and metrics."""
    content = good()
    sizes = payload_bytes(content)
    assert (sizes["arrays"], sizes["buffers"]) == (24, 16)
    # Three doubles and an integer, beside keys and framing; without its keys the record is smaller by their letters.
    short = payload_bytes(RecordDict({"m": MetricRecord({"n": 7, "l": 0.5, "h": [1.0, 2.0]})}))["m"]
    assert sizes["metrics"] - short == len("num-examplestrain-losshistory") - 3
    assert 3 * 8 + 1 < short < 3 * 8 + 1 + 40
    total = sum(sizes.values())
    check_size(content, total / 1e6)
    with pytest.raises(
        MessageError, match=rf"at most .* MB .* got {total / 1e6:.3g} MB, .*metrics \(.*arrays/fc\.weight"
    ):
        check_size(content, (total - 1) / 1e6)


def test_a_large_record_of_entries_counts_towards_the_limit() -> None:
    content = RecordDict({"arrays": pack_arrays({}), "journal": ConfigRecord({"rounds": b"x" * 5000})})
    assert payload_bytes(content)["arrays"] == 0
    assert 5000 < payload_bytes(content)["journal"] < 5050
    with pytest.raises(MessageError, match=r"got 0.0050\d MB, the largest parts being journal \(0.0050"):
        check_size(content, 5e-3)


@pytest.mark.parametrize(
    ("data", "stype", "dtype"),
    [
        (b"junk", "numpy.ndarray", "float32"),
        (b"", "numpy.ndarray", "float32"),
        (b"junk", "another.kind", "float32"),
        (b"junk", "numpy.ndarray", "garbage"),
    ],
    ids=["no array", "nothing", "unknown type", "unknown dtype"],
)
def test_an_array_that_cannot_be_read_is_refused_and_counts_as_the_bytes_that_came(
    data: bytes, stype: str, dtype: str
) -> None:
    content = RecordDict({"arrays": ArrayRecord({"w": Array(dtype=dtype, shape=(2, 3), stype=stype, data=data)})})
    with pytest.raises(MessageError, match=f"client 1, record 'arrays', tensor 'w': .*{len(data)} bytes"):
        unpack_arrays(content, "arrays", "client 1")
    assert payload_bytes(content) == {"arrays": len(data)}


def npy(header: str, data: bytes = b"", version: int = 1) -> bytes:
    """Bytes of NumPy's format with the header as given."""
    length = len(header).to_bytes(2 if version == 1 else 4, "little")
    return b"\x93NUMPY" + bytes([version, 0]) + length + header.encode("latin1") + data


def described(shape: str, dtype: str = "'<f4'") -> str:
    return f"{{'descr': {dtype}, 'fortran_order': False, 'shape': {shape}, }}\n"


def saved(value: object) -> bytes:
    file = io.BytesIO()
    np.save(file, np.array(value), allow_pickle=True)
    return file.getvalue()


def zipped() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("fc.weight.npy", saved([1.0]))
    return file.getvalue()


class Bomb:
    """An object whose unpickling would be noticed."""

    def __reduce__(self) -> tuple[object, ...]:
        return pytest.fail, ("unpickled",)


GOOD = saved(np.ones((2, 3), dtype=np.float32))
HOSTILE = {
    "the magic alone": b"\x93NUMPY",
    "the magic and a version": b"\x93NUMPY\x01\x00",
    "an unknown version": npy(described("(2, 3)"), bytes(24), version=9),
    "a zip archive, as of np.savez": zipped(),
    "the magic of a zip archive": b"PK\x03\x04",
    "a pickle": pickle.dumps(np.ones((2, 3), dtype=np.float32)),
    "a header that lost its }": npy(described("(2, 3)").replace(", }", ""), bytes(24)),
    "a header of expressions": npy("__import__('os').abort()\n", bytes(24)),
    "a header that is deeply nested": npy("(" * 5000 + ")" * 5000, bytes(24)),
    "a header of minus signs": npy(described("(" + "-" * 9000 + "1,)"), bytes(24)),
    "a longer header than there are bytes": GOOD[:40],
    "no shape": npy("{'descr': '<f4', 'fortran_order': False}\n", bytes(24)),
    "terabytes in 128 bytes": npy(described(f"({10**12},)"), bytes(128)),
    "more than 64 bits of elements": npy(described(f"({10**20},)"), bytes(128)),
    "a product that overflows to what follows": npy(described(f"({2**32}, {2**32}, 2, 3)"), bytes(0)),
    "negative lengths": npy(described("(-2, -3)"), bytes(24)),
    "a float as length": npy(described("(2.0, 3)"), bytes(24)),
    "a bracketed half of a dtype": npy(described("(2, 3)", "'(1,'"), bytes(24)),
    "an unknown dtype": npy(described("(2, 3)", "'<q9'"), bytes(24)),
    "objects": saved([[Bomb()] * 3] * 2),
    "objects inside a structure": npy(described("(2, 3)", "[('a', '|O')]"), bytes(48)),
    "a byte too many": GOOD + b"\0",
    "two arrays": GOOD + GOOD,
    "a byte too few": GOOD[:-1],
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_bytes_are_refused_by_name_before_anything_is_allocated(data: bytes) -> None:
    content = good()
    content["arrays"] = ArrayRecord({"fc.weight": Array("float32", (2, 3), "numpy.ndarray", data)})
    tracemalloc.start()
    try:
        with pytest.raises(MessageError) as caught:
            read_reply(content, 5, ANNOUNCED)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert re.match(
        r"client 5, record 'arrays', tensor 'fc\.weight': expected the bytes of a NumPy array, "
        rf"got {len(data)} bytes of type 'numpy\.ndarray' \(\w+: ",
        str(caught.value),
    ), caught.value
    assert len(str(caught.value)) < 600
    assert peak < 20e6
    with pytest.raises(MessageError, match=r"server, record 'arrays', tensor 'fc\.weight'"):
        unpack_arrays(content, "arrays", "server")
    assert payload_bytes(content)["arrays"] <= len(data)


@pytest.mark.parametrize(
    "data",
    [GOOD, npy(described("(2, 3)"), np.ones(6, "<f4").tobytes(), version=2), saved(np.ones((3, 2), "f4").T)],
    ids=["as Flower writes it", "version 2", "Fortran order"],
)
def test_every_form_that_numpy_writes_is_read(data: bytes) -> None:
    content = good()
    content["arrays"] = ArrayRecord({"fc.weight": Array("float32", (2, 3), "numpy.ndarray", data)})
    np.testing.assert_array_equal(read_reply(content, 5, ANNOUNCED).arrays["fc.weight"], np.ones((2, 3)))
