"""Replies that lie: a seeded generator over every part of a message, and rounds of a real run in which one client sends them.

`mangle` draws one of `KINDS` and changes an honest reply in place. `UnderFire` replays the same round of a run again and again:
each time the run is resumed from the same folder by the package's own server, one client's reply is changed on its way, and
what the round made of it is checked against what the documents promise.
"""

from __future__ import annotations

import json
import math
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.message_pb2 import Message as ProtoMessage

from fedapps.messages.schema import pack_arrays
from fedapps.methods import get_method
from fedapps.results.run_folder import RunFolder
from fedapps.server_apps import app
from fedapps.simulation.inprocess import InProcessGrid, set_server_identity
from fedapps.strategies.exchange import GridWrapper

Kind = Callable[[RecordDict, random.Random], bool]
"""Changes a reply; False where it holds nothing to change so."""


def header(shape: Any, dtype: str = "<f4", order: bool = False, version: int = 1) -> bytes:
    """The head of an array in NumPy's format, whatever it says."""
    text = f"{{'descr': '{dtype}', 'fortran_order': {order}, 'shape': {shape!r}, }}".ljust(117) + "\n"
    length = len(text).to_bytes(2 if version == 1 else 4, "little")
    return b"\x93NUMPY" + bytes([version, 0]) + length + text.encode()


def zipped() -> bytes:
    """A real ``.npz``."""
    file = BytesIO()
    np.savez(file, a=np.zeros(3))
    return file.getvalue()


BYTES: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "magic alone": lambda data, _: b"\x93NUMPY",
    "npz": lambda data, _: zipped(),
    "zip's magic": lambda data, _: b"PK\x03\x04",
    "header without its brace": lambda data, _: data.replace(b"}", b"{", 1),
    "10^12 numbers in the header": lambda data, _: header((10**12,)),
    "10^20 numbers in the header": lambda data, _: header((10**20,)),
    "negative shape": lambda data, _: header((-1, -4)) + data[128:],
    "a shape of many zeros": lambda data, _: header((0,) * 40),
    "dtype (1,": lambda data, _: header((4,), "(1,"),
    "dtype of objects": lambda data, _: header((1,), "|O") + b"cos\nsystem\n(S'true'\ntR.",
    "version 3": lambda data, _: header((4,), version=3) + bytes(16),
    "a header of 4 GB": lambda data, _: b"\x93NUMPY\x02\x00\xff\xff\xff\xff" + data[128:],
    "nested header": lambda data, _: header("(" * 5000),
    "cut": lambda data, r: data[: r.randrange(len(data) + 1)],
    "longer": lambda data, r: data + bytes(r.randrange(1, 64)),
    "nothing": lambda data, _: b"",
    "column order": lambda data, _: data.replace(b"False", b"True ", 1),
    "big-endian": lambda data, _: data.replace(b"'<f", b"'>f", 1),
    "flipped bit in the header": lambda data, r: flipped(data, r, 0, 128),
    "flipped bit in the numbers": lambda data, r: flipped(data, r, 128, len(data)),
    "flipped bit anywhere": lambda data, r: flipped(data, r, 0, len(data)),
}
"""What becomes of the bytes of one array."""

VALUES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "NaN": lambda v: np.where(np.arange(v.size).reshape(v.shape) == v.size // 2, np.nan, v).astype(v.dtype),
    "infinity": lambda v: np.full_like(v, np.inf),
    "1e30": lambda v: np.full_like(v, 1e30),
    "the largest number": lambda v: np.full_like(v, np.finfo(v.dtype).max),
    "times -10": lambda v: -10 * v,
    "times 1000": lambda v: 1000 * v,
    "negative": lambda v: -v,
    "zeros": np.zeros_like,
    "denormal": lambda v: np.full_like(v, np.finfo(v.dtype).tiny / 4),
    "noise": lambda v: np.random.default_rng(0).normal(size=v.shape).astype(v.dtype),
    "an axis more": lambda v: v[None],
    "flat": lambda v: np.concatenate([v.ravel(), v.ravel()[:1]]),
    "transposed": lambda v: np.ascontiguousarray(v.T)[..., :-1] if v.ndim else v[None, None],
    "float64": lambda v: v.astype(np.float64 if v.dtype != np.float64 else np.float32),
    "float16": lambda v: v.astype(np.float16),
    "complex": lambda v: v.astype(np.complex64),
    "integers": lambda v: np.zeros(v.shape, np.int64),
    "booleans": lambda v: np.zeros(v.shape, bool),
    "text": lambda v: np.full(v.shape, "abc"),
    "dates": lambda v: np.zeros(v.shape, "datetime64[s]"),
    "empty": lambda v: np.zeros((0, *v.shape[1:]), v.dtype),
}
"""What becomes of the numbers of one array."""

