"""Submit, follow and stop a run through Flower's own command line.

The command line is Flower's public interface to a SuperLink. Each call starts a Python process of
about a second, so a run is followed by one long ``flwr log --stream``, which ends with the run;
the status is asked for only then.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedapps.errors import LaunchError
from fedapps.simulation.flower_environment import flower_program

_CALL_SECONDS = 120.0
_LAST_LINES = 15


@dataclass(frozen=True)
class RunInfo:
    """What the SuperLink says about a run."""

    status: str  # "pending", "starting", "running" or "finished:<how>"
    details: str  # the exception's text where there is one

    @property
    def finished(self) -> bool:
        """Whether the run is over."""
        return self.status.startswith("finished")

    @property
    def ending(self) -> str:
        """How the run ended: ``completed``, ``failed`` or ``stopped``."""
        return self.status.partition(":")[2]


class FlowerCli:
    """Flower's command line, aimed at one SuperLink.

    Args:
        connection: Name of the connection in the Flower configuration.
        environment: Variables that the commands run with, ``FLWR_HOME`` among them.
    """

    def __init__(self, connection: str, environment: Mapping[str, str]) -> None:
        self._connection = connection
        self._environment = {**environment, "PYTHONUNBUFFERED": "1"}

    def submit(self, app_folder: Path, federation_config: str = "") -> str:
        """Submit an app.

        Args:
            app_folder: Folder with its ``pyproject.toml``.
            federation_config: Pairs for ``--federation-config``.

        Returns:
            The run id.

        Raises:
            LaunchError: Flower refused the app, or the SuperLink cannot be reached.
        """
        options = ["--federation-config", federation_config] if federation_config else []
        process = self._start("run", str(app_folder), self._connection, *options)
        try:
            return str(_answer("run", process)["run-id"])
        except KeyboardInterrupt:
            # The request may have arrived: learn the run's id, lest it go on unseen.
            with suppress(LaunchError):
                self.stop(str(_answer("run", process)["run-id"]))
            raise

    def info(self, run_id: str) -> RunInfo:
        """Ask for the status of a run.

        Returns:
            Status and details.

        Raises:
            LaunchError: The SuperLink cannot be reached or does not know the run.
        """
        answer = _answer("list", self._start("list", self._connection, "--run-id", run_id))
        run = answer["runs"][0]
        details = run["status-details"]
        return RunInfo(run["status"], "" if details == "N/A" else details)

    def stop(self, run_id: str) -> None:
        """Stop a run.

        Raises:
            LaunchError: The SuperLink cannot be reached, or the run is over.
        """
        _answer("stop", self._start("stop", run_id, self._connection))

    @contextmanager
    def follow(self, run_id: str, log_path: Path, offset: int = 0) -> Iterator[subprocess.Popen[bytes]]:
        """Write the log of a run, from its beginning, to a file while it grows.

        Args:
            run_id: The run.
            log_path: The file.
            offset: Bytes at the file's beginning that stay; what follows them is replaced.

        Yields:
            The process that writes; it ends with the run, or when the connection breaks.
        """
        with log_path.open("ab") as log:
            log.truncate(offset)
            process = subprocess.Popen(
                [flower_program("flwr"), "log", run_id, self._connection, "--stream"],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            yield process
        finally:
            process.kill()
            process.wait()

    def _start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [flower_program("flwr"), *arguments, "--format", "json"],
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for us alone.
        )


def _answer(command: str, process: subprocess.Popen[str]) -> dict[str, Any]:
    """Wait for a command and return the JSON object that it printed."""
    where = f"command 'flwr {command}'"
    try:
        out, err = process.communicate(timeout=_CALL_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        raise LaunchError(
            where,
            expected=f"an answer within {_CALL_SECONDS:.0f} s",
            got="none",
            do="check that the SuperLink can be reached",
        ) from None
    answer: dict[str, Any] = {}
    with suppress(json.JSONDecodeError):
        answer = json.loads(out)
    if answer.get("success"):
        return answer
    text = answer.get("error-message") or f"{out}\n{err}"
    raise LaunchError(
        where,
        expected="success",
        got=f"exit code {process.returncode}",
        do="Flower says:\n" + "\n".join(text.strip().splitlines()[-_LAST_LINES:]),
    )
