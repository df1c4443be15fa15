"""Starting a run in any engine: run folder, log, progress, outcome."""

from __future__ import annotations

import json
import logging
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from fedapps.errors import FedAppsError, LaunchError
from fedapps.methods import get_method, resolve_settings
from fedapps.results.run_folder import RunFolder
from fedapps.results.summary import RunStatus, summarise
from fedapps.settings import Scalar, flatten
from fedapps.simulation.inprocess import run_inprocess
from fedapps.simulation.launcher import run_on_superlink, run_simulation

LOG = "flower.log"
"""The log of a run, in its folder."""

TAIL_SECONDS = 0.5
"""Seconds between two looks at the rows of a run that goes on."""


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
    workers: int | None = None  # worker processes (in-process: 0 = this process; simulation: None = one a core)
    superlink: str = ""  # name of a SuperLink connection, instead of an engine
    python_path: Sequence[Path] = ()  # folders from which tasks and methods of one's own are imported


@dataclass(frozen=True)
class Ended:
    """How a run ended."""

    status: RunStatus
    reason: str  # why, if it was not completed
    folder: Path | None  # its run folder; None if it lies on another machine


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
    settings = resolve_settings(run_config)
    config = flatten(settings, get_method(settings.method).group)
    if settings.resume:
        folder: RunFolder | None = RunFolder.open(Path(settings.run_dir))
    elif root is not None:
        folder = RunFolder.create(root.absolute(), method=settings.method, task=settings.task, seed=settings.seed)
    else:
        folder = None
    if folder is not None:
        config["run-dir"] = str(folder.path)
    tail = Tail(folder, on_row, skip=settings.resume)
    try:
        with _signals_interrupt():
            return _in_engine(config, how, folder, tail, settings.device)
    except KeyboardInterrupt:
        # The server's process was ended and left no word of its own.
        if folder is not None and folder.settings_path.exists():
            folder.write_summary(summarise(folder.read_metrics(), status=RunStatus.STOPPED, reason="interrupted"))
        raise


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


def _in_engine(config: dict[str, Scalar], how: Start, folder: RunFolder | None, tail: Tail, device: str) -> Ended:
    if how.superlink:
        return _on_superlink(config, how, folder, tail)
    if folder is None:
        raise LaunchError("a run on this machine needs a folder for its results: give one with --out")
    if how.engine is Engine.INPROCESS:
        return _inprocess(config, how, folder, tail)
    outcome = run_simulation(
        config,
        num_clients=how.num_clients,
        actors=how.workers or None,
        gpus_per_actor=_gpu_share(device, how),
        python_path=how.python_path,
        on_poll=tail.look,
        log_path=folder.path / LOG,
    )
    tail.look()
    return _ended(folder, RunStatus(outcome.status.value), outcome.details or outcome.log_tail)


def _gpu_share(device: str, how: Start) -> float:
    # Ray hides GPUs from an actor that asks for none.
    return 1.0 / max(1, how.workers or 1) if device.startswith("cuda") else 0.0


def _on_superlink(config: dict[str, Scalar], how: Start, folder: RunFolder | None, tail: Tail) -> Ended:
    outcome = run_on_superlink(
        config,
        connection=how.superlink,
        python_path=how.python_path,
        on_poll=tail.look,
        log_path=folder.path / LOG if folder else None,
    )
    tail.look()
    return _ended(folder, RunStatus(outcome.status.value), outcome.details or outcome.log_tail)


def _inprocess(config: dict[str, Scalar], how: Start, folder: RunFolder, tail: Tail) -> Ended:
    status, reason = RunStatus.COMPLETED, ""
    with logged_to(folder.path / LOG), tail.running():
        try:
            run_inprocess(config, how.num_clients, workers=how.workers or 0)
        except FedAppsError as error:
            status, reason = RunStatus.FAILED, f"{type(error).__name__}: {error}"
    return _ended(folder, status, reason)


def _ended(folder: RunFolder | None, status: RunStatus, reason: str) -> Ended:
    # The server's own word is the more precise one, but a server that was killed left none.
    summary = folder.read_summary() if folder is not None else None
    if summary is not None and status is not RunStatus.COMPLETED:
        reason = str(summary.get("reason", reason))
    return Ended(status, "" if status is RunStatus.COMPLETED else reason, folder.path if folder else None)


class Tail:
    """Reads the rows that a run adds to ``metrics.jsonl``.

    Args:
        folder: The run folder; None reads nothing.
        on_row: Called with every new row.
        skip: Leave out the rows that are there already.
    """

    def __init__(self, folder: RunFolder | None, on_row: OnRow | None, *, skip: bool) -> None:
        self._path = folder.metrics_path if folder is not None and on_row is not None else None
        self._on_row = on_row
        self._offset = self._path.stat().st_size if skip and self._path is not None and self._path.exists() else 0

    def look(self) -> None:
        """Read the new rows."""
        if self._path is None or self._on_row is None or not self._path.exists():
            return
        # A resume cuts the rows of an unfinished round off first.
        self._offset = min(self._offset, self._path.stat().st_size)
        with self._path.open("rb") as file:
            file.seek(self._offset)
            lines = file.read().split(b"\n")
        for line in lines[:-1]:
            self._offset += len(line) + 1
            if line.strip():
                self._on_row(json.loads(line))

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
