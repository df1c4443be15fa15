"""Folding replies in the order of their partitions, whatever order they arrive in.

A floating-point sum depends on the order of its terms. Replies are therefore folded by increasing partition id; one
that arrives ahead of its turn waits, in memory up to a limit and beyond it in a scratch file.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from typing import IO

from flwr.app import Array, ArrayRecord, RecordDict
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.proto.recorddict_pb2 import RecordDict as ProtoRecordDict

from fedapps.compute import free_memory
from fedapps.records import payload_bytes

COLLECT_MB = 64
"""MB of replies after which memory is freed: those that are done with stay in reference cycles of Flower's records, and
Python, which counts objects and not bytes, would let a gigabyte of them pile up."""


class OrderedFold:
    """Calls ``fold(partition, content)`` for every reply, by increasing partition id.

    Use as a context manager: the scratch file is removed at the end.

    Args:
        partitions: Partition ids that were sampled.
        fold: Called with each reply when its turn has come.
        buffer_mb: MB of waiting replies kept in memory.
    """

    def __init__(self, partitions: Sequence[int], fold: Callable[[int, RecordDict], None], buffer_mb: float) -> None:
        self._turns = sorted(partitions)
        self._next = 0
        self._fold = fold
        self._limit = int(buffer_mb * 1e6)
        self._held = 0
        self._done_with = 0
        self._has_freed = False
        self._waiting: dict[int, RecordDict | int | None] = {}
        self._scratch: IO[bytes] | None = None

    def add(self, partition: int, content: RecordDict | None) -> None:
        """Take the reply of a partition, and fold all whose turn has come.

        Args:
            partition: Partition id.
            content: The content of its reply; None if there will be none.
        """
        if content is not None:
            size = sum(payload_bytes(content).values())
            if partition != self._turns[self._next] and self._held + size > self._limit:
                self._waiting[partition] = self._spill(content)
                self._release(size)
                return
            self._held += size
        self._waiting[partition] = content
        del content
        self._advance()

    def _advance(self) -> None:
        while self._next < len(self._turns) and self._turns[self._next] in self._waiting:
            partition = self._turns[self._next]
            waiting = self._waiting.pop(partition)
            self._next += 1
            content = self._read_back(waiting) if isinstance(waiting, int) else waiting
            if content is not None:
                self._fold(partition, content)
                size = sum(payload_bytes(content).values())
                self._held -= size if content is waiting else 0
                del content, waiting
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

    def _spill(self, content: RecordDict) -> int:
        """Write a reply at the end of the scratch file, and give its place there."""
        if self._scratch is None:
            self._scratch = tempfile.TemporaryFile(prefix="fedapps-fold-")
        parts: list[bytes] = []

        def size_of(data: bytes) -> bytes:
            parts.append(data)
            return str(len(data)).encode()

        # Only sizes pass through Flower's serialisation, which would copy the arrays several times.
        head = recorddict_to_proto(_map_data(content, size_of)).SerializeToString()
        place = self._scratch.seek(0, 2)
        self._scratch.writelines([len(head).to_bytes(8, "little"), head, *parts])
        return place

    def _read_back(self, place: int) -> RecordDict:
        if self._scratch is None:
            raise RuntimeError("the scratch file of waiting replies is closed")
        self._scratch.seek(place)
        read = self._scratch.read
        head = read(int.from_bytes(read(8), "little"))
        return _map_data(recorddict_from_proto(ProtoRecordDict.FromString(head)), lambda size: read(int(size)))

    def close(self) -> None:
        """Remove the scratch file, and free the memory of the round's replies if they were large."""
        if self._scratch is not None:
            self._scratch.close()
            self._scratch = None
        if self._has_freed:
            free_memory()
            self._has_freed = False


def _map_data(content: RecordDict, change: Callable[[bytes], bytes]) -> RecordDict:
    """Change the data of every array, in order."""
    return RecordDict(
        {
            name: ArrayRecord({key: Array(a.dtype, a.shape, a.stype, change(a.data)) for key, a in record.items()})
            if isinstance(record, ArrayRecord)
            else record
            for name, record in content.items()
        }
    )
