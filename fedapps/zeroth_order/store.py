"""A replica on disk, memory-mapped: it opens at once, is updated in place, and notices an update cut short.

Where each message is a new process, loading and replaying a model would cost more than the round. The store is a folder:

    state.bin    theta, then the slots of the state, tensors at multiples of 64 bytes
    state.json   key of the run, round, whether an update is under way, id of the machine's boot
    lock         held while the store is open

Crash safety: `state.json` says that an update is under way before the first byte changes, and tells the new round after
the last. A process that dies in between leaves that mark. A machine that dies may lose changes that were never written
to the disk; their mark is the id of the boot, since a store from before it is not trusted. In both cases the state is
started anew from the base model, and the journal brings it back. So nothing waits for the disk, which the kernel keeps
busy for long with so many changed pages.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedapps.private_files import private_folder, private_opener
from fedapps.zeroth_order.journal import Header, Slice, header_line
from fedapps.zeroth_order.layout import TensorSpec
from fedapps.zeroth_order.replica import Base, Replica
from fedapps.zeroth_order.rules import rule_of
from fedapps.zeroth_order.tensors import ALIGNMENT, Tensor

LOG = logging.getLogger("flwr")
"""Flower's logger."""

NO_STATE = "no state"
OTHER_RUN = "the state of another run"
"""Why a store is started from the base model where nothing went wrong."""

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Store:
    """An open store; use it as a context manager or close it.

    Attributes:
        replica: The state in the file, as NumPy arrays over the mapped memory.
        rebuilt: Why the state was started anew from the base model, or None if the file was whole.
    """

    def __init__(self, folder: Path, header: Header, base: Base, *, threads: int | None = None) -> None:
        """Open a store; a state that is missing, of another run or half applied is started from the base model.

        Args:
            folder: The store's folder, made if missing; it and its files are for their owner only.
            header: The run's journal header: the key of the state.
            base: Loads the parameters at the start of the run; called only if the state must be started.
            threads: Of the kernels.
        """
        private_folder(folder.parent, folder.name)
        self._folder = folder
        self._key = hashlib.sha256(header_line(header).encode("utf-8")).hexdigest()
        self._take_lock()
        try:
            self.rebuilt = self._fault(header)
            self.replica = self._map(header, threads)
            if self.rebuilt is not None:
                LOG.info("replica store %s: %s; starting from the base model", folder.name, self.rebuilt)
                self.rebuild(base)
        except BaseException:
            self.close()
            raise

    def advance(self, part: Slice, *, verify: bool = True) -> int:
        """Apply what a slice has beyond the state, in place, as `Replica.advance` does; the number of rounds applied.

        After an AstrayError the next opening starts from the base model.
        """
        if not self.replica.pending(part) and part.through <= self.replica.round:
            return 0
        self._mark(applying=True)
        applied = self.replica.advance(part, verify=verify)
        self._mark(applying=False)
        return applied

    def rebuild(self, base: Base) -> None:
        """Start again from the base model; then advance by the journal from round 0."""
        self._mark(applying=True)
        self.replica.rebuild(base)
        self._mark(applying=False)

    def reopen(self) -> bool:
        """Take a closed store's lock again, and tell whether its mapped state still is the whole state in the file.

        A process that serves many messages keeps the store mapped between them; meanwhile another may have changed it. Where
        it has moved to another round, was left half applied, or lies in another file, the store is closed again and False.
        """
        try:
            self._take_lock()
        except FileNotFoundError:  # with the whole folder
            return False
        try:
            mark = json.loads((self._folder / "state.json").read_text(encoding="utf-8"))
            same = mark == self._mark_of(applying=False) and _identity(self._folder / "state.bin") == self._file
        except (OSError, ValueError):
            same = False
        if not same:
            self.close()
        return same

    def close(self) -> None:
        """Let other processes open the store."""
        if not self._lock.closed:
            # Closing alone would leave the lock with a process that was forked in between.
            fcntl.flock(self._lock, fcntl.LOCK_UN)
            self._lock.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _take_lock(self) -> None:
        self._lock = open(self._folder / "lock", "w", opener=private_opener)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def _fault(self, header: Header) -> str | None:
        """Say why the file cannot be used as it is."""
        try:
            mark = json.loads((self._folder / "state.json").read_text(encoding="utf-8"))
            size = (self._folder / "state.bin").stat().st_size
            found = (mark["key"], mark["applying"], mark["boot"], mark["round"])
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return NO_STATE
        if found[0] != self._key:
            return OTHER_RUN
        if found[1]:
            return f"an update from round {found[3]} was cut short"
        if found[2] != _boot_id():
            return "the machine was restarted"
        return None if size == _size(header) else "a file of another size"

    def _map(self, header: Header, threads: int | None) -> Replica:
        path = self._folder / "state.bin"
        if self.rebuilt is None:
            start = int(json.loads((self._folder / "state.json").read_text(encoding="utf-8"))["round"])
        else:
            start = 0
            path.unlink(missing_ok=True)
            with open(path, "wb", opener=private_opener) as stream:
                os.posix_fallocate(stream.fileno(), 0, _size(header))  # a full disk is an error here, not a crash later
        memory = np.memmap(path, np.uint8, "r+")
        self._file = _identity(path)
        theta: dict[str, Tensor] = {}
        state: dict[str, dict[str, Tensor]] = {slot: {} for slot in rule_of(header.scheme).slots}
        for slot, tensor, place in _places(header):
            dtype = tensor.number_format.storage if slot is None else np.dtype(np.float32)
            part = memory[place : place + tensor.size * dtype.itemsize].view(np.ndarray)
            array: NDArray[Any] = part.view(dtype).reshape(tensor.shape)
            (theta if slot is None else state[slot])[tensor.name] = array
        return Replica(header.scheme, theta, state, round=start, fixed=header.layout.fixed, threads=threads)

    def _mark_of(self, *, applying: bool) -> dict[str, Any]:
        return {"key": self._key, "round": self.replica.round, "applying": applying, "boot": _boot_id()}

    def _mark(self, *, applying: bool) -> None:
        aside = self._folder / "state.json.new"
        with open(aside, "w", encoding="utf-8", opener=private_opener) as stream:
            json.dump(self._mark_of(applying=applying), stream)
        aside.replace(self._folder / "state.json")


def _places(header: Header) -> Iterator[tuple[str | None, TensorSpec, int]]:
    """Give slot (None for theta), tensor and first byte of everything in the file."""
    place = 0
    for slot in (None, *rule_of(header.scheme).slots):
        for tensor in header.layout.tensors:
            yield slot, tensor, place
            place += -(-_bytes(slot, tensor) // ALIGNMENT) * ALIGNMENT


def _bytes(slot: str | None, tensor: TensorSpec) -> int:
    return tensor.size * (tensor.number_format.storage.itemsize if slot is None else 4)


def _size(header: Header) -> int:
    return max(place + _bytes(slot, tensor) for slot, tensor, place in _places(header)) or 1


def _identity(path: Path) -> tuple[int, int]:
    """Name a file whatever its path; a name is not given again while the file is mapped."""
    found = path.stat()
    return found.st_dev, found.st_ino


def _boot_id() -> str:
    # Without the id of the boot nothing tells that the machine went down: then no state is trusted after its process.
    return _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else f"process {os.getpid()}"
