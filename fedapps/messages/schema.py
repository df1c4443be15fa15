"""The message schema: names of records and keys, packing, unpacking and checks.

==========  ===============  =======================================================================================
direction   record           content
==========  ===============  =======================================================================================
down        ``arrays``       the model: trainable parameters, then buffers, each by name
down        ``config``       round, experiment, learning rate in force, last folded round of this client; FedCLUP: its
                             part in the round (`fedapps.messages.plans`); ``generation`` of a sum over all clients
up          ``arrays``       trainable tensors after local training; FedPM: only those without a curvature
                             block; FedCLUP: personal ones as the change of ``w - w_i``; PSGD, FedNL: their gradients;
                             FedNL with sampled clients: the change of ``q_i``; FedNew: ``y_i``; LocalTrain: none
up          ``buffers``      buffers after local training (absent if the model has none)
up          ``metrics``      ``num-examples`` and scalars such as ``train-loss``; ``store-lost`` from a client that has
                             lost what it kept over rounds, ``rebuilt`` from one whose replica went astray, ``step-limit``
                             from one whose step on a loss with a pull is not below that number; LTDA:
                             ``plain-steps``, steps without curvature
both        ``control``      SCAFFOLD: ``c``; up: the change of ``c_i``, and in ``arrays`` that of the model
down        ``direction``    that of a line search; FedNew: ``y`` of the last round. ``own-direction``: that of the
                             client's last folded round, where it is another one
up          ``sketch``       FedNS: ``Y_i`` by tensor, ``k`` rows of each, and in ``arrays`` the gradients
both        any other name   what one method sends: curvature blocks (`fedapps.messages.blocks`), what is new of a Hessian
                             (`fedapps.messages.hessians`), the line search
                             (`fedapps.messages.line_search`), journal and scalars (`fedapps.messages.scalars`)
==========  ===============  =======================================================================================

Both ends see a message as plain data, `Records`: name of a record -> arrays or entries, by name. A strategy says what it
sends a client, and announces the array records of a reply, against which each is checked once, when it arrives.

``arrays``, ``config``, ``metrics`` and ``num-examples`` are Flower's own default names, so a client written for
Flower's FedAvg fits. Unpacked arrays are read-only views of the received bytes: nothing is copied.
"""

from __future__ import annotations

import functools
import io
import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_object_body

from fedapps.errors import MessageError

ARRAYS = "arrays"
BUFFERS = "buffers"
CONFIG = "config"
METRICS = "metrics"

NUM_EXAMPLES = "num-examples"
CONTROL = "control"
"""SCAFFOLD's control variate: the server's in its message, the change of the client's own in a reply."""

DIRECTION = "direction"
OWN_DIRECTION = "own-direction"
"""Directions by name, down: that of a line search, or FedNew's ``y``; and its ``y`` of the client's last folded round."""

SKETCH = "sketch"
"""FedNS's sketched square root of the Hessian."""

SERVER_ROUND = "server-round"
CLIENT = "client"
AGREED = "agreed"
GENERATION = "generation"
STORE_LOST = "store-lost"
STEP_LIMIT = "step-limit"
REBUILT = "rebuilt"
PLAIN_STEPS = "plain-steps"

MOST_METRICS = 200
LONGEST_NAME = 200
"""Metrics of one reply: each costs a column of the run's record, and time."""

Arrays: TypeAlias = dict[str, np.ndarray]
"""Tensors by name, in the order of the model."""

Entries: TypeAlias = dict[str, Any]
"""What a config record holds: int, float, bool, str, bytes and lists of one of them, by key."""

Records: TypeAlias = Mapping[str, Mapping[str, Any]]
"""A message as plain data: name of a record -> its `Arrays` or `Entries`."""


Packed: TypeAlias = "dict[int, tuple[Mapping[str, Any], ArrayRecord]]"
"""Arrays that are packed already, by the ``id`` of their mapping, which is held with them."""


def pack(records: Records, packed: Packed | None = None) -> RecordDict:
    """Pack a message.

    Args:
        records: Name -> arrays (an empty mapping is one of arrays) or entries.
        packed: Arrays that are packed already; those that are not are added, so that what goes to every client is packed
            once.

    Returns:
        The content of a message, in the same order.
    """
    packed = {} if packed is None else packed
    content = RecordDict()
    for name, values in records.items():
        if all(isinstance(value, np.ndarray) for value in values.values()):
            if id(values) not in packed:
                packed[id(values)] = (values, pack_arrays(values))
            content[name] = packed[id(values)][1]
        else:
            content[name] = ConfigRecord(dict(values))
    return content


