"""Comparing methods: the same task, partition and seeds for all, and one tuning protocol.

The protocol of the whole project: every method gets the same grid of learning rates. Each is tried on the first seed, with
all rounds; the one with the best validation accuracy is chosen (of equals the one that reached it first), and never is test
data looked at. The other seeds run with the choice. Choice and all trials are recorded.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedapps.methods import resolve_settings
from fedapps.results.plots import plot_compare
from fedapps.results.report import Run, compare_table, load_run
from fedapps.results.summary import RunStatus, validation_key
from fedapps.results.tables import CompareRow, to_csv, to_markdown
from fedapps.simulation.start import Ended, Start, start

NOTE_LENGTH = 120
"""Characters of a failed run's reason in a note; the whole reason is in its trial."""


@dataclass(frozen=True)
class Trial:
    """One run of a comparison.

    Attributes:
        method: Name of the method.
        seed: Its seed.
        lr: Its learning rate.
        tuning: Whether it is one of the runs from which the learning rate was chosen.
        status: How it ended.
        reason: Why, if it was not completed.
        score: Best validation accuracy, or None.
        score_round: Round of it.
        folder: Its run folder, relative to that of the comparison.
    """

    method: str
    seed: int
    lr: float
    tuning: bool
    status: str
    reason: str
    score: float | None
    score_round: int | None
    folder: str


@dataclass(frozen=True)
class Comparison:
    """The result of a comparison.

    Attributes:
        folder: Where everything is.
        table: A row a method.
        chosen: Method -> learning rate.
        trials: Every run.
        notes: Remarks for the reader, such as a choice at the edge of the grid.
    """

    folder: Path
    table: list[CompareRow]
    chosen: dict[str, float]
    trials: list[Trial]
    notes: list[str]


OnTrial = Callable[[Trial, int, int], None]


def compare(
    run_config: Mapping[str, Any],
    *,
    methods: Sequence[str],
    seeds: Sequence[int],
    lr_grid: Sequence[float],
    how: Start,
    root: Path,
    jobs: int,
    target: float | None,
    on_trial: OnTrial,
) -> Comparison:
    """Run several methods under the same conditions.

    Args:
        run_config: Settings shared by all runs.
        methods: Names of the methods.
        seeds: Seeds; the learning rate is chosen on the first.
        lr_grid: Learning rates to try; empty keeps each method's own.
        how: Engine, clients and workers of every run.
        root: Folder of all runs.
        jobs: Runs at the same time, each in its own process.
        target: Accuracy for the rounds-to-target column.
        on_trial: Called with each run that ended, the number of runs that ended, and of all.

    Returns:
        The comparison; its folder holds ``compare.json``, ``table.md``, ``table.csv``, ``compare.png`` and the runs.
    """
    configs = {m: {**run_config, "method": m} for m in methods}
    for config in configs.values():
        resolve_settings(config)  # A wrong setting of the last method is told before the first has run.
    folder = root.absolute() / f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-compare-{run_config.get('task', 'digits')}"
    folder.mkdir(parents=True)
    grid = list(lr_grid)
    tried: list[float | None] = [*grid] or [None]
    total = len(methods) * (len(tried) + len(seeds) - 1)
    trials: list[Trial] = []

    def run_all(wanted: Iterable[tuple[str, int, float | None]], *, tuning: bool) -> None:
        jobs_of = [
            ({**configs[m], "seed": seed, **({"lr": lr} if lr is not None else {})}, m, seed) for m, seed, lr in wanted
        ]
        for config, method, seed, ended in _in_processes(jobs_of, how, folder / "runs", jobs):
            trials.append(_trial(config, method, seed, ended, folder, tuning=tuning))
            on_trial(trials[-1], len(trials), total)

    run_all(((m, seeds[0], lr) for m in methods for lr in tried), tuning=bool(grid))
    chosen = {m: _choose([t for t in trials if t.method == m]) for m in methods}
    run_all(((m, seed, chosen[m].lr) for m in methods for seed in seeds[1:]), tuning=False)
    trials.sort(key=lambda t: (methods.index(t.method), not t.tuning, t.seed, t.lr))
    shown = [t for t in trials if not t.tuning or t is chosen[t.method]]
    runs = [load_run(folder / t.folder) for m in methods for t in shown if t.method == m]
    table = compare_table(runs, target)
    comparison = Comparison(folder, table, {m: t.lr for m, t in chosen.items()}, trials, _notes(chosen, grid, trials))
    _write(comparison, run_config, methods, seeds, grid, how, target, runs)
    return comparison


