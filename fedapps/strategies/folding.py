"""Folding replies in the order of their partitions, whatever order they arrive in.

A floating-point sum depends on the order of its terms. Replies are therefore folded by increasing partition id; one
that arrives ahead of its turn waits, in memory up to a limit and beyond it in a scratch file.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import IO, Any, Literal, TypeAlias

import numpy as np

from fedapps.compute import free_memory
from fedapps.messages.schema import Arrays, Reply

COLLECT_MB = 64
"""MB of replies after which memory is freed: those that are done with stay in reference cycles of Flower's records, and
Python, which counts objects and not bytes, would let a gigabyte of them pile up."""


_Form: TypeAlias = tuple[tuple[int, ...], np.dtype[Any], Literal["C", "F"]]


@dataclass(frozen=True)
class _Spilled:
    """A reply whose arrays lie in the scratch file.

    Attributes:
        reply: The reply, without arrays.
        place: Where they begin.
        tensors: Record -> name -> shape, dtype and order in memory, in the order of the file.
    """

    reply: Reply
    place: int
    tensors: dict[str, dict[str, _Form]]


def _form(value: np.ndarray) -> _Form:
    return value.shape, value.dtype, "F" if value.flags.fnc else "C"


class OrderedFold:
    """Calls ``fold(reply)`` for every reply, by increasing partition id.

    Args:
        partitions: Partition ids that were asked.
        fold: Called with each reply when its turn has come.
        buffer_mb: MB of waiting replies kept in memory.
        together: If given, all replies wait until the last is in, and what this makes of their list is folded.
    """

    def __init__(
        self,
        partitions: Iterable[int],
        fold: Callable[[Reply], None],
        buffer_mb: float,
        together: Callable[[list[Reply]], Iterable[Reply]] | None = None,
    ) -> None:
        self._turns = sorted(partitions)
        self._next = 0
        self._fold = fold
        self._together = together
        self._limit = int(buffer_mb * 1e6)
        self._held = 0
        self._done_with = 0
        self._has_freed = False
        self._waiting: dict[int, Reply | _Spilled | None] = {}
        self._scratch: IO[bytes] | None = None

    def add(self, partition: int, reply: Reply | None) -> None:
        """Take the reply of a partition, and fold all whose turn has come.

        Args:
            partition: Partition id.
            reply: Its reply; None if there will be none.
        """
        if reply is not None:
            size = reply.num_bytes
            waits = self._together is not None or partition != self._turns[self._next]
            if waits and self._held + size > self._limit:
                self._waiting[partition] = self._spill(reply)
                del reply
                self._release(size)
                self._advance()  # Where all wait for the last one, it may be this.
                return
            self._held += size
        self._waiting[partition] = reply
        del reply
        self._advance()

    def _advance(self) -> None:
        if self._together is not None:
            if not self.missing:
                self._fold_together(self._together)
            return
        while self._next < len(self._turns) and self._turns[self._next] in self._waiting:
            waiting = self._waiting.pop(self._turns[self._next])
            self._next += 1
            reply = self._read_back(waiting) if isinstance(waiting, _Spilled) else waiting
            if reply is not None:
                self._fold(reply)
                size = reply.num_bytes
                self._held -= size if reply is waiting else 0
                del reply, waiting
                self._release(size)

    def _fold_together(self, together: Callable[[list[Reply]], Iterable[Reply]]) -> None:
        waiting = [self._waiting.pop(partition) for partition in self._turns]
        self._next, self._held = len(self._turns), 0
        replies = [self._read_back(w) if isinstance(w, _Spilled) else w for w in waiting if w is not None]
        size = sum(reply.num_bytes for reply in replies)
        del waiting
        for reply in together(replies):
            self._fold(reply)
        del replies
        self._release(size)

    def _release(self, size: int) -> None:
        """Free the memory of replies that are done with, every `COLLECT_MB`."""
        self._done_with += size
        if self._done_with > COLLECT_MB * 1e6:
            free_memory()
            self._done_with, self._has_freed = 0, True

    @property
    def missing(self) -> list[int]:
        """Partitions from which nothing has come yet."""
        return [partition for partition in self._turns[self._next :] if partition not in self._waiting]

    def _spill(self, reply: Reply) -> _Spilled:
        """Write the arrays of a reply at the end of the scratch file."""
        if self._scratch is None:
            self._scratch = tempfile.TemporaryFile(prefix="fedapps-fold-")
        place = self._scratch.seek(0, 2)
        groups = {"arrays": reply.arrays, "buffers": reply.buffers, **reply.records}
        for arrays in groups.values():
            for value in arrays.values():
                self._scratch.write(value.tobytes("A"))
        tensors = {record: {n: _form(v) for n, v in arrays.items()} for record, arrays in groups.items()}
        return _Spilled(replace(reply, arrays={}, buffers={}, records={}), place, tensors)

    def _read_back(self, spilled: _Spilled) -> Reply:
        """View the arrays of a reply in the scratch file: they come into memory as far as they are used."""
        if self._scratch is None:
            raise RuntimeError("the scratch file of waiting replies is closed")
        self._scratch.flush()
        start, groups = spilled.place, dict[str, Arrays]()
        data = np.memmap(self._scratch, np.uint8, "r") if self._scratch.seek(0, 2) else np.empty(0, np.uint8)
        for record, tensors in spilled.tensors.items():
            groups[record] = {}
            for name, (shape, dtype, order) in tensors.items():
                groups[record][name] = np.ndarray(shape, dtype, data, start, order=order)
                start += groups[record][name].nbytes
        arrays, buffers = groups.pop("arrays"), groups.pop("buffers")
        return replace(spilled.reply, arrays=arrays, buffers=buffers, records=groups)

    def close(self) -> None:
        """Remove the scratch file, and free the memory of the round's replies if they were large."""
        if self._scratch is not None:
            self._scratch.close()
            self._scratch = None
        if self._has_freed:
            free_memory()
            self._has_freed = False
