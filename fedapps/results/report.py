"""Runs read back from their folders, and the rows of the tables about them.

Rounds to a target, final and best accuracy are those of the clients' personal models if the run has any, else they are
read on test data if there is some, else on validation data, else on the clients' test data. *Which* round is best is always
decided on validation data, for personal models on the clients'.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedapps.results.run_folder import RunFolder
from fedapps.results.storage import Row
from fedapps.results.summary import TRAIN, RunStatus, evaluations_by_round, summarise
from fedapps.results.tables import CompareRow, RunRow, Spread
from fedapps.settings import Scalar

ACCURACIES = (
    "client-personal-test-accuracy", "test-accuracy", "validation-accuracy", "client-test-accuracy", "test-f1",
)  # fmt: skip

NOT_COMPARED = {"seed", "run-dir", "resume", "accept-changes", "device", "data-dir"}
"""Settings that may differ between runs whose mean is taken."""


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
    def accuracy_metric(self) -> str | None:
        """The metric that tables and figures call accuracy; None if the run has none of `ACCURACIES`."""
        held = {key for row in self.rows for key in row}
        return next((name for name in ACCURACIES if name in held), None)

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

    def rounds_to(self, target: float) -> int | None:
        """Give the first round whose accuracy reaches a target.

        Returns:
            The round; 0 is the initial model, None is never.
        """
        if self.accuracy_metric is None:
            return None
        return next((number for number, value in self.curve(self.accuracy_metric).items() if value >= target), None)

    def accuracy_at(self, which: str) -> float | None:
        """Give the accuracy at the final or at the best round.

        Args:
            which: ``"final"`` or ``"best"``.

        Returns:
            The accuracy, None if it is not known.
        """
        value = self.summary.get(which, {}).get(self.accuracy_metric)
        return None if value is None else float(value)


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


def run_table(runs: Iterable[Run], target: float | None = None) -> list[RunRow]:
    """Make a table with a row a run.

    Args:
        runs: The runs.
        target: Accuracy to reach; None leaves that column out.

    Returns:
        The rows, in the order of the runs.
    """
    return [_run_row(run, target) for run in runs]


def _run_row(run: Run, target: float | None) -> RunRow:
    return RunRow(
        method=run.method,
        task=run.task,
        seed=int(run.settings.get("seed", 0)),
        status=str(run.summary["status"]),
        rounds=run.summary["rounds"],
        round_limit=run.round_limit,
        accuracy_metric=run.accuracy_metric,
        final=run.accuracy_at("final"),
        best=run.accuracy_at("best"),
        target=target,
        rounds_to_target=None if target is None else run.rounds_to(target),
        payload_down=int(run.training_total("payload-down")),
        payload_up=int(run.training_total("payload-up")),
        seconds=run.summary["totals"]["seconds"],
    )


def compare_table(runs: Iterable[Run], target: float | None = None) -> list[CompareRow]:
    """Make a table with a row a method, over its seeds.

    Args:
        runs: The runs.
        target: Accuracy to reach; None leaves that column out.

    Returns:
        The rows, one for each group of `group_runs`.
    """
    return [_compare_row(label, group, target) for label, group in group_runs(runs).items()]


def _compare_row(label: str, runs: Sequence[Run], target: float | None) -> CompareRow:
    reached = [None if target is None else run.rounds_to(target) for run in runs]
    counted = [run.round_limit if first is None else first for run, first in zip(runs, reached, strict=True)]

    return CompareRow(
        label=label,
        runs=len(runs),
        completed=sum(run.summary["status"] == RunStatus.COMPLETED for run in runs),
        target=target,
        rounds_to_target=Spread.of(counted if target is not None else ()),
        unreached=0 if target is None else reached.count(None),
        final=Spread.of(run.accuracy_at("final") for run in runs),
        best=Spread.of(run.accuracy_at("best") for run in runs),
        payload_down=Spread.of(run.training_total("payload-down") for run in runs),
        payload_up=Spread.of(run.training_total("payload-up") for run in runs),
        seconds=Spread.of(run.summary["totals"]["seconds"] for run in runs),
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
