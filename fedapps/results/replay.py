"""Base model + journal = the model of any round, bit for bit: replaying a journal, and verifying one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedapps.results.storage import load_arrays, save_arrays
from fedapps.zeroth_order.errors import JournalError
from fedapps.zeroth_order.journal import Journal
from fedapps.zeroth_order.layout import fingerprint, layout_of
from fedapps.zeroth_order.replica import Replica


@dataclass(frozen=True)
class Replayed:
    """What a replay gave."""

    round: int  # the round whose model this is
    fingerprint: str  # of parameters and state after it
    arrays: dict[str, np.ndarray]  # the model, name -> array, in the order of the base model's file


def replay(journal: Path, base: Path, last: int | None = None) -> Replayed:
    """Rebuild the model of a round.

    Args:
        journal: A run's ``journal.jsonl``.
        base: Safetensors file with the model before round 1, such as the run's ``initial.safetensors``.
        last: The round; None for the last one. A refused round leaves the model of the round before.

    Raises:
        JournalError: A file is missing or malformed, they do not belong together, the journal has no such round, or the
            state differs from a fingerprint.
    """
    read, arrays, replica = _open(journal, base)
    advance(replica, read, last, str(journal))
    new = {name: np.asarray(replica.theta.get(name, value)) for name, value in arrays.items()}
    return Replayed(replica.round, replica.fingerprint(), new)


def write_replayed(replayed: Replayed, folder: Path) -> Path:
    """Write a replayed model.

    Args:
        replayed: What `replay` gave.
        folder: Where to; made if missing.

    Returns:
        Path of ``model.safetensors``, the same bytes as a run that ended with this round would have written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "model.safetensors"
    save_arrays(path, replayed.arrays)
    return path


def verify(journal: Path, base: Path) -> list[int]:
    """Replay a journal from fingerprint to fingerprint.

    Args:
        journal: A run's ``journal.jsonl``.
        base: Safetensors file with the model before round 1.

    Returns:
        The rounds whose fingerprint was confirmed; the base model's is confirmed in any case.

    Raises:
        JournalError: As `replay`.
        AstrayError: A fingerprint differs; the message names its round.
    """
    read, _, replica = _open(journal, base)
    return confirm(replica, read)


def advance(replica: Replica, journal: Journal, last: int | None, where: str) -> None:
    """Bring a replica of the base model to a round.

    Args:
        replica: At round 0; changed in place.
        journal: The run's journal.
        last: The round; None for the last one.
        where: Names the journal in messages.

    Raises:
        JournalError: The journal has no such round.
        AstrayError: The state differs from a fingerprint.
    """
    if last is not None and not 0 <= last <= journal.through:
        expected, do = f"a round from 0 to {journal.through}, the last of the journal", "choose another --round"
        raise JournalError(where, expected=expected, got=str(last), do=do)
    replica.advance(journal.slice(0, last))


def confirm(replica: Replica, read: Journal) -> list[int]:
    """Bring a replica of the base model from fingerprint to fingerprint.

    Args:
        replica: At round 0; changed in place.
        read: The run's journal.

    Returns:
        The rounds whose fingerprint was confirmed.

    Raises:
        AstrayError: A fingerprint differs; the message names its round.
    """
    confirmed = [record.round for record in read.records if record.fingerprint is not None]
    for last in confirmed:
        replica.advance(read.slice(replica.round, last))
    replica.advance(read.slice(replica.round))
    return confirmed


def _open(journal: Path, base: Path) -> tuple[Journal, dict[str, np.ndarray], Replica]:
    read = Journal.read(journal)
    if not base.is_file():
        do = "give --base the initial.safetensors of the run, or the source of its language model"
        raise JournalError(str(base), expected="the model before round 1", got="no file", do=do)
    arrays = load_arrays(base)
    wanted = [tensor.name for tensor in read.header.layout.tensors]
    missing = [name for name in wanted if name not in arrays]
    if missing:
        got, do = f"no tensor '{missing[0]}'", "use the base model that the journal was written for"
        raise JournalError(str(base), expected=f"the {len(wanted)} tensors of the journal", got=got, do=do)
    theta = {name: arrays[name].copy() for name in wanted}
    layout = layout_of(theta, read.header.layout.fixed)
    # Another layout is named before a fingerprint is computed over it.
    read.check_model(layout)
    read.check_model(layout, fingerprint(layout, theta))
    return read, arrays, Replica(read.header.scheme, theta, fixed=layout.fixed)
