from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedapps.zeroth_order.directions import Distribution
from fedapps.zeroth_order.errors import JournalError
from fedapps.zeroth_order.journal import (
    BaseModel,
    Header,
    Journal,
    JournalFile,
    Slice,
    header_line,
    parse_header,
    parse_record,
    record_line,
    show,
)
from fedapps.zeroth_order.layout import Layout, TensorSpec
from fedapps.zeroth_order.number_formats import NumberFormat
from fedapps.zeroth_order.scheme import HessianUpdate, Record, Scheme

LAYOUT = Layout((TensorSpec("w\u2028", (2, 3)), TensorSpec("b", (3,))))
HEADER = Header(Scheme(7), BaseModel("digits-mlp", None, "ab" * 32), LAYOUT)


def record_of(round_: int, tau: int = 2) -> Record:
    return Record(round_, 2 * round_, 0.1, 1e-3, 0.1, 1e-8, ((0.5, -1.0),) * tau, 2)


def journal_of(*rounds: int) -> Journal:
    return Journal(HEADER, [record_of(r) for r in rounds])


def test_a_journal_comes_back_from_text_and_file(tmp_path: Path) -> None:
    journal = journal_of(1, 2, 5)
    assert Journal.from_text(journal.to_text()) == journal
    stored = JournalFile.create(tmp_path / "j.jsonl", HEADER)
    for record in journal.records:
        stored.append(record)
    assert Journal.read(tmp_path / "j.jsonl") == journal == stored.journal
    assert (tmp_path / "j.jsonl").read_text(encoding="utf-8") == journal.to_text()
    stored.close()


@pytest.mark.parametrize("cut", range(1, 40, 3))
def test_a_torn_last_line_is_dropped_and_the_file_goes_on(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "j.jsonl"
    whole = journal_of(1, 2, 3).to_text().encode()
    path.write_bytes(whole[:-cut])
    rounds = [1, 2, 3] if cut == 1 else [1, 2]  # without its line end alone, the last record is whole
    assert [r.round for r in Journal.read(path).records] == rounds
    stored = JournalFile.open(path)
    stored.append(record_of(4))
    stored.close()
    assert path.read_bytes() == journal_of(*rounds, 4).to_text().encode()


def test_a_line_torn_within_a_letter_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    path.write_bytes(journal_of(1).to_text().encode() + b'{"round": "\xe2\x80')
    stored = JournalFile.open(path)
    stored.close()
    assert path.read_text(encoding="utf-8") == journal_of(1).to_text()


def test_a_damaged_line_elsewhere_is_an_error() -> None:
    lines = journal_of(1, 2).to_text().splitlines(keepends=True)
    # Line separators within a name are no line ends.
    lines = journal_of(1, 2).to_text().split("\n")
    with pytest.raises(JournalError, match=r"line 2: .*journal"):
        Journal.from_text("\n".join([lines[0], lines[1][:30], lines[2], ""]))
    with pytest.raises(JournalError, match=r"line 3: .*journal"):
        Journal.from_text("\n".join([lines[0], lines[1], lines[2][:30], ""]))


def test_files_that_are_no_journal_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    with pytest.raises(JournalError, match=r"j.jsonl: expected a journal, got no file"):
        Journal.read(path)
    path.write_text("")
    with pytest.raises(JournalError, match=r"header.*, got an empty file"):
        Journal.read(path)
    path.write_text('{"format": 1, "meth')
    with pytest.raises(JournalError, match=r"line 1: .*journal"):
        JournalFile.open(path)
    with pytest.raises(JournalError, match="expected no file, got a journal"):
        JournalFile.create(path, HEADER)


def test_slices_hold_what_somebody_lacks() -> None:
    journal = journal_of(1, 2, 5, 6)
    part = journal.slice(2)
    assert ([r.round for r in part.records], part.after, part.through) == ([5, 6], 2, 6)
    assert [r.round for r in journal.slice(0, through=4).records] == [1, 2]
    assert journal.slice(0, through=4).through == 4  # rounds 3 and 4 were refused
    assert journal.slice(6) == Slice(6, 6, ())
    assert journal.slice(9) == Slice(9, 9, ())


def test_a_prefix_grows_by_slices_that_overlap() -> None:
    journal = journal_of(1, 2)
    journal.extend(journal_of(1, 2, 4).slice(1).records, through=5)
    assert [r.round for r in journal.records] == [1, 2, 4]
    assert journal.through == 5
    other = dataclasses.replace(record_of(4), lr=0.2)
    with pytest.raises(JournalError, match=r"round 4: .*record"):
        journal.extend([other])


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (record_of(2), "round 2: expected a later round"),
        (dataclasses.replace(record_of(3), first_step=5), "round 3: expected first-step 6 or more, got 5"),
        (dataclasses.replace(record_of(3), momentum=0.9), "expected no momentum, got method 'hiso'"),
    ],
    ids=["round", "steps", "momentum"],
)
def test_a_record_that_does_not_follow_is_refused(record: Record, message: str) -> None:
    journal = journal_of(1, 2)
    with pytest.raises(JournalError, match=message):
        journal.append(record)
    assert len(journal.records) == 2


def test_a_journal_with_momentum_needs_it() -> None:
    journal = Journal(dataclasses.replace(HEADER, scheme=Scheme(7, "hiso-momentum")))
    with pytest.raises(JournalError, match="expected a momentum"):
        journal.append(record_of(1))


@pytest.mark.parametrize(
    ("after", "through", "rounds"),
    [(2, 1, ()), (2, 4, (2,)), (2, 4, (5,)), (0, 4, (3, 2)), (0, 4, (2, 2)), (-1, 0, ())],
)
def test_a_slice_in_disorder_is_refused(after: int, through: int, rounds: tuple[int, ...]) -> None:
    with pytest.raises(JournalError, match="journal slice: expected rounds in"):
        Slice(after, through, tuple(record_of(r) for r in rounds))


