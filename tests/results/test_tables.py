from __future__ import annotations

import csv
import io
import json
import math
import statistics

import pytest
from rich.console import Console

from fedapps.results.tables import Spread, narrow_tables, to_csv, to_json_rows, to_markdown, to_rich

CELLS = [{"method": "a|b", "loss": "0.2"}, {"method": "fedpm, own", "loss": ""}]
RECORDS: list[dict[str, int | float | bool | str | None]] = [
    {"method": "a|b", "loss": 0.25}, {"method": "fedpm, own", "loss": None}
]  # fmt: skip


def test_spread_is_mean_and_sample_deviation_of_what_is_finite() -> None:
    values = [0.9, 0.95, 0.97]
    spread = Spread.of([values[0], None, values[1], math.nan, values[2]])
    assert spread == Spread(pytest.approx(sum(values) / 3), pytest.approx(statistics.stdev(values)), 3)
    one, none = Spread.of([2]), Spread.of([None])
    assert (one.mean, one.n) == (2.0, 1)
    assert math.isnan(one.std)
    assert math.isnan(none.mean)
    assert none.n == 0


def test_markdown_escapes_its_bars() -> None:
    assert to_markdown(CELLS) == "| method | loss |\n| --- | --- |\n| a\\|b | 0.2 |\n| fedpm, own |  |\n"


def test_csv_and_json_hold_numbers_and_gaps() -> None:
    assert list(csv.DictReader(io.StringIO(to_csv(RECORDS)))) == [
        {"method": "a|b", "loss": "0.25"},
        {"method": "fedpm, own", "loss": ""},
    ]
    assert json.loads(to_json_rows(RECORDS)) == [
        {"method": "a|b", "loss": 0.25},
        {"method": "fedpm, own", "loss": None},
    ]


def test_the_terminal_shows_title_columns_and_cells() -> None:
    console = Console(file=io.StringIO(), width=80)
    console.print(to_rich(CELLS, title="runs"))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for word in ("runs", "method", "loss", "a|b", "0.2", "fedpm, own"):
        assert word in text
    assert [column.justify for column in to_rich(CELLS).columns] == ["left", "right"]


def test_no_rows_make_empty_tables() -> None:
    assert to_markdown([]) == to_csv([]) == ""
    assert json.loads(to_json_rows([])) == []
    assert to_rich([]).row_count == 0


def test_a_terminal_too_narrow_for_a_table_shows_it_in_parts_that_are_whole() -> None:
    """80 columns; the method is in front of each part, and every heading and cell is there, whole."""
    names = [f"accuracy, global model, test data of {number} clients" for number in range(7)]
    rows = [{"method": method, **{name: f"0.{method}{i}" for i, name in enumerate(names)}} for method in ("111", "222")]
    console = Console(file=io.StringIO(), width=80)
    parts = narrow_tables(rows, "results", 80)
    for part in parts:
        console.print(part)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert len(parts) == 4  # 10 characters of the method, and two columns of 26
    assert max(len(line) for line in text.splitlines()) <= 80
    assert text.count("results") == 1
    assert text.count("method") == 4
    for number in range(7):
        assert f"test data of {number} clients" in text
        assert f"0.111{number}" in text
    (whole,) = narrow_tables(rows, None, 1000)
    assert len(whole.columns) == 8
