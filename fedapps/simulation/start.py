"""Starting a run in any engine: run folder, log, progress, outcome."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from fedapps.compute import choose_device
from fedapps.errors import CheckpointError, FedAppsError, LaunchError, SettingsError
from fedapps.methods import get_method, resolve_settings
from fedapps.results.log_copy import FolderCopy
from fedapps.results.run_folder import RunFolder
from fedapps.results.storage import from_json
from fedapps.results.summary import RunStatus, summarise
from fedapps.server_apps.resume import load_checkpoint
from fedapps.settings import AUTO, Scalar, Settings, default_config, flatten
from fedapps.simulation.inprocess import run_inprocess
from fedapps.simulation.launcher import run_on_superlink, run_simulation
from fedapps.simulation.own_modules import own_modules
from fedapps.tasks.from_settings import load_task_of

LOG = "flower.log"
"""The log of a run, in its folder."""

TAIL_SECONDS = 0.5
"""Seconds between two looks at the rows of a run that goes on."""


COLLECT_MB = 64.0
"""What ``collect-mb`` is where a command follows a run on a SuperLink and nothing else is set."""

STILL_BUSY = "{} was still busy after the last round, and was ended"


class Engine(StrEnum):
    """Where clients run."""

    INPROCESS = "inprocess"
    """In this process or in worker processes of it; no Ray."""
    SIMULATION = "simulation"
    """Flower's simulation engine: a local SuperLink and Ray actors."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """How to start a run."""

    engine: Engine = Engine.SIMULATION  # where clients run
    num_clients: int = 10  # number of clients; a SuperLink's nodes say it themselves
    # Worker processes. Simulation: None = one a core. In-process: 0 = this process, whose clients no time-out can end;
    # None = one where round-timeout is set, else 0.
    workers: int | None = None
    superlink: str = ""  # name of a SuperLink connection, instead of an engine
    python_path: Sequence[Path] = ()  # folders from which tasks and methods of one's own are imported


@dataclass(frozen=True)
class Ended:
    """How a run ended."""

    status: RunStatus
    reason: str  # why, if it was not completed
    folder: Path | None  # its run folder; None if it lies on another machine
    note: str = ""  # what else there is to say


OnRow = Callable[[dict[str, Any]], None]


def start(run_config: Mapping[str, Any], how: Start, root: Path | None, on_row: OnRow | None = None) -> Ended:
    """Run a method from its settings to its results.

    SIGTERM and a hang-up end it as Ctrl-C does.

    Args:
        run_config: Flat kebab-case keys; with ``resume`` their ``run-dir`` is gone on with.
        how: How to start it.
        root: Folder of all runs; None leaves the place of the run folder to the server (a SuperLink elsewhere).
        on_row: Called with every new row of ``metrics.jsonl`` while the run goes on.

    Returns:
        How it ended.

    Raises:
        SettingsError: A setting is wrong; nothing was started.
        LaunchError: The engine could not be started, or went away.
    """
    if how.superlink:
        run_config = on_superlink(run_config)
    settings = resolve_settings(run_config)
    if how.superlink and settings.client_evaluation == "every" and run_config.get("client-evaluation", AUTO) == AUTO:
        # It starts a process on every node, which may cost as much as a round: not every round unless that is asked for.
        settings = resolve_settings({**run_config, "client-evaluation": "last"})
    if settings.partition == "local" and not how.superlink:
        raise SettingsError(
            "setting 'partition'",
            expected="a split of the data that are here, since all clients run here",
            got="'local', which is for nodes of a SuperLink with data of their own",
            do="leave it out, or choose a connection with --superlink",
        )
    config = flatten(settings, get_method(settings.method).group)
    folder = RunFolder.open(Path(settings.run_dir)) if settings.resume else None
    if not how.superlink:
        _check_here(settings, how, folder)
    before, done = None, None
    if folder is not None:
        config["run-dir"] = _place_of(folder, how)
        before = folder.read_summary()
        is_copy = config["run-dir"] != str(folder.path)  # Its server says after which round it goes on.
        done = 0 if is_copy else folder.load_checkpoint(arrays=False).server_round
    elif root is not None:
        folder = RunFolder.create(root.absolute(), method=settings.method, task=settings.task, seed=settings.seed)
        config["run-dir"] = str(folder.path)
    tail = Tail(folder, on_row, after=done)
    try:
        with _signals_interrupt():
            return _in_engine(config, how, folder, tail, before)
    except KeyboardInterrupt:
        if folder is not None:
            _note_stop(folder)
        raise
    except LaunchError as error:
        raise LaunchError(f"{error}{_how_to_go_on(folder, how)}") from error
    finally:
        if folder is not None and not any(folder.path.iterdir()):
            folder.path.rmdir()


