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
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from fedapps.errors import CheckpointError, FedAppsError, LaunchError, SettingsError
from fedapps.methods import get_method, resolve_settings
from fedapps.results.personal import DATA_SETTINGS, Gains, PersonalRow, client_gains, client_table, personal_table
from fedapps.results.plots import plot_compare, plot_gains
from fedapps.results.report import Run, compare_sections, compare_table, load_run
from fedapps.results.run_folder import RunFolder
from fedapps.results.series import curves_of
from fedapps.results.storage import from_json, read_as, to_json, write_atomically
from fedapps.results.summary import TRAIN, RunStatus, smaller_is_better, validation_key
from fedapps.results.tables import CompareRow, to_csv, to_markdown
from fedapps.settings import AUTO, Scalar, Settings, flatten, keys_of
from fedapps.simulation.start import Ended, Start, start
from fedapps.simulation.worker_pool import kill_pool, worker_pool
from fedapps.tasks.base import Task
from fedapps.tasks.from_settings import load_task_of

RECORD = "compare.json"
"""The record of a comparison, in its folder."""

VALIDATION_SHARE = 0.1
"""Share of the training data (of each client's, for personal models) that a comparison with a grid holds out to choose by,
where neither user nor registry say another."""

PARTNER = "globaltrain"
"""What takes part where personalised methods meet others."""

NOTE_LENGTH = 120
"""Characters of a failed run's reason in a note; the whole reason is in its trial."""

OF_ONE_MACHINE = ("data-dir", "run-dir", "resume", "accept-changes")
"""Settings that mean nothing elsewhere, and are left out of a record."""

_SHARES = ("validation-fraction", "client-validation-fraction", "client-test-fraction")
_WHEN = ("none", "last", "every")
_SHARED = (*(key for key in DATA_SETTINGS if key not in ("task", "seed")), "client-evaluation", "evaluate-every")
_FIRST_EXAMPLES = 8  # enough to see what a task measures
_POLL_SECONDS = 0.5

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


@dataclass(frozen=True)
class Plan:
    """What is to be compared."""

    run_config: Mapping[str, Any]
    methods: Sequence[str]
    seeds: Sequence[int]
    grid: Mapping[str, Sequence[Scalar]]
    how: Start
    target: float | None
    data: Mapping[str, Scalar] = field(default_factory=dict)  # settings that are the same for all methods
    about: Mapping[str, int] = field(default_factory=dict)  # how many examples the first seed's server and clients have
    notes: Sequence[str] = ()

    @property
    def points(self) -> dict[str, list[Point]]:
        """Method -> its points of the grid."""
        return {method: _points(self.grid, method, self.methods) for method in self.methods}

    @property
    def tunes(self) -> bool:
        """Whether anything is chosen."""
        return any(len(points) > 1 for points in self.points.values())

    def job(self, method: str, seed: int, point: Point) -> Job:
        """Give the run of a method with a seed and a point of its grid."""
        config = config_of({**self.run_config, **self.data, **point, "seed": seed}, method, self.methods)
        return Job(method, seed, point, config)


OnTrial = Callable[[Trial, int, int], None]
OnRounds = Callable[[int, int], None]


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


def make_plan(plan: Plan) -> Plan:
    """Complete what is to be compared: the data of all methods, and the partner where families meet.

    Raises:
        SettingsError: As `compare`.
    """
    personal = [m for m in plan.methods if _is_personal(m)]
    notes = []
    if personal and len(personal) < len(plan.methods):
        plan = replace(plan, methods=list(dict.fromkeys([*plan.methods, PARTNER])))
        notes.append(f"{PARTNER} takes part: the global model, chosen and measured as the personal models are")
    _refuse_other_data(plan)
    for method, points in plan.points.items():
        for point in points:
            # A wrong setting of the last method is told before the first has run.
            resolve_settings(config_of({**plan.run_config, **point}, method, plan.methods))
    plan = replace(plan, data=_shared_data(plan), notes=notes)
    plan = replace(plan, about=_about_data(plan))
    if len(set(map(len, plan.points.values()))) > 1:
        tried = ", ".join(f"{method} {len(points)}" for method, points in plan.points.items())
        plan = replace(plan, notes=[*notes, f"unequal budgets of tuning, in points tried: {tried}"])
    return plan


def _is_personal(method: str) -> bool:
    """Tell whether a method is about personal models, so that they choose its settings."""
    return get_method(method).family == "personalised"


