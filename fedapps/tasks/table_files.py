r"""Tables in files, CSV and Parquet: columns of numbers and of text, and the line that a row stands on.

Apache Arrow reads both. Its CSV reader refuses a row with a field too many or too few, which pandas pads in silence; only if a
row is wrong is the text read again, with Python's ``csv``, to find its line.

A number is written ``-12.5``, ``.5`` or ``1e-3``, with the decimal sign of the format, and its magnitude is at most `LARGEST`.
A text is compared without blanks at its ends; a whole number is the same text whether its column is written ``1`` or
``1.0``, as programs write it that have seen a missing value.
"""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedapps.errors import TaskError, did_you_mean
from fedapps.tasks.compressed import DAMAGED, open_compressed

LARGEST = 1e100
"""Largest magnitude of a number: the squares of so many as memory holds have a finite sum."""

PARQUET = b"PAR1"
"""First bytes of a Parquet file."""


@dataclass(frozen=True)
class TableFormat:
    """How a table is written; all but ``missing`` is for CSV.

    Attributes:
        delimiter: One character between fields.
        header: Whether the first line names the columns; else they are called 1, 2, ...
        decimal: Decimal sign of numbers that are text.
        encoding: Of the text, a name that Python knows.
        missing: What stands for a missing value, beside nothing at all.
    """

    delimiter: str = ","
    header: bool = True
    decimal: str = "."
    encoding: str = "utf-8"
    missing: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Table:
    """A table as it is in its file; `read_table` makes it.

    Attributes:
        path: The file.
        form: How it is written.
        names: The columns, in the file's order.
        content: Arrow's table, its columns called 0, 1, ...
        from_text: Whether the file is CSV.
    """

    path: Path
    form: TableFormat
    names: tuple[str, ...]
    content: Any = field(repr=False)
    from_text: bool = True

    def __len__(self) -> int:
        return int(self.content.num_rows)

    def numbers(self, name: str) -> NDArray[np.float64]:
        """Give a column as numbers ``(n,)``, NaN where there is none; booleans are 0 and 1.

        Raises:
            TaskError: A value is no number: which column, and which line of which file.
        """
        pa, compute = _arrow()
        column = self._plain(name)
        if not pa.types.is_string(column.type):
            if pa.types.is_boolean(column.type):
                column = column.cast(pa.int8())
            # Safe casts refuse integers beyond 2**53, which no float64 holds exactly: rounded is what a float is.
            values = np.array(column.cast(pa.float64(), safe=False).to_numpy(), dtype=np.float64)
        else:
            text = self._trimmed(column)
            sign = re.escape(self.form.decimal)
            known = compute.is_null(text)
            right = compute.match_substring_regex(text, rf"^[+-]?(\d+({sign}\d*)?|{sign}\d+)([eE][+-]?\d+)?$")
            wrong = compute.invert(compute.or_kleene(known, right)).to_numpy()
            if wrong.any():
                row = int(np.argmax(wrong))
                raise self._no_number(name, row, repr(text[row].as_py()))
            if self.form.decimal != ".":
                text = compute.replace_substring(text, self.form.decimal, ".")
            text = compute.replace_substring_regex(text, r"^\+", "")
            values = np.array(text.cast(pa.float64()).to_numpy(), dtype=np.float64)
        beyond = np.abs(values) > LARGEST  # NaN is not
        if beyond.any():
            row = int(np.argmax(beyond))
            raise self._no_number(name, row, f"{values[row]:g}")
        return values

    def texts(self, name: str) -> list[str | None]:
        """Give a column as texts, None where there is none; booleans are ``true`` and ``false``."""
        pa, compute = _arrow()
        column = self._plain(name)
        sign = re.escape(self.form.decimal if pa.types.is_string(column.type) else ".")
        if pa.types.is_floating(column.type):
            column = compute.if_else(compute.is_nan(column), pa.scalar(None, column.type), column)
        text = self._trimmed(column.cast(pa.string()))
        texts: list[str | None] = compute.replace_substring_regex(text, rf"^([+-]?\d+){sign}0+$", r"\1").to_pylist()
        return texts

    def check_name(self, name: str) -> None:
        """Refuse a column that is not there."""
        if name not in self.names:
            raise TaskError(
                f"file {self.path}",
                expected=f"a column '{name}'",
                got=f"{len(self.names)} columns, none of that name"
                + ("" if self.form.header else ": they are numbered"),
                do=did_you_mean(name, self.names, "correct the options of the task, or the delimiter"),
            )

    def place(self, row: int) -> str:
        """Say where a row from 0 is: ``"file patients.csv, line 7"``, the first line of the row as an editor counts."""
        if not self.from_text:
            return f"file {self.path}, row {row + 1}"
        records = _records(_decode(_bytes_of(self.path), self.path, self.form), self.form)
        line = next(line for i, (line, _) in enumerate(records) if i == row + self.form.header)
        return f"file {self.path}, line {line}"

    def _no_number(self, name: str, row: int, got: str) -> TaskError:
        return TaskError(
            f"{self.place(row)}, column '{name}'",
            expected=f"a number of magnitude at most {LARGEST:g}, such as 0{self.form.decimal}5",
            got=got,
            do="correct it, or name it in missing-marks, or its column in categories or ignore",
        )

    def _plain(self, name: str) -> Any:
        """Give a column whose values are numbers, booleans or text."""
        pa, _ = _arrow()
        self.check_name(name)
        column = self.content.column(str(self.names.index(name)))
        if pa.types.is_dictionary(column.type):
            column = column.cast(column.type.value_type)
        kind, types = column.type, pa.types
        if types.is_null(kind) or types.is_large_string(kind) or types.is_string_view(kind):
            return column.cast(pa.string())
        if types.is_string(kind) or types.is_boolean(kind):
            return column
        if types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind):
            return column
        raise TaskError(
            f"file {self.path}, column '{name}'",
            expected="numbers, booleans or text",
            got=f"values of type {kind}",
            do="convert the column, or name it in ignore",
        )

    def _trimmed(self, text: Any) -> Any:
        """Take blanks off the ends, and make null what stands for a missing value."""
        pa, compute = _arrow()
        text = compute.utf8_trim_whitespace(text)
        marks = pa.array(["", *self.form.missing], pa.string())
        return compute.if_else(compute.is_in(text, value_set=marks), pa.scalar(None, pa.string()), text)


