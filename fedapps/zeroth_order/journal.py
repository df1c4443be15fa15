"""The journal: one file holds a run, and base model + journal = the trained model of any round.

JSON Lines, UTF-8, append-only. The first line is the header, every other line one applied round; a refused round has no
line. Floats are written so that they read back exactly. A line that was torn by a crash is dropped on reading.

References:
    DeComFL, arXiv 2405.15861 (clients rebuild the model from scalars and seeds).
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, TypeVar

from fedapps.errors import FedAppsError
from fedapps.zeroth_order.directions import Distribution
from fedapps.zeroth_order.errors import JournalError
from fedapps.zeroth_order.layout import Layout, Ranges, TensorSpec
from fedapps.zeroth_order.number_formats import NumberFormat
from fedapps.zeroth_order.rules import rule_of
from fedapps.zeroth_order.scheme import HessianUpdate, Record, Scheme

LOG = logging.getLogger("flwr")
"""Flower's logger."""

T = TypeVar("T")

FORMAT = 1
"""Version of the format."""

FORMAT_WITH_FIXED = 2
"""Version of a journal whose tensors have fixed elements, which programs that know only format 1 would move."""


@dataclass(frozen=True)
class BaseModel:
    """The model that round 1 starts from."""

    id: str  # a hub id, a folder's name, or a task's name
    revision: str | None  # of the hub, a checksum of a file, or None
    fingerprint: str  # of the state at the start of the run


@dataclass(frozen=True)
class Header:
    """The first line of a journal."""

    scheme: Scheme  # method, seed, distribution and policy of `H`
    base: BaseModel  # the model at the start
    layout: Layout  # the trainable tensors in order


def header_line(header: Header) -> str:
    """Write a header as one line of JSON."""
    scheme, base = header.scheme, header.base
    return _line(
        {
            "format": FORMAT_WITH_FIXED if header.layout.fixed else FORMAT,
            "method": scheme.method,
            "seed": str(scheme.seed),
            "distribution": scheme.distribution.value,
            "hessian-update": scheme.hessian_update.value,
            "base": {"id": base.id, "revision": base.revision, "fingerprint": base.fingerprint},
            "tensors": [
                {
                    "name": t.name,
                    "shape": list(t.shape),
                    "dtype": t.number_format.value,
                    **({"fixed": [list(one) for one in t.fixed]} if t.fixed else {}),
                }
                for t in header.layout.tensors
            ],
        }
    )


def _ranges(fixed: list[list[int]]) -> Ranges:
    if not all(type(edge) is int for one in fixed for edge in one):
        raise TypeError("'fixed' holds no integers")
    return tuple((start, stop) for start, stop in fixed)


def record_line(record: Record) -> str:
    """Write a round as one line of JSON; `fingerprint` and `momentum` only where there are any."""
    row: dict[str, Any] = {
        "round": record.round,
        "first-step": record.first_step,
        "lr": float(record.lr),
        "mu": float(record.mu),
        "nu": float(record.nu),
        "eps": float(record.eps),
        "scalars": [[float(value) for value in scalars] for scalars in record.scalars],
        "participants": record.participants,
    }
    if record.momentum is not None:
        row["momentum"] = float(record.momentum)
    if record.fingerprint is not None:
        row["fingerprint"] = record.fingerprint
    return _line(row)


def parse_header(line: str, where: str) -> Header:
    """Read a header of this format from one line of JSON; `where` is file and line, for messages.

    Raises:
        JournalError: It is no header of this format.
    """
    row = _parse(line, where)
    if row.get("format") not in (FORMAT, FORMAT_WITH_FIXED):
        got = repr(row.get("format"))
        raise JournalError(
            where, expected=f"format {FORMAT} or {FORMAT_WITH_FIXED}", got=got, do="use the version that wrote it"
        )

    def build() -> Header:
        _check_keys(row, {"format", "method", "seed", "distribution", "hessian-update", "base", "tensors"}, set())
        policy = HessianUpdate(row["hessian-update"])
        scheme = Scheme(_seed(row["seed"]), row["method"], Distribution(row["distribution"]), policy)
        rule_of(scheme)
        tensors = (
            TensorSpec(t["name"], tuple(t["shape"]), NumberFormat(t["dtype"]), _ranges(t.get("fixed", [])))
            for t in row["tensors"]
        )
        base = BaseModel(row["base"]["id"], row["base"]["revision"], row["base"]["fingerprint"])
        return Header(scheme, base, Layout(tuple(tensors)))

    return _built(build, where)


def parse_record(line: str, where: str) -> Record:
    """Read a round from one line of JSON, every field checked; `where` is file and line, for messages.

    Raises:
        JournalError: A field is missing, unknown, of the wrong type or out of range, or scalars are not a matrix.
    """
    row = _parse(line, where)

    def build() -> Record:
        required = {"round", "first-step", "lr", "mu", "nu", "eps", "scalars", "participants"}
        _check_keys(row, required, {"fingerprint", "momentum"})
        for key in ("round", "first-step", "participants"):
            if type(row[key]) is not int:
                raise TypeError(f"'{key}' is no integer")
        scalars = tuple(tuple(_number(value) for value in scalars) for scalars in row["scalars"])
        lr, mu, nu, eps = (_number(row[key]) for key in ("lr", "mu", "nu", "eps"))
        return Record(
            row["round"], row["first-step"], lr, mu, nu, eps, scalars, row["participants"],
            row.get("fingerprint"), row.get("momentum"),
        )  # fmt: skip

    return _built(build, where)


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n"