Job = tuple[dict[str, Any], str, int]


def _in_processes(
    jobs_of: Sequence[Job], how: Start, root: Path, jobs: int
) -> Iterable[tuple[dict[str, Any], str, int, Ended]]:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        futures = {pool.submit(_run, config, how, root, list(sys.path)): job for job in jobs_of for config in [job[0]]}
        for future in as_completed(futures):
            yield *futures[future], future.result()


def _run(config: dict[str, Any], how: Start, root: Path, path: list[str]) -> Ended:
    sys.path[:] = path
    return start(config, how, root)


def _trial(config: dict[str, Any], method: str, seed: int, ended: Ended, folder: Path, *, tuning: bool) -> Trial:
    if ended.folder is None:
        raise RuntimeError("a run of a comparison left no folder")
    run = load_run(ended.folder)
    best = run.summary.get("best", {})
    return Trial(
        method=method,
        seed=seed,
        lr=float(run.settings.get("lr", config.get("lr", math.nan))),
        tuning=tuning,
        status=str(ended.status),
        reason=ended.reason,
        score=best.get(validation_key([best], "accuracy")),
        score_round=best.get("round"),
        folder=str(ended.folder.relative_to(folder)),
    )


def _choose(trials: Sequence[Trial]) -> Trial:
    completed = [t for t in trials if t.status == RunStatus.COMPLETED and t.score is not None] or list(trials)
    return min(completed, key=lambda t: (-(t.score or 0.0), t.score_round or 0, t.lr))


def _notes(chosen: Mapping[str, Trial], grid: Sequence[float], trials: Sequence[Trial]) -> list[str]:
    notes = [
        f"{method}: the chosen learning rate {trial.lr:g} is at the edge of the grid; widen it"
        for method, trial in chosen.items()
        if len(grid) > 1 and trial.lr in (min(grid), max(grid))
    ]
    notes += [
        f"{t.method}, seed {t.seed}, lr {t.lr:g}: {t.status} ({t.reason[:NOTE_LENGTH]} ...; see {t.folder})"
        for t in trials
        if t.status != RunStatus.COMPLETED
    ]
    return notes


def _write(
    comparison: Comparison,
    run_config: Mapping[str, Any],
    methods: Sequence[str],
    seeds: Sequence[int],
    grid: Sequence[float],
    how: Start,
    target: float | None,
    runs: Sequence[Run],
) -> None:
    folder = comparison.folder
    record = {
        "settings": dict(run_config),
        "methods": list(methods),
        "seeds": list(seeds),
        "lr-grid": list(grid),
        "protocol": "each learning rate on the first seed, best validation accuracy chosen; never test data",
        "clients": how.num_clients,
        "engine": str(how.engine),
        "target": target,
        "chosen-lr": comparison.chosen,
        "notes": comparison.notes,
        "table": [row.data() for row in comparison.table],
        "trials": [asdict(trial) for trial in comparison.trials],
        "curves": [
            {
                "method": run.method,
                "seed": run.settings["seed"],
                "rounds": list(run.curve("test-accuracy")),
                "test-accuracy": list(run.curve("test-accuracy").values()),
                "validation-accuracy": list(run.curve("validation-accuracy").values()),
                **{
                    key: run.curve(key)
                    for key in ("client-personal-test-accuracy", "client-global-test-accuracy")
                    if run.curve(key)
                },
            }
            for run in runs
        ],
        "environment": json.loads((runs[0].path / "environment.json").read_text(encoding="utf-8")),
    }
    (folder / "compare.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    (folder / "table.md").write_text(to_markdown(comparison.table), encoding="utf-8")
    (folder / "table.csv").write_text(to_csv(comparison.table), encoding="utf-8")
    plot_compare(runs, folder / "compare.png", target)
