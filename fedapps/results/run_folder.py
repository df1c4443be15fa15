"""The run folder: everything about one run, and everything needed to resume it.

===========================  ========================================================================================
``settings.toml``            the resolved settings
``environment.json``         versions, processor, device, commit, checksums of the data; changes that a resume accepted
``metrics.jsonl``            a row a round and phase
``ledger.jsonl``             a row a message: bytes by record
``clients.jsonl``            a row an evaluation of a client: round, partition, number of examples, metrics; and a row
                             for what each node with data of its own told: name, key, examples, features, classes
``summary.json``             status, final and best metrics, totals
``model.safetensors``        the final model
``best.safetensors``         the model of the best validation, if there is any; in scalar-only methods the journal leads to it
``initial.safetensors``      scalar-only methods: the model before round 1, unless it is a published one
``journal.jsonl``            scalar-only methods: the aggregated scalars of every round, from which the model can be rebuilt
``.lock``                    held, by the kernel, by the process that works on the run
``.followed``                held likewise by the command that follows a run on a SuperLink, while it does
``checkpoint/``              the last checkpoint, with ``checkpoint.previous/``; without tensors in scalar-only methods
===========================  ========================================================================================

Rows of ``metrics.jsonl`` have ``round``, ``phase`` and ``seconds``, and by phase

* ``start-up``: the task is read, the clients' processes start and are greeted; once a start or resume, before its first round;
* ``train``: ``sampled``, ``folded`` (partitions), ``refused`` (partition -> reason), ``payload-down``, ``payload-up``,
  ``wire-down``, ``wire-up`` (bytes), ``lr``, ``train-loss``, and numbers of the method such as ``lambda`` and ``gamma``;
* ``evaluate`` (on the server; round 0 is the initial model): ``validation-loss``, ``validation-accuracy``,
  ``test-loss``, ``test-accuracy``;
* ``client-evaluate``: ``client-test-accuracy`` (mean over clients) and the same with ``-weighted``, ``-std``,
  ``-worst-decile``; personalised methods: ``client-personal-test-accuracy`` and ``client-global-test-accuracy``.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

import numpy as np

from fedapps.errors import CheckpointError
from fedapps.results import checkpoint as checkpoints
from fedapps.results.checkpoint import Checkpoint
from fedapps.results.settings_file import from_toml, to_toml
from fedapps.results.storage import (
    Row,
    append_row,
    from_json,
    load_arrays,
    read_as,
    read_lines,
    save_arrays,
    sync_file,
    to_json,
    write_atomically,
)
from fedapps.results.summary import RunStatus
from fedapps.settings import Scalar

_LONGEST_PART = 60
_FOLLOWED = ".followed"


@dataclass(frozen=True)
class RunFolder:
    """One run on disk."""

    path: Path  # absolute path: Flower runs the app in another working directory

    def __post_init__(self) -> None:
        if not self.path.is_absolute():
            raise CheckpointError(
                "run folder",
                expected="an absolute path",
                got=repr(str(self.path)),
                do="resolve it where it is given: Flower runs the app in another working directory",
            )

    @classmethod
    def create(cls, root: Path, *, method: str, task: str, seed: int, now: datetime | None = None) -> Self:
        """Make the folder of a new run, ``<root>/<utc-time>-<method>-<task>-<seed>``.

        Args:
            root: Absolute path of the folder of all runs; made if missing.
            method: Value of the setting ``method``.
            task: Value of the setting ``task``.
            seed: Value of the setting ``seed``.
            now: Time in the name; None for the present.

        Returns:
            The folder, new and empty; a name that is taken gets ``-2``, ``-3``, ...
        """
        time = (now or datetime.now(UTC)).astimezone(UTC)
        name = f"{time:%Y%m%dT%H%M%SZ}-{_file_safe(method)}-{_file_safe(task)}-{seed}"
        number = 1
        while True:
            folder = cls(root / (name if number == 1 else f"{name}-{number}"))
            try:
                folder.path.mkdir(parents=True)
            except FileExistsError:
                number += 1
            else:
                return folder

    @classmethod
    def claim(cls, path: Path) -> Self:
        """Use a given folder for a new run.

        Args:
            path: Absolute path; made if missing.

        Raises:
            CheckpointError: It holds a run already, or is a file.
        """
        folder = cls(path)
        if folder.settings_path.exists() or (path.exists() and not path.is_dir()):
            raise CheckpointError(
                f"run folder {path}",
                expected="a new or empty folder",
                got="a file" if path.is_file() else "a folder that holds a run",
                do="choose another one, or resume that run",
            )
        path.mkdir(parents=True, exist_ok=True)
        return folder

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open the folder of a run that was started.

        Raises:
            CheckpointError: It is not a run folder.
        """
        folder = cls(path.absolute())
        if not folder.settings_path.is_file():
            raise CheckpointError(
                f"run folder {path}",
                expected="a folder with settings.toml",
                got="a folder without it" if path.is_dir() else "no such folder",
                do="give the folder of a run, which has the time of its start in its name",
            )
        return folder

    @property
    def settings_path(self) -> Path:
        """Path of ``settings.toml``."""
        return self.path / "settings.toml"

    @property
    def environment_path(self) -> Path:
        """Path of ``environment.json``."""
        return self.path / "environment.json"

    @property
    def metrics_path(self) -> Path:
        """Path of ``metrics.jsonl``."""
        return self.path / "metrics.jsonl"

    @property
    def ledger_path(self) -> Path:
        """Path of ``ledger.jsonl``."""
        return self.path / "ledger.jsonl"

    @property
    def clients_path(self) -> Path:
        """Path of ``clients.jsonl``."""
        return self.path / "clients.jsonl"

    @property
    def summary_path(self) -> Path:
        """Path of ``summary.json``."""
        return self.path / "summary.json"

    @property
    def model_path(self) -> Path:
        """Path of ``model.safetensors``."""
        return self.path / "model.safetensors"

    @property
    def initial_path(self) -> Path:
        """Path of ``initial.safetensors``."""
        return self.path / "initial.safetensors"

    @property
    def journal_path(self) -> Path:
        """Path of ``journal.jsonl``."""
        return self.path / "journal.jsonl"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep others from working on the run; the kernel gives the lock back when this process ends, however it does.

        Yields:
            Nothing.

        Raises:
            CheckpointError: Another process works on it.
        """
        descriptor = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise CheckpointError(
                    f"run folder {self.path}",
                    expected="a run that no process works on",
                    got=f"one that process {os.read(descriptor, 20).decode() or 'of another machine'} works on",
                    do="wait for its end, or end it",
                ) from None
            os.ftruncate(descriptor, 0)
            os.write(descriptor, str(os.getpid()).encode())
            yield
        finally:
            os.close(descriptor)

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Show a server app that has this folder before it, too, that it need not send its results.

        Yields:
            Nothing.
        """
        path = self.path / _FOLLOWED
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            yield
        finally:
            path.unlink(missing_ok=True)
            os.close(descriptor)

    def is_followed(self) -> bool:
        """Tell whether the folder is here, can be written, and is held by a command that follows the run."""
        try:
            descriptor = os.open(self.path / _FOLLOWED, os.O_RDONLY)
        except OSError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return os.access(self.path, os.W_OK)
        else:
            return False  # Its command was killed.
        finally:
            os.close(descriptor)

    def write_settings(self, settings: Mapping[str, Scalar]) -> None:
        """Write the resolved settings.

        Args:
            settings: Dotted kebab-case key -> value.
        """
        write_atomically(self.settings_path, to_toml(settings))

    def read_settings(self) -> dict[str, Scalar]:
        """Read the settings.

        Returns:
            What `write_settings` was given.

        Raises:
            CheckpointError: The file is damaged.
        """
        return read_as(self.settings_path, "settings as TOML", _settings)

    def write_environment(self, environment: Mapping[str, Any]) -> None:
        """Write what the run runs on.

        Args:
            environment: What `fedapps.results.environment.describe_environment` gives.
        """
        write_atomically(self.environment_path, to_json(environment, indent=2) + "\n")

    def read_environment(self) -> dict[str, Any]:
        """Read what the run ran on.

        Returns:
            What `write_environment` was given.
        """
        return read_as(self.environment_path, "a JSON object", lambda text: dict(from_json(text)))

    def append_metrics(self, row: Row) -> None:
        """Add a row to ``metrics.jsonl``.

        Args:
            row: The row, with ``round`` and ``phase``.
        """
        append_row(self.metrics_path, row)

    def read_metrics(self) -> list[Row]:
        """Read ``metrics.jsonl``.

        Returns:
            Its rows; none if there is no file yet. A torn last line is left out.
        """
        return [row for _, row in read_lines(self.metrics_path, ("round", "phase"))]

    def append_ledger(self, row: Row) -> None:
        """Add a row to ``ledger.jsonl``.

        Args:
            row: What `fedapps.results.ledger.message_row` gives.
        """
        append_row(self.ledger_path, row)

    def read_ledger(self) -> list[Row]:
        """Read ``ledger.jsonl``.

        Returns:
            Its rows; none if there is no file yet. A torn last line is left out.
        """
        return [row for _, row in read_lines(self.ledger_path)]

    def append_clients(self, row: Row) -> None:
        """Add a row to ``clients.jsonl``.

        Args:
            row: ``round``, ``partition``, ``num-examples`` and the metrics of one client.
        """
        append_row(self.clients_path, row)

    def read_clients(self) -> list[Row]:
        """Read the evaluations in ``clients.jsonl``.

        Returns:
            Their rows; none if no client evaluated. A torn last line is left out.
        """
        return [row for row in self._client_rows() if "node" not in row]

    def read_nodes(self) -> list[Row]:
        """Read in ``clients.jsonl`` what nodes with data of their own told of themselves.

        Returns:
            Their rows, with ``node``, its name; none where the run has partitions.
        """
        return [row for row in self._client_rows() if "node" in row]

    def _client_rows(self) -> list[Row]:
        return [row for _, row in read_lines(self.clients_path, ("round", "partition", "num-examples"))]

    def truncate_after(self, server_round: int) -> None:
        """Go back to the end of a round: remove the rows of later ones, and a torn last line.

        What stays keeps its bytes. ``summary.json`` goes too: the run has not ended any more.

        Args:
            server_round: The round from which the run goes on, of its checkpoint.
        """
        files = (self.metrics_path, self.ledger_path, self.clients_path, self.journal_path)
        kept = {
            path: _lines_until(path, server_round) for path in files if path.exists()
        }  # All are read before one is cut.
        for path, lines in kept.items():
            write_atomically(path, lines)
        self.summary_path.unlink(missing_ok=True)

    def journal_sum(self, server_round: int) -> str:
        """Give the SHA-256 of the journal up to a round; that of nothing where there is no journal.

        Args:
            server_round: The last round that counts.
        """
        return hashlib.sha256(_lines_until(self.journal_path, server_round).encode()).hexdigest()

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write ``summary.json``.

        Args:
            summary: What `fedapps.results.summary.summarise` gives.
        """
        write_atomically(self.summary_path, to_json(summary, indent=2) + "\n")

    def read_summary(self) -> dict[str, Any] | None:
        """Read ``summary.json``.

        Returns:
            The summary; None while the run goes on, or if it was killed.

        Raises:
            CheckpointError: The file is damaged.
        """
        return read_as(self.summary_path, "a summary as JSON", _summary) if self.summary_path.exists() else None

    def write_model(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Write the model.

        Args:
            arrays: Name -> array, any shape, ``()`` included.
        """
        self._write_arrays(self.model_path, arrays)

    def write_best(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Write the model of the best validation so far.

        Args:
            arrays: Name -> array.
        """
        self._write_arrays(self.path / "best.safetensors", arrays)

    def write_initial(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Write the model before round 1, from which the journal is replayed.

        Args:
            arrays: Name -> array.
        """
        self._write_arrays(self.initial_path, arrays)

    def _write_arrays(self, path: Path, arrays: Mapping[str, np.ndarray]) -> None:
        aside = path.with_name(f".{path.name}.tmp")
        save_arrays(aside, arrays)
        sync_file(aside)
        aside.replace(path)

    def read_model(self) -> dict[str, np.ndarray]:
        """Read the model.

        Returns:
            Name -> array, in the order in which they were written.

        Raises:
            CheckpointError: There is none.
        """
        if not self.model_path.exists():
            do = "resume the run to its end, or read the arrays of its checkpoint"
            raise CheckpointError(
                str(self.path), expected="model.safetensors", got="a run without a final model", do=do
            )
        return load_arrays(self.model_path)

    def save_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Save a checkpoint; a kill at any moment leaves one that loads.

        Args:
            checkpoint: What to save.
        """
        checkpoints.save_checkpoint(self.path, checkpoint)

    def load_checkpoint(self, *, arrays: bool = True) -> Checkpoint:
        """Load the newest complete checkpoint.

        Args:
            arrays: Whether to read its arrays; else they are left empty.

        Raises:
            CheckpointError: None is complete; the message says what is missing.
        """
        return checkpoints.load_checkpoint(self.path, arrays=arrays)

    def read_num_clients(self) -> int | None:
        """Read the number of clients, which no setting says.

        Returns:
            The number; None without a checkpoint.
        """
        return checkpoints.read_num_partitions(self.path)


def _file_safe(part: str) -> str:
    return re.sub(r"[^A-Za-z0-9._]+", "-", part)[:_LONGEST_PART].strip("-") or "unnamed"


def _lines_until(path: Path, server_round: int) -> str:
    return "".join(line for line, row in read_lines(path) if row.get("round", 0) <= server_round)


def _settings(text: str) -> dict[str, Scalar]:
    settings = from_toml(text)
    for key, value in settings.items():
        kind = int if key in ("seed", "num-server-rounds") else (bool, int, float, str)  # The two that a table shows.
        if not isinstance(value, kind):
            raise TypeError(f"{key} = {value!r:.40}")
    return settings


def _summary(text: str) -> dict[str, Any]:
    """Read a summary, and make sure of what tables are made from."""
    summary = dict(from_json(text))
    numbers = [summary["rounds"], summary["totals"]["seconds"], *summary["final"].values()]
    numbers += summary.get("best", {}).values()
    if any(isinstance(value, bool) or not isinstance(value, int | float) for value in numbers):
        raise ValueError("a summary whose numbers are none")
    if summary["status"] not in list(RunStatus):
        raise ValueError(f"status = {summary['status']!r:.40}")
    return summary