def _refuse_other_data(plan: Plan) -> None:
    """Refuse data for one method alone: its numbers could not be compared."""
    for key in (*plan.run_config, *plan.grid):
        name = next((key.removeprefix(f"{m}.") for m in plan.methods if key.startswith(f"{m}.")), key)
        if name in (*_SHARED, "seed", "task") and (name != key or key in plan.grid):
            raise SettingsError(
                f"setting '{key}'",
                expected="the same data for all methods and points of a comparison",
                got="values of one method alone" if name != key else "several values",
                do=f"set {name} once for all; compare other data in another comparison",
            )


def _shared_data(plan: Plan) -> dict[str, Scalar]:
    """Settle the settings that say which examples are trained on and which are measured, once for all methods.

    Of the shares that a method's family holds out by default the largest is held out for all.
    """
    resolved = {
        m: flatten(resolve_settings(config_of({**plan.run_config, **plan.points[m][0]}, m, plan.methods)), "")
        for m in plan.methods
    }
    shared: dict[str, Scalar] = {}
    for key in _SHARED:
        values = [resolved[m][key] for m in plan.methods]
        if key in _SHARES:
            shared[key] = max(float(value) for value in values)
        elif key == "client-evaluation":
            shared[key] = max(map(str, values), key=_WHEN.index)
        elif len(set(values)) == 1:
            shared[key] = values[0]
        else:
            told = ", ".join(f"{m} {value!r}" for m, value in zip(plan.methods, values, strict=True))
            do = f"set {key} for all"
            raise SettingsError(f"setting '{key}'", expected="one value for all methods", got=told, do=do)
    if plan.tunes:
        for key, needed in (
            ("validation-fraction", not all(map(_is_personal, plan.methods))),
            ("client-validation-fraction", any(map(_is_personal, plan.methods))),
        ):
            if needed and shared[key] == 0 and plan.run_config.get(key, AUTO) == AUTO:
                shared[key] = VALIDATION_SHARE
    return shared


def _about_data(plan: Plan) -> dict[str, int]:
    """Count the examples of the first seed; refuse a grid where there is nothing to choose by.

    Raises:
        SettingsError: The validation data is empty, is never looked at, or the task does not measure its metric.
    """
    method = plan.methods[0]
    settings = resolve_settings(plan.job(method, plan.seeds[0], plan.points[method][0]).config)
    task = load_task_of(settings)
    server = task.server_data()
    clients = [task.client_data(p, plan.how.num_clients) for p in range(plan.how.num_clients)]
    about = {
        "clients": len(clients),
        "train": sum(len(client.train) for client in clients),
        "server-validation": len(server.validation),
        "server-test": len(server.test),
        "clients-validation": sum(len(client.validation) for client in clients),
        "clients-test": sum(len(client.test) for client in clients),
        "clients-with-test": sum(len(client.test) > 0 for client in clients),
    }
    if not plan.tunes:
        return about
    judges: list[tuple[str, str, str, bool, Any]] = []
    if not all(map(_is_personal, plan.methods)):
        seen = settings.evaluate_every > 0
        judges.append(("validation-fraction", "the server", "evaluate-every", seen, server.validation))
    if any(map(_is_personal, plan.methods)):
        seen = settings.client_evaluation != "none"
        most = max((client.validation for client in clients), key=len)
        judges.append(("client-validation-fraction", "the clients", "client-evaluation", seen, most))
    for key, who, when, seen, examples in judges:
        if not len(examples) or not seen:
            raise SettingsError(
                f"comparison with a grid, setting '{key if seen else when}'",
                expected=f"validation data of {who} to choose by",
                got=f"none at {key} = {plan.data[key]:g}" if seen else f"no look at it ({when} = {plan.data[when]})",
                do=f"raise {key}" if seen else f"set another {when}" + ", or compare without a grid",
            )
    examples = judges[0][-1]
    few = examples.take(np.arange(min(_FIRST_EXAMPLES, len(examples))))
    measured = task.evaluate(task.initial_arrays(settings.seed), few)
    if task.metric not in measured:
        raise SettingsError(
            f"task '{task.name}'",
            expected=f"its metric '{task.metric}' among what it measures, to choose by",
            got=", ".join(measured),
            do="set the attribute `metric` of the task's class to one of these",
        )
    return about