def read_table(path: Path, form: TableFormat) -> Table:
    """Read a table, CSV unless the file begins as Parquet does; it may be compressed, as its ending says.

    Raises:
        TaskError: The file cannot be read, two columns have one name, or a row has not as many fields as there are columns.
    """
    raw = _bytes_of(path)
    if raw.startswith(PARQUET):
        return _read_parquet(path, form, raw)
    if ".parquet" in path.suffixes:
        raise TaskError(f"file {path}", expected="a Parquet file", got="other content", do="get it again")
    pa, _ = _arrow()
    from pyarrow import csv as arrow_csv

    text = _decode(raw, path, form)
    first = _first_record(text, path, form)
    width = len(first)
    names = tuple(name.strip() for name in first) if form.header else tuple(map(str, range(1, width + 1)))
    _check_names(names, path)
    columns = list(map(str, range(width)))
    if text.count('"') % 2:  # A last field whose quotation mark is never closed would swallow the rest of the file.
        _check_records(text, path, form, width)
    try:
        table = arrow_csv.read_csv(
            io.BytesIO(text.encode()),
            arrow_csv.ReadOptions(column_names=columns),
            arrow_csv.ParseOptions(delimiter=form.delimiter, newlines_in_values=True),
            arrow_csv.ConvertOptions(
                column_types=dict.fromkeys(columns, pa.string()), strings_can_be_null=False, check_utf8=False
            ),
        )
    except pa.ArrowException as error:
        _check_records(text, path, form, width)
        raise TaskError(f"file {path}", expected="CSV text", got=str(error), do="correct the file") from error
    return Table(path, form, names, table.slice(int(form.header)))


