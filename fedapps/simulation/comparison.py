"""How a comparison stands: its trials and choices, the tables and figures that are made of them, and its record."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fedapps.errors import FedAppsError
from fedapps.results.personal import Gains, PersonalRow, client_gains, client_table, personal_table
from fedapps.results.plots import plot_compare, plot_gains
from fedapps.results.report import Run, compare_sections, compare_table, remarks
from fedapps.results.run_folder import RunFolder
from fedapps.results.series import curves_of
from fedapps.results.storage import from_json, read_as, to_json, write_atomically
from fedapps.results.summary import RunStatus, smaller_is_better
from fedapps.results.tables import CompareRow, to_csv, to_markdown
from fedapps.settings import Scalar
from fedapps.simulation.plan import OF_ONE_MACHINE, Plan, Point, describe

RECORD = "compare.json"
"""The record of a comparison, in its folder."""

NOTE_LENGTH = 120
"""Characters of a failed run's reason in a note; the whole reason is in its trial."""


@dataclass(frozen=True)
class Trial:
    """One run of a comparison."""

    method: str
    seed: int
    lr: float
    point: Point  # its point of the grid
    tuning: bool  # whether it is one of the runs from which the point was chosen
    status: str
    reason: str  # why, if it was not completed
    score: float | None  # best validation value of the task's metric, or None
    score_metric: str  # what the score is of, such as "validation-accuracy"
    score_round: int | None  # round of it
    folder: str  # its run folder, relative to that of the comparison; "" for a run that could not be started
    final: Mapping[str, float] = field(default_factory=dict)  # metrics after the last round
    best: Mapping[str, float] = field(default_factory=dict)  # and at the round of the score
    seconds: Mapping[str, float] = field(default_factory=dict)  # by phase

    @property
    def place(self) -> str:
        """Its point of the grid in words; the learning rate if there is no grid."""
        return ", ".join(f"{key} {_short(value)}" for key, value in (self.point or {"lr": self.lr}).items())


@dataclass(frozen=True)
class Comparison:
    """A comparison as far as it has come."""

    folder: Path  # where everything is
    table: list[CompareRow]  # a row a method
    sections: dict[str, list[dict[str, str]]]  # the tables that people read: title -> rows
    personal: list[PersonalRow]  # a row a method with personal models
    gains: Gains  # each client's gain over the reference methods, if they were compared
    chosen: dict[str, Trial]  # method -> the trial of the first seed with the chosen point
    trials: list[Trial]  # every run
    notes: list[str]  # remarks for the reader, such as a choice at the edge of the grid
    data: str  # what every method was trained and measured on
    runs: list[Run]  # the runs of the table


def write_state(
    plan: Plan, folder: Path, trials: list[Trial], loaded: Mapping[str, Run], *, completed: bool = False
) -> Comparison:
    """Write down how a comparison stands: all that was computed is on disk after each run."""
    points, methods = plan.points, list(plan.methods)
    order = {m: [dict(point) for point in points[m]] for m in methods}
    trials.sort(key=lambda t: (methods.index(t.method), not t.tuning, t.seed, order[t.method].index(dict(t.point))))
    first = {m: [t for t in trials if t.method == m and t.seed == plan.seeds[0]] for m in methods}
    chosen = {m: choose(first[m], points[m]) for m in methods if len(first[m]) == len(points[m])}
    shown = [t for t in trials if t.method in chosen and t.folder and (not t.tuning or t is chosen[t.method])]
    runs = [loaded[t.folder] for t in shown]
    table = compare_table(runs, plan.target)
    comparison = Comparison(
        folder=folder,
        table=table,
        sections=_sections(plan, table, chosen),
        personal=personal_table(runs),
        gains=client_gains(runs),
        chosen=chosen,
        trials=list(trials),
        notes=[*plan.notes, *_notes(plan, chosen, trials), *remarks(runs)],
        data=describe(plan),
        runs=runs,
    )
    _write(comparison, plan, loaded, completed=completed)
    return comparison


def _sections(plan: Plan, table: Sequence[CompareRow], chosen: Mapping[str, Trial]) -> dict[str, list[dict[str, str]]]:
    """Arrange the tables, with each method's choice and how many points it was chosen from."""
    sections = compare_sections(table) if table else {}
    for rows in itertools.islice(sections.values(), 1):
        for number, cells in enumerate(rows):
            method = cells["method"].split(" ")[0]
            tried = len(plan.points[method])
            choice = {"chosen": _choice(chosen[method], plan)} if tried > 1 else {"chosen": ""}
            rows[number] = {"method": cells["method"], **choice, "tried": str(tried), **cells}
    return sections


def choose(trials: Sequence[Trial], points: Sequence[Point]) -> Trial:
    """Choose the best trial, the first of equals; a failed one rather than none."""
    scored = [t for t in trials if t.status == RunStatus.COMPLETED and t.score is not None] or list(trials)
    order = [dict(point) for point in points]

    def rank(trial: Trial) -> tuple[float, int, int]:
        score = trial.score or 0.0
        least_first = score if smaller_is_better(trial.score_metric) else -score
        return least_first, trial.score_round or 0, order.index(dict(trial.point))

    return min(scored, key=rank)


