"""Checkpoints that a kill at any moment cannot lose.

A checkpoint is a folder of ``arrays.safetensors``, ``strategy.safetensors``, ``state.json`` and, written last,
``manifest.json`` with the SHA-256 of the others: a folder whose manifest matches is complete. Saving goes

1. write ``checkpoint.next/``, manifest last, everything synced;
2. remove ``checkpoint.previous/``;
3. rename ``checkpoint/`` to ``checkpoint.previous/``;
4. rename ``checkpoint.next/`` to ``checkpoint/``.

Before the manifest is written ``checkpoint/`` is whole, and from then on ``checkpoint.next/`` is. Loading takes the
complete one of the latest round; the next save finishes first what an earlier one left at steps 2 to 4.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedapps.errors import CheckpointError
from fedapps.results.storage import UNREADABLE, fault, load_arrays, save_arrays, sync_file, sync_folder
from fedapps.settings import Scalar

CURRENT = "checkpoint"
PREVIOUS = "checkpoint.previous"
NEXT = "checkpoint.next"

_ARRAYS = "arrays.safetensors"
_STRATEGY = "strategy.safetensors"
_STATE = "state.json"
_MANIFEST = "manifest.json"
_FILES = (_ARRAYS, _STRATEGY, _STATE)

_log = logging.getLogger("flwr")


@dataclass(frozen=True)
class Checkpoint:
    """Everything the server needs to go on after a round.

    Attributes:
        server_round: The last finished round.
        experiment: Id of the experiment, kept over resumes.
        method: Value of the setting ``method``.
        task: Value of the setting ``task``.
        num_partitions: Number of clients.
        arrays: The model after that round, name -> array.
        strategy_arrays: Arrays that the strategy keeps (moments, ...), name -> array.
        strategy_state: What else it keeps, as JSON: string keys; values None, bool, int, float, str, list, dict.
        last_folded: Partition -> last round in which its reply was folded.
        made_with: What a resume is compared with; None in a checkpoint of a version that did not write it.
        roster: Who the clients are, where nodes have data of their own: `fedapps.strategies.roster.Roster.state`.
    """

    server_round: int
    experiment: str
    method: str
    task: str
    num_partitions: int
    arrays: dict[str, np.ndarray]
    strategy_arrays: dict[str, np.ndarray]
    strategy_state: dict[str, Any]
    last_folded: dict[int, int]
    made_with: MadeWith | None = None
    roster: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class MadeWith:
    """What a run was made with, as far as its result depends on it."""

    settings: dict[str, Scalar]  # dotted key -> value
    version: str  # of this package
    data: dict[str, str]  # name of a part of the data -> SHA-256
    journal: str  # SHA-256 of the journal's bytes up to the checkpoint's round; of none in methods without one


def save_checkpoint(folder: Path, checkpoint: Checkpoint) -> None:
    """Save a checkpoint; the one before stays as ``checkpoint.previous/``.

    Args:
        folder: The run folder.
        checkpoint: What to save.

    Raises:
        CheckpointError: The strategy's state is not JSON, or an array has a dtype that cannot be stored.
    """
    _check_state(checkpoint.strategy_state, "strategy_state")
    _finish_interrupted_save(folder)
    aside = folder / NEXT
    aside.mkdir()
    save_arrays(aside / _ARRAYS, checkpoint.arrays)
    save_arrays(aside / _STRATEGY, checkpoint.strategy_arrays)
    # Python's own JSON, in which nan and infinity survive beside the texts "nan" and "inf".
    (aside / _STATE).write_text(json.dumps(_state(checkpoint)), encoding="utf-8")
    for name in _FILES:
        sync_file(aside / name)
    manifest = {name: _sha256(aside / name) for name in _FILES}
    (aside / _MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
    sync_file(aside / _MANIFEST)
    sync_folder(aside)
    _promote(folder)


def _state(checkpoint: Checkpoint) -> dict[str, Any]:
    return {
        "server-round": checkpoint.server_round,
        "experiment": checkpoint.experiment,
        "method": checkpoint.method,
        "task": checkpoint.task,
        "num-partitions": checkpoint.num_partitions,
        "strategy-state": checkpoint.strategy_state,
        "last-folded": {str(partition): last for partition, last in checkpoint.last_folded.items()},
        "roster": checkpoint.roster,
        "made-with": None if checkpoint.made_with is None else asdict(checkpoint.made_with),
    }


def _check_state(value: object, where: str) -> None:
    """Refuse what JSON would change in silence: a resumed run would differ from a straight one."""
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise _not_json(f"{where}, key {key!r}", "a string key", key)
            _check_state(item, f"{where}[{key!r}]")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _check_state(item, f"{where}[{index}]")
    elif not (value is None or isinstance(value, bool | int | float | str)):
        raise _not_json(where, "None, bool, int, float, str, list or dict", value)


def _not_json(where: str, expected: str, got: object) -> CheckpointError:
    do = "convert it, or keep it as an array in strategy_arrays"
    return CheckpointError(where, expected=expected, got=type(got).__name__, do=do)


def _promote(folder: Path) -> None:
    """Take steps 2 to 4; ``checkpoint.next/`` is complete."""
    current = folder / CURRENT
    if current.exists():
        _remove(folder / PREVIOUS)
        current.rename(folder / PREVIOUS)
    (folder / NEXT).rename(current)
    sync_folder(folder)


def _finish_interrupted_save(folder: Path) -> None:
    """Clear ``checkpoint.next/``: promote it if it is complete, so that its round is never lost, else remove it."""
    if not (folder / NEXT).exists():
        return
    if _defect(folder / NEXT) is None:
        _promote(folder)
    else:
        _remove(folder / NEXT)


def _remove(path: Path) -> None:
    """Remove a checkpoint, whatever somebody may have put in its place."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def load_checkpoint(folder: Path, *, arrays: bool = True) -> Checkpoint:
    """Load the complete checkpoint of the latest round; changes nothing on disk.

    Args:
        folder: The run folder.
        arrays: Whether to read its arrays; else they are left empty, for a look at the rest.

    Returns:
        The checkpoint, with the order of its arrays.

    Raises:
        CheckpointError: No checkpoint is complete; the message says what each one lacks.
    """
    defects = {name: _defect(folder / name) for name in (NEXT, CURRENT, PREVIOUS)}
    complete = {name: _read(folder / name) for name, defect in defects.items() if defect is None}
    if not complete:
        raise CheckpointError(
            f"run folder {folder}",
            expected=f"a complete {CURRENT}/ or {PREVIOUS}/",
            got="; ".join(f"{name}: {defects[name]}" for name in (CURRENT, PREVIOUS)),
            do="start a new run: nothing can be resumed from this one",
        )
    name = max(complete, key=lambda candidate: complete[candidate].server_round)
    if defects[CURRENT] is not None:
        _log.warning("%s/%s is not usable (%s); going on from %s/", folder, CURRENT, defects[CURRENT], name)
    if not arrays:
        return complete[name]
    return replace(
        complete[name],
        arrays=load_arrays(folder / name / _ARRAYS),
        strategy_arrays=load_arrays(folder / name / _STRATEGY),
    )