def on_superlink(run_config: Mapping[str, Any]) -> dict[str, Any]:
    """Give what settings are on a SuperLink where nothing else is said: nodes have data of their own, and results come here."""
    own = {"partition": "local"} if run_config.get("partition", AUTO) == AUTO else {}
    return {"collect-mb": COLLECT_MB, **run_config, **own}


def _check_here(settings: Settings, how: Start, folder: RunFolder | None) -> None:
    """Refuse what cannot work on this machine, before anything is made or started."""
    if settings.device != AUTO:
        choose_device(settings.device)
    task = load_task_of(settings)
    task.client_data(0, how.num_clients)  # It says what is wrong with the data, or with so many clients.
    if folder is not None:
        load_checkpoint(folder, settings, get_method(settings.method), task, arrays=False)
        with folder.locked():
            pass  # The server app takes the lock, in a process of its own.


def _note_stop(folder: RunFolder) -> None:
    """Note an interrupt where the server's process was ended and left no word of its own."""
    if folder.settings_path.exists() and folder.read_summary() is None:
        with suppress(CheckpointError), folder.locked():
            folder.write_summary(summarise(folder.read_metrics(), status=RunStatus.STOPPED, reason="interrupted"))


def _place_of(folder: RunFolder, how: Start) -> str:
    """Give the path of a run folder as its server knows it: that of a copy is in its settings."""
    named = str(folder.read_settings().get("run-dir", "")) if how.superlink else ""
    return named or str(folder.path)


def _how_to_go_on(folder: RunFolder | None, how: Start) -> str:
    if folder is None or not (folder.read_num_clients() or any("lr" in row for row in folder.read_metrics())):
        return ""
    there = f" --superlink {how.superlink}" if how.superlink else ""
    return f"\nits last checkpoint is whole; go on with: fedapps run --resume {folder.path}{there}"


