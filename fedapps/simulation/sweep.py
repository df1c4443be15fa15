"""Comparing methods: the same data for all, one tuning protocol, and numbers that say what they are of.

The protocol of the whole project: every method gets the same grid of learning rates, and the grids of its own keys that the
user names; tables say how many points each has tried. Each point is tried on the first seed, with all rounds; the one with the
best validation value of the task's own metric is chosen (of equals the one that reached it first): of the global model on the
server's validation data, for personalised methods of the personal models on the clients'. Never is test data looked at. The
other seeds run with the choice. Choice and all trials are recorded, after each run.

All methods train and are measured on the same examples: what the families hold out by default, each for its own models, is
held out for all. Where personalised methods meet others GlobalTrain takes part: the global model, chosen and measured as the
personal ones are.

A key with the name of a compared method in front is for that method alone, also if it is a shared one: `ditto.local-steps`.
"""

from __future__ import annotations

import itertools
import multiprocessing
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeAlias

from fedapps.errors import CheckpointError, FedAppsError, LaunchError, SettingsError
from fedapps.methods import resolve_settings
from fedapps.results.report import Run, load_run
from fedapps.results.run_folder import RunFolder
from fedapps.results.summary import TRAIN, RunStatus, validation_key
from fedapps.settings import Scalar
from fedapps.simulation.comparison import Comparison, Trial, choose, draw, write_state
from fedapps.simulation.plan import Job, Plan, Point, make_plan, settings_key
from fedapps.simulation.start import Ended, Start, start
from fedapps.simulation.worker_pool import kill_pool, worker_pool
from fedapps.tasks.base import Task

_POLL_SECONDS = 0.5

