"""A run: rounds, evaluation, checkpoint, results."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass
from logging import getLogger
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from flwr.app import ConfigRecord, Message
from flwr.serverapp import Grid

from fedapps.errors import CheckpointError, RoundFailedError, explain
from fedapps.methods import Method, get_method
from fedapps.records import Arrays, pack_arrays
from fedapps.results.checkpoint import Checkpoint
from fedapps.results.environment import describe_environment
from fedapps.results.ledger import Direction, Kind, message_row, sum_bytes
from fedapps.results.run_folder import RunFolder
from fedapps.results.spread import client_statistics
from fedapps.results.summary import RunStatus, summarise
from fedapps.results.units import human_bytes, human_seconds
from fedapps.settings import Settings, flatten, learning_rate
from fedapps.strategies.exchange import GridWrapper, exchange
from fedapps.strategies.rounds import RoundMixin
from fedapps.tasks.base import Task
from fedapps.tasks.from_settings import load_task_of

if TYPE_CHECKING:
    from fedapps.tasks.torch_task import TorchTask

logger = getLogger("flwr")

MAY_CHANGE = frozenset(
    {
        "num-server-rounds", "run-dir", "resume", "device", "round-timeout", "node-wait", "min-replies", "on-failure",
        "max-consecutive-failed-rounds", "fold-buffer-mb", "max-message-mb", "evaluate-every", "client-evaluation",
        "data-dir",
    }
)  # fmt: skip
"""Settings that a resume may change; any other would make another experiment."""

LOGGED_METRICS = (
    "validation-accuracy", "test-accuracy", "test-loss", "test-statistical-error", "client-personal-test-accuracy",
    "client-global-test-accuracy", "client-personal-test-statistical-error",
)  # fmt: skip
"""Metrics that the log's line of a round shows."""


class MeteredGrid(GridWrapper):
    """A grid that writes down every message that passes.

    Args:
        inner: The grid that does the work.
    """

    def __init__(self, inner: Grid) -> None:
        super().__init__(inner)
        self.server_round = 0
        self._rows: list[tuple[int, dict[str, Any]]] = []

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages."""
        messages = list(messages)
        for message in messages:
            self._note(message, message.metadata.dst_node_id, "down")
        return self.inner.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Receive the replies that are there."""
        replies = list(self.inner.pull_messages(message_ids))
        for reply in replies:
            self._note(reply, reply.metadata.src_node_id, "up")
        return replies

    def _note(self, message: Message, node_id: int, direction: Direction) -> None:
        row = message_row(
            message,
            server_round=self.server_round,
            partition=None,
            direction=direction,
            kind=cast(Kind, message.metadata.message_type),
        )
        self._rows.append((node_id, row))

    def take_rows(self, strategy: RoundMixin) -> list[dict[str, Any]]:
        """Hand over the rows since the last call, with the partitions that the roster knows by now.

        Args:
            strategy: The strategy, for its roster.

        Returns:
            Ledger rows.
        """
        rows = [{**row, "partition": strategy.roster.partition_of(node_id)} for node_id, row in self._rows]
        self._rows = []
        return rows


@dataclass
class _Run:
    grid: MeteredGrid
    settings: Settings
    method: Method
    folder: RunFolder
    task: Task
    strategy: Any
    experiment: str
    arrays: Arrays
    rows: list[dict[str, Any]]
    first_round: int
    num_partitions: int | None


def run(grid: Grid, settings: Settings, folder: RunFolder) -> None:
    """Run a method from its first or next round to the last, and write the run folder.

    Args:
        grid: Flower's grid.
        settings: The settings.
        folder: The run folder.

    Raises:
        FedAppsError: The run failed; the summary in the folder says why.
    """
    rows: list[dict[str, Any]] = []
    try:
        state = _start(grid, settings, folder, rows)
        for server_round in range(state.first_round, settings.num_server_rounds + 1):
            _one_round(state, server_round)
        folder.write_model(state.arrays)
    except BaseException as error:
        status = RunStatus.STOPPED if isinstance(error, KeyboardInterrupt) else RunStatus.FAILED
        folder.write_summary(summarise(rows, status=status, reason=f"{type(error).__name__}: {error}"))
        logger.error("run %s: %s", status, error)
        raise
    folder.write_summary(summarise(rows, status=RunStatus.COMPLETED))


