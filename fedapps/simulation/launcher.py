"""Run the app through Flower: in its simulation engine, or on a SuperLink that is there already.

``flwr run`` answers 0 even for a run that failed; here the outcome is what the SuperLink says.
"""

from __future__ import annotations

import importlib.util
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from subprocess import TimeoutExpired

from fedapps.errors import LaunchError
from fedapps.results.log_copy import FolderCopy
from fedapps.settings import Scalar
from fedapps.simulation.app_folder import Components, write_app_folder
from fedapps.simulation.connection import read_connection
from fedapps.simulation.flower_cli import FlowerCli, RunInfo
from fedapps.simulation.flower_environment import flower_environment, log_tail
from fedapps.simulation.own_modules import OwnModule
from fedapps.simulation.processes import CONNECTION, SuperLink

_POLL_SECONDS = 1.0
_PATIENCE_SECONDS = 60.0  # how long a SuperLink may be out of reach
_GRACE_SECONDS = 15.0  # how long the engine may take to end once the server app has ended

BUSY = "a client was still busy"
"""Details of a run that is over although its engine has not ended."""

Poll = Callable[[], None]


class RunStatus(StrEnum):
    """How a run ended."""

    COMPLETED = "completed"
    """The server app returned."""
    FAILED = "failed"
    """The server app raised, or its process ended early."""
    STOPPED = "stopped"
    """Somebody stopped the run."""


@dataclass(frozen=True)
class Outcome:
    """The end of a run."""

    status: RunStatus
    run_id: str  # Flower's
    details: str  # the exception's text of a run that failed, else ""
    log_tail: str  # last lines of the run's log, without colours
    busy: bool = False  # whether a client was still busy when the server app had ended, and was ended


def run_simulation(
    run_config: Mapping[str, Scalar],
    *,
    num_clients: int,
    actors: int | None = None,
    gpus_per_actor: float = 0.0,
    python_path: Sequence[Path] = (),
    environment: Mapping[str, str] | None = None,
    on_poll: Poll | None = None,
    ending: Callable[[], str | None] | None = None,
    log_path: Path | None = None,
    components: Components | None = None,
) -> Outcome:
    """Run the app in Flower's simulation engine, on a SuperLink of its own.

    No process and no temporary file is left, however this ends; Ctrl-C ends the run.

    Args:
        run_config: Every setting with its value.
        num_clients: Number of simulated nodes.
        actors: Number of worker processes; by default the cores at hand, at most `num_clients`.
        gpus_per_actor: Share of a GPU that each of them gets; without one it sees no GPU.
        python_path: Folders from which tasks are imported.
        environment: Further variables for server app and workers.
        on_poll: Called about once a second while the run goes on.
        ending: How the server app has ended (a `RunStatus`), or None while it goes on. The engine itself ends only with
            the last client, so that one that hangs would keep it for ever.
        log_path: The run's log, added to the file while it grows; that of the SuperLink is
            ``superlink.log`` beside it.
        components: The two apps; by default those of this package.

    Returns:
        How the run ended.

    Raises:
        LaunchError: Ray is not installed, the run could not be started, or its SuperLink ended.
    """
    _require_ray()
    federation = _federation_config(num_clients, actors, gpus_per_actor)
    superlink = SuperLink(
        simulation=True,
        python_path=python_path,
        environment=environment,
        log_path=log_path.with_name("superlink.log") if log_path else None,
    )
    with superlink:
        app_folder = superlink.folder / "app"
        write_app_folder(app_folder, run_config, components=components)
        cli = FlowerCli(CONNECTION, superlink.environment)
        log_path = log_path or superlink.folder / "run.log"
        try:
            run_id = cli.submit(app_folder, federation)
            info = _watch(cli, run_id, log_path, on_poll, superlink.check, ending)
        except LaunchError:
            superlink.check()  # Where the SuperLink has ended, that is the cause to name.
            raise
        return _outcome(run_id, info, log_path)