def _notes(plan: Plan, chosen: Mapping[str, Trial], trials: Sequence[Trial]) -> list[str]:
    notes = [
        f"{method}: the chosen {key} {_short(value)} is the {edge} that was tried; widen the grid"
        for method, trial in chosen.items()
        for key, value in trial.point.items()
        if (edge := _edge(value, plan.grid[key]))
    ]
    notes += [
        f"{method}: nothing was chosen, no run of the grid has a score"
        for method, trial in chosen.items()
        if trial.tuning and (trial.score is None or trial.status != RunStatus.COMPLETED)
    ]
    notes += [
        f"{t.method}, seed {t.seed}, {t.place}: {t.status} ({t.reason[:NOTE_LENGTH]} ...; see {t.folder or RECORD})"
        for t in trials
        if t.status != RunStatus.COMPLETED
    ]
    return notes


def _edge(value: Scalar, values: Sequence[Scalar]) -> str:
    """Name the end of a grid at which a value lies; empty within, and where there are no numbers to be beyond."""
    numbers = [v for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
    if len(numbers) < 2:
        return ""
    return "lowest" if value == min(numbers) else "highest" if value == max(numbers) else ""


def _choice(trial: Trial, plan: Plan) -> str:
    """Write a choice for a table, with the end of the grid at which it lies."""
    parts = []
    for key, value in trial.point.items():
        edge = _edge(value, plan.grid[key])
        parts.append(f"{key.removeprefix(trial.method + '.')} {_short(value)}" + (f" ({edge} tried)" if edge else ""))
    return "; ".join(parts)


def _short(value: Scalar) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def read_record(folder: Path) -> dict[str, Any]:
    """Read what a comparison has written.

    Raises:
        CheckpointError: There is no readable record.
    """
    return read_as(folder / RECORD, "the record of a comparison", lambda text: dict(from_json(text)))


def _write(comparison: Comparison, plan: Plan, loaded: Mapping[str, Run], *, completed: bool) -> None:
    folder = comparison.folder
    chosen = comparison.chosen
    runs = comparison.runs
    record = {
        "status": RunStatus.COMPLETED if completed else RunStatus.UNFINISHED,
        "settings": {key: value for key, value in plan.run_config.items() if key not in OF_ONE_MACHINE},
        "methods": list(plan.methods),
        "seeds": list(plan.seeds),
        "grid": {key: list(values) for key, values in plan.grid.items()},
        "tried": {method: len(points) for method, points in plan.points.items()},
        "protocol": "each point of the grid on the first seed, best validation metric of the task chosen; never test data",
        "data": {**plan.data, "examples": dict(plan.about)},
        "clients": plan.how.num_clients,
        "engine": str(plan.how.engine),
        "target": plan.target,
        "chosen-lr": {m: trial.lr for m, trial in chosen.items()},
        "chosen": {m: dict(trial.point) for m, trial in chosen.items()},
        "notes": comparison.notes,
        "table": [row.data() for row in comparison.table],
        "personal": [row.data() for row in comparison.personal],
        "gains": {name: {m: {str(p): v for p, v in g.items()} for m, g in of.items()}
                  for name, of in comparison.gains.items()},
        "trials": [asdict(trial) for trial in comparison.trials],
        "curves": [
            {
                "method": trial.method, "seed": trial.seed, "point": dict(trial.point),
                "chosen": loaded[trial.folder] in runs, **curves_of(loaded[trial.folder]),
            }
            for trial in comparison.trials if trial.folder
        ],
        "environment": RunFolder.open(runs[0].path).read_environment() if runs else {},
    }  # fmt: skip
    write_atomically(folder / RECORD, to_json(record, indent=1) + "\n")
    write_atomically(folder / "table.md", markdown_of(comparison, plan))
    write_atomically(folder / "table.csv", to_csv([row.data() for row in comparison.table]))
    if comparison.personal:
        write_atomically(folder / "personal.csv", to_csv([row.data() for row in comparison.personal]))
        write_atomically(folder / "clients.csv", to_csv([row.data() for row in client_table(runs)]))


def draw(comparison: Comparison, plan: Plan) -> list[str]:
    """Draw the figures; where that cannot be done the numbers stay, and the reason is returned."""
    try:
        plot_compare(comparison.runs, comparison.folder / "compare.png", plan.target)
        if comparison.gains:
            metric = comparison.personal[0].metric
            plot_gains(comparison.gains, comparison.folder / "gains.png", quantity=metric)
    except FedAppsError as error:
        return [f"no figure: {error}"]
    return []


def markdown_of(comparison: Comparison, plan: Plan) -> str:
    """Write the tables, and below them what a reader needs to know about the data and each method's settings."""
    parts = [f"{title[0].upper()}{title[1:]}:\n\n{to_markdown(rows)}" for title, rows in comparison.sections.items()]
    if comparison.personal:
        rows = [row.cells() for row in comparison.personal]
        parts.append("Personal models on the clients' own test data:\n\n" + to_markdown(rows))
    parts.append(comparison.data + "\n")
    tuned = [
        f"{method} {trial.place} (by {trial.score_metric} of {len(plan.points[method])} tried)"
        for method, trial in comparison.chosen.items()
        if len(plan.points[method]) > 1
    ]
    if tuned:
        parts.append(f"Chosen on validation data, seed {plan.seeds[0]}: {'; '.join(tuned)}.\n")
    alone = [
        f"{key} = {_short(v)}"
        for key, v in plan.run_config.items()
        if key.startswith(tuple(f"{m}." for m in plan.methods))
    ]
    if alone:
        parts.append(f"Set for one method alone: {', '.join(alone)}.\n")
    parts += [f"Note: {note}.\n" for note in comparison.notes]
    if any(row.runs > 1 for row in comparison.table):
        parts.append("± is the sample standard deviation over seeds.\n")
    return "\n".join(parts)