OnTrial = Callable[[Trial, int, int], None]
OnRounds = Callable[[int, int], None]


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
    on_rounds: OnRounds,
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
        target: Value of the task's metric for the rounds-to-target columns.
        on_trial: Called with each run that ended, the number of runs that ended, and of all.
        on_rounds: Called now and then with the rounds done since the start, and the rounds that were to be done.
        resume: Folder of a comparison that was interrupted, or is to be widened: completed runs in it with the same settings
            are not made again, and one that was killed goes on from its checkpoint.

    Returns:
        The comparison; its folder holds ``compare.json``, ``table.md``, ``table.csv``, ``compare.png`` and the runs, and
        for personal models ``personal.csv``, ``clients.csv`` and ``gains.png``. All but the figures are there after each run.

    Raises:
        SettingsError: A setting or a value of the grid is wrong, or there is nothing to choose by, which is told before
            anything runs.
        LaunchError: A worker process died.
    """
    plan = make_plan(Plan(run_config, methods, seeds, grid, how, target))
    name = f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-compare-{run_config.get('task', 'digits')}"
    folder = (resume or root / name).absolute()
    (folder / "runs").mkdir(parents=True, exist_ok=resume is not None)
    with RunFolder(folder).locked():
        _same_clients(folder / "clients", how.num_clients)
        return _run_plan(plan, folder, jobs, on_trial, on_rounds)


def _run_plan(plan: Plan, folder: Path, jobs: int, on_trial: OnTrial, on_rounds: OnRounds) -> Comparison:
    points, methods, seeds = plan.points, plan.methods, plan.seeds
    made, broken_off = _runs_in(folder / "runs")
    trials: list[Trial] = []
    total = sum(len(points[m]) + len(seeds) - 1 for m in methods)
    loaded: dict[str, Run] = {}

    def run_all(make: Make, wanted: Iterable[tuple[str, int, Point]], *, tuning: bool) -> None:
        jobs_of = [plan.job(method, seed, point) for method, seed, point in wanted]
        there = [(job, Ended(RunStatus.COMPLETED, "", made[job.key])) for job in jobs_of if job.key in made]
        missing = [job.going_on(broken_off.get(job.key)) for job in jobs_of if job.key not in made]
        for job, ended in itertools.chain(there, make(missing)):
            trial = _trial(job, ended, folder, tuning=tuning, loaded=loaded)
            trials.append(trial)
            write_state(plan, folder, trials, loaded)
            on_trial(trial, len(trials), total)

    write_state(plan, folder, trials, loaded)
    with _in_processes(plan.how, folder / "runs", jobs, on_rounds) as make:
        # All methods advance alike, so that an interrupted comparison can be ended with a smaller grid.
        first = sorted((i / len(points[m]), methods.index(m), i) for m in methods for i in range(len(points[m])))
        run_all(make, ((methods[m], seeds[0], points[methods[m]][i]) for _, m, i in first), tuning=bool(plan.grid))
        chosen = {m: choose([t for t in trials if t.method == m], points[m]) for m in methods}
        run_all(make, ((m, seed, chosen[m].point) for seed in seeds[1:] for m in methods), tuning=False)
    comparison = write_state(plan, folder, trials, loaded, completed=True)
    drawn = draw(comparison, plan)
    return replace(comparison, notes=[*comparison.notes, *drawn])


def _same_clients(path: Path, num_clients: int) -> None:
    """Note the number of clients, which no setting of a run says, or compare it with that of the first part."""
    first = path.read_text().strip() if path.exists() else str(num_clients)
    if first != str(num_clients):
        where, do = f"comparison {path.parent}", f"pass --clients {first}, or start another comparison"
        raise SettingsError(where, expected=f"{first} clients, as before", got=str(num_clients), do=do)
    path.write_text(f"{num_clients}\n")


def _runs_in(root: Path) -> tuple[dict[str, Path], dict[str, Path]]:
    """Find the runs in a folder by what tells them apart: the completed ones, and those broken off that left a checkpoint."""
    completed: dict[str, Path] = {}
    broken_off: dict[str, Path] = {}
    for path in sorted(root.iterdir()):
        if not (path / "settings.toml").exists():
            continue
        folder = RunFolder.open(path)
        status = (folder.read_summary() or {"status": RunStatus.UNFINISHED})["status"]
        if status == RunStatus.COMPLETED:
            completed[settings_key(folder.read_settings())] = path
        elif status in (RunStatus.UNFINISHED, RunStatus.STOPPED) and folder.read_num_clients() is not None:
            broken_off[settings_key(folder.read_settings())] = path
    return completed, broken_off


Make: TypeAlias = Callable[[Sequence[Job]], Iterable[tuple[Job, Ended]]]
"""Makes runs, several at a time, and gives each when it has ended."""


@contextmanager
def _in_processes(how: Start, root: Path, jobs: int, on_rounds: OnRounds) -> Iterator[Make]:
    """Keep worker processes for the runs of a comparison; what they are at when it ends early is left as after a kill."""
    rounds = multiprocessing.get_context("spawn").Value("q", 0)
    pool = worker_pool(jobs, _count_in, rounds)
    total = 0

    def ended(jobs_of: Sequence[Job]) -> Iterator[tuple[Job, Ended]]:
        nonlocal total
        total += sum(resolve_settings(job.config).num_server_rounds for job in jobs_of)
        futures: dict[Future[Ended], Job] = {
            pool.submit(_run, job.config, how, root, list(sys.path)): job for job in jobs_of
        }
        while futures:
            for future in wait(futures, _POLL_SECONDS, FIRST_COMPLETED).done:
                try:
                    yield futures.pop(future), future.result()
                except BrokenProcessPool as error:
                    raise LaunchError(
                        f"comparison {root.parent}",
                        expected="worker processes that live as long as their runs",
                        got=str(error),
                        do="use fewer --jobs if memory ran out; what was computed is kept: go on with --resume",
                    ) from error
            on_rounds(rounds.value, total)

    try:
        yield ended
    except BaseException:
        kill_pool(pool)
        raise
    pool.shutdown()


_rounds: Any = None
"""Rounds that all workers of a comparison have done: a shared number."""


def _count_in(rounds: Any) -> None:
    global _rounds
    _rounds = rounds


def _run(config: dict[str, Any], how: Start, root: Path, path: list[str]) -> Ended:
    sys.path[:] = path
    told = 0

    def add(rounds: int) -> None:
        nonlocal told
        told += rounds
        with _rounds.get_lock():
            _rounds.value += rounds

    try:
        return start(config, how, root, lambda row: add(int(row["phase"] == TRAIN)))
    except CheckpointError:
        if not config.get("resume"):
            raise
        # Another version, or data that has changed: what was broken off cannot go on, and is made anew.
        return start({**config, "run-dir": "", "resume": False}, how, root, lambda row: add(int(row["phase"] == TRAIN)))
    except FedAppsError as error:
        return Ended(RunStatus.FAILED, f"{type(error).__name__}: {error}", None)
    finally:
        # Of a run that failed, or that went on from a checkpoint, the other rounds are over too.
        add(max(0, resolve_settings(config).num_server_rounds - told))


def _trial(job: Job, ended: Ended, folder: Path, *, tuning: bool, loaded: dict[str, Run]) -> Trial:
    trial = Trial(
        method=job.method,
        seed=job.seed,
        lr=resolve_settings(job.config).lr,
        point=dict(job.point),
        tuning=tuning,
        status=str(ended.status),
        reason=ended.reason,
        score=None,
        score_metric="",
        score_round=None,
        folder="",
    )
    if ended.folder is None or not (ended.folder / "settings.toml").exists():
        return trial
    run = load_run(ended.folder)
    name = str(ended.folder.relative_to(folder))
    loaded[name] = run
    best = run.summary.get("best", {})
    key = validation_key([best], run.summary.get("judged-by", Task.metric))
    return replace(
        trial,
        score=best.get(key),
        score_metric=key,
        score_round=best.get("round"),
        folder=name,
        final=run.summary["final"],
        best=best,
        seconds=run.summary["totals"]["seconds-by-phase"],
    )
