"""Comparing methods: the same task, partition and seeds for all, and one tuning protocol.

The protocol of the whole project: every method gets the same grid of learning rates, and the grids of its own keys that the
user names. Each point is tried on the first seed, with all rounds; the one with the best validation accuracy is chosen (of
equals the one that reached it first), for personalised methods that of the personal models on the clients' validation data.
Never is test data looked at. The other seeds run with the choice. Choice and all trials are recorded.

A key with the name of a compared method in front is for that method alone, also if it is a shared one: `ditto.local-steps`.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import as_completed
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedapps.errors import SettingsError
from fedapps.methods import get_method, resolve_settings
from fedapps.results.personal import Gains, PersonalRow, client_gains, client_table, personal_table
from fedapps.results.plots import plot_compare, plot_gains
from fedapps.results.report import Run, compare_table, load_run
from fedapps.results.run_folder import RunFolder
from fedapps.results.series import curves_of
from fedapps.results.summary import RunStatus, validation_key
from fedapps.results.tables import CompareRow, to_csv, to_markdown
from fedapps.settings import Scalar, Settings, flatten, keys_of
from fedapps.simulation.start import Ended, Start, start
from fedapps.simulation.worker_pool import worker_pool
from fedapps.tasks.base import Task

NOTE_LENGTH = 120
"""Characters of a failed run's reason in a note; the whole reason is in its trial."""

OF_ONE_MACHINE = ("data-dir", "run-dir", "resume", "accept-changes")
"""Settings that mean nothing elsewhere, and are left out of a record."""

Point = Mapping[str, Scalar]
"""One point of a method's grid: key -> value."""


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
    score: float | None  # best validation accuracy, or None
    score_round: int | None  # round of it
    folder: str  # its run folder, relative to that of the comparison

    @property
    def place(self) -> str:
        """Its point of the grid in words; the learning rate if there is no grid."""
        return ", ".join(f"{key} {_short(value)}" for key, value in (self.point or {"lr": self.lr}).items())


@dataclass(frozen=True)
class Comparison:
    """The result of a comparison."""

    folder: Path  # where everything is
    table: list[CompareRow]  # a row a method
    personal: list[PersonalRow]  # a row a method with personal models
    gains: Gains  # each client's gain over the reference methods, if they were compared
    chosen: dict[str, Trial]  # method -> the trial of the first seed with the chosen point
    trials: list[Trial]  # every run
    notes: list[str]  # remarks for the reader, such as a choice at the edge of the grid


OnTrial = Callable[[Trial, int, int], None]


def config_of(run_config: Mapping[str, Any], method: str, methods: Sequence[str]) -> dict[str, Any]:
    """Give the settings of one method of a comparison.

    Args:
        run_config: Settings of all, with those of one method alone under its name.
        method: The method.
        methods: All methods that are compared.

    Returns:
        Its settings: keys of other methods of the comparison are left out, and a shared key under its name takes the place
        of the one for all.
    """
    shared = set(keys_of(Settings))
    mine: dict[str, Any] = {}
    for_all: dict[str, Any] = {"method": method}
    for key, value in run_config.items():
        name = key.removeprefix(f"{method}.")
        if name != key:
            mine[name if name in shared else key] = value
        elif not any(key.startswith(f"{other}.") for other in methods):
            for_all[key] = value
    return {**for_all, **mine, "method": method}


