from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest

from fedapps.zeroth_order.directions import Distribution
from fedapps.zeroth_order.errors import JournalError
from fedapps.zeroth_order.journal_lines import (
    BaseModel,
    Header,
    header_line,
    parse_header,
    parse_record,
    record_line,
)
from fedapps.zeroth_order.layout import Layout, TensorSpec
from fedapps.zeroth_order.number_formats import NumberFormat
from fedapps.zeroth_order.scheme import HessianUpdate, Record, Scheme

LAYOUT = Layout((TensorSpec("w", (2, 3)), TensorSpec("scale \u2028 ä", (), NumberFormat.BFLOAT16)))
SCHEME = Scheme(2**64 - 1, "hiso", Distribution.RADEMACHER, HessianUpdate.ROUND_MEAN)
HEADER = Header(SCHEME, BaseModel("facebook/opt-125m", None, "ab" * 32), LAYOUT)
RECORD = Record(4, 6, 0.1, 1e-3, 0.05, 1e-8, ((float(np.float32(0.1)), -1.5),), 3, "cd" * 32)


def test_the_header_has_the_published_form() -> None:
    assert json.loads(header_line(HEADER)) == {
        "format": 1,
        "method": "hiso",
        "seed": "18446744073709551615",
        "distribution": "rademacher",
        "hessian-update": "round-mean",
        "base": {"id": "facebook/opt-125m", "revision": None, "fingerprint": "ab" * 32},
        "tensors": [
            {"name": "w", "shape": [2, 3], "dtype": "float32"},
            {"name": "scale \u2028 ä", "shape": [], "dtype": "bfloat16"},
        ],
    }


def test_a_record_has_the_published_form() -> None:
    """Settings as set (0.1), scalars as the float32 values that they are, written in full."""
    line = record_line(RECORD)
    assert line.endswith("\n")
    assert json.loads(line) == {
        "round": 4,
        "first-step": 6,
        "lr": 0.1,
        "mu": 0.001,
        "nu": 0.05,
        "eps": 1e-8,
        "scalars": [[0.10000000149011612, -1.5]],
        "participants": 3,
        "fingerprint": "cd" * 32,
    }
    assert "fingerprint" not in record_line(dataclasses.replace(RECORD, fingerprint=None))
    assert json.loads(record_line(dataclasses.replace(RECORD, momentum=0.9)))["momentum"] == 0.9


def test_lines_read_back_exactly() -> None:
    assert parse_header(header_line(HEADER), "line 1") == HEADER
    random = np.random.default_rng(0)
    for _ in range(200):
        bits = random.integers(0, 2**32, 6, dtype=np.uint32).view(np.float32)
        scalars = tuple(tuple(row) for row in np.where(np.isfinite(bits), bits, 1).reshape(3, 2).tolist())
        lr, mu, nu, eps = 10.0 ** random.uniform(-9, 0, 4)
        record = Record(1, int(random.integers(2**31)), lr, mu, nu, eps, scalars, 2, momentum=float(random.random()))
        assert parse_record(record_line(record), "line 2") == record


def changed(line: str, **changes: Any) -> str:
    row = json.loads(line)
    for key, value in changes.items():
        row[key.replace("_", "-")] = value
        if value is None:
            del row[key.replace("_", "-")]
    return json.dumps(row)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": 2}, "j.jsonl, line 1: expected format 1, got 2; use the version that wrote it"),
        ({"seed": 5}, "seed 5 is no decimal text"),
        ({"seed": str(2**64)}, r"seed: expected an integer from 0 to 2\^64 - 1"),
        ({"seed": "-1"}, "seed '-1' is no decimal text"),
        ({"method": "hisso"}, "method: expected one of"),
        ({"distribution": "normal"}, "'normal' is not a valid Distribution"),
        ({"tensors": []}, "model: expected a trainable parameter"),
        ({"tensors": None}, "no key 'tensors'"),
        ({"base": {"id": "x"}}, "no key 'revision'"),
        ({"colour": "red"}, "unknown key 'colour'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_bad_header_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(JournalError, match=message):
        parse_header(changed(header_line(HEADER), **changes), "j.jsonl, line 1")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "j.jsonl, line 3: expected a line of a journal"),
        ("[1]", "got a list"),
        (record_line(RECORD).replace("-1.5", "NaN"), "NaN is not finite"),
        (changed(record_line(RECORD), scalars=[[1.0], [1.0, 2.0]]), "expected tau rows of P numbers"),
        (changed(record_line(RECORD), scalars=[["1"]]), "'1' is no number"),
        (changed(record_line(RECORD), scalars=[[0.1]]), "expected float32 values"),
        (changed(record_line(RECORD), scalars=7), "not iterable"),
        (changed(record_line(RECORD), round=1.5), "'round' is no integer"),
        (changed(record_line(RECORD), lr="0.1"), "'0.1' is no number"),
        (changed(record_line(RECORD), mu=None), "no key 'mu'"),
        (changed(record_line(RECORD), first_step=2**32), "expected steps from 0"),
        (changed(record_line(RECORD), extra=1), "unknown key 'extra'"),
    ],
    ids=[
        "torn", "list", "nan", "ragged", "text", "digits", "no rows", "round", "lr", "no mu", "step", "unknown"
    ],
)  # fmt: skip
def test_a_bad_record_is_refused(line: str, message: str) -> None:
    with pytest.raises(JournalError, match=message):
        parse_record(line, "j.jsonl, line 3")
