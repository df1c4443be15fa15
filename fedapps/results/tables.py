"""Rows of tables about runs, and tables as terminal, Markdown, CSV and JSON text."""

from __future__ import annotations

import csv
import io
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from fedapps.results.storage import to_json
from fedapps.results.units import human_bytes, human_seconds
from fedapps.results.views import Measure
from fedapps.settings import Scalar


@dataclass(frozen=True)
class RunRow:
    """One run in a table."""

    method: str
    task: str
    seed: int
    status: str
    rounds: int  # rounds done
    round_limit: int  # rounds it was given
    final: Mapping[Measure, float]  # after the last round
    best: Mapping[Measure, float]  # at the round that is best on validation data
    target: float | None  # value to reach, or None
    rounds_to_target: Mapping[Measure, int | None]  # first round that is as good; None for never
    payload_down: int  # bytes to the clients in training rounds
    payload_up: int  # bytes from them
    seconds: Mapping[str, float]  # seconds by phase

    def cells(self) -> dict[str, str]:
        """Give the row as people read it: title of the column -> text."""
        cells = {
            "method": self.method, "task": self.task, "seed": str(self.seed), "status": self.status,
            "rounds": f"{self.rounds}/{self.round_limit}",
        }  # fmt: skip
        cells |= {f"final {measure.title}": _number(value) for measure, value in self.final.items()}
        cells |= {f"best {measure.title}": _number(value) for measure, value in self.best.items()}
        for measure, reached in self.rounds_to_target.items():
            cells[f"rounds to {self.target:g}, {measure.where}"] = (
                f"{self.round_limit}+" if reached is None else str(reached)
            )
        cells |= {"down": human_bytes(self.payload_down), "up": human_bytes(self.payload_up)}
        return cells | {f"time, {phase}": human_seconds(seconds) for phase, seconds in self.seconds.items()}

    def data(self) -> dict[str, Scalar | None]:
        """Give the row for CSV and JSON: key -> number, text or None."""
        data: dict[str, Scalar | None] = {
            "method": self.method, "task": self.task, "seed": self.seed, "status": self.status, "rounds": self.rounds,
            "round-limit": self.round_limit, "target": self.target,
        }  # fmt: skip
        data |= {f"final-{measure.key}": _finite(value) for measure, value in self.final.items()}
        data |= {f"best-{measure.key}": _finite(value) for measure, value in self.best.items()}
        data |= {f"rounds-to-target-{measure.key}": reached for measure, reached in self.rounds_to_target.items()}
        data |= {"payload-down": self.payload_down, "payload-up": self.payload_up}
        return data | {f"seconds-{phase}": seconds for phase, seconds in self.seconds.items()}


def _number(value: float) -> str:
    return f"{value:.4f}" if abs(value) >= 1e-3 or value == 0 else f"{value:.2g}"


@dataclass(frozen=True)
class Spread:
    """A quantity over seeds, or over clients."""

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


PHASES = ("start-up", "train", "evaluate")
"""Phases in a table of costs; evaluations on server and clients are one."""