def pack_arrays(arrays: Mapping[str, np.ndarray]) -> ArrayRecord:
    """Pack named arrays of any dtype that NumPy can save, shapes ``()`` included, into a record of the same order."""
    return ArrayRecord({name: Array(np.asarray(array)) for name, array in arrays.items()})


def unpack(content: RecordDict, where: str) -> dict[str, Arrays | Entries]:
    """Unpack a message.

    Args:
        content: The content of a message.
        where: Whose message it is, for errors.

    Returns:
        Name of each record -> its arrays or entries.

    Raises:
        MessageError: An array cannot be read.
    """
    return {
        name: _read_arrays(record, f"{where}, record '{name}'") if isinstance(record, ArrayRecord) else dict(record)
        for name, record in content.items()
    }


def unpack_arrays(content: RecordDict, record: str, where: str) -> Arrays:
    """Unpack one record of arrays.

    Args:
        content: The content of a message.
        record: Name of the record.
        where: Whose message it is, for errors.

    Returns:
        Name -> array, in the order of the record.

    Raises:
        MessageError: The record is absent or of another type, or an array cannot be read.
    """
    value = content.get(record)
    if not isinstance(value, ArrayRecord):
        raise missing_record(where, record, "ArrayRecord", content)
    return _read_arrays(value, f"{where}, record '{record}'")


def missing_record(where: str, record: str, kind: str, content: Mapping[str, Any]) -> MessageError:
    """Compose the error of a message that lacks a record, or has another type in its place."""
    held = ", ".join(f"{name} ({type(value).__name__})" for name, value in content.items())
    return MessageError(
        where,
        expected=f"a record '{record}' of type {kind}",
        got=held or "no record at all",
        do="see the table in fedapps.messages.schema for what a message holds",
    )


def _read_arrays(record: ArrayRecord, where: str, announced: Arrays | None = None) -> Arrays:
    """Read a record's arrays; with `announced`, each must be one of those, with its shape and dtype."""
    arrays = {}
    for name, array in record.items():
        place = f"{where}, tensor '{name}'"
        if announced is not None and name not in announced:
            raise MessageError(
                place,
                expected="a tensor of the model that was sent out",
                got="an unknown name",
                do="build the same model on both ends",
            )
        arrays[name] = _read_array(array, place, None if announced is None else announced[name])
    return arrays


def _read_array(array: Array, where: str, like: np.ndarray | None) -> np.ndarray:
    try:
        values = _view(array)
    except Exception as problem:  # The bytes are foreign: whatever NumPy's parser makes of them is the sender's fault.
        raise MessageError(
            where,
            expected="the bytes of a NumPy array",
            got=f"{len(array.data)} bytes of type '{array.stype}' ({type(problem).__name__}: {str(problem)[:200]})",
            do="pack arrays with fedapps.messages.pack_arrays",
        ) from problem
    if like is not None and (values.shape != like.shape or values.dtype != like.dtype):
        raise MessageError(
            where,
            expected=f"shape {like.shape} and dtype {like.dtype}",
            got=f"shape {values.shape} and dtype {values.dtype}",
            do="build the same model on both ends",
        )
    return values


def _view(array: Array) -> np.ndarray:
    """View the bytes of an array in NumPy's format, whose header must say how many they are: nothing is allocated."""
    if array.stype != "numpy.ndarray":
        raise ValueError("another serialisation")
    file = io.BytesIO(array.data)
    version = np.lib.format.read_magic(file)
    read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[version]
    shape, fortran_order, dtype = read(file)
    start = file.tell()
    # In Python's integers, which do not overflow.
    if dtype.hasobject or len(array.data) - start != functools.reduce(operator.mul, shape, dtype.itemsize):
        raise ValueError(f"the header says shape {shape} and dtype {dtype}, and {len(array.data) - start} bytes follow")
    return np.ndarray(shape, dtype, array.data, start, order="F" if fortran_order else "C")


