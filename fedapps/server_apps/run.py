"""A run: rounds, evaluation, checkpoint, results."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, field
from logging import getLogger
from typing import Any

import numpy as np
from flwr.app import ConfigRecord
from flwr.serverapp import Grid

import fedapps
from fedapps.compute import choose_device
from fedapps.errors import CheckpointError, RoundFailedError
from fedapps.messages.node_facts import TOLD, shown
from fedapps.messages.schema import Arrays, pack_arrays
from fedapps.methods import Method, get_method
from fedapps.results.checkpoint import Checkpoint, MadeWith
from fedapps.results.environment import describe_environment
from fedapps.results.ledger import sum_bytes
from fedapps.results.run_folder import RunFolder
from fedapps.results.storage import GrowingSum, fault
from fedapps.results.summary import (
    REPORTED,
    START_UP,
    RunStatus,
    add_metrics,
    best_evaluation,
    client_statistics,
    evaluations_by_round,
    summarise,
    validation_key,
)
from fedapps.results.units import human_bytes, human_seconds
from fedapps.server_apps.metered_grid import MeteredGrid
from fedapps.server_apps.resume import load_checkpoint
from fedapps.settings import Settings, flatten, learning_rate
from fedapps.strategies.base import RoundStrategy
from fedapps.strategies.exchange import exchange
from fedapps.strategies.rounds import last_line
from fedapps.tasks.base import Task
from fedapps.tasks.from_settings import load_task_of

logger = getLogger("flwr")

LOGGED_METRICS = (
    "validation-accuracy", "test-accuracy", "validation-f1", "test-f1", "validation-absolute-error", "test-absolute-error",
    "test-loss", "test-statistical-error",
    "client-personal-test-accuracy", "client-global-test-accuracy", "client-personal-test-statistical-error",
    "client-validation-accuracy-weighted", "client-test-accuracy-weighted",
)  # fmt: skip
"""Metrics that the log's line of a round shows."""


@dataclass
class _Run:
    """A run; `arrays` is the model, or empty where the strategy builds it on demand."""

    grid: MeteredGrid
    settings: Settings
    method: Method
    folder: RunFolder
    task: Task
    strategy: RoundStrategy
    experiment: str
    arrays: Arrays
    rows: list[dict[str, Any]]
    first_round: int
    num_partitions: int | None
    data: dict[str, str]
    journal: GrowingSum
    noted: dict[int, dict[str, Any]] = field(default_factory=dict)


def run(grid: Grid, settings: Settings, folder: RunFolder) -> None:
    """Run a method from its first or next round to the last, and write the run folder.

    Args:
        grid: Flower's grid.
        settings: The settings.
        folder: The run folder.

    Raises:
        CheckpointError: It cannot be resumed as asked; the folder is as it was.
        FedAppsError: The run failed; the summary in the folder says why.
    """
    rows: list[dict[str, Any]] = []
    state = None
    resumed: tuple[Checkpoint, list[str]] | None = None
    if settings.resume:
        resumed = load_checkpoint(folder, settings, get_method(settings.method), load_task_of(settings))
    try:
        state = _start(grid, settings, folder, rows, resumed)
        for server_round in range(state.first_round, settings.num_server_rounds + 1):
            _one_round(state, server_round)
        _check_accepted(rows)
        folder.write_model(_model(state, settings.num_server_rounds))
    except BaseException as error:
        status = RunStatus.STOPPED if isinstance(error, KeyboardInterrupt) else RunStatus.FAILED
        reason = f"{type(error).__name__}: {error}"
        if state is not None or resumed is None:  # A resume that could not begin leaves the word of the earlier part.
            folder.write_summary(summarise(rows, status=status, reason=reason, primary=_judged_by(state)))
        logger.error("run %s: %s", status, error)
        if state is not None and not state.arrays:
            _leave_model(state)
        raise
    folder.write_summary(summarise(rows, status=RunStatus.COMPLETED, primary=_judged_by(state)))