def read_num_partitions(folder: Path) -> int | None:
    """Read the number of clients of a run, which is the same in all its checkpoints, without reading a model.

    Returns:
        The number; None without a checkpoint.
    """
    for name in (CURRENT, PREVIOUS):
        if (folder / name).exists():
            with suppress(*UNREADABLE):
                return _read(folder / name).num_partitions
    return None


def _defect(folder: Path) -> str | None:
    """Say why a checkpoint is not complete; None if it is."""
    if not folder.is_dir():
        return "no such folder"
    try:
        manifest = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        sums = {name: str(manifest[name]) for name in _FILES}
    except FileNotFoundError:
        return f"{_MANIFEST} is missing"
    except UNREADABLE:
        return f"{_MANIFEST} cannot be read"
    for name, expected in sums.items():
        if not (folder / name).is_file():
            return f"{name} is missing"
        if _sha256(folder / name) != expected:
            return f"{name} differs from its checksum"
    try:
        _read(folder)
    except UNREADABLE as error:
        return f"{_STATE} cannot be read ({fault(error)})"
    return None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read(folder: Path) -> Checkpoint:
    """Read a checkpoint without its arrays."""
    state: dict[str, Any] = json.loads((folder / _STATE).read_text(encoding="utf-8"))
    made_with = state.get("made-with")
    return Checkpoint(
        server_round=int(state["server-round"]),
        experiment=str(state["experiment"]),
        method=str(state["method"]),
        task=str(state["task"]),
        num_partitions=int(state["num-partitions"]),
        arrays={},
        strategy_arrays={},
        strategy_state=dict(state["strategy-state"]),
        last_folded={int(partition): int(last) for partition, last in state["last-folded"].items()},
        made_with=None if made_with is None else MadeWith(**made_with),
        roster=dict(state.get("roster", {})),
    )