@dataclass(frozen=True)
class Reply:
    """A train reply whose form has been checked.

    Attributes:
        partition: Partition id of the client.
        num_examples: Examples that it trained on, at least 1, or what it is weighted by in their place; 0 in an answer to a
            follow-up.
        metrics: Its scalar metrics, without ``num-examples``.
        arrays: Trainable tensors after local training, by name.
        buffers: Buffers after local training, by name.
        records: Further records of arrays that the method announced.
        entries: Records of entries.
    """

    partition: int
    num_examples: float
    metrics: dict[str, float]
    arrays: Arrays = field(default_factory=dict)
    buffers: Arrays = field(default_factory=dict)
    records: Mapping[str, Arrays] = field(default_factory=dict)
    entries: Mapping[str, Entries] = field(default_factory=dict)

    @property
    def where(self) -> str:
        """Name the client for messages."""
        return f"client {self.partition}"

    @property
    def num_bytes(self) -> int:
        """Bytes of all its arrays."""
        groups = [self.arrays, self.buffers, *self.records.values()]
        return sum(value.nbytes for arrays in groups for value in arrays.values())


Announced: TypeAlias = Mapping[str, "Arrays | None"]
"""Records of arrays that a reply may hold: name -> tensors of which it may hold some, of the same shapes and dtypes; None
where the method checks the shapes itself."""


def read_reply(
    content: RecordDict,
    partition: int,
    announced: Announced,
    *,
    follow_up: bool = False,
    weighted_by: str = NUM_EXAMPLES,
) -> Reply:
    """Read a train reply, and check what every one must fulfil, whatever the method.

    Args:
        content: The content of the reply.
        partition: Partition id of the client.
        announced: The records of arrays that it may hold.
        follow_up: Whether it answers a further exchange of the round, and need hold neither metrics nor tensors.
        weighted_by: Metric that stands for the number of examples; another one may be any positive number.

    Returns:
        The checked reply.

    Raises:
        MessageError: A record is absent, the number of examples is not positive, or a tensor was not announced, has another
            shape or dtype, or a value that is not finite.
    """
    where = f"client {partition}"
    metrics = read_metrics(content, where, weighted_by)
    num_examples = 0 if follow_up else _num_examples(content, where, weighted_by)
    if not follow_up and not isinstance(content.get(ARRAYS), ArrayRecord):
        raise missing_record(where, ARRAYS, "ArrayRecord", content)
    records = {}
    for name, record in content.items():
        if not isinstance(record, ArrayRecord):
            continue
        if name not in announced:
            expected = ", ".join(announced) or "none"
            raise MessageError(where, expected=f"records of arrays among {expected}", got=f"one called '{name}'")
        place, tensors = f"{where}, record '{name}'", announced[name]
        records[name] = _read_arrays(record, place, tensors)
        if tensors is not None:
            for tensor, value in records[name].items():
                check_finite(value, f"{place}, tensor '{tensor}'")
    arrays, buffers = records.pop(ARRAYS, {}), records.pop(BUFFERS, {})
    if repeated := arrays.keys() & buffers.keys():
        raise MessageError(
            f"{where}, tensor '{min(repeated)}'",
            expected="it either in 'arrays' or in 'buffers'",
            got="it in both",
            do="put trainable parameters into 'arrays' only",
        )
    entries = {name: dict(record) for name, record in content.items() if isinstance(record, ConfigRecord)}
    return Reply(partition, num_examples, metrics, arrays, buffers, records, entries)


def _num_examples(content: RecordDict, where: str, key: str) -> float:
    record = content.get(METRICS)
    if not isinstance(record, MetricRecord):
        raise missing_record(where, METRICS, "MetricRecord", content)
    num_examples, whole = record.get(key), key == NUM_EXAMPLES
    if not isinstance(num_examples, int if whole else int | float) or not 0 < num_examples < math.inf:
        raise MessageError(
            f"{where}, metric '{key}'",
            expected="a positive integer" if whole else "a positive number (weighted_by_key)",
            got=repr(num_examples),
            do="report how many examples were trained on; a client without data has nothing to add",
        )
    return num_examples


