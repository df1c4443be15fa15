from __future__ import annotations

import csv
import io
import json
import math
import statistics

import pytest
from rich.console import Console

from fedapps.results.tables import Spread, to_csv, to_json_rows, to_markdown, to_rich


class Row:
    """A row of two columns."""

    def __init__(self, method: str, value: float | None) -> None:
        self.method, self.value = method, value

    def cells(self) -> dict[str, str]:
        return {"method": self.method, "loss": "-" if self.value is None else f"{self.value:.1f}"}

    def data(self) -> dict[str, int | float | bool | str | None]:
        return {"method": self.method, "loss": self.value}


ROWS = [Row("a|b", 0.25), Row("fedpm, own", None)]


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
    assert to_markdown(ROWS) == "| method | loss |\n| --- | --- |\n| a\\|b | 0.2 |\n| fedpm, own | - |\n"


def test_csv_and_json_hold_numbers_and_gaps() -> None:
    assert list(csv.DictReader(io.StringIO(to_csv(ROWS)))) == [
        {"method": "a|b", "loss": "0.25"},
        {"method": "fedpm, own", "loss": ""},
    ]
    assert json.loads(to_json_rows(ROWS)) == [{"method": "a|b", "loss": 0.25}, {"method": "fedpm, own", "loss": None}]


def test_the_terminal_shows_title_columns_and_cells() -> None:
    console = Console(file=io.StringIO(), width=80)
    console.print(to_rich(ROWS, title="runs"))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for word in ("runs", "method", "loss", "a|b", "0.2", "fedpm, own"):
        assert word in text
    assert [column.justify for column in to_rich(ROWS).columns] == ["left", "right"]


def test_no_rows_make_empty_tables() -> None:
    assert to_markdown([]) == to_csv([]) == ""
    assert json.loads(to_json_rows([])) == []
    assert to_rich([]).row_count == 0
