"""The message schema: names of records and keys, packing, unpacking and checks.

==========  ===============  =======================================================================================
direction   record           content
==========  ===============  =======================================================================================
down        ``arrays``       the model: trainable parameters, then buffers, each by name
down        ``config``       round, experiment, learning rate in force, last folded round of this client, ...
up          ``arrays``       trainable tensors after local training; FedPM: only those without a curvature
                             block; FedCLUP: personal ones as the change of ``w - w_i``; LocalTrain: none
up          ``buffers``      buffers after local training (absent if the model has none)
up          ``products``     FedPM: layer -> ``M = (W_i - W) P``, shape (rows, width)
up          ``curvature``    FedPM: layer -> upper triangle of ``P``, shape (width (width + 1) / 2,), or another form of
                             `fedapps.curvature.blocks`
up          ``layout``       FedPM: which parameters each block covers, as JSON; ``wire`` = ``bfloat16`` if ``P`` is in that
                             (as uint16), and ``factors``, layer -> rows of its factor, if some travel so
down        ``direction``    LocalNewton's line search: mean minus old value of every parameter; ``arrays`` is the model
                             at step 0
down        ``line-search``  ``steps``, the candidates
up          ``line-search``  ``losses`` of the client's training data at step 0 and at the candidates; no other record
down        ``journal``      scalar-only methods: rounds of the journal as in `fedapps.zeroth_order.wire`, and
                             ``base`` (fingerprint of the first model), ``next-first-step`` and ``next-mu``;
                             ``confirm`` where the client is only to name the state that the rounds lead to
up          ``scalars``      scalar-only methods: ``values`` (float32, ``tau`` rows of ``P``), ``server-round``, and
                             ``fingerprint`` of the client's replica; or ``need-from``, a round, from a client whose
                             journal is lost
up          ``metrics``      ``num-examples`` and scalars such as ``train-loss``; ``store-lost`` from a client that has
                             lost what it kept over rounds, ``rebuilt`` from one whose replica went astray, ``step-limit``
                             from one whose step on a loss with a pull is not below that number
==========  ===============  =======================================================================================

``arrays``, ``config``, ``metrics`` and ``num-examples`` are Flower's own default names, so a client written for
Flower's FedAvg fits. Received messages are read-only: unpacking copies nothing and changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from fedapps.errors import MessageError

ARRAYS = "arrays"
BUFFERS = "buffers"
CONFIG = "config"
METRICS = "metrics"
PRODUCTS = "products"
CURVATURE = "curvature"
LAYOUT = "layout"
WIRE = "wire"
FACTORS = "factors"
NODE = "node"
JOURNAL = "journal"
SCALARS = "scalars"
DIRECTION = "direction"
LINE_SEARCH = "line-search"

NUM_EXAMPLES = "num-examples"
SERVER_ROUND = "server-round"
STORE_LOST = "store-lost"
STEP_LIMIT = "step-limit"
NEED_FROM = "need-from"
STEPS = "steps"
LOSSES = "losses"
REBUILT = "rebuilt"
CONFIRM = "confirm"

Arrays = dict[str, np.ndarray]
"""Tensors by name, in the order of the model."""


def pack_arrays(arrays: Mapping[str, np.ndarray]) -> ArrayRecord:
    """Pack named arrays into a record.

    Args:
        arrays: Name -> array of any dtype that NumPy can save, shapes ``()`` included.

    Returns:
        The record, in the same order.
    """
    return ArrayRecord({name: Array(np.asarray(array)) for name, array in arrays.items()})


def unpack_arrays(content: RecordDict, record: str, where: str, *, optional: bool = False) -> Arrays:
    """Unpack a record of arrays.

    Args:
        content: The content of a message.
        record: Name of the record.
        where: Whose message it is, for the error message.
        optional: Give an empty dictionary if the record is absent.

    Returns:
        Name -> array, in the order of the record.

    Raises:
        MessageError: The record is absent or of another type, or an array cannot be read.
    """
    value = content.get(record)
    if value is None and optional:
        return {}
    if not isinstance(value, ArrayRecord):
        raise _missing(where, record, "ArrayRecord", content)
    arrays = {}
    for name, array in value.items():
        try:
            arrays[name] = array.numpy()
        except (ValueError, TypeError, EOFError, OSError) as problem:
            raise MessageError(
                f"{where}, array '{name}' of record '{record}'",
                expected="the bytes of a NumPy array",
                got=f"{len(array.data)} bytes of type '{array.stype}' ({problem})",
                do="pack arrays with fedapps.records.pack_arrays",
            ) from problem
    return arrays


def _missing(where: str, record: str, kind: str, content: RecordDict) -> MessageError:
    held = ", ".join(f"{name} ({type(value).__name__})" for name, value in content.items())
    return MessageError(
        where,
        expected=f"a record '{record}' of type {kind}",
        got=held or "no record at all",
        do="see the table in fedapps.records for what a message holds",
    )


def unpack_config(content: RecordDict, where: str) -> ConfigRecord:
    """Give the ``config`` record of a message.

    Args:
        content: The content of a message.
        where: Whose message it is, for the error message.

    Returns:
        The record.

    Raises:
        MessageError: It is absent or of another type.
    """
    value = content.get(CONFIG)
    if not isinstance(value, ConfigRecord):
        raise _missing(where, CONFIG, "ConfigRecord", content)
    return value


@dataclass(frozen=True)
class Reply:
    """A train reply whose form has been checked.

    Attributes:
        partition: Partition id of the client.
        num_examples: Examples that it trained on, at least 1.
        metrics: Its scalar metrics, without ``num-examples``.
        arrays: Trainable tensors after local training, by name.
        buffers: Buffers after local training, by name.
        content: The whole content, for records of one method.
    """

    partition: int
    num_examples: int
    metrics: dict[str, float]
    arrays: Arrays
    buffers: Arrays
    content: RecordDict

    @property
    def where(self) -> str:
        """Name the client for messages."""
        return f"client {self.partition}"


def check_reply(content: RecordDict, partition: int, sent: Mapping[str, np.ndarray]) -> Reply:
    """Check what every train reply must fulfil, whatever the method.

    Args:
        content: The content of the reply.
        partition: Partition id of the client.
        sent: The model that was sent out, by name.

    Returns:
        The checked reply.

    Raises:
        MessageError: A record is absent, the number of examples is not positive, or a tensor has an unknown name,
            another shape or dtype, or a value that is not finite.
    """
    where = f"client {partition}"
    num_examples, metrics = _check_metrics(content, where)
    arrays = unpack_arrays(content, ARRAYS, where)
    buffers = unpack_arrays(content, BUFFERS, where, optional=True)
    for name, value in (*arrays.items(), *buffers.items()):
        _check_tensor(name, value, sent, where)
    if repeated := arrays.keys() & buffers.keys():
        raise MessageError(
            f"{where}, tensor '{min(repeated)}'",
            expected="it either in 'arrays' or in 'buffers'",
            got="it in both",
            do="put trainable parameters into 'arrays' only",
        )
    return Reply(partition, num_examples, metrics, arrays, buffers, content)


def _check_metrics(content: RecordDict, where: str) -> tuple[int, dict[str, float]]:
    record = content.get(METRICS)
    if not isinstance(record, MetricRecord):
        raise _missing(where, METRICS, "MetricRecord", content)
    num_examples = record.get(NUM_EXAMPLES)
    if not isinstance(num_examples, int) or num_examples <= 0:
        raise MessageError(
            f"{where}, metric '{NUM_EXAMPLES}'",
            expected="a positive integer",
            got=repr(num_examples),
            do="report how many examples were trained on; a client without data has nothing to add",
        )
    metrics = {
        name: float(value) for name, value in record.items() if name != NUM_EXAMPLES and isinstance(value, int | float)
    }
    return num_examples, metrics


def _check_tensor(name: str, value: np.ndarray, sent: Mapping[str, np.ndarray], where: str) -> None:
    if name not in sent:
        raise MessageError(
            f"{where}, tensor '{name}'",
            expected="a tensor of the model that was sent out",
            got="an unknown name",
            do="build the same model on both ends",
        )
    reference = sent[name]
    if value.shape != reference.shape or value.dtype != reference.dtype:
        raise MessageError(
            f"{where}, tensor '{name}'",
            expected=f"shape {reference.shape} and dtype {reference.dtype}",
            got=f"shape {value.shape} and dtype {value.dtype}",
            do="build the same model on both ends",
        )
    check_finite(value, f"{where}, tensor '{name}'")


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
    """Count the bytes of the arrays in a message, without headers.

    Args:
        content: The content of a message.

    Returns:
        Record name -> bytes.
    """
    return {name: sum(map(_array_bytes, record.values())) for name, record in _array_records(content).items()}


def _array_bytes(array: Array) -> int:
    """Count an array's bytes; a malformed one has those that came."""
    try:
        stated = int(np.prod(array.shape, dtype=np.int64)) * np.dtype(array.dtype).itemsize
    except (TypeError, ValueError):
        return len(array.data)
    return stated if 0 <= stated <= len(array.data) else len(array.data)


def _array_records(content: RecordDict) -> dict[str, ArrayRecord]:
    # Flower's property of that name makes a reference cycle, which keeps the message in memory until the next collection.
    return {name: record for name, record in content.items() if isinstance(record, ArrayRecord)}


def check_size(content: RecordDict, limit_mb: float) -> None:
    """Refuse to send a message that is too large.

    Args:
        content: The content of a message.
        limit_mb: Largest payload, MB.

    Raises:
        MessageError: The arrays are larger; the message names the largest tensors.
    """
    total = sum(payload_bytes(content).values())
    if total <= limit_mb * 1e6:
        return
    sizes = {
        f"{record}/{name}": int(np.prod(a.shape, dtype=np.int64)) * np.dtype(a.dtype).itemsize
        for record, arrays in _array_records(content).items()
        for name, a in arrays.items()
    }
    largest = sorted(sizes.items(), key=lambda item: -item[1])[:5]
    raise MessageError(
        "message",
        expected=f"at most {limit_mb:g} MB of payload (setting max-message-mb)",
        got=f"{total / 1e6:.3g} MB, the largest tensors being "
        + ", ".join(f"{name} ({size / 1e6:.3g} MB)" for name, size in largest),
        do="raise max-message-mb or use a smaller model",
    )