def compare(
    run_config: Mapping[str, Any],
    *,
    methods: Sequence[str],
    seeds: Sequence[int],
    grid: Mapping[str, Sequence[Scalar]],
    how: Start,
    root: Path,
    jobs: int,
    target: float | None,
    on_trial: OnTrial,
    resume: Path | None = None,
) -> Comparison:
    """Run several methods under the same conditions.

    Args:
        run_config: Settings shared by all runs, and those of one method alone under its name.
        methods: Names of the methods.
        seeds: Seeds; the point of the grid is chosen on the first.
        grid: Key -> values to try; every method tries all combinations of the keys that it has. Empty keeps its own values.
        how: Engine, clients and workers of every run.
        root: Folder of all runs.
        jobs: Runs at the same time, each in its own process.
        target: Accuracy for the rounds-to-target column.
        on_trial: Called with each run that ended, the number of runs that ended, and of all.
        resume: Folder of a comparison that was interrupted, or is to be widened: completed runs in it with the same settings
            are not made again.

    Returns:
        The comparison; its folder holds ``compare.json``, ``table.md``, ``table.csv``, ``compare.png`` and the runs, and
        for personal models ``personal.csv``, ``clients.csv`` and ``gains.png``.

    Raises:
        SettingsError: A setting or a value of the grid is wrong, which is told before anything runs.
    """
    points = {m: _points(grid, m, methods) for m in methods}
    for m in methods:
        for point in points[m]:
            # A wrong setting of the last method is told before the first has run.
            resolve_settings(config_of({**run_config, **point}, m, methods))
    name = f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-compare-{run_config.get('task', 'digits')}"
    folder = (resume or root / name).absolute()
    (folder / "runs").mkdir(parents=True, exist_ok=resume is not None)
    _same_clients(folder / "clients", how.num_clients)
    made = _completed_runs(folder / "runs")
    total = sum(len(points[m]) + len(seeds) - 1 for m in methods)
    trials: list[Trial] = []

    def run_all(wanted: Iterable[tuple[str, int, Point]], *, tuning: bool) -> None:
        jobs_of = [
            Job(m, seed, point, config_of({**run_config, **point, "seed": seed}, m, methods))
            for m, seed, point in wanted
        ]
        there = [(job, Ended(RunStatus.COMPLETED, "", made[job.key])) for job in jobs_of if job.key in made]
        missing = [job for job in jobs_of if job.key not in made]
        for job, ended in itertools.chain(there, _in_processes(missing, how, folder / "runs", jobs)):
            trials.append(_trial(job, ended, folder, tuning=tuning))
            on_trial(trials[-1], len(trials), total)

    # All methods advance alike, so that an interrupted comparison can be ended with a smaller grid.
    first = sorted((i / len(points[m]), methods.index(m), i) for m in methods for i in range(len(points[m])))
    run_all(((methods[m], seeds[0], points[methods[m]][i]) for _, m, i in first), tuning=bool(grid))
    order = {m: [dict(point) for point in points[m]] for m in methods}
    chosen = {m: _choose([t for t in trials if t.method == m], order[m]) for m in methods}
    run_all(((m, seed, chosen[m].point) for seed in seeds[1:] for m in methods), tuning=False)
    trials.sort(key=lambda t: (methods.index(t.method), not t.tuning, t.seed, order[t.method].index(dict(t.point))))
    shown = [t for t in trials if not t.tuning or t is chosen[t.method]]
    runs = [load_run(folder / t.folder) for m in methods for t in shown if t.method == m]
    comparison = Comparison(
        folder=folder,
        table=compare_table(runs, target),
        personal=personal_table(runs),
        gains=client_gains(runs),
        chosen=chosen,
        trials=trials,
        notes=_notes(chosen, grid, trials),
    )
    _write(comparison, run_config, seeds, grid, how, target, runs)
    return comparison


def _points(grid: Mapping[str, Sequence[Scalar]], method: str, methods: Sequence[str]) -> list[Point]:
    """List the combinations of the values of a method's keys; one empty point without any."""
    keys = [key for key in grid if not any(key.startswith(f"{other}.") for other in methods if other != method)]
    return [dict(zip(keys, values, strict=True)) for values in itertools.product(*(grid[key] for key in keys))]


@dataclass(frozen=True)
class Job:
    """A run to make."""

    method: str
    seed: int
    point: Point
    config: dict[str, Any]

    @property
    def key(self) -> str:
        """What tells its run from others: its resolved settings."""
        settings = resolve_settings(self.config)
        return _key(flatten(settings, get_method(settings.method).group))


def _key(settings: Mapping[str, Any]) -> str:
    return json.dumps({key: value for key, value in settings.items() if key not in OF_ONE_MACHINE}, sort_keys=True)


def _same_clients(path: Path, num_clients: int) -> None:
    """Note the number of clients, which no setting of a run says, or compare it with that of the first part."""
    first = path.read_text().strip() if path.exists() else str(num_clients)
    if first != str(num_clients):
        where, do = f"comparison {path.parent}", f"pass --clients {first}, or start another comparison"
        raise SettingsError(where, expected=f"{first} clients, as before", got=str(num_clients), do=do)
    path.write_text(f"{num_clients}\n")


def _completed_runs(root: Path) -> dict[str, Path]:
    """Find the completed runs in a folder, by what tells them apart."""
    folders = [RunFolder.open(path) for path in sorted(root.iterdir()) if (path / "summary.json").exists()]
    summaries = [(folder, folder.read_summary() or {}) for folder in folders]
    return {
        _key(folder.read_settings()): folder.path
        for folder, summary in summaries
        if summary.get("status") == RunStatus.COMPLETED
    }


def _in_processes(jobs_of: Sequence[Job], how: Start, root: Path, jobs: int) -> Iterable[tuple[Job, Ended]]:
    with worker_pool(jobs) as pool:
        futures = {pool.submit(_run, job.config, how, root, list(sys.path)): job for job in jobs_of}
        for future in as_completed(futures):
            yield futures[future], future.result()


