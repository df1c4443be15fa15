"""Runs read back from their folders, and the rows of the tables about them.

Every number says which model it is of, and on whose data it was measured (`fedapps.results.views`). *Which* round is best is
always decided on validation data, for personal models on the clients'.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fedapps.methods import METHODS
from fedapps.results.run_folder import RunFolder
from fedapps.results.storage import Row
from fedapps.results.summary import START_UP, TRAIN, RunStatus, evaluations_by_round, smaller_is_better, summarise
from fedapps.results.tables import PHASES, CompareRow, RunRow, Spread
from fedapps.results.views import TEST_VIEWS, VALIDATION_VIEWS, Measure, View
from fedapps.settings import Scalar

METRICS = ("accuracy", "f1", "exact-match", "statistical-error")
"""Metrics that tables and figures show where a run has them, beside the one that it is judged by."""

LOSS = "loss"
"""What is shown of a run that has none of these."""

NOT_COMPARED = {"seed", "run-dir", "resume", "accept-changes", "device", "data-dir", "collect-mb"}
"""Settings that may differ between runs whose mean is taken."""


MOST_NAMES = 4
"""Tensors that a remark names."""


@dataclass(frozen=True)
class Run:
    """A run read from its folder; it need not have ended."""

    path: Path
    settings: Mapping[str, Scalar]  # dotted key -> value
    rows: Sequence[Row]  # rows of ``metrics.jsonl``
    summary: Mapping[str, Any]  # as `summarise` gives it; status ``unfinished`` if the folder has none

    @property
    def method(self) -> str:
        """Value of the setting ``method``."""
        return str(self.settings.get("method", "?"))

    @property
    def task(self) -> str:
        """Value of the setting ``task``."""
        return str(self.settings.get("task", "?"))

    @property
    def round_limit(self) -> int:
        """Rounds that the run was given."""
        return int(self.settings.get("num-server-rounds", self.summary["rounds"]))

    @property
    def shares_model(self) -> bool:
        """Whether its clients get a model: else the server's stays the initial one, which says nothing of the method."""
        return all(row.name != self.method or row.travels_down != "nothing" for row in METHODS)

    @cached_property
    def held(self) -> frozenset[str]:
        """All keys of its rows."""
        return frozenset(key for row in self.rows for key in row)

    def key(self, metric: str, view: View) -> str | None:
        """Name a metric of a view in its rows; None if the run has it not, or no such model."""
        if view.model == "global" and not self.shares_model:
            return None
        return view.key(metric, self.held)

    def curve(self, metric: str) -> dict[int, float]:
        """Give a metric over rounds.

        Args:
            metric: Key of an evaluation row.

        Returns:
            Round -> value, in the order of the rounds.
        """
        evaluations = evaluations_by_round(self.rows)
        return {number: float(metrics[metric]) for number, metrics in evaluations.items() if metric in metrics}

    def training_total(self, key: str, last_round: int | None = None) -> float:
        """Add up a number over the training rounds: what evaluation costs is the observer's, not the method's.

        Args:
            key: Key of a train row, such as ``payload-up`` or ``seconds``.
            last_round: The last round to count; None for all.
        """
        rows = (
            row for row in self.rows if row["phase"] == TRAIN and (last_round is None or row["round"] <= last_round)
        )
        return float(sum(row.get(key, 0) for row in rows))

    def measured(self, measure: Measure) -> dict[int, float]:
        """Give a measure over rounds: round -> value; empty if the run has it not."""
        key = self.key(measure.metric, measure.view)
        return self.curve(key) if key else {}

    def rounds_to(self, measure: Measure, target: float) -> int | None:
        """Give the first round that is as good as a target: 0 is the initial model, None is never."""
        sign = -1.0 if smaller_is_better(measure.metric) else 1.0
        return next((number for number, v in self.measured(measure).items() if sign * v >= sign * target), None)

    def value(self, measure: Measure, which: str) -> float | None:
        """Give a measure at the ``"final"`` or at the ``"best"`` round; None if it is not known."""
        key = self.key(measure.metric, measure.view)
        value = self.summary.get(which, {}).get(key) if key else None
        return None if value is None else float(value)

    @cached_property
    def clients_measured(self) -> int:
        """Number of clients in its last evaluation on clients; 0 if no client measured."""
        rows = RunFolder(self.path).read_clients()
        last = max((row["round"] for row in rows), default=0)
        return sum(row["round"] == last for row in rows)