def _check_accepted(rows: list[dict[str, Any]]) -> None:
    trained = [row for row in rows if row["phase"] == "train"]
    if not trained or any(row.get("accepted", True) for row in trained):
        return
    refused = trained[-1].get("refused", {})
    raise RoundFailedError(
        "run",
        expected="at least one accepted round",
        got=f"none of {len(trained)}; in the last one "
        + ("; ".join(f"client {p}: {last_line(reason)}" for p, reason in refused.items()) or "nobody was refused"),
        do="the model is still the first one: correct the cause and start again",
    )


def _judged_by(state: _Run | None) -> str:
    return Task.metric if state is None else state.task.metric


def _start(
    grid: Grid,
    settings: Settings,
    folder: RunFolder,
    rows: list[dict[str, Any]],
    resumed: tuple[Checkpoint, list[str]] | None,
) -> _Run:
    started = time.monotonic()
    method, grid = get_method(settings.method), MeteredGrid(grid)
    checkpoint, changes = resumed or (None, [])
    experiment = checkpoint.experiment if checkpoint else _new_experiment(settings)
    strategy: RoundStrategy = method.load_strategy().from_settings(settings, experiment)
    grid.server_round = checkpoint.server_round + 1 if checkpoint else 1
    goes_on = grid.server_round <= settings.num_server_rounds
    if goes_on:
        strategy.roster.hail(grid)
    task = load_task_of(settings)
    flat = flatten(settings, method.group)
    folder.write_settings(flat)
    logger.info("settings: %s", " ".join(f"{key}={value!r}" for key, value in flat.items()))
    data = task.server_checksums()
    environment = describe_environment(device=settings.device, data_checksums=data)
    if checkpoint:
        environment |= _accepted_changes(folder, checkpoint, changes)
    folder.write_environment(environment)
    state = _Run(
        grid=grid, settings=settings, method=method, folder=folder, task=task, strategy=strategy,
        experiment=experiment, arrays={}, rows=rows, first_round=grid.server_round, num_partitions=None, data=data,
        journal=GrowingSum(folder.journal_path),
    )  # fmt: skip
    if checkpoint:
        _take_back(state, checkpoint)
    own_data = settings.partition == "local"
    if own_data:
        # The nodes have the data, so the first model's shape may be theirs to say.
        strategy.roster.task = task
        if goes_on:
            _greet(state, started)
        state.task = load_task_of(settings, strategy.roster.agreed)
        strategy.roster.own_layout = method.layout_of(state.task, settings)
    arrays = state.task.initial_arrays(settings.seed)
    strategy.check_model(arrays)
    state.arrays = strategy.open(arrays, state.task, folder, resumed=checkpoint is not None)
    if checkpoint:
        _take_back_arrays(state, checkpoint)
    if goes_on and not own_data:
        _greet(state, started)
    if not checkpoint:
        _evaluate(state, 0)
    return state


def _greet(state: _Run, started: float) -> None:
    """Wait for the clients before the first round: their processes start and read the data now, which is no training."""
    state.strategy.roster.refresh(state.grid)
    if state.num_partitions is not None:
        _check_partitions(state)
    row = {"round": state.first_round - 1, "phase": START_UP, "seconds": time.monotonic() - started}
    _write(state, row)


def _accepted_changes(folder: RunFolder, checkpoint: Checkpoint, changes: list[str]) -> dict[str, Any]:
    """Give the run's record of what resumes have changed, with what this one does."""
    known = folder.read_environment().get("accepted-changes", []) if folder.environment_path.exists() else []
    if changes:
        logger.warning("accepted changes after round %d: %s", checkpoint.server_round, "; ".join(changes))
        known = [*known, {"after-round": checkpoint.server_round, "changes": changes}]
    return {"accepted-changes": known} if known else {}