def _start(grid: Grid, settings: Settings, folder: RunFolder, rows: list[dict[str, Any]]) -> _Run:
    method = get_method(settings.method)
    task = load_task_of(settings)
    checkpoint = _load_checkpoint(folder, settings, method) if settings.resume else None
    experiment = checkpoint.experiment if checkpoint else _new_experiment(settings)
    strategy = method.load_strategy().from_settings(settings, experiment)
    flat = flatten(settings, method.group)
    folder.write_settings(flat)
    logger.info("settings: %s", " ".join(f"{key}={value!r}" for key, value in flat.items()))
    folder.write_environment(describe_environment(device=settings.device, data_checksums=task.checksums()))
    arrays = task.initial_arrays(settings.seed)
    state = _Run(
        grid=MeteredGrid(grid), settings=settings, method=method, folder=folder, task=task, strategy=strategy,
        experiment=experiment, arrays=arrays, rows=rows, first_round=1, num_partitions=None,
    )  # fmt: skip
    if checkpoint:
        _take_back(state, checkpoint)
    if method.replicas:
        _open_journal(state, checkpoint)
    if not checkpoint:
        _evaluate(state, 0)
    return state


def _open_journal(state: _Run, checkpoint: Checkpoint | None) -> None:
    """Scalar-only methods: the journal, and the model that it starts from, lie in the run folder."""
    if checkpoint is None:
        state.folder.write_initial(state.arrays)
    state.strategy.open_journal(
        state.arrays,
        cast("TorchTask", state.task).trainable_names(),
        base=state.task.name,
        path=state.folder.journal_path,
        resumed_after=checkpoint.server_round if checkpoint else None,
    )


def _new_experiment(settings: Settings) -> str:
    # Two runs with the same settings are two experiments: neither may find the other's client states.
    return f"{settings.method}-{settings.task}-{settings.seed}-{secrets.token_hex(4)}"


def _load_checkpoint(folder: RunFolder, settings: Settings, method: Method) -> Checkpoint:
    checkpoint = folder.load_checkpoint()
    before, now = folder.read_settings(), flatten(settings, method.group)
    changed = sorted(
        (k for k in before.keys() | now.keys() if before.get(k) != now.get(k) and k not in MAY_CHANGE),
        key=lambda k: ("." in k, k),  # shared keys first: another method has other keys, too
    )
    if changed:
        raise CheckpointError(
            explain(
                f"resume of {folder.path}",
                expected="the settings of the run",
                got=", ".join(f"{k} = {now.get(k)!r} where it was {before.get(k)!r}" for k in changed[:5]),
                do="leave them as they were, or start a new run",
            )
        )
    total = settings.num_server_rounds
    if settings.lr_schedule == "cosine" and total != before["num-server-rounds"]:
        raise CheckpointError(
            explain(
                f"resume of {folder.path}",
                expected=f"num-server-rounds = {before['num-server-rounds']}, since the cosine schedule runs over it",
                got=str(total),
                do="keep the total, or use another schedule from the start",
            )
        )
    if checkpoint.server_round >= total:
        raise CheckpointError(
            explain(
                f"resume of {folder.path}",
                expected=f"more than {checkpoint.server_round} rounds, since those are done",
                got=f"num-server-rounds = {total} (it is the total)",
                do="raise --rounds",
            )
        )
    return checkpoint


def _take_back(state: _Run, checkpoint: Checkpoint) -> None:
    shapes = {name: (value.shape, value.dtype) for name, value in state.arrays.items()}
    for name, value in checkpoint.arrays.items():
        if shapes.pop(name, None) != (value.shape, value.dtype):
            shapes[name] = (value.shape, value.dtype)
            break
    if shapes:
        name = next(iter(shapes))
        raise CheckpointError(
            explain(
                f"resume of {state.folder.path}, tensor '{name}'",
                expected="the model of the checkpoint",
                got="another one from the task",
                do="resume with the task and model that the run was started with",
            )
        )
    state.folder.truncate_after(checkpoint.server_round)
    state.rows.extend(state.folder.read_metrics())
    state.arrays = {name: checkpoint.arrays[name] for name in state.arrays}
    state.first_round = checkpoint.server_round + 1
    state.num_partitions = checkpoint.num_partitions
    state.strategy.load_state(checkpoint.strategy_state, checkpoint.last_folded)
    state.strategy.load_state_arrays(checkpoint.strategy_arrays)
    logger.info("resumed after round %d of %s", checkpoint.server_round, state.folder.path)