def measures_of(runs: Iterable[Run]) -> list[Measure]:
    """List what some runs measure: a column and a curve each.

    Returns:
        The metrics that the runs are judged by, those of `METRICS`, and the loss if there is none of them, on test data;
        on validation data if nothing was tested.
    """
    runs = list(runs)
    judged = [str(run.summary.get("judged-by", "")) for run in runs]
    for views in (TEST_VIEWS, VALIDATION_VIEWS):
        found = [
            Measure(metric, view, _clients_of(runs, metric, view))
            for metric in dict.fromkeys([*filter(None, judged), *METRICS, LOSS])
            for view in views
            if any(run.key(metric, view) for run in runs)
        ]
        told = [measure for measure in found if measure.metric != LOSS or LOSS in judged]
        if found:
            return told or found
    return []


def _clients_of(runs: Sequence[Run], metric: str, view: View) -> str:
    """Say how many clients the means of a view are over; "8 to 10" if not the same in all runs."""
    if view.data == "server":
        return ""
    counts = set()
    for run in runs:
        if key := run.key(metric, view):
            counts.add(int(run.summary["final"].get(f"{key}-clients", run.clients_measured)))
    counts.discard(0)
    return "" if not counts else str(min(counts)) if len(counts) == 1 else f"{min(counts)} to {max(counts)}"


def load_run(path: Path) -> Run:
    """Read a run folder.

    Args:
        path: The folder, of a run that has ended, failed or still goes on.

    Raises:
        CheckpointError: It is not a run folder, or a file in it cannot be read.
    """
    folder = RunFolder.open(path)
    rows = folder.read_metrics()
    summary = folder.read_summary() or summarise(rows, status=RunStatus.UNFINISHED)
    return Run(path=folder.path, settings=folder.read_settings(), rows=rows, summary=summary)


def remarks(runs: Iterable[Run]) -> list[str]:
    """Say what second-order methods averaged in place of preconditioning it, and why; each remark once a method."""
    told: dict[str, None] = {}
    for run in runs:
        row = next((row for row in run.rows if "preconditioned" in row), None)
        if row is None:
            continue
        for reason, names in row.get("averaged-since", {}).items():
            told[f"{run.method}: averaged, not preconditioned, since {reason}: {_some(names)}"] = None
        if not row["preconditioned"]:
            told[f"{run.method}: nothing was preconditioned: this is a first-order method's result"] = None
    return list(told)


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more


def run_table(runs: Iterable[Run], target: float | None = None) -> list[RunRow]:
    """Make a table with a row a run.

    Args:
        runs: The runs.
        target: Value to reach; None leaves those columns out.

    Returns:
        The rows, in the order of the runs.
    """
    return [_run_row(run, measures_of([run]), target) for run in runs]


def _run_row(run: Run, measures: Sequence[Measure], target: float | None) -> RunRow:
    def values(which: str) -> dict[Measure, float]:
        return {measure: value for measure in measures if (value := run.value(measure, which)) is not None}

    return RunRow(
        method=run.method,
        task=run.task,
        seed=int(run.settings.get("seed", 0)),
        status=str(run.summary["status"]),
        rounds=run.summary["rounds"],
        round_limit=run.round_limit,
        final=values("final"),
        best=values("best"),
        target=target,
        rounds_to_target={m: run.rounds_to(m, target) for m in _of_target(measures, target)}
        if target is not None
        else {},
        payload_down=int(run.training_total("payload-down")),
        payload_up=int(run.training_total("payload-up")),
        seconds=_seconds(run),
    )