def test_a_journal_of_another_model_is_refused() -> None:
    journal = journal_of(1)
    journal.check_model(LAYOUT, "ab" * 32)
    with pytest.raises(JournalError, match=r"model .*got 1 tensors instead of 2"):
        journal.check_model(Layout(LAYOUT.tensors[:1]))
    with pytest.raises(JournalError, match=r"base model 'digits-mlp' with fingerprint abab.* got cdcd"):
        journal.check_model(LAYOUT, "cd" * 32)


def test_show_tells_what_a_reader_needs() -> None:
    records = [record_of(1), dataclasses.replace(record_of(2), fingerprint="ef" * 32)]
    lines = show(Journal(HEADER, records))
    assert lines[0] == "method hiso, seed 7, gaussian directions, H every-step"
    assert lines[1] == "base digits-mlp (abababababababab)"
    assert lines[2] == "2 tensors, 9 parameters, 2 rounds, 8 scalars"
    assert lines[4].startswith("round 2: steps 4-5, P 2, lr 0.1, mu 0.001, nu 0.1, largest scalar 1, 2 clients, finger")


# Of each kind of field the one that is hardest to write.
FULL_LAYOUT = Layout((TensorSpec("w", (2, 3)), TensorSpec("scale \u2028 ä", (), NumberFormat.BFLOAT16)))
FULL_SCHEME = Scheme(2**64 - 1, "hiso", Distribution.RADEMACHER, HessianUpdate.ROUND_MEAN)
FULL_HEADER = Header(FULL_SCHEME, BaseModel("facebook/opt-125m", None, "ab" * 32), FULL_LAYOUT)
FULL_RECORD = Record(4, 6, 0.1, 1e-3, 0.05, 1e-8, ((float(np.float32(0.1)), -1.5),), 3, "cd" * 32)


def test_the_header_has_the_published_form() -> None:
    assert json.loads(header_line(FULL_HEADER)) == {
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


def test_a_header_with_fixed_elements_has_a_format_of_its_own() -> None:
    """A program that knows format 1 only would move them."""
    layout = Layout((TensorSpec("w", (2, 3), fixed=((3, 6),)), TensorSpec("b", (2,))))
    header = dataclasses.replace(FULL_HEADER, layout=layout)
    row = json.loads(header_line(header))
    assert row["format"] == 2
    assert row["tensors"] == [
        {"name": "w", "shape": [2, 3], "dtype": "float32", "fixed": [[3, 6]]},
        {"name": "b", "shape": [2], "dtype": "float32"},
    ]
    assert parse_header(header_line(header), "j.jsonl") == header
    plain = dataclasses.replace(header, layout=Layout((TensorSpec("w", (2, 3)), TensorSpec("b", (2,)))))
    with pytest.raises(JournalError, match=r"'w' .* in the place of 'w' .* with 3 fixed elements from 3 on"):
        Journal(header).check_model(plain.layout)


def test_a_record_has_the_published_form() -> None:
    """Settings as set (0.1), scalars as the float32 values that they are, written in full."""
    line = record_line(FULL_RECORD)
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
    assert "fingerprint" not in record_line(dataclasses.replace(FULL_RECORD, fingerprint=None))
    assert json.loads(record_line(dataclasses.replace(FULL_RECORD, momentum=0.9)))["momentum"] == 0.9


def test_lines_read_back_exactly() -> None:
    assert parse_header(header_line(FULL_HEADER), "line 1") == FULL_HEADER
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
        ({"format": 3}, "j.jsonl, line 1: expected format 1 or 2, got 3; use the version that wrote it"),
        (
            {"tensors": [{"name": "w", "shape": [4], "dtype": "float32", "fixed": [[3, 9]]}]},
            "fixed elements: .* 4 elements",
        ),
        ({"tensors": [{"name": "w", "shape": [4], "dtype": "float32", "fixed": [[2, 1]]}]}, "fixed elements: "),
        ({"tensors": [{"name": "w", "shape": [4], "dtype": "float32", "fixed": [["0", 1]]}]}, "holds no integers"),
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
        parse_header(changed(header_line(FULL_HEADER), **changes), "j.jsonl, line 1")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "j.jsonl, line 3: expected a line of a journal"),
        ("[1]", "got a list"),
        (record_line(FULL_RECORD).replace("-1.5", "NaN"), "NaN is not finite"),
        (changed(record_line(FULL_RECORD), scalars=[[1.0], [1.0, 2.0]]), "expected tau rows of P numbers"),
        (changed(record_line(FULL_RECORD), scalars=[["1"]]), "'1' is no number"),
        (changed(record_line(FULL_RECORD), scalars=[[0.1]]), "expected float32 values"),
        (changed(record_line(FULL_RECORD), scalars=7), "not iterable"),
        (changed(record_line(FULL_RECORD), round=1.5), "'round' is no integer"),
        (changed(record_line(FULL_RECORD), lr="0.1"), "'0.1' is no number"),
        (changed(record_line(FULL_RECORD), mu=None), "no key 'mu'"),
        (changed(record_line(FULL_RECORD), first_step=2**32), "expected steps from 0"),
        (changed(record_line(FULL_RECORD), extra=1), "unknown key 'extra'"),
    ],
    ids=[
        "torn", "list", "nan", "ragged", "text", "digits", "no rows", "round", "lr", "no mu", "step", "unknown"
    ],
)  # fmt: skip
def test_a_bad_record_is_refused(line: str, message: str) -> None:
    with pytest.raises(JournalError, match=message):
        parse_record(line, "j.jsonl, line 3")