def _one_round(state: _Run, server_round: int) -> None:
    settings, strategy = state.settings, state.strategy
    started = time.monotonic()
    state.grid.server_round = server_round
    lr = learning_rate(settings, server_round)
    config = ConfigRecord({"lr": lr, "run-dir": str(state.folder.path)})
    messages = strategy.configure_train(server_round, pack_arrays(state.arrays), config, state.grid)
    _check_partitions(state)
    while messages:
        for reply in exchange(state.grid, messages, settings.round_timeout):
            strategy.receive_message(reply)
        messages = strategy.take_resends()
    new = strategy.end_round()
    if new is not None:
        _check_model(new, server_round)
        state.arrays = new
    ledger = state.grid.take_rows(strategy)
    train_row = _train_row(state, server_round, lr, time.monotonic() - started, ledger)
    _append_ledger(state, ledger)
    _write(state, train_row)
    if _due(settings.evaluate_every, server_round, settings.num_server_rounds):
        _evaluate(state, server_round)
    if settings.clients_evaluate(server_round):
        _evaluate_on_clients(state, server_round, config)
    # Rows first: a resume cuts off those beyond the checkpoint, but could not make up for missing ones.
    state.folder.save_checkpoint(_checkpoint(state, server_round))
    _log_round(state, server_round, train_row)


def _check_partitions(state: _Run) -> None:
    now = state.strategy.roster.num_partitions
    if state.num_partitions is None:
        state.num_partitions = now
        logger.info("%s", state.task.summary(now))
        for how, names in _treatment(state).items():
            logger.info("%s: %s", how, ", ".join(names) or "nothing")
    elif now != state.num_partitions:
        raise CheckpointError(
            explain(
                f"resume of {state.folder.path}",
                expected=f"{state.num_partitions} clients as before",
                got=f"{now} clients (num-partitions of the nodes)",
                do="start as many clients as the run had",
            )
        )


def _treatment(state: _Run) -> dict[str, list[str]]:
    """Sort the tensors of the model into preconditioned and averaged; nothing for methods without curvature."""
    facts = next(iter(state.strategy.roster.facts.values()), None)
    if facts is None or not state.method.layout:
        return {}
    averaged = [name for name in state.arrays if name not in facts.preconditioned]
    return {"preconditioned": list(facts.preconditioned), "averaged": averaged}


def _check_model(arrays: Arrays, server_round: int) -> None:
    for name, value in arrays.items():
        if np.issubdtype(value.dtype, np.inexact) and not np.isfinite(value).all():
            raise RoundFailedError(
                explain(
                    f"round {server_round}, model tensor '{name}'",
                    expected="finite numbers after aggregation",
                    got="NaN or infinity",
                    do="lower the learning rate or raise the damping; --resume goes on from the last good round",
                )
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
    report = state.strategy.report
    row: dict[str, Any] = {
        "round": server_round, "phase": "train", "seconds": seconds, "sampled": report.sampled,
        "folded": report.folded, "refused": {str(p): reason[-1000:] for p, reason in report.refused.items()},
        "accepted": report.accepted, **sum_bytes(ledger), "lr": lr,
    }  # fmt: skip
    if server_round == 1:
        row |= _treatment(state)
    row |= report.values
    if report.notes:
        row["notes"] = report.notes
    if report.folded:
        row |= dict(state.strategy.train_metrics())
    return row


def _evaluate(state: _Run, server_round: int) -> None:
    if state.settings.evaluate_every == 0:
        return
    started = time.monotonic()
    data = state.task.server_data()
    metrics = {
        f"{split}-{name}": value
        for split, part in (("validation", data.validation), ("test", data.test))
        for name, value in state.task.evaluate(state.arrays, part).items()
    }
    row = {"round": server_round, "phase": "evaluate", "seconds": time.monotonic() - started, **metrics}
    _write(state, row)


def _evaluate_on_clients(state: _Run, server_round: int, config: ConfigRecord) -> None:
    started = time.monotonic()
    messages = state.strategy.configure_evaluate(server_round, pack_arrays(state.arrays), config, state.grid)
    replies = exchange(state.grid, messages, state.settings.round_timeout)
    metrics, num_examples = state.strategy.evaluation_results(replies)
    for partition, values in metrics.items():
        client_row = {"round": server_round, "partition": partition, "num-examples": num_examples[partition], **values}
        state.folder.append_clients(client_row)
    ledger = state.grid.take_rows(state.strategy)
    _append_ledger(state, ledger)
    seconds = time.monotonic() - started
    statistics = client_statistics(metrics, num_examples)
    row = {"round": server_round, "phase": "client-evaluate", "seconds": seconds, **sum_bytes(ledger), **statistics}
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
        last_folded=state.strategy.last_folded,
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