@dataclass(frozen=True)
class CompareRow:
    """The runs of one method in a table; over several runs a number is ``mean ± sample standard deviation``."""

    label: str  # the method, and what else tells the group from others
    runs: int
    completed: int  # how many of them completed
    target: float | None  # value to reach, or None
    final: Mapping[Measure, Spread]  # after the last round
    best: Mapping[Measure, Spread]  # at the round that is best on validation data
    rounds_to_target: Mapping[Measure, Spread]  # rounds to it; a run that never got there counts as its round limit
    unreached: Mapping[Measure, int]  # how many runs never got there: with any, the mean is a lower bound
    payload_down: Spread  # bytes to the clients in training rounds
    payload_up: Spread  # bytes from the clients in training rounds
    seconds: Mapping[str, Spread]  # seconds of each of `PHASES`

    def final_cells(self) -> dict[str, str]:
        """Give what people read about the end; a cell is empty where the method has no such model or data.

        Returns:
            Title of the column -> text; ``20+`` is "not within 20 rounds".
        """
        whole = self.completed == self.runs
        cells = {"method": self.label, "runs": str(self.runs) if whole else f"{self.completed} of {self.runs}"}
        cells |= {measure.title: self._text(spread, _number) for measure, spread in self.final.items()}
        for measure, spread in self.rounds_to_target.items():
            mark = "+" if self.unreached[measure] else ""
            cells[f"rounds to {self.target:g}, {measure.where}"] = self._text(spread, _rounds, mark)
        return cells

    def best_cells(self) -> dict[str, str]:
        """Give what people read about the round that is best on validation data: title of the column -> text."""
        return {"method": self.label} | {m.title: self._text(spread, _number) for m, spread in self.best.items()}

    def cost_cells(self) -> dict[str, str]:
        """Give what people read about bytes of training, all clients and rounds, and time: title of the column -> text."""
        cells = {
            "method": self.label,
            "down": self._text(self.payload_down, human_bytes),
            "up": self._text(self.payload_up, human_bytes),
        }
        return cells | {f"time, {phase}": self._text(spread, human_seconds) for phase, spread in self.seconds.items()}

    def _text(self, spread: Spread, write: Callable[[float], str], mark: str = "") -> str:
        if spread.n == 0:
            return ""
        text = write(spread.mean) + mark
        if spread.n > 1 and write(spread.mean + spread.std) != write(spread.mean):  # visible at this precision
            text += f" ± {write(spread.std)}"
        return text if spread.n == self.runs else f"{text} (n={spread.n})"

    def data(self) -> dict[str, Scalar | None]:
        """Give the row for CSV and JSON: key -> number, text or None; a mean and a standard deviation have a key each."""
        data: dict[str, Scalar | None] = {
            "method": self.label, "runs": self.runs, "completed": self.completed, "target": self.target
        }  # fmt: skip
        spreads = {f"final-{measure.key}": spread for measure, spread in self.final.items()}
        spreads |= {f"best-{measure.key}": spread for measure, spread in self.best.items()}
        for measure, spread in self.rounds_to_target.items():
            spreads[f"rounds-to-target-{measure.key}"] = spread
            data[f"rounds-to-target-{measure.key}-unreached"] = self.unreached[measure] if spread.n else None
        spreads |= {"payload-down": self.payload_down, "payload-up": self.payload_up}
        spreads |= {f"seconds-{phase}": spread for phase, spread in self.seconds.items()}
        for name, spread in spreads.items():
            data[f"{name}-mean"] = _finite(spread.mean)
            data[f"{name}-std"] = _finite(spread.std)
        return data


def _rounds(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


Cells = Mapping[str, str]
"""One row for people: title of the column -> text; the titles are the same in all rows of a table."""

Record = Mapping[str, Scalar | None]
"""One row for programs: key -> value."""


def to_rich(rows: Sequence[Cells], title: str | None = None) -> Table:
    """Make a table for the terminal; numbers are aligned to the right, and a heading has a line for each part."""
    table = Table(title=title, title_justify="left")
    for column in rows[0] if rows else ():
        left = column in ("method", "task", "status", "chosen", "metric")
        table.add_column(column.replace(", ", "\n"), justify="left" if left else "right", overflow="fold")
    for row in rows:
        table.add_row(*row.values())
    return table


def narrow_tables(rows: Sequence[Cells], title: str | None, width: int) -> list[Table]:
    """Make as many tables as it takes for every column to be whole, each with the first column in front.

    Args:
        rows: The rows.
        title: Title above the first.
        width: Characters of a line.
    """
    titles = list(rows[0]) if rows else []
    first, parts = titles[:1], [titles[:2]]
    for column in titles[2:]:
        if _width(rows, [*parts[-1], column]) <= width:
            parts[-1].append(column)
        else:
            parts.append([*first, column])
    return [
        to_rich([{name: row[name] for name in part} for row in rows], title if part is parts[0] else None)
        for part in parts
    ]


def _width(rows: Sequence[Cells], columns: Sequence[str]) -> int:
    table = to_rich([{name: row[name] for name in columns} for row in rows])
    return Measurement.get(_MEASURING, _MEASURING.options, table).maximum


_MEASURING = Console(width=10_000)


def to_markdown(rows: Sequence[Cells]) -> str:
    """Make a table for a document, in Markdown; empty without rows."""
    if not rows:
        return ""
    titles = list(rows[0])
    lines = [titles, ["---"] * len(titles), *(list(row.values()) for row in rows)]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def to_csv(rows: Sequence[Record]) -> str:
    """Make a table for a spreadsheet: CSV with a header; an unknown value is empty."""
    if not rows:
        return ""
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def to_json_rows(rows: Sequence[Record]) -> str:
    """Make a table for a program: a JSON list of objects; an unknown value is null."""
    return to_json(list(rows), indent=2) + "\n"
