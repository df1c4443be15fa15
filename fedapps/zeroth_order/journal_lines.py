"""The lines of a journal file: header and records to JSON and back, with every fault named."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from fedapps.errors import FedAppsError
from fedapps.zeroth_order.directions import Distribution
from fedapps.zeroth_order.errors import JournalError
from fedapps.zeroth_order.layout import Layout, TensorSpec
from fedapps.zeroth_order.number_formats import NumberFormat
from fedapps.zeroth_order.rules import rule_of
from fedapps.zeroth_order.scheme import HessianUpdate, Record, Scheme

T = TypeVar("T")

FORMAT = 1
"""Version of the format that this module reads and writes."""


@dataclass(frozen=True)
class BaseModel:
    """The model that round 1 starts from.

    Attributes:
        id: A hub id, a folder's name, or a task's name.
        revision: Of the hub, a checksum of a file, or None.
        fingerprint: Of the state at the start of the run.
    """

    id: str
    revision: str | None
    fingerprint: str


@dataclass(frozen=True)
class Header:
    """The first line of a journal.

    Attributes:
        scheme: Method, seed, distribution and policy of `H`.
        base: The model at the start.
        layout: The trainable tensors in order.
    """

    scheme: Scheme
    base: BaseModel
    layout: Layout


def header_line(header: Header) -> str:
    """Write a header.

    Args:
        header: The header.

    Returns:
        One line of JSON.
    """
    scheme, base = header.scheme, header.base
    return _line(
        {
            "format": FORMAT,
            "method": scheme.method,
            "seed": str(scheme.seed),
            "distribution": scheme.distribution.value,
            "hessian-update": scheme.hessian_update.value,
            "base": {"id": base.id, "revision": base.revision, "fingerprint": base.fingerprint},
            "tensors": [
                {"name": t.name, "shape": list(t.shape), "dtype": t.number_format.value} for t in header.layout.tensors
            ],
        }
    )


def record_line(record: Record) -> str:
    """Write a round.

    Args:
        record: The round.

    Returns:
        One line of JSON; `fingerprint` and `momentum` only where there are any.
    """
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
    """Read a header.

    Args:
        line: One line of JSON.
        where: File and line, for messages.

    Returns:
        The header.

    Raises:
        JournalError: It is no header of this format.
    """
    row = _parse(line, where)
    if row.get("format") != FORMAT:
        got = repr(row.get("format"))
        raise JournalError(where, expected=f"format {FORMAT}", got=got, do="use the version that wrote it")

    def build() -> Header:
        _check_keys(row, {"format", "method", "seed", "distribution", "hessian-update", "base", "tensors"}, set())
        policy = HessianUpdate(row["hessian-update"])
        scheme = Scheme(_seed(row["seed"]), row["method"], Distribution(row["distribution"]), policy)
        rule_of(scheme)
        tensors = (TensorSpec(t["name"], tuple(t["shape"]), NumberFormat(t["dtype"])) for t in row["tensors"])
        base = BaseModel(row["base"]["id"], row["base"]["revision"], row["base"]["fingerprint"])
        return Header(scheme, base, Layout(tuple(tensors)))

    return _built(build, where)


def parse_record(line: str, where: str) -> Record:
    """Read a round.

    Args:
        line: One line of JSON.
        where: File and line, for messages.

    Returns:
        The round.

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
    except ValueError as error:
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