ENTRIES: dict[str, Callable[[Any, random.Random], Any]] = {
    "text": lambda value, _: "[/x] [bold]a",
    "a number": lambda value, _: 7,
    "a negative number": lambda value, _: -1,
    "a huge number": lambda value, _: 2**62,
    "NaN": lambda value, _: math.nan,
    "a list": lambda value, _: [1.0, math.inf],
    "bytes": lambda value, _: b"\x00" * 7,
    "no bytes": lambda value, _: b"",
    "truth": lambda value, _: True,
    "deep JSON": lambda value, _: "[" * 100_000,
    "long text": lambda value, _: "x" * 1_000_000,
    "cut": lambda value, r: value[: r.randrange(len(value) + 1)] if isinstance(value, str | bytes) else 0,
    "a digit": lambda value, r: altered(value, r),
    "a flipped bit": lambda value, r: flipped_entry(value, r),
    "scalars 1e30": lambda value, _: (
        np.full(len(value) // 4, 1e30, "<f4").tobytes() if isinstance(value, bytes) else 1e30
    ),
    "scalars NaN": lambda value, _: (
        np.full(len(value) // 4, np.nan, "<f4").tobytes() if isinstance(value, bytes) else 0
    ),
    "scalars times -10": lambda value, _: scaled(value, -10) if isinstance(value, bytes) else -10,
}
"""What becomes of one entry."""

RESERVED = (
    "round",
    "lr",
    "accepted",
    "payload-up",
    "folded",
    "sampled",
    "phase",
    "refused",
    "notes",
    "seconds",
    "[/x]",
)


def flipped(data: bytes, r: random.Random, first: int, last: int) -> bytes:
    """One bit changed."""
    last = min(last, len(data))
    if first >= last:
        first = 0
    changed = bytearray(data)
    if changed:
        changed[r.randrange(first, last)] ^= 1 << r.randrange(8)
    return bytes(changed)


def flipped_entry(value: Any, r: random.Random) -> Any:
    if isinstance(value, bytes):
        return flipped(value, r, 0, len(value))
    if isinstance(value, str):
        return flipped(value.encode(), r, 0, len(value)).decode(errors="replace")
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value ^ (1 << r.randrange(62))
    if isinstance(value, float):
        return float(np.frombuffer(flipped(np.float64(value).tobytes(), r, 0, 8), np.float64)[0])
    return value


def altered(value: Any, r: random.Random) -> Any:
    """JSON of which one number is another: a layout of a block that is too wide, has no row, or is cut finely."""
    if not isinstance(value, str) or not any(c.isdigit() for c in value):
        return 3
    places = [i for i, c in enumerate(value) if c.isdigit()]
    place = r.choice(places)
    return value[:place] + r.choice(["-1", "0", "1000000000", "null", "1.5", "[]"]) + value[place + 1 :]


def scaled(value: bytes, factor: float) -> bytes:
    with np.errstate(all="ignore"):
        return (np.frombuffer(value[: len(value) // 4 * 4], "<f4") * np.float32(factor)).astype("<f4").tobytes()


def some_array(content: RecordDict, r: random.Random) -> tuple[str, str] | None:
    places = [(name, key) for name, record in content.items() if isinstance(record, ArrayRecord) for key in record]
    return r.choice(places) if places else None


def put(content: RecordDict, name: str, key: str, array: Array) -> None:
    """Replace an array in its place: Flower's records share what they hold."""
    content[name] = ArrayRecord({k: array if k == key else v for k, v in content[name].items()})


def in_bytes(how: str) -> Kind:
    def change(content: RecordDict, r: random.Random) -> bool:
        place = some_array(content, r)
        if place is None:
            return False
        old = content[place[0]][place[1]]
        put(content, *place, Array(old.dtype, old.shape, old.stype, BYTES[how](old.data, r)))
        return True

    return change


def in_values(how: str) -> Kind:
    def change(content: RecordDict, r: random.Random) -> bool:
        place = some_array(content, r)
        if place is None:
            return False
        value = content[place[0]][place[1]].numpy()
        if not np.issubdtype(value.dtype, np.floating):
            return False
        whole = r.random() < 0.5  # Of one array, or of all in the record.
        with np.errstate(all="ignore"):
            content[place[0]] = pack_arrays(
                {
                    key: VALUES[how](array.numpy())
                    if (whole or key == place[1]) and _is_float(array)
                    else array.numpy()
                    for key, array in content[place[0]].items()
                }
            )
        return True

    return change


def _is_float(array: Array) -> bool:
    return np.issubdtype(array.numpy().dtype, np.floating)


def in_entries(how: str) -> Kind:
    def change(content: RecordDict, r: random.Random) -> bool:
        places = [(name, key) for name, record in content.items() if isinstance(record, ConfigRecord) for key in record]
        if not places:
            return False
        name, key = r.choice(places)
        content[name] = ConfigRecord({**content[name], key: ENTRIES[how](content[name][key], r)})
        return True

    return change


def metric(changes: Callable[[random.Random, int], dict[str, Any]]) -> Kind:
    def change(content: RecordDict, r: random.Random) -> bool:
        record = content.get("metrics")
        if not isinstance(record, MetricRecord):
            return False
        content["metrics"] = MetricRecord({**record, **changes(r, int(record.get("num-examples", 1)))})
        return True

    return change


def without(kind: type) -> Kind:
    def change(content: RecordDict, r: random.Random) -> bool:
        names = [name for name, record in content.items() if isinstance(record, kind)]
        if not names:
            return False
        del content[r.choice(names)]
        return True

    return change


def another_type(content: RecordDict, r: random.Random) -> bool:
    if not content:
        return False
    name = r.choice(list(content))
    content[name] = ConfigRecord({"a": 1}) if not isinstance(content[name], ConfigRecord) else MetricRecord({"a": 1.0})
    return True


def another_name(content: RecordDict, r: random.Random) -> bool:
    if not content:
        return False
    name = r.choice(list(content))
    record = content[name]
    del content[name]
    content[r.choice(["models", "", "buffers", "arrays", "curvature", "scalars", "x" * 10_000])] = record
    return True


def tensors(content: RecordDict, r: random.Random) -> bool:
    """A tensor fewer, one more, another order, one twice, or one under another's name."""
    place = some_array(content, r)
    if place is None:
        return False
    name, key = place
    held = dict(content[name].items())
    how = r.choice(["fewer", "more", "order", "twice", "renamed", "none"])
    if how == "fewer":
        del held[key]
    elif how == "more":
        held["extra" * r.choice([1, 2000])] = held[key]
    elif how == "order":
        held = dict(reversed(held.items()))
    elif how == "renamed":
        held = {k + ("." if k == key else ""): v for k, v in held.items()}
    elif how == "twice":
        content["buffers" if name != "buffers" else "arrays"] = ArrayRecord({key: held[key]})
    else:
        held = {}
    content[name] = ArrayRecord(held)
    return True


def added(content: RecordDict, r: random.Random) -> bool:
    """A record that nobody announced."""
    content[r.choice(["gift", "curvature", "products", "scalars", "layout", "buffers", "line-search"])] = r.choice(
        [
            ConfigRecord({"layout": "{}", "values": b"abcd", "x": [1, 2]}),
            ArrayRecord({"x": Array(np.zeros(3, np.float32))}),
            MetricRecord({"x": 1.0}),
        ]
    )
    return True


def huge_layout(content: RecordDict, r: random.Random) -> bool:
    """A layout of few bytes that asks for much."""
    for name, record in content.items():
        if isinstance(record, ConfigRecord) and "layout" in record:
            try:
                told = json.loads(str(record["layout"]))
            except ValueError:
                return False
            text = json.dumps(told)
            for word in ("rows", "width", "cut", "groups"):
                if r.random() < 0.5:
                    text = _with(text, word, r.choice([0, -1, 1, 10**9, 10**18]))
            content[name] = ConfigRecord({**record, "layout": text})
            return True
    return False


def _with(text: str, word: str, number: int) -> str:
    head, found, tail = text.partition(f'"{word}": ')
    digits = len(tail) - len(tail.lstrip("-0123456789"))
    return head + found + (str(number) + tail[digits:] if found else "")


def empty(content: RecordDict, r: random.Random) -> bool:
    for name in list(content):
        del content[name]
    return True


KINDS: dict[str, Kind] = {
    **{f"bytes: {how}": in_bytes(how) for how in BYTES},
    **{f"numbers: {how}": in_values(how) for how in VALUES},
    **{f"entry: {how}": in_entries(how) for how in ENTRIES},
    "examples: 0": metric(lambda r, n: {"num-examples": 0}),
    "examples: -1": metric(lambda r, n: {"num-examples": -1}),
    "examples: 2^62": metric(lambda r, n: {"num-examples": 2**62}),
    "examples: one more": metric(lambda r, n: {"num-examples": n + 1}),
    "examples: 1.5": metric(lambda r, n: {"num-examples": 1.5}),
    "metrics: reserved": metric(lambda r, n: {name: r.choice([1.0, -1.0, math.nan]) for name in RESERVED}),
    "metrics: not finite": metric(lambda r, n: {"train-loss": r.choice([math.nan, math.inf, -1e308])}),
    "metrics: many": metric(lambda r, n: {f"m{i}": 1.0 for i in range(r.choice([190, 5000]))}),
    "metrics: long name": metric(lambda r, n: {"x" * 10_000: 1.0}),
    "metrics: a list": metric(lambda r, n: {"train-loss": [1.0, 2.0]}),
    "metrics: told to have lost": metric(lambda r, n: {"store-lost": 1, "rebuilt": 1, "step-limit": -1.0}),
    "no arrays": without(ArrayRecord),
    "no entries": without(ConfigRecord),
    "no metrics": without(MetricRecord),
    "a record of another type": another_type,
    "a record of another name": another_name,
    "other tensors": tensors,
    "a record more": added,
    "a layout of much": huge_layout,
    "nothing at all": empty,
}
"""Name -> how a reply is changed."""

FLIPS = ("bytes: flipped bit anywhere", "entry: a flipped bit")


def mangle(content: RecordDict, r: random.Random) -> str:
    """Change a reply in place.

    Args:
        content: The content of an honest reply.
        r: Where chance comes from; a third of all draws are single flipped bits.

    Returns:
        Which of `KINDS` was drawn.
    """
    while True:
        kind = r.choice(FLIPS) if r.random() < 1 / 3 else r.choice(list(KINDS))
        if KINDS[kind](content, r):
            return kind


MOST_EFFECT = 200.0
"""How far a round may go with one liar among five, in units of the round without it: ``max-update-ratio`` = 100 times the
greatest median norm of the rounds before, weighted by 1/5, over the norm of the mean update, which is less than theirs."""

ERRORS = ("", "a[/x] b[bold]c", "x" * 1_000_000, "\x00\x1b[2J", "No query function registered", "line\n" * 10_000)


class Tape(GridWrapper):
    """A grid that asks a client for the answer to a message once, and from then on gives it from memory.

    Args:
        inner: The grid that does the work.

    Attributes:
        liar: Partition of the client whose reply is changed.
        target: ``(kind of message, exchange)`` of that reply; exchanges of a kind count from 0.
        change: What is done with it.
        changed: Whether it came to that.
        seen: Kind of message -> exchanges of it in the last run.
    """

    def __init__(self, inner: InProcessGrid) -> None:
        super().__init__(inner)
        self._inner = inner
        self._known: dict[tuple[int, str, bytes], bytes] = {}
        self._out: dict[str, Message] = {}
        self._exchanges: Counter[str] = Counter()
        self.liar = 0
        self.target = ("", 0)
        self.change: Callable[[Message, Message], Message] | None = None
        self.changed = False
        self.seen: dict[str, int] = {}

    def rewind(self) -> None:
        """Count exchanges from 0 again, and forget what is out."""
        self.seen = dict(self._exchanges)
        self._exchanges.clear()
        self._out.clear()
        self.changed = False

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        ids = []
        messages = list(messages)
        for message in messages:
            key = f"{message.metadata.message_type}-{len(self._out)}-{len(ids)}-{id(message)}"
            message.metadata.__dict__["_message_id"] = key
            self._out[key] = message
            ids.append(key)
        if messages:
            kind = messages[0].metadata.message_type
            self._now = (kind, self._exchanges[kind])
            self._exchanges[kind] += 1
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [self._answer(self._out.pop(key)) for key in message_ids if key in self._out]

    def _answer(self, sent: Message) -> Message:
        reply = self._honest(sent)
        partition = self._inner.partitions[sent.metadata.dst_node_id]
        if self.change is not None and partition == self.liar and self._now == self.target and not self.changed:
            self.changed = True
            reply = self.change(sent, reply)
        return reply

    def _honest(self, sent: Message) -> Message:
        asked = message_to_proto(sent)
        node, kind = sent.metadata.dst_node_id, sent.metadata.message_type
        key = (node, kind, sha256(asked.content.SerializeToString(deterministic=True)).digest())
        if key not in self._known:
            own = sent.metadata.message_id
            (inner_id,) = self._inner.push_messages([sent])
            (reply,) = self._inner.pull_messages([inner_id])
            sent.metadata.__dict__["_message_id"] = own
            self._known[key] = message_to_proto(reply).SerializeToString(deterministic=True)
        reply = message_from_proto(ProtoMessage.FromString(self._known[key]))
        if reply.has_error():
            return Message(reply.error, reply_to=sent)
        answer = Message(reply.content, reply_to=sent)
        answer.metadata.__dict__["_src_node_id"] = node
        return answer


CLIENTS = 5


def config_of(method: str) -> dict[str, Any]:
    """Settings of a run in which a method uses all the messages that it has."""
    own: dict[str, Any] = {}
    if method == "localnewton":
        own = {"localnewton.line-search": "1,0.5"}
    elif method in ("hiso", "decomfl", "hiso-momentum"):
        own = {f"{method}.fingerprint-every": 1}
    elif get_method(method).family == "personalised":
        own = {"client-test-fraction": 0.34, "client-evaluation": "every"}
    elif method == "fedpm":
        own = {"fedpm.damping": 0.1}
    return {
        "task": "fedapps_testing:Sites", "task-options": f'sizes = "{",".join(["6"] * CLIENTS)}"', "partition": "column",
        "partition-column": "site", "lr": 0.05, "batch-size": 4, "num-server-rounds": 4, "validation-fraction": 0.0,
        "node-wait": 0.0, "method": method,
    } | own  # fmt: skip


class UnderFire:
    """A round of a run that is run again and again, each time with another lie.

    Args:
        config: Settings of the run; the round is its last one.
        clients: Number of clients.
        folder: An empty folder.

    Attributes:
        first: The model before the round.
        honest: What the round leaves if nobody lies.
    """

    def __init__(self, config: dict[str, Any], clients: int, folder: Path) -> None:
        self.clients, self.root = clients, folder
        self.kind = ""
        self.config = {**config, "run-dir": str(folder / "run"), "max-consecutive-failed-rounds": 2}
        self.rounds = int(config["num-server-rounds"])
        self.tape = Tape(InProcessGrid(clients, self.config))
        self._run(self.config | {"num-server-rounds": self.rounds - 1})
        self.first = self.folder.read_model()
        self.folder.path.rename(folder / "before")
        self._restore()
        self._run({**self.config, "resume": True})
        self.honest = self.left()
        self.exchanges = dict(self.tape.seen)

    @property
    def folder(self) -> RunFolder:
        return RunFolder.open(self.root / "run")

    def _restore(self) -> None:
        shutil.rmtree(self.root / "run", ignore_errors=True)
        shutil.copytree(self.root / "before", self.root / "run")

    def _run(self, config: dict[str, Any]) -> None:
        set_server_identity(1)
        context = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config=config)
        try:
            app(self.tape, context)
        finally:
            self.tape.rewind()

    def left(self) -> dict[str, Any]:
        """What the round left: its rows, and the model."""
        rows = [row for row in self.folder.read_metrics() if row["round"] == self.rounds]
        return {"row": next(row for row in rows if row["phase"] == "train"), "model": self.folder.read_model()}

    def fire(self, r: random.Random) -> dict[str, Any]:
        """Let one client lie once, and run the round.

        Args:
            r: Where chance comes from.

        Returns:
            What it left, with ``kind``, ``liar`` and ``where``, the message that was changed.

        Raises:
            FedAppsError: The run ended.
        """
        tape = self.tape
        tape.liar = r.randrange(self.clients)
        kinds = [(kind, i) for kind, number in sorted(self.exchanges.items()) for i in range(number)]
        weights = [8 if target == ("train", 0) else 4 if target[0] == "train" else 1 for target in kinds]
        tape.target = r.choices(kinds, weights)[0]
        self.kind = ""

        def change(sent: Message, reply: Message) -> Message:
            if reply.has_error() or r.random() < 0.03:
                self.kind = "an error"
                return Message(Error(r.randrange(1, 10), r.choice(ERRORS)), reply_to=sent)
            self.kind = mangle(reply.content, r)
            return reply

        tape.change = change
        self._restore()
        try:
            self._run({**self.config, "resume": True})
        finally:
            tape.change = None
        return {**self.left(), "kind": self.kind, "liar": tape.liar, "where": tape.target}

    def faults(self, left: dict[str, Any]) -> list[str]:
        """Compare what a round left with what is promised, whoever lies.

        Args:
            left: What `fire` gave.

        Returns:
            What is broken; nothing is expected.
        """
        row, liar = left["row"], left["liar"]
        honest = [p for p in range(self.clients) if p != liar]
        broken = []
        if not row["accepted"]:
            broken.append("the round was not accepted")
        if lost := [p for p in honest if p not in row["folded"] or str(p) in row["refused"]]:
            broken.append(f"honest clients {lost} do not count: {row['refused']}")
        if str(liar) in row["refused"] and not row["refused"][str(liar)].strip(" .") and left["kind"] != "an error":
            broken.append("refused without a cause")
        if any(len(cause) > 1000 for cause in row["refused"].values()):
            broken.append("a cause of more than 1000 characters")
        if not all(np.isfinite(value).all() for value in left["model"].values()):
            broken.append("the model is not finite")
        if (effect := self.effect(left)) > MOST_EFFECT:
            broken.append(f"the round went {effect:.3g} times as far as without the lie")
        return broken

    def effect(self, left: dict[str, Any]) -> float:
        """Give how far the round went, in units of the same round without the lie."""
        honest = distance(self.honest["model"], self.first)
        return distance(left["model"], self.first) / honest if honest else distance(left["model"], self.first)


def distance(model: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]) -> float:
    """Give the Euclidean distance of two models, in float64."""
    return math.sqrt(sum(float(np.sum((np.float64(value) - other[name]) ** 2)) for name, value in model.items()))