def _run_plan(plan: Plan, folder: Path, jobs: int, on_trial: OnTrial, on_rounds: OnRounds) -> Comparison:
    points, methods, seeds = plan.points, plan.methods, plan.seeds
    made, broken_off = _runs_in(folder / "runs")
    trials: list[Trial] = []
    total = sum(len(points[m]) + len(seeds) - 1 for m in methods)
    loaded: dict[str, Run] = {}

    def run_all(runs: _Runs, wanted: Iterable[tuple[str, int, Point]], *, tuning: bool) -> None:
        jobs_of = [plan.job(method, seed, point) for method, seed, point in wanted]
        there = [(job, Ended(RunStatus.COMPLETED, "", made[job.key])) for job in jobs_of if job.key in made]
        missing = [job.going_on(broken_off.get(job.key)) for job in jobs_of if job.key not in made]
        for job, ended in itertools.chain(there, runs.ended(missing)):
            trial = _trial(job, ended, folder, tuning=tuning, loaded=loaded)
            trials.append(trial)
            _state(plan, folder, trials, loaded)
            on_trial(trial, len(trials), total)

    _state(plan, folder, trials, loaded)
    with _in_processes(plan.how, folder / "runs", jobs, on_rounds) as runs:
        # All methods advance alike, so that an interrupted comparison can be ended with a smaller grid.
        first = sorted((i / len(points[m]), methods.index(m), i) for m in methods for i in range(len(points[m])))
        run_all(runs, ((methods[m], seeds[0], points[methods[m]][i]) for _, m, i in first), tuning=bool(plan.grid))
        chosen = {m: _choose([t for t in trials if t.method == m], points[m]) for m in methods}
        run_all(runs, ((m, seed, chosen[m].point) for seed in seeds[1:] for m in methods), tuning=False)
    comparison = _state(plan, folder, trials, loaded, completed=True)
    drawn = _draw(comparison, plan)
    return replace(comparison, notes=[*comparison.notes, *drawn])


def _state(
    plan: Plan, folder: Path, trials: list[Trial], loaded: Mapping[str, Run], *, completed: bool = False
) -> Comparison:
    """Write down how a comparison stands: all that was computed is on disk after each run."""
    points, methods = plan.points, list(plan.methods)
    order = {m: [dict(point) for point in points[m]] for m in methods}
    trials.sort(key=lambda t: (methods.index(t.method), not t.tuning, t.seed, order[t.method].index(dict(t.point))))
    first = {m: [t for t in trials if t.method == m and t.seed == plan.seeds[0]] for m in methods}
    chosen = {m: _choose(first[m], points[m]) for m in methods if len(first[m]) == len(points[m])}
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
        notes=[*plan.notes, *_notes(plan, chosen, trials)],
        data=_describe(plan),
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


def _points(grid: Mapping[str, Sequence[Scalar]], method: str, methods: Sequence[str]) -> list[Point]:
    """List the combinations of the values of a method's keys; one empty point without any.

    Values of a shared key under the method's name take the place of those for all: ``ditto.lr`` of ``lr``.
    """
    others = tuple(f"{other}." for other in methods if other != method)
    keys = [key for key in grid if not key.startswith(others) and f"{method}.{key}" not in grid]
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

    def going_on(self, folder: Path | None) -> Job:
        """Give the run that goes on in the folder of one that was broken off."""
        return self if folder is None else replace(self, config={**self.config, "run-dir": str(folder), "resume": True})


def _key(settings: Mapping[str, Any]) -> str:
    return to_json({key: settings[key] for key in sorted(settings) if key not in OF_ONE_MACHINE})


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
            completed[_key(folder.read_settings())] = path
        elif status in (RunStatus.UNFINISHED, RunStatus.STOPPED) and folder.read_num_clients() is not None:
            broken_off[_key(folder.read_settings())] = path
    return completed, broken_off


@dataclass(frozen=True)
class _Runs:
    """Makes runs, several at a time."""

    ended: Callable[[Sequence[Job]], Iterable[tuple[Job, Ended]]]


@contextmanager
def _in_processes(how: Start, root: Path, jobs: int, on_rounds: OnRounds) -> Iterator[_Runs]:
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
        yield _Runs(ended)
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


def _choose(trials: Sequence[Trial], points: Sequence[Point]) -> Trial:
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


def _describe(plan: Plan) -> str:
    """Say what all methods were trained and measured on."""
    data, about = plan.data, plan.about
    split = f"{data['partition']}" + (f" (alpha {data['alpha']:g})" if data["partition"] == "dirichlet" else "")
    shares = {key: f"{100 * float(data[key]):g} %" for key in _SHARES}
    return (
        f"All methods have the same data (examples of seed {plan.seeds[0]}): {about['clients']} clients, split {split}, with"
        f" {about['train']} examples to train on; the server {about['server-validation']} for validation"
        f" ({shares['validation-fraction']} of the training data) and {about['server-test']} for testing; the clients"
        f" {about['clients-validation']} for validation ({shares['client-validation-fraction']} of each) and"
        f" {about['clients-test']} for testing, which {about['clients-with-test']} of them have."
    )


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


def _draw(comparison: Comparison, plan: Plan) -> list[str]:
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