def read_metrics(content: RecordDict, where: str, weighted_by: str = NUM_EXAMPLES) -> dict[str, float]:
    """Read a reply's metrics.

    Args:
        content: The content of the reply.
        where: Whose reply it is, for errors.
        weighted_by: Metric that stands for the number of examples.

    Returns:
        Name -> value, without that one; nothing where there is no such record.

    Raises:
        MessageError: There are more than `MOST_METRICS`, or a name is longer than `LONGEST_NAME`.
    """
    record = content.get(METRICS)
    held = record if isinstance(record, MetricRecord) else {}
    if len(held) > MOST_METRICS or any(len(name) > LONGEST_NAME for name in held):
        raise MessageError(
            f"{where}, record '{METRICS}'",
            expected=f"at most {MOST_METRICS} metrics with names of at most {LONGEST_NAME} characters",
            got=f"{len(held)} metrics, the longest name of {max(map(len, held))} characters",
        )
    return {
        name: float(value) for name, value in held.items() if name != weighted_by and isinstance(value, int | float)
    }


def check_finite(value: np.ndarray, where: str) -> None:
    """Refuse NaN and infinity.

    Args:
        value: Any array; integers always pass.
        where: What it is, for the error message.

    Raises:
        MessageError: A value is not finite.
    """
    if np.issubdtype(value.dtype, np.inexact) and not np.isfinite(value).all():
        count = int(value.size - np.isfinite(value).sum())
        raise MessageError(
            where,
            expected="finite numbers",
            got=f"{count} of {value.size} that are NaN or infinite",
            do="lower the learning rate or raise the damping on that client",
        )


def check_complete(reply: Reply, covered: set[str], sent: Mapping[str, np.ndarray]) -> None:
    """Check that a reply covers the whole model.

    Args:
        reply: A checked reply.
        covered: Names of parameters that travel in another form (curvature blocks).
        sent: The model that was sent out, by name.

    Raises:
        MessageError: A tensor is missing, or comes twice.
    """
    held = reply.arrays.keys() | reply.buffers.keys()
    if twice := held & covered:
        raise MessageError(
            f"{reply.where}, tensor '{min(twice)}'",
            expected="it once",
            got="it both as a tensor and in a curvature block",
            do="leave parameters of a block out of 'arrays'",
        )
    if missing := [name for name in sent if name not in held and name not in covered]:
        raise MessageError(
            reply.where,
            expected=f"all {len(sent)} tensors of the model",
            got=f"a reply without {', '.join(missing[:5])}{' ...' if len(missing) > 5 else ''}",
            do="send every trainable tensor and every buffer; if these are tied or frozen weights, start the server from "
            "pack_arrays(module_arrays(model)), not from state_dict()",
        )


def payload_bytes(content: RecordDict) -> dict[str, int]:
    """Count what a method must send.

    Args:
        content: The content of a message.

    Returns:
        Record name -> bytes of its arrays, without the ``.npy`` header that Flower puts before each, or of its serialised
        values and their keys.
    """
    return {name: record_bytes(record) for name, record in content.items()}


def record_bytes(record: ArrayRecord | ConfigRecord | MetricRecord) -> int:
    """Count the payload of one record; see `payload_bytes`."""
    if isinstance(record, ArrayRecord):
        return sum(_array_bytes(array) for array in record.values())
    return len(get_object_body(record.deflate(), type(record)))


def _array_bytes(array: Array) -> int:
    """Count the data behind the header (magic, version, length of the rest); a malformed array has all that came."""
    data = array.data
    if not data.startswith(b"\x93NUMPY") or len(data) < 12:
        return len(data)
    start = 10 if data[6] == 1 else 12
    return max(len(data) - start - int.from_bytes(data[8:start], "little"), 0)


def check_size(content: RecordDict, limit_mb: float) -> None:
    """Refuse to send a message that is too large.

    Args:
        content: The content of a message.
        limit_mb: Largest payload, MB.

    Raises:
        MessageError: Its records are larger; the message names the largest of them and of their tensors.
    """
    payload = payload_bytes(content)
    total = sum(payload.values())
    if total <= limit_mb * 1e6:
        return
    sizes = {
        f"{name}/{key}": _array_bytes(array)
        for name, record in content.items()
        if isinstance(record, ArrayRecord)
        for key, array in record.items()
    } | {name: payload[name] for name, record in content.items() if not isinstance(record, ArrayRecord)}
    largest = sorted(sizes.items(), key=lambda item: -item[1])[:5]
    raise MessageError(
        "message",
        expected=f"at most {limit_mb:g} MB of payload (setting max-message-mb)",
        got=f"{total / 1e6:.3g} MB, the largest parts being "
        + ", ".join(f"{name} ({size / 1e6:.3g} MB)" for name, size in largest),
        do="raise max-message-mb or use a smaller model",
    )