def _read_parquet(path: Path, form: TableFormat, raw: bytes) -> Table:
    pa, _ = _arrow()
    from pyarrow import parquet

    try:
        table = parquet.read_table(io.BytesIO(raw))
    except (pa.ArrowException, OSError) as error:
        raise TaskError(f"file {path}", expected="a readable file", got=str(error), do="get it again") from error
    names = tuple(table.column_names)
    _check_names(names, path)
    columns = table.rename_columns(list(map(str, range(len(names)))))
    return Table(path, form, names, columns, from_text=False)


def _arrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        from pyarrow import compute
    except ImportError as error:
        raise TaskError(
            "reading a table", expected="Apache Arrow", got=f"an import error ({error})", do="install fedapps[table]"
        ) from error
    return pyarrow, compute


def _bytes_of(path: Path) -> bytes:
    try:
        with open_compressed(path) as file:
            return file.read()
    except DAMAGED as error:
        raise TaskError(f"file {path}", expected="a readable file", got=str(error), do="get it again") from error


def _decode(raw: bytes, path: Path, form: TableFormat) -> str:
    # Spreadsheets begin UTF-8 with a mark, which is no part of the first column's name.
    encoding = "utf-8-sig" if form.encoding.lower().replace("_", "-") in ("utf-8", "utf8") else form.encoding
    try:
        return raw.decode(encoding)
    except UnicodeError as error:
        before = raw[: getattr(error, "start", 0)].decode(encoding, errors="ignore")
        line = len(re.findall(r"\r\n|\r|\n", before)) + 1
        raise TaskError(
            f"file {path}, line {line}",
            expected=f"text in the encoding {form.encoding}",
            got=str(error),
            do='set encoding in task-options, for example encoding = "cp1252"',
        ) from error


class _BadQuotesError(Exception):
    """A row whose quotation marks are wrong: on which line it begins, and what Python's ``csv`` says."""


def _records(text: str, form: TableFormat, strict: bool = False) -> Iterator[tuple[int, list[str]]]:
    """Yield each row, the header's included, with the line that it begins on, from 1; empty lines are none."""
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=form.delimiter, strict=strict)
    line = 1
    try:
        for record in reader:
            if record:
                yield line, record
            line = reader.line_num + 1
    except csv.Error as error:
        raise _BadQuotesError(line, str(error)) from error


def _first_record(text: str, path: Path, form: TableFormat) -> list[str]:
    try:
        return next(_records(text, form))[1]
    except StopIteration:
        raise TaskError(f"file {path}", expected="a table", got="an empty file", do="check the file") from None
    except _BadQuotesError as error:
        raise _bad_quotes(error, path) from error


def _bad_quotes(error: _BadQuotesError, path: Path) -> TaskError:
    line, reason = error.args
    return TaskError(
        f"file {path}, line {line}",
        expected="a quotation mark at both ends of a field, or at none",
        got=reason,
        do="correct the row that begins there; a quotation mark inside a field is written twice",
    )


def _check_names(names: Sequence[str], path: Path) -> None:
    name, times = Counter(names).most_common(1)[0] if names else ("", 0)
    if times > 1 or "" in names:
        raise TaskError(
            f"file {path}, header",
            expected="a name of its own for each column",
            got=f"{times} columns '{name}'" if times > 1 else f"no name for column {names.index('') + 1}",
            do="rename them, or set header = false if the file has no header",
        )


def _check_records(text: str, path: Path, form: TableFormat, width: int) -> None:
    """Refuse the first row that has not as many fields as there are columns, or quotation marks in wrong places."""
    try:
        for line, record in _records(text, form, strict=True):
            if len(record) != width:
                raise TaskError(
                    f"file {path}, line {line}",
                    expected=f"{width} fields with '{form.delimiter}' between them, as on the first line",
                    got=f"{len(record)}",
                    do="correct the line, or set delimiter; a field that holds the delimiter stands in quotation marks",
                )
    except _BadQuotesError as error:
        raise _bad_quotes(error, path) from error