@contextmanager
def _signals_interrupt() -> Iterator[None]:
    """Raise KeyboardInterrupt in the body at SIGTERM and SIGHUP; what is ignored, as a hang-up under ``nohup``, stays so."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = {}
    if threading.current_thread() is threading.main_thread():  # Python lets no other one handle signals.
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is signal.SIG_DFL:
                before[number] = signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


Summary = dict[str, Any] | None


def _in_engine(config: dict[str, Scalar], how: Start, folder: RunFolder | None, tail: Tail, before: Summary) -> Ended:
    """Run; `before` is the summary of the part that is gone on with."""
    if how.superlink:
        return _on_superlink(config, how, folder, tail, before)
    if folder is None:
        raise LaunchError("a run on this machine needs a folder for its results: give one with --out")
    if how.engine is Engine.INPROCESS:
        return _inprocess(config, how, folder, tail, before)
    outcome = run_simulation(
        config,
        num_clients=how.num_clients,
        actors=how.workers or None,
        gpus_per_actor=_gpu_share(str(config["device"]), how),
        python_path=how.python_path,
        on_poll=tail.look,
        ending=lambda: (_word(folder, before) or {}).get("status"),
        log_path=folder.path / LOG,
    )
    tail.look()
    note = STILL_BUSY.format("a client") if outcome.busy else ""
    return _ended(folder, RunStatus(outcome.status.value), outcome.details or outcome.log_tail, before, how, note)


def _gpu_share(device: str, how: Start) -> float:
    # Ray hides GPUs from an actor that asks for none.
    return 1.0 / max(1, how.workers or 1) if device.startswith("cuda") else 0.0


def _on_superlink(
    config: dict[str, Scalar], how: Start, folder: RunFolder | None, tail: Tail, before: Summary
) -> Ended:
    modules = own_modules(config, how.python_path)
    if folder is None:
        outcome = run_on_superlink(config, connection=how.superlink, python_path=how.python_path, modules=modules)
        return _ended(None, RunStatus(outcome.status.value), outcome.details or outcome.log_tail, before, how)
    copy = FolderCopy(folder, folder.path / LOG, heading="".join(f"{module.told()}\n" for module in modules))

    def look() -> None:
        tail.after = tail.after if copy.after is None else copy.after
        tail.look()

    with folder.followed():
        outcome = run_on_superlink(
            config,
            connection=how.superlink,
            python_path=how.python_path,
            on_poll=look,
            log_path=folder.path / LOG,
            copy=copy,
            modules=modules,
        )
    status, reason = RunStatus(outcome.status.value), outcome.details or outcome.log_tail
    return _ended(folder, status, reason, before, how, copy.told())


def _inprocess(config: dict[str, Scalar], how: Start, folder: RunFolder, tail: Tail, before: Summary) -> Ended:
    status, reason, busy = RunStatus.COMPLETED, "", []
    waits = config["round-timeout"] != default_config({})["round-timeout"]
    workers = int(waits) if how.workers is None else how.workers
    with logged_to(folder.path / LOG), tail.running():
        try:
            busy = run_inprocess(config, how.num_clients, workers=workers)
        except FedAppsError as error:
            status, reason = RunStatus.FAILED, f"{type(error).__name__}: {error}"
    clients = "client " + ", ".join(map(str, busy))
    return _ended(folder, status, reason, before, how, STILL_BUSY.format(clients) if busy else "")


def _word(folder: RunFolder, before: Summary) -> Summary:
    """Give the server's own word on how the run ended: its summary, unless that is of an earlier part of the run."""
    summary = folder.read_summary()
    return None if summary == before else summary


def _ended(
    folder: RunFolder | None, status: RunStatus, reason: str, before: Summary, how: Start, note: str = ""
) -> Ended:
    if status is RunStatus.COMPLETED:
        return Ended(status, "", folder.path if folder else None, note)
    # The server's own word is the more precise one, but a server that was killed left none.
    word = _word(folder, before) if folder is not None else None
    reason = str(word.get("reason", reason)) if word else reason + _how_to_go_on(folder, how)
    return Ended(status, reason, folder.path if folder else None, note)


class Tail:
    """Reads the rows that a run adds to ``metrics.jsonl``.

    Args:
        folder: The run folder; None reads nothing.
        on_row: Called with every new row.
        after: The round after which a run is gone on with. A resume writes the file anew, without later rows and without
            the torn line that a kill leaves; until then it holds nothing new.
    """

    def __init__(self, folder: RunFolder | None, on_row: OnRow | None, *, after: int | None = None) -> None:
        self._path = folder.metrics_path if folder is not None and on_row is not None else None
        self._on_row = on_row
        self.after = -1 if after is None else after
        self._offset = 0
        self._old = self._path.stat().st_ino if after is not None and self._path and self._path.exists() else None

    def look(self) -> None:
        """Read the new rows."""
        if self._path is None or self._on_row is None or not self._path.exists():
            return
        with self._path.open("rb") as file:
            if os.fstat(file.fileno()).st_ino == self._old:
                return
            file.seek(self._offset)
            lines = file.read().split(b"\n")
        for line in lines[:-1]:
            self._offset += len(line) + 1
            row = from_json(line.decode())
            if row["round"] > self.after:
                self._on_row(row)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Look again and again while the body runs.

        Yields:
            Nothing.
        """
        over = threading.Event()

        def watch() -> None:
            while not over.wait(TAIL_SECONDS):
                self.look()

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            self.look()


@contextmanager
def logged_to(path: Path) -> Iterator[None]:
    """Send Flower's log to a file instead of the terminal.

    Args:
        path: The file; lines are added to it.

    Yields:
        Nothing; the log's own handlers are put back at the end.
    """
    logger = logging.getLogger("flwr")
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    before = list(logger.handlers)
    logger.handlers[:] = [handler]
    try:
        yield
    finally:
        logger.handlers[:] = before
        handler.close()
