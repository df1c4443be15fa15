"""Rows of tables about runs, and tables as terminal, Markdown, CSV and JSON text."""

from __future__ import annotations

import csv
import io
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from rich.table import Table

from fedapps.results.storage import to_json
from fedapps.results.units import human_bytes, human_seconds
from fedapps.settings import Scalar


class TableRow(Protocol):
    """One row of a table, for people and for programs."""

    def cells(self) -> dict[str, str]:
        """Give the row as people read it.

        Returns:
            Title of the column -> text; the titles are the same in all rows of a table.
        """

    def data(self) -> dict[str, Scalar | None]:
        """Give the row for CSV and JSON.

        Returns:
            Key -> number, text or None; the keys are the same in all rows of a table.
        """


@dataclass(frozen=True)
class RunRow:
    """One run in a table; every field reads as in `cells`."""

    method: str
    task: str
    seed: int
    status: str
    rounds: int
    round_limit: int
    accuracy_metric: str | None
    final: float | None
    best: float | None
    target: float | None
    rounds_to_target: int | None
    payload_down: int
    payload_up: int
    seconds: float

    def cells(self) -> dict[str, str]:
        """Give the row as people read it.

        Returns:
            Title of the column -> text.
        """
        cells = {
            "method": self.method,
            "task": self.task,
            "seed": str(self.seed),
            "status": self.status,
            "rounds": f"{self.rounds}/{self.round_limit}",
            "final accuracy": _accuracy(self.final),
            "best accuracy": _accuracy(self.best),
        }
        if self.target is not None:
            reached = self.rounds_to_target is not None
            cells[f"rounds to {self.target:g}"] = str(self.rounds_to_target) if reached else f"{self.round_limit}+"
        return cells | {
            "down": human_bytes(self.payload_down),
            "up": human_bytes(self.payload_up),
            "time": human_seconds(self.seconds),
        }

    def data(self) -> dict[str, Scalar | None]:
        """Give the row for CSV and JSON.

        Returns:
            Key -> number, text or None.
        """
        return {
            "method": self.method,
            "task": self.task,
            "seed": self.seed,
            "status": self.status,
            "rounds": self.rounds,
            "round-limit": self.round_limit,
            "accuracy-metric": self.accuracy_metric,
            "final-accuracy": self.final,
            "best-accuracy": self.best,
            "target": self.target,
            "rounds-to-target": self.rounds_to_target,
            "payload-down": self.payload_down,
            "payload-up": self.payload_up,
            "seconds": self.seconds,
        }


def _accuracy(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


@dataclass(frozen=True)
class Spread:
    """A quantity over seeds."""

    mean: float  # mean of the finite values; nan without any
    std: float  # sample standard deviation (divisor n - 1); nan for fewer than two values
    n: int  # number of finite values

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Spread:
        """Compute mean and standard deviation.

        Args:
            values: The values; None and what is not finite are left out.
        """
        finite = [float(value) for value in values if value is not None and math.isfinite(value)]
        return cls(
            mean=statistics.fmean(finite) if finite else math.nan,
            std=statistics.stdev(finite) if len(finite) > 1 else math.nan,
            n=len(finite),
        )


@dataclass(frozen=True)
class CompareRow:
    """The runs of one method in a table."""

    label: str  # the method, and what else tells the group from others
    runs: int
    completed: int  # how many of them completed
    target: float | None  # accuracy to reach, or None
    rounds_to_target: Spread  # rounds to it; a run that never got there counts as its round limit
    unreached: int  # how many runs never got there: with any, the mean is a lower bound
    final: Spread  # accuracy at the end
    best: Spread  # accuracy at the round that is best on validation data
    payload_down: Spread  # bytes to the clients in training rounds
    payload_up: Spread  # bytes from the clients in training rounds
    seconds: Spread  # time of all phases, s

    def cells(self) -> dict[str, str]:
        """Give the row as people read it.

        Returns:
            Title of the column -> text, ``mean ± standard deviation``; ``20+`` is "not within 20 rounds".
        """
        whole = self.completed == self.runs
        cells = {"method": self.label, "runs": str(self.runs) if whole else f"{self.completed} of {self.runs}"}
        if self.target is not None:
            mark = "+" if self.unreached else ""
            cells[f"rounds to {self.target:g}"] = self._text(self.rounds_to_target, _rounds, mark)
        return cells | {
            "final accuracy": self._text(self.final, lambda x: f"{x:.4f}"),
            "best accuracy": self._text(self.best, lambda x: f"{x:.4f}"),
            "down": self._text(self.payload_down, human_bytes),
            "up": self._text(self.payload_up, human_bytes),
            "time": self._text(self.seconds, human_seconds),
        }

    def _text(self, spread: Spread, write: Callable[[float], str], mark: str = "") -> str:
        if spread.n == 0:
            return "-"
        text = write(spread.mean) + mark
        if spread.n > 1 and write(spread.mean + spread.std) != write(spread.mean):  # visible at this precision
            text += f" ± {write(spread.std)}"
        return text if spread.n == self.runs else f"{text} (n={spread.n})"

    def data(self) -> dict[str, Scalar | None]:
        """Give the row for CSV and JSON.

        Returns:
            Key -> number, text or None; a mean and a standard deviation have a key each.
        """
        data: dict[str, Scalar | None] = {"method": self.label, "runs": self.runs, "completed": self.completed}
        data |= {"target": self.target, "rounds-to-target-unreached": self.unreached}
        spreads = {
            "rounds-to-target": self.rounds_to_target,
            "final-accuracy": self.final,
            "best-accuracy": self.best,
            "payload-down": self.payload_down,
            "payload-up": self.payload_up,
            "seconds": self.seconds,
        }
        for name, spread in spreads.items():
            data[f"{name}-mean"] = _finite(spread.mean)
            data[f"{name}-std"] = _finite(spread.std)
        return data


def _rounds(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def to_rich(rows: Sequence[TableRow], title: str | None = None) -> Table:
    """Make a table for the terminal.

    Args:
        rows: The rows.
        title: Title above it.

    Returns:
        A `rich` table; numbers are aligned to the right.
    """
    table = Table(title=title)
    for column in rows[0].cells() if rows else ():
        left = column in ("method", "task", "status")
        table.add_column(column, justify="left" if left else "right", no_wrap=column == "method")
    for row in rows:
        table.add_row(*row.cells().values())
    return table


def to_markdown(rows: Sequence[TableRow]) -> str:
    """Make a table for a document.

    Returns:
        Markdown; empty without rows.
    """
    if not rows:
        return ""
    titles = list(rows[0].cells())
    lines = [titles, ["---"] * len(titles), *(list(row.cells().values()) for row in rows)]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def to_csv(rows: Sequence[TableRow]) -> str:
    """Make a table for a spreadsheet.

    Returns:
        CSV with a header; an unknown value is empty.
    """
    if not rows:
        return ""
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0].data()), lineterminator="\n")
    writer.writeheader()
    writer.writerows(row.data() for row in rows)
    return text.getvalue()


def to_json_rows(rows: Sequence[TableRow]) -> str:
    """Make a table for a program.

    Returns:
        A JSON list of objects; an unknown value is null.
    """
    return to_json([row.data() for row in rows], indent=2) + "\n"