def _run(config: dict[str, Any], how: Start, root: Path, path: list[str]) -> Ended:
    sys.path[:] = path
    return start(config, how, root)


def _trial(job: Job, ended: Ended, folder: Path, *, tuning: bool) -> Trial:
    if ended.folder is None:
        raise RuntimeError("a run of a comparison left no folder")
    run = load_run(ended.folder)
    best = run.summary.get("best", {})
    return Trial(
        method=job.method,
        seed=job.seed,
        lr=resolve_settings(job.config).lr,
        point=dict(job.point),
        tuning=tuning,
        status=str(ended.status),
        reason=ended.reason,
        score=best.get(validation_key([best], run.summary.get("judged-by", Task.metric))),
        score_round=best.get("round"),
        folder=str(ended.folder.relative_to(folder)),
    )


def _choose(trials: Sequence[Trial], order: Sequence[dict[str, Scalar]]) -> Trial:
    completed = [t for t in trials if t.status == RunStatus.COMPLETED and t.score is not None] or list(trials)
    return min(completed, key=lambda t: (-(t.score or 0.0), t.score_round or 0, order.index(dict(t.point))))


def _notes(chosen: Mapping[str, Trial], grid: Mapping[str, Sequence[Scalar]], trials: Sequence[Trial]) -> list[str]:
    notes = [
        f"{method}: the chosen {key} {_short(value)} is at the edge of the grid; widen it"
        for method, trial in chosen.items()
        for key, value in trial.point.items()
        if _at_edge(value, grid[key])
    ]
    notes += [
        f"{t.method}, seed {t.seed}, {t.place}: {t.status} ({t.reason[:NOTE_LENGTH]} ...; see {t.folder})"
        for t in trials
        if t.status != RunStatus.COMPLETED
    ]
    return notes


def _at_edge(value: Scalar, values: Sequence[Scalar]) -> bool:
    numbers = [v for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
    return len(numbers) > 1 and value in (min(numbers), max(numbers))


def _short(value: Scalar) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _write(
    comparison: Comparison,
    run_config: Mapping[str, Any],
    seeds: Sequence[int],
    grid: Mapping[str, Sequence[Scalar]],
    how: Start,
    target: float | None,
    runs: Sequence[Run],
) -> None:
    folder, methods = comparison.folder, list(comparison.chosen)
    record = {
        "settings": {key: value for key, value in run_config.items() if key not in OF_ONE_MACHINE},
        "methods": methods,
        "seeds": list(seeds),
        "grid": {key: list(values) for key, values in grid.items()},
        "protocol": "each point of the grid on the first seed, best validation metric of the task chosen; never test data",
        "clients": how.num_clients,
        "engine": str(how.engine),
        "target": target,
        "chosen-lr": {m: trial.lr for m, trial in comparison.chosen.items()},
        "chosen": {m: dict(trial.point) for m, trial in comparison.chosen.items()},
        "notes": comparison.notes,
        "table": [row.data() for row in comparison.table],
        "personal": [row.data() for row in comparison.personal],
        "gains": comparison.gains,
        "trials": [asdict(trial) for trial in comparison.trials],
        "curves": [{"method": run.method, "seed": run.settings["seed"], **curves_of(run)} for run in runs],
        "environment": RunFolder.open(runs[0].path).read_environment(),
    }
    (folder / "compare.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    (folder / "table.md").write_text(_markdown(comparison, run_config), encoding="utf-8")
    (folder / "table.csv").write_text(to_csv(comparison.table), encoding="utf-8")
    plot_compare(runs, folder / "compare.png", target)
    if comparison.personal:
        (folder / "personal.csv").write_text(to_csv(comparison.personal), encoding="utf-8")
        (folder / "clients.csv").write_text(to_csv(client_table(runs)), encoding="utf-8")
    if comparison.gains:
        plot_gains(comparison.gains, folder / "gains.png", quantity=comparison.personal[0].metric)


def _markdown(comparison: Comparison, run_config: Mapping[str, Any]) -> str:
    """Write the tables, and below them what a reader needs to know about each method's settings."""
    parts = [to_markdown(comparison.table)]
    if comparison.personal:
        parts.append("Personal models on the clients' own test data:\n\n" + to_markdown(comparison.personal))
    tuned = [f"{method} {trial.place}" for method, trial in comparison.chosen.items() if trial.point]
    if tuned:
        parts.append(f"Chosen on validation data: {'; '.join(tuned)}.\n")
    alone = [
        f"{key} = {_short(v)}"
        for key, v in run_config.items()
        if key.startswith(tuple(f"{m}." for m in comparison.chosen))
    ]
    if alone:
        parts.append(f"Set for one method alone: {', '.join(alone)}.\n")
    return "\n".join(parts)