def _of_target(measures: Sequence[Measure], target: float | None) -> list[Measure]:
    """Give the measures that a target is for: those of the metric that the runs are judged by."""
    return [m for m in measures if target is not None and m.metric == measures[0].metric]


def _seconds(run: Run) -> dict[str, float]:
    """Give the seconds of each of `PHASES`; a run made before start-up was a phase has none of it."""
    by_phase = run.summary["totals"].get("seconds-by-phase", {})
    start_up, train = by_phase.get(START_UP, 0.0), by_phase.get(TRAIN, 0.0)
    return dict(zip(PHASES, (start_up, train, run.summary["totals"]["seconds"] - start_up - train), strict=True))


def compare_table(runs: Iterable[Run], target: float | None = None) -> list[CompareRow]:
    """Make a table with a row a method, over its seeds.

    Args:
        runs: The runs.
        target: Value to reach; None leaves those columns out.

    Returns:
        The rows, one for each group of `group_runs`.
    """
    runs = list(runs)
    measures = measures_of(runs)
    return [_compare_row(label, group, measures, target) for label, group in group_runs(runs).items()]


def compare_sections(rows: Sequence[CompareRow]) -> dict[str, list[dict[str, str]]]:
    """Arrange the rows of a comparison as the tables that people read: title -> rows.

    A table is left out in which no method has anything, such as that of the best round where nothing was validated.
    """
    sections = {"after the last round": [row.final_cells() for row in rows]}
    if any(spread.n for row in rows for spread in row.best.values()):
        sections["at the round that is best on validation data"] = [row.best_cells() for row in rows]
    return sections | {"bytes of training, all clients and rounds; time of a run": [row.cost_cells() for row in rows]}


def _compare_row(label: str, runs: Sequence[Run], measures: Sequence[Measure], target: float | None) -> CompareRow:
    def rounds_to(measure: Measure) -> list[int | None]:
        return [run.rounds_to(measure, target) for run in runs if run.measured(measure)] if target is not None else []

    def counted(measure: Measure) -> Spread:
        limits = [run.round_limit for run in runs if run.measured(measure)]
        reached = rounds_to(measure)
        return Spread.of(limit if first is None else first for limit, first in zip(limits, reached, strict=True))

    with_target = _of_target(measures, target)
    return CompareRow(
        label=label,
        runs=len(runs),
        completed=sum(run.summary["status"] == RunStatus.COMPLETED for run in runs),
        target=target,
        final={m: Spread.of(run.value(m, "final") for run in runs) for m in measures},
        best={m: Spread.of(run.value(m, "best") for run in runs) for m in measures},
        rounds_to_target={m: counted(m) for m in with_target},
        unreached={m: rounds_to(m).count(None) for m in with_target},
        payload_down=Spread.of(run.training_total("payload-down") for run in runs),
        payload_up=Spread.of(run.training_total("payload-up") for run in runs),
        seconds={phase: Spread.of(_seconds(run)[phase] for run in runs) for phase in PHASES},
    )


def group_runs(runs: Iterable[Run]) -> dict[str, list[Run]]:
    """Put runs together that differ in nothing but the seed (and in `NOT_COMPARED`).

    Returns:
        Label -> runs, in the order in which they first appear. The label is the method, with the task if there are
        several, and with the settings that tell groups of one method apart: runs of two learning rates are never
        averaged in silence.
    """
    runs = list(runs)
    several_tasks = len({run.task for run in runs}) > 1
    groups: dict[str, list[Run]] = {}
    for run in runs:
        label = f"{run.method} on {run.task}" if several_tasks else run.method
        alike = [other for other in runs if (other.method, other.task) == (run.method, run.task)]
        varying = _varying(alike)
        if varying:
            label += " (" + ", ".join(f"{key}={run.settings.get(key, '-')}" for key in varying) + ")"
        groups.setdefault(label, []).append(run)
    return groups


def _varying(runs: Sequence[Run]) -> list[str]:
    keys = dict.fromkeys(key for run in runs for key in run.settings if key not in NOT_COMPARED)
    return [key for key in keys if any(run.settings.get(key) != runs[0].settings.get(key) for run in runs)]