def _model(state: _Run, server_round: int) -> Arrays:
    """Give the server's model, checked; some strategies build it now."""
    arrays = state.strategy.model(state.arrays)
    if arrays is not state.arrays:
        _check_model(arrays, server_round)
    return arrays


def _leave_model(state: _Run) -> None:
    """Write the model of a run that failed and whose checkpoint holds none, since its strategy builds it on demand."""
    try:
        state.folder.write_model(state.strategy.model(state.arrays))
    except Exception as problem:
        # The journal still leads to it, and the failure of the run is what the user must see.
        logger.error("the model could not be written: %s", problem)


def _new_experiment(settings: Settings) -> str:
    # Two runs with the same settings are two experiments: neither may find the other's client states.
    return f"{settings.method}-{settings.task}-{settings.seed}-{secrets.token_hex(4)}"


def _take_back(state: _Run, checkpoint: Checkpoint) -> None:
    state.num_partitions = checkpoint.num_partitions
    try:
        state.strategy.roster.load_state(checkpoint.roster)
        state.strategy.load_state(checkpoint.strategy_state, checkpoint.last_folded)
        state.strategy.load_state_arrays(checkpoint.strategy_arrays)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"resume of {state.folder.path}",
            expected=f"the state of method '{state.settings.method}' in the checkpoint",
            got=fault(error),
            do="restore the checkpoint that belongs to the run",
        ) from error
    state.folder.truncate_after(checkpoint.server_round)
    state.rows.extend(state.folder.read_metrics())
    logger.info("resumed after round %d of %s", checkpoint.server_round, state.folder.path)


def _take_back_arrays(state: _Run, checkpoint: Checkpoint) -> None:
    shapes = {name: (value.shape, value.dtype) for name, value in state.arrays.items()}
    for name, value in checkpoint.arrays.items():
        if shapes.pop(name, None) != (value.shape, value.dtype):
            shapes[name] = (value.shape, value.dtype)
            break
    if shapes:
        name = next(iter(shapes))
        raise CheckpointError(
            f"resume of {state.folder.path}, tensor '{name}'",
            expected="the model of the checkpoint",
            got="another one from the task",
            do="resume with the task and model that the run was started with",
        )
    state.arrays = {name: checkpoint.arrays[name] for name in state.arrays}


def _one_round(state: _Run, server_round: int) -> None:
    settings, strategy = state.settings, state.strategy
    started = time.monotonic()
    state.grid.server_round = server_round
    lr = learning_rate(settings, server_round)
    config = ConfigRecord({"lr": lr, "run-dir": str(state.folder.path)})
    messages = strategy.configure_train(server_round, pack_arrays(state.arrays), config, state.grid)
    _check_partitions(state)
    strategy.take_replies(exchange(state.grid, messages, settings.round_timeout))
    new = strategy.rounds.end()
    if new is not None:
        state.arrays = new
    ledger = state.grid.take_rows(strategy)
    train_row = _train_row(state, server_round, lr, time.monotonic() - started, ledger)
    _append_ledger(state, ledger)
    _write(state, train_row)
    if _due(settings.evaluate_every, server_round, settings.num_server_rounds):
        _evaluate(state, server_round)
    if settings.clients_evaluate(server_round):
        _evaluate_on_clients(state, server_round, config)
    _keep_best(state, server_round)
    # Rows first: a resume cuts off those beyond the checkpoint, but could not make up for missing ones.
    state.folder.save_checkpoint(_checkpoint(state, server_round))
    _log_round(state, server_round, train_row)


def _keep_best(state: _Run, server_round: int) -> None:
    """Keep the model of the best validation so far, which later rounds may spoil; a journal leads to that of any round."""
    evaluations = evaluations_by_round(state.rows).values()
    best = best_evaluation(evaluations, validation_key(evaluations, state.task.metric))
    if state.arrays and best is not None and best["round"] == server_round:
        state.folder.write_best(state.arrays)


