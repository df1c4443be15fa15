"""Folding replies in the order of their partitions, whatever order they arrive in.

A floating-point sum depends on the order of its terms. Replies are therefore folded by increasing partition id; one
that arrives ahead of its turn waits, in memory up to a limit and beyond it in a scratch file.
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable, Sequence
from typing import IO

from flwr.app import RecordDict
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.proto.recorddict_pb2 import RecordDict as ProtoRecordDict

from fedapps.records import payload_bytes

COLLECT_MB = 64
"""MB of replies after which garbage is collected: those that are done with stay in reference cycles of Flower's records, and
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
        self._waiting: dict[int, RecordDict | tuple[int, int] | None] = {}
        self._scratch: IO[bytes] | None = None

    def add(self, partition: int, content: RecordDict | None) -> None:
        """Take the reply of a partition, and fold all whose turn has come.

        Args:
            partition: Partition id.
            content: The content of its reply; None if there will be none.
        """
        if content is not None and partition != self._turns[self._next]:
            size = sum(payload_bytes(content).values())
            if self._held + size > self._limit:
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
            content = self._read_back(*waiting) if isinstance(waiting, tuple) else waiting
            if content is not None:
                self._fold(partition, content)
                size = sum(payload_bytes(content).values())
                del content, waiting
                self._release(size)
        if not self._waiting:
            self._held = 0

    def _release(self, size: int) -> None:
        """Free the memory of replies that are done with, every `COLLECT_MB`."""
        self._done_with += size
        if self._done_with > COLLECT_MB * 1e6:
            gc.collect()
            self._done_with = 0

    @property
    def missing(self) -> list[int]:
        """Partitions from which nothing has come yet."""
        return [partition for partition in self._turns[self._next :] if partition not in self._waiting]

    def _spill(self, content: RecordDict) -> tuple[int, int]:
        if self._scratch is None:
            self._scratch = tempfile.TemporaryFile(prefix="fedapps-fold-")
        data = recorddict_to_proto(content).SerializeToString()
        offset = self._scratch.seek(0, 2)
        self._scratch.write(data)
        return offset, len(data)

    def _read_back(self, offset: int, size: int) -> RecordDict:
        if self._scratch is None:
            raise RuntimeError("the scratch file of waiting replies is closed")
        self._scratch.seek(offset)
        return recorddict_from_proto(ProtoRecordDict.FromString(self._scratch.read(size)))

    def close(self) -> None:
        """Remove the scratch file."""
        if self._scratch is not None:
            self._scratch.close()
            self._scratch = None
