"""Tables as they are in files: what is read, and which line an error names."""

from __future__ import annotations

import bz2
import datetime
import decimal
import gzip
import io
import lzma
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from fedapps.errors import TaskError
from fedapps.tasks.table_files import Table, TableFormat, read_table


def table_of(folder: Path, content: str | bytes, name: str = "t.csv", **form: Any) -> Table:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return read_table(path, TableFormat(**form))


TEXT = 'age,ward,x\n\n31,"Nor""th, 1",1.5\r\n\n\n32," two\nlines ",-.5\n33,,+2e1\n'


@pytest.mark.parametrize(
    ("name", "pack"),
    [("t", bytes), ("t.csv", bytes), ("t.gz", gzip.compress), ("t.csv.xz", lzma.compress), ("t.bz2", bz2.compress)],
)
def test_fields_names_and_lines(tmp_path: Path, name: str, pack: Any) -> None:
    table = table_of(tmp_path, pack(TEXT.encode()), name)
    assert (table.names, len(table)) == (("age", "ward", "x"), 3)
    assert table.numbers("age").tolist() == [31, 32, 33]
    assert table.texts("ward") == ['Nor"th, 1', "two\nlines", None]
    assert table.numbers("x").tolist() == [1.5, -0.5, 20]
    assert [table.place(row).rpartition(" ")[2] for row in range(3)] == ["3", "6", "8"]  # as an editor counts
    assert table.place(0) == f"file {tmp_path / name}, line 3"


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_every_end_of_line_counts_once(tmp_path: Path, end: str) -> None:
    table = table_of(tmp_path, end.join(["a,b", "1,2", "", f'3,"x{end}y"', "5,6", ""]))
    assert table.numbers("a").tolist() == [1, 3, 5]
    assert [table.place(row)[-1] for row in range(3)] == ["2", "4", "6"]


@pytest.mark.parametrize(
    ("form", "content"),
    [
        pytest.param({"delimiter": ";", "decimal": ","}, "a;b\n1,5;ä\n", id="semicolon-and-comma"),
        pytest.param({"delimiter": "\t"}, "a\tb\n1.5\tä\n", id="tab"),
        pytest.param({"encoding": "cp1252"}, "a,b\n1.5,ä\n".encode("cp1252"), id="cp1252"),
        pytest.param({"encoding": "utf-16"}, "a,b\n1.5,ä\n".encode("utf-16"), id="utf-16"),
        pytest.param({}, "\ufeffa,b\n1.5,ä\n", id="spreadsheet-s-utf-8"),
        pytest.param({"encoding": "UTF_8"}, "\ufeffa,b\n1.5,ä\n", id="utf-8-by-another-name"),
        pytest.param({}, " a , b \n 1.5 , ä \n", id="blanks"),
    ],
)
def test_how_a_table_may_be_written(tmp_path: Path, form: dict[str, str], content: Any) -> None:
    table = table_of(tmp_path, content, **form)
    assert (table.names, table.numbers("a").tolist(), table.texts("b")) == (("a", "b"), [1.5], ["ä"])


def test_rows_that_lie_across_the_parser_s_blocks_are_whole(tmp_path: Path) -> None:
    """Arrow reads a megabyte at a time; in a field with line breaks no end of a line says where a row ends."""
    values = ["\n".join(["x"] * 50) + str(i) for i in range(30_000)]
    table = table_of(tmp_path, "a,b\n" + "".join(f'{i},"{value}"\n' for i, value in enumerate(values)))
    assert table.texts("b") == values
    assert table.numbers("a").tolist() == list(range(30_000))


def test_without_a_header_columns_are_numbered(tmp_path: Path) -> None:
    table = table_of(tmp_path, "1,x\n\n2,y\n", header=False)
    assert (table.names, table.numbers("1").tolist(), table.texts("2")) == (("1", "2"), [1, 2], ["x", "y"])
    assert [table.place(0)[-1], table.place(1)[-1]] == ["1", "3"]
    with pytest.raises(TaskError, match="expected a column '3', got 2 columns, none of that name: they are numbered"):
        table.texts("3")


def test_missing_values_are_told_from_texts(tmp_path: Path) -> None:
    table = table_of(tmp_path, 'x,c\n,""\nNA, NA\n1,na\n?,?\n', missing=("NA", "?"))
    assert table.texts("c") == [None, None, "na", None]
    assert np.isnan(table.numbers("x")).tolist() == [True, True, False, True]


def test_a_whole_number_is_one_text_however_it_is_written(tmp_path: Path) -> None:
    assert table_of(tmp_path, "c\n1.0\n1\n-2.00\n007\n1.5\nv1.0\n").texts("c") == ["1", "1", "-2", "007", "1.5", "v1.0"]
    assert table_of(tmp_path, "c;d\n1,0;1.0\n", delimiter=";", decimal=",").texts("c") == ["1"]
    assert table_of(tmp_path, "c;d\n1,0;1.0\n", delimiter=";", decimal=",").texts("d") == ["1.0"]