def _check_partitions(state: _Run) -> None:
    roster = state.strategy.roster
    now, own_data = roster.num_partitions, roster.task is not None
    if own_data:
        _note_nodes(state)
    if state.num_partitions is None:
        state.num_partitions = now
        logger.info("%s", state.task.summary(now))
        for how, names in _treatment(state).items():
            logger.info("%s: %s", how, ", ".join(names) or "nothing")
        for reason, names in _reasons(state).items():
            logger.info("averaged since %s: %s", reason, ", ".join(names))
    elif own_data:
        state.num_partitions = now
    elif now != state.num_partitions:
        raise CheckpointError(
            f"resume of {state.folder.path}",
            expected=f"{state.num_partitions} clients as before",
            got=f"{now} clients (num-partitions of the nodes)",
            do="start as many clients as the run had",
        )


def _note_nodes(state: _Run) -> None:
    """Note what each node tells of itself and of its data, once it is known or tells anything else."""
    roster = state.strategy.roster
    for number in sorted(roster.node_of):
        facts = roster.facts[number]
        row = {
            "node": roster.names[number], "key": roster.key_of(number),
            "num-examples": facts.num_examples, **{k: facts.told.get(k) for k in TOLD},
            "device": facts.device, "version": facts.version,
        }  # fmt: skip
        if state.noted.get(number) != row:
            state.noted[number] = row
            # A resume cuts off the rows of rounds that it repeats.
            state.folder.append_clients({"round": max(0, state.first_round - 1), "partition": number, **row})
            told = ", ".join(f"{key} {shown(value)}" for key, value in row.items() if value not in ("", None))
            logger.info("client %d: %s", number, told)


def _treatment(state: _Run) -> dict[str, list[str]]:
    """Sort the tensors of the model by what happens to them; nothing for methods without curvature, or if not known yet."""
    layout = state.strategy.curvature_layout()
    if layout is None:
        return {}
    preconditioned = layout.preconditioned
    others = [name for name in state.arrays if name not in preconditioned]
    averaged = [name for name in others if np.issubdtype(state.arrays[name].dtype, np.floating)]
    maximum = [name for name in others if name not in averaged]
    return {"preconditioned": list(preconditioned), "averaged": averaged, "maximum": maximum}


def _reasons(state: _Run) -> dict[str, list[str]]:
    """Say why trainable tensors have no block: reason -> tensors."""
    layout, reasons = state.strategy.curvature_layout(), dict[str, list[str]]()
    for name, reason in ({} if layout is None else layout.averaged).items():
        reasons.setdefault(reason, []).append(name)
    return reasons


def _check_model(arrays: Arrays, server_round: int) -> None:
    for name, value in arrays.items():
        if np.issubdtype(value.dtype, np.inexact) and not np.isfinite(value).all():
            raise RoundFailedError(
                f"round {server_round}, model tensor '{name}'",
                expected="finite numbers after aggregation",
                got="NaN or infinity",
                do="lower the learning rate or raise the damping; --resume goes on from the last good round",
            )


def _due(every: int, server_round: int, total: int) -> bool:
    return every > 0 and (server_round % every == 0 or server_round == total)


def _write(state: _Run, row: dict[str, Any]) -> None:
    state.rows.append(row)
    state.folder.append_metrics(row)


def _append_ledger(state: _Run, rows: list[dict[str, Any]]) -> None:
    for row in rows:
        state.folder.append_ledger(row)