def run_on_superlink(
    run_config: Mapping[str, Scalar],
    *,
    connection: str,
    python_path: Sequence[Path] = (),
    environment: Mapping[str, str] | None = None,
    on_poll: Poll | None = None,
    log_path: Path | None = None,
    copy: FolderCopy | None = None,
    modules: Sequence[OwnModule] = (),
    components: Components | None = None,
) -> Outcome:
    """Run the app on a SuperLink named in the user's Flower configuration.

    Ctrl-C stops the run, as does any other exception in here.

    Args:
        run_config: Every setting with its value.
        connection: Name of the connection in ``$FLWR_HOME/config.toml``.
        python_path: Folders in which Flower's command line finds the components.
        environment: Further variables for Flower's command line, for example ``FLWR_HOME``.
        on_poll: Called about once a second while the run goes on.
        log_path: The run's log, added to the file while it grows.
        copy: Takes what the server app sends of its run folder out of the log.
        modules: The user's own modules, which server and nodes get with the run.
        components: The two apps; by default those of this package.

    Returns:
        How the run ended.

    Raises:
        LaunchError: No such connection, or the SuperLink refused the run or stayed out of reach.
    """
    variables = flower_environment(python_path, environment)
    read_connection(connection, variables)
    with tempfile.TemporaryDirectory(prefix="fedapps-app-") as folder:
        write_app_folder(Path(folder, "app"), run_config, components=components, modules=modules)
        cli = FlowerCli(connection, variables)
        log_path = log_path or Path(folder, "run.log")
        stream = log_path if copy is None else Path(folder, "stream")

        def look() -> None:
            if copy is not None:
                copy.look(stream)
            if on_poll is not None:
                on_poll()

        run_id = cli.submit(Path(folder, "app"))
        try:
            info = _watch(cli, run_id, stream, look, check=None, on_start=copy.restart if copy else None)
            look()
            if copy is not None and copy.lacks_records:
                _watch(cli, run_id, stream, look, check=None, on_start=copy.restart)
                look()
        except BaseException:
            with suppress(LaunchError):
                cli.stop(run_id)
            raise
        return _outcome(run_id, info, log_path)


def _watch(
    cli: FlowerCli,
    run_id: str,
    log_path: Path,
    on_poll: Poll | None,
    check: Poll | None,
    ending: Callable[[], str | None] | None = None,
    on_start: Poll | None = None,
) -> RunInfo:
    """Follow a run to its end; `check` raises when waiting has no point any more, `on_start` hears that the log begins anew."""
    lost_since: float | None = None
    ended_since: float | None = None
    earlier = log_path.stat().st_size if log_path.exists() else 0  # of the run that is resumed
    while True:
        if on_start is not None:
            on_start()
        with cli.follow(run_id, log_path, earlier) as stream:
            while stream.poll() is None:
                with suppress(TimeoutExpired):
                    stream.wait(_POLL_SECONDS)
                if check is not None:
                    check()
                if on_poll is not None:
                    on_poll()
                if ending is not None and (status := ending()) is not None:
                    ended_since = ended_since or time.monotonic()
                    if time.monotonic() - ended_since > _GRACE_SECONDS:
                        return RunInfo(f"finished:{status}", BUSY)
        try:
            info = cli.info(run_id)
        except LaunchError:
            # Patience begins when contact is lost, however long the run has gone on by then.
            lost_since = lost_since or time.monotonic()
            if time.monotonic() - lost_since > _PATIENCE_SECONDS:
                raise
        else:
            if info.finished:
                return info
            lost_since = None
        time.sleep(_POLL_SECONDS)


def _outcome(run_id: str, info: RunInfo, log_path: Path) -> Outcome:
    busy = info.details == BUSY
    return Outcome(RunStatus(info.ending), run_id, "" if busy else info.details, log_tail(log_path), busy)


def _require_ray() -> None:
    if importlib.util.find_spec("ray") is None:
        raise LaunchError(
            "simulation engine",
            expected="an installed Ray",
            got="no package 'ray'",
            do="install it with: pip install 'fedapps[simulation]'",
        )


def _federation_config(num_clients: int, actors: int | None, gpus_per_actor: float) -> str:
    if actors is None:
        actors = len(os.sched_getaffinity(0))
    pairs = {
        "num-supernodes": num_clients,
        "client-resources-num-cpus": 1,
        "init-args-num-cpus": min(actors, num_clients),
    }
    text = " ".join(f"{key}={value}" for key, value in pairs.items())
    return f"{text} client-resources-num-gpus={gpus_per_actor}" if gpus_per_actor else text