@pytest.mark.parametrize(
    "bad", ["x", "nan", "inf", "-Infinity", "1_000", "1,5", "0x10", "1e", "--1", "1 2", ".", "1e101", "1e400", "٣"]
)
def test_what_is_no_number_is_named_with_its_line(tmp_path: Path, bad: str) -> None:
    table = table_of(tmp_path, f'"a\nb",x\n\n1,1\n2,"{bad}"\n3,4\n')
    with pytest.raises(TaskError, match=r"t\.csv, line 5, column 'x': expected a number") as caught:
        table.numbers("x")
    assert caught.value.got in str(caught.value)
    assert f"got {caught.value.got}" not in caught.value.outside(), "content stays on the machine"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param("a,b\n1,2\n\n3\n", "line 4: expected 2 fields .*, got 1;", id="too-few"),
        pytest.param('a,b\n1,"2\n2"\n\n3,4,5\n', "line 5: expected 2 fields .*, got 3;", id="too-many"),
        pytest.param("a,b\n1,2\n  \n3,4\n", "line 3: expected 2 fields .*, got 1;", id="line-of-blanks"),
        pytest.param('a,b\n1,2\n"3,4\n5,6\n', "line 3: expected a quotation mark at both ends", id="never-closed"),
        pytest.param('a,b\n1,2\n3,"4\n5,6\n', "line 3: expected a quotation mark", id="never-closed-in-last-column"),
        pytest.param('a,b\n1,"' + "x" * 140_000 + "\n", "line 2: expected a quotation mark", id="never-closed-long"),
        pytest.param('a,"' + "x" * 140_000, "line 1: expected a quotation mark", id="header-never-closed"),
        pytest.param("a,b,a\n1,2,3\n", "header: expected a name of its own .*, got 2 columns 'a'", id="same-names"),
        pytest.param("a,,b\n1,2,3\n", "header: .*got no name for column 2", id="no-name"),
        pytest.param("", "expected a table, got an empty file", id="empty"),
        pytest.param("\n\r\n", "expected a table, got an empty file", id="only-empty-lines"),
        pytest.param(b"a,b\n1,2\r\n\xe4,4\n", "line 3: expected text in the encoding utf-8", id="other-encoding"),
    ],
)
def test_a_malformed_table_is_refused_with_the_line(tmp_path: Path, content: Any, message: str) -> None:
    with pytest.raises(TaskError, match=rf"file .*t\.csv, {message}" if "line" in message else message):
        table_of(tmp_path, content)


def test_a_quotation_mark_inside_a_field_is_none(tmp_path: Path) -> None:
    assert table_of(tmp_path, 'a,b\n5" pipe,1\nx,2\n').texts("a") == ['5" pipe', "x"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.csv.gz", b"a,b\n", "a readable file"),
        ("t.gz", gzip.compress(TEXT.encode() * 99)[:-20], "a readable file"),
        ("t.parquet", b"a,b\n", "a Parquet file, got other content"),
        ("t.parquet.xz", lzma.compress(b"version https://git-lfs"), "a Parquet file"),
        ("t.parquet", b"PAR1 and no more", "a readable file"),
    ],
    # Not what the bytes look like: gzip writes the time, and every process that runs tests must name them alike.
    ids=["no gzip", "torn gzip", "text for Parquet", "text in xz", "torn Parquet"],
)
def test_unreadable_files_are_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    with pytest.raises(TaskError, match=rf"file .*{name}: expected {message}"):
        table_of(tmp_path, content, name)


COLUMNS = {
    "int": [1, None, 3],
    "float": [1.0, 2.5, math.nan],
    "bool": [True, False, None],
    "text": ["x", " NA", None],
    "number": ["1", "-2.5", None],
    "coded": pyarrow.array(["u", "v", "u"]).dictionary_encode(),
    "large": pyarrow.array(["u", "v", "u"], pyarrow.large_string()),
    "decimal": [decimal.Decimal("1.50")] * 3,
    "huge": [2**60 + 1, 0, 0],
    "none": pyarrow.nulls(3),
    "date": [datetime.date(2020, 1, 1)] * 3,
}
NAN = math.nan


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_parquet(tmp_path: Path, pack: Any) -> None:
    buffer = io.BytesIO()
    parquet.write_table(pyarrow.table(COLUMNS), buffer)
    table = table_of(
        tmp_path, pack(buffer.getvalue()), "t.parquet" + (".gz" if pack is not bytes else ""), missing=("NA",)
    )
    assert table.names == tuple(COLUMNS)
    numbers = {
        name: table.numbers(name).tolist() for name in ("int", "float", "bool", "number", "decimal", "huge", "none")
    }
    assert repr(numbers) == repr({
        "int": [1.0, NAN, 3.0], "float": [1.0, 2.5, NAN], "bool": [1.0, 0.0, NAN], "number": [1.0, -2.5, NAN],
        "decimal": [1.5] * 3, "huge": [float(2**60), 0.0, 0.0], "none": [NAN] * 3,
    })  # fmt: skip
    texts = {name: table.texts(name) for name in ("int", "float", "bool", "text", "coded", "large", "none")}
    assert texts == {
        "int": ["1", None, "3"], "float": ["1", "2.5", None], "bool": ["true", "false", None],
        "text": ["x", None, None], "coded": ["u", "v", "u"], "large": ["u", "v", "u"], "none": [None] * 3,
    }  # fmt: skip
    with pytest.raises(TaskError, match=r"t\.parquet.*, row 1, column 'text': expected a number"):
        table.numbers("text")
    for read in (table.numbers, table.texts):
        with pytest.raises(
            TaskError, match=r"column 'date': expected numbers, booleans or text, got values of type date32"
        ):
            read("date")


def test_a_column_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        TaskError, match="expected a column 'Age', got 3 columns, none of that name; did you mean 'age'"
    ):
        table_of(tmp_path, TEXT).numbers("Age")


def test_without_arrow(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(TaskError, match=r"reading a table: expected Apache Arrow.*install fedapps\[table\]"):
        table_of(tmp_path, TEXT)