def _train_row(
    state: _Run, server_round: int, lr: float, seconds: float, ledger: list[dict[str, Any]]
) -> dict[str, Any]:
    report = state.strategy.rounds.report
    row: dict[str, Any] = {
        "round": server_round, "phase": "train", "seconds": seconds, "sampled": report.sampled,
        "folded": report.folded, "refused": {str(p): reason[-1000:] for p, reason in report.refused.items()},
        "accepted": report.accepted, **sum_bytes(ledger), "lr": lr,
    }  # fmt: skip
    if not any("preconditioned" in earlier for earlier in state.rows):
        row |= _treatment(state)
        if reasons := _reasons(state):
            row["averaged-since"] = reasons
    row |= report.values
    if report.notes:
        row["notes"] = report.notes
    if report.folded:
        row = add_metrics(row, state.strategy.train_metrics())
    return row


def _evaluate(state: _Run, server_round: int) -> None:
    # Where every node has data of its own the server has none, and no model need be built for a measurement.
    if state.settings.evaluate_every == 0 or state.settings.partition == "local":
        return
    started = time.monotonic()
    arrays, data = _model(state, server_round), state.task.server_data()
    # The server need not have the device that was set for the clients.
    device = "cpu" if state.settings.device == "cpu" else choose_device("auto")
    metrics = {
        f"{split}-{name}": value
        for split, part in (("validation", data.validation), ("test", data.test))
        if len(part)  # a model is built for each part
        for name, value in state.task.evaluate(arrays, part, device).items()
    }
    row = {"round": server_round, "phase": "evaluate", "seconds": time.monotonic() - started, **metrics}
    _write(state, row)


def _evaluate_on_clients(state: _Run, server_round: int, config: ConfigRecord) -> None:
    started = time.monotonic()
    messages = state.strategy.configure_evaluate(server_round, pack_arrays(state.arrays), config, state.grid)
    replies = exchange(state.grid, messages, state.settings.round_timeout)
    metrics, num_examples = state.strategy.evaluation_results(replies)
    for partition, values in sorted(metrics.items()):
        client_row = {"round": server_round, "partition": partition, "num-examples": num_examples[partition]}
        state.folder.append_clients(add_metrics(client_row, values))
    ledger = state.grid.take_rows(state.strategy)
    _append_ledger(state, ledger)
    seconds = time.monotonic() - started
    statistics = client_statistics(metrics, num_examples)
    row = {
        "round": server_round, "phase": "client-evaluate", "seconds": seconds, REPORTED: len(metrics),
        **sum_bytes(ledger), **statistics,
    }  # fmt: skip
    _write(state, row)


def _checkpoint(state: _Run, server_round: int) -> Checkpoint:
    return Checkpoint(
        server_round=server_round,
        experiment=state.experiment,
        method=state.settings.method,
        task=state.settings.task,
        num_partitions=state.num_partitions or 0,
        arrays=state.arrays,
        strategy_arrays=state.strategy.state_arrays(),
        strategy_state=state.strategy.state(),
        last_folded=state.strategy.rounds.last_folded,
        roster=state.strategy.roster.state(),
        made_with=MadeWith(
            settings=flatten(state.settings, state.method.group),
            version=fedapps.__version__,
            data=state.data,
            journal=state.journal.hexdigest(),
        ),
    )


def _log_round(state: _Run, server_round: int, train_row: dict[str, Any]) -> None:
    last = {key: value for row in state.rows if row["round"] == server_round for key, value in row.items()}
    metrics = " ".join(f"{key} {last[key]:.4g}" for key in LOGGED_METRICS if key in last)
    seconds = [row["seconds"] for row in state.rows if row["phase"] == "train"]
    left = (state.settings.num_server_rounds - server_round) * sum(seconds) / len(seconds)
    logger.info(
        "round %d/%d: %d of %d clients, train-loss %s, %s, down %s, up %s, %s, about %s left",
        server_round, state.settings.num_server_rounds, len(train_row["folded"]), len(train_row["sampled"]),
        f"{train_row['train-loss']:.4g}" if "train-loss" in train_row else "-", metrics or "not evaluated",
        human_bytes(train_row["payload-down"]), human_bytes(train_row["payload-up"]),
        human_seconds(train_row["seconds"]), human_seconds(left),
    )  # fmt: skip
