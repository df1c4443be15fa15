"""The message schema: round trips, and one table of malformed replies."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.proto.recorddict_pb2 import RecordDict as ProtoRecordDict

from fedapps.errors import MessageError
from fedapps.messages.schema import (
    check_complete,
    check_reply,
    check_size,
    pack_arrays,
    payload_bytes,
    unpack_arrays,
    unpack_config,
)

SENT = {
    "fc.weight": np.zeros((2, 3), dtype=np.float32),
    "bn.running_mean": np.zeros(2, dtype=np.float32),
    "bn.num_batches_tracked": np.array(0),
}


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


def test_arrays_keep_name_order_shape_dtype_and_value_through_bytes() -> None:
    """Nothing changes shape, dtype or value on the way: a batch-normalised net, its 0-dimensional integer included."""
    arrays = {**SENT, "half": np.arange(3, dtype=np.float16), "flag": np.array(True), "empty": np.zeros((0, 4))}
    data = recorddict_to_proto(RecordDict({"arrays": pack_arrays(arrays)})).SerializeToString()
    back = unpack_arrays(recorddict_from_proto(ProtoRecordDict.FromString(data)), "arrays", "test")
    assert list(back) == list(arrays)
    for name, value in arrays.items():
        assert back[name].dtype == value.dtype
        assert back[name].shape == value.shape
        np.testing.assert_array_equal(back[name], value)


def test_a_good_reply_is_taken_apart() -> None:
    reply = check_reply(good(), 3, SENT)
    assert (reply.partition, reply.num_examples, reply.where) == (3, 7, "client 3")
    assert reply.metrics == {"train-loss": 0.5}
    assert list(reply.arrays) == ["fc.weight"]
    assert list(reply.buffers) == ["bn.running_mean", "bn.num_batches_tracked"]
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
    "an unknown tensor": (_set("arrays", "fc.wieght", np.zeros(1)), "tensor 'fc.wieght': expected a tensor of the model"),
    "another shape": (
        _set("arrays", "fc.weight", np.zeros((3, 2), dtype=np.float32)),
        "expected shape (2, 3) and dtype float32, got shape (3, 2) and dtype float32",
    ),
    "another dtype": (_set("arrays", "fc.weight", np.zeros((2, 3))), "got shape (2, 3) and dtype float64"),
    "not a number": (
        _set("arrays", "fc.weight", np.array([[1, np.nan, 1], [np.inf, 1, 1]], dtype=np.float32)),
        "expected finite numbers, got 2 of 6 that are NaN or infinite",
    ),
    "infinite buffer": (_set("buffers", "bn.running_mean", np.full(2, np.inf, dtype=np.float32)), "2 of 2"),
    "float counter": (_set("buffers", "bn.num_batches_tracked", np.array(5.0)), "dtype int64, got shape () and dtype float64"),
    "a tensor in two records": (
        _set("buffers", "fc.weight", np.ones((2, 3), dtype=np.float32)),
        "either in 'arrays' or in 'buffers'",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("change", "match"), MALFORMED.values(), ids=MALFORMED.keys())
def test_a_malformed_reply_is_refused_with_client_and_reason(change: Callable[[RecordDict], None], match: str) -> None:
    content = good()
    change(content)
    with pytest.raises(MessageError, match=re.escape(match)) as caught:
        check_reply(content, 12, SENT)
    assert "client 12" in str(caught.value)


def test_an_incomplete_or_repeated_model_is_refused() -> None:
    content = good()
    content["buffers"] = pack_arrays({"bn.running_mean": np.ones(2, dtype=np.float32)})
    reply = check_reply(content, 1, SENT)
    with pytest.raises(MessageError, match=r"all 3 tensors of the model, got a reply without bn\.num_batches_tracked"):
        check_complete(reply, set(), SENT)
    with pytest.raises(MessageError, match=r"'fc\.weight': expected it once"):
        check_complete(check_reply(good(), 1, SENT), {"fc.weight"}, SENT)


def test_a_message_without_config_is_refused() -> None:
    with pytest.raises(MessageError, match="expected a record 'config' of type ConfigRecord"):
        unpack_config(good(), "server's message")


def test_payload_counts_the_arrays_alone_and_a_limit_names_the_largest() -> None:
    """Traffic is measured, not derived.

    Counted bytes are the bytes of the arrays, and a message over the limit names its largest tensors.
    """
    content = good()
    assert payload_bytes(content) == {"arrays": 24, "buffers": 16}
    check_size(content, 40e-6)
    with pytest.raises(MessageError, match=r"at most 3.9e-05 MB .* got 4e-05 MB, .*arrays/fc\.weight \(2.4e-05 MB\)"):
        check_size(content, 39e-6)


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
    with pytest.raises(MessageError, match=f"client 1, array 'w' of record 'arrays': .*{len(data)} bytes"):
        unpack_arrays(content, "arrays", "client 1")
    assert payload_bytes(content) == {"arrays": len(data)}