def _parse(line: str, where: str) -> dict[str, Any]:
    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not finite")

    try:
        row = json.loads(line, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise _unreadable(where, str(error)) from None
    if not isinstance(row, dict):
        raise _unreadable(where, f"a {type(row).__name__}")
    return row


def _built(build: Callable[[], T], where: str) -> T:
    try:
        return build()
    except KeyError as error:
        raise _unreadable(where, f"no key {error}") from None
    except (FedAppsError, ValueError, TypeError, OverflowError) as error:
        raise _unreadable(where, str(error)) from None


def _check_keys(row: Mapping[str, Any], required: set[str], optional: set[str]) -> None:
    unknown = sorted(set(row) - required - optional)
    if unknown:
        raise ValueError(f"unknown key '{unknown[0]}'")
    missing = sorted(required - set(row))
    if missing:
        raise ValueError(f"no key '{missing[0]}'")


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{value!r} is no number")
    return float(value)


def _seed(text: Any) -> int:
    if not isinstance(text, str) or not text.isdecimal():
        raise ValueError(f"seed {text!r} is no decimal text")
    return int(text)


def _unreadable(where: str, got: str) -> JournalError:
    return JournalError(where, expected="a line of a journal", got=got, do="restore the file from a copy")


@dataclass(frozen=True)
class Slice:
    """A part of a journal: every applied round with `after < round <= through`."""

    after: int  # who holds the state of this round may apply the slice
    through: int  # the round whose state the slice leads to; refused rounds between have no record
    records: tuple[Record, ...]  # the rounds, in order

    def __post_init__(self) -> None:
        rounds = [record.round for record in self.records]
        if self.after < 0 or self.through < self.after or rounds != sorted(set(rounds)):
            raise JournalError("journal slice", expected="rounds in order", got=f"{rounds}", do="send the slice again")
        if rounds and not (self.after < rounds[0] and rounds[-1] <= self.through):
            got = f"rounds {rounds[0]} to {rounds[-1]}"
            expected = f"rounds in ({self.after}, {self.through}]"
            raise JournalError("journal slice", expected=expected, got=got, do="send the slice again")


@dataclass
class Journal:
    """A journal in memory; the persistent state of a client is such a prefix."""

    header: Header  # what is constant over the run
    records: list[Record] = field(default_factory=list)  # the applied rounds, in order
    through: int = 0  # the last round that is known, applied or refused

    def __post_init__(self) -> None:
        records, self.records = self.records, []
        self.extend(records)

    @classmethod
    def from_text(cls, text: str, where: str = "journal") -> Journal:
        """Read a journal from its text; a torn last line is dropped. `where` says where it comes from, for messages.

        Raises:
            JournalError: A line other than a torn last one cannot be read, or the rounds are out of order.
        """
        return _read(text.encode("utf-8"), where)[0]

    @classmethod
    def read(cls, path: Path) -> Journal:
        """Read a journal file; a torn last line is dropped.

        Raises:
            JournalError: There is no such file, or a line cannot be read.
        """
        return _read(_bytes_of(path), str(path))[0]

    def to_text(self) -> str:
        """Write header and records, one a line."""
        return "".join([header_line(self.header), *(record_line(record) for record in self.records)])

    def append(self, record: Record) -> None:
        """Add a round; it and its steps must lie after the end, and it must have what the method needs."""
        self._check_next(record)
        self.records.append(record)
        self.through = max(self.through, record.round)

    def extend(self, records: Iterable[Record], through: int = 0) -> None:
        """Add rounds, in order; those that the journal holds already are skipped if they are equal, else refused.

        `through` is the last round that they tell about.
        """
        held = {record.round: record for record in self.records}
        for record in records:
            if record.round not in held:
                self.append(record)
            elif held[record.round] != record:
                raise JournalError(
                    f"round {record.round}",
                    expected="the record that is held already",
                    got="another one",
                    do="this is another run's journal: start the client with an empty store",
                )
        self.through = max(self.through, through)

    def slice(self, after: int, through: int | None = None) -> Slice:
        """Cut out what somebody lacks who holds the state of round `after`, 0 for the base model; None means to the end."""
        last = self.through if through is None else through
        return Slice(after, max(after, last), tuple(r for r in self.records if after < r.round <= last))

    def check_model(self, layout: Layout, base_fingerprint: str | None = None) -> None:
        """Refuse a model that the journal was not written for.

        It is told by its layout and, if that is given, by the fingerprint of its state at the start.
        """
        base = self.header.base
        difference = self.header.layout.difference(layout)
        if difference is not None:
            do = f"use the base model '{base.id}' with the same adapters and frozen parameters"
            raise JournalError("journal", expected="the model it was written for", got=difference, do=do)
        if base_fingerprint is not None and base_fingerprint != base.fingerprint:
            raise JournalError(
                "journal",
                expected=f"the base model '{base.id}' with fingerprint {base.fingerprint[:16]}",
                got=base_fingerprint[:16],
                do="the shapes fit but the weights differ: use the same revision and initialisation",
            )

    def _check_next(self, record: Record) -> None:
        where = f"round {record.round}"
        if record.round <= (self.records[-1].round if self.records else 0):
            got = f"round {record.round} after round {self.records[-1].round}"
            raise JournalError(where, expected="a later round", got=got, do="append each round once")
        end = self.records[-1].end_step if self.records else 0
        if record.first_step < end:
            got = str(record.first_step)
            raise JournalError(where, expected=f"first-step {end} or more", got=got, do="never use a step twice")
        has, needs = record.momentum is not None, rule_of(self.header.scheme).momentum
        if has != needs:
            expected = "a momentum" if needs else "no momentum"
            got = f"method '{self.header.scheme.method}' and momentum {record.momentum}"
            raise JournalError(where, expected=expected, got=got, do="write what the method uses")


class JournalFile:
    """A journal on disk that only grows; each record is on the disk before `append` returns.

    Attributes:
        journal: The same in memory.
        path: The file.
    """

    def __init__(self, path: Path, journal: Journal, stream: IO[bytes]) -> None:
        self.path = path
        self.journal = journal
        self._stream = stream

    @classmethod
    def create(cls, path: Path, header: Header) -> JournalFile:
        """Start a journal without records; the file must not exist."""
        try:
            stream = path.open("xb")
        except FileExistsError:
            raise JournalError(
                str(path), expected="no file", got="a journal", do="open it to go on, or choose another folder"
            ) from None
        opened = cls(path, Journal(header), stream)
        opened._write(header_line(header))
        return opened

    @classmethod
    def open(cls, path: Path) -> JournalFile:
        """Go on with a journal; a torn last line is cut off.

        Raises:
            JournalError: It cannot be read.
        """
        data = _bytes_of(path)
        journal, good = _read(data, str(path))
        stream = path.open("r+b")
        stream.truncate(good)
        stream.seek(0, os.SEEK_END)
        opened = cls(path, journal, stream)
        if not data[:good].endswith(b"\n"):
            opened._write("\n")
        return opened

    def append(self, record: Record) -> None:
        """Add a round, in memory and on disk; see `Journal.append`.

        Raises:
            JournalError: See `Journal.append`.
        """
        self.journal.append(record)
        self._write(record_line(record))

    def close(self) -> None:
        """Close the file."""
        self._stream.close()

    def _write(self, line: str) -> None:
        self._stream.write(line.encode("utf-8"))
        self._stream.flush()
        os.fsync(self._stream.fileno())


def show(journal: Journal) -> list[str]:
    """Describe a journal in lines for a reader: what the run fixed, then a line a round."""
    scheme, base = journal.header.scheme, journal.header.base
    lines = [
        f"method {scheme.method}, seed {scheme.seed}, {scheme.distribution} directions, H {scheme.hessian_update}",
        f"base {base.id} {base.revision or ''} ({base.fingerprint[:16]})".replace("  ", " "),
        f"{len(journal.header.layout.tensors)} tensors, {journal.header.layout.size} parameters, "
        f"{len(journal.records)} rounds, {sum(r.tau * r.num_probes for r in journal.records)} scalars",
    ]
    for record in journal.records:
        mark = f", fingerprint {record.fingerprint[:16]}" if record.fingerprint else ""
        size = max(abs(value) for row in record.scalars for value in row)
        lines.append(
            f"round {record.round}: steps {record.first_step}-{record.end_step - 1}, P {record.num_probes}, "
            f"lr {record.lr:g}, mu {record.mu:g}, nu {record.nu:g}, largest scalar {size:.4g}, "
            f"{record.participants} clients{mark}"
        )
    return lines


def _bytes_of(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise JournalError(str(path), expected="a journal", got="no file", do="check the path") from None
    except OSError as error:
        raise JournalError(str(path), expected="a journal", got=str(error), do="restore the file from a copy") from None


def _read(data: bytes, where: str) -> tuple[Journal, int]:
    """Read lines; returns the journal and the number of bytes that are good."""
    lines = data.split(b"\n")
    if not lines[-1]:
        lines.pop()
    if not lines:
        raise JournalError(where, expected="a header line", got="an empty file", do="start the run again")
    journal = Journal(parse_header(_decoded(lines[0], f"{where}, line 1"), f"{where}, line 1"))
    good = len(lines[0]) + 1
    for number, line in enumerate(lines[1:], 2):
        place = f"{where}, line {number}"
        try:
            journal.append(parse_record(_decoded(line, place), place))
        except JournalError:
            if number == len(lines) and not data.endswith(b"\n"):
                LOG.warning("%s is torn and was dropped; the journal ends with round %d", place, journal.through)
                return journal, good
            raise
        good += len(line) + 1
    return journal, min(good, len(data))


def _decoded(line: bytes, where: str) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise JournalError(where, expected="UTF-8", got=str(error), do="restore the file from a copy") from None
