"""Sending messages and receiving replies one by one, as they arrive."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence

from flwr.app import Message, RecordDict
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from typing_extensions import override

PULL_AT_ONCE = 8
"""Replies asked for in one request: each is held in memory whole, so not all at once."""

FIRST_PAUSE = 0.02
LONGEST_PAUSE = 0.2
"""Seconds between two sweeps over the replies that are still out; Flower's own loop sleeps 3 s on a SuperLink."""


def exchange(grid: Grid, messages: Sequence[Message], timeout: float) -> Iterator[Message]:
    """Send messages and yield each reply when it arrives.

    Replies that do not arrive in time are left out; the caller knows which messages it sent.

    Args:
        grid: Flower's grid.
        messages: Messages to send.
        timeout: Seconds to wait for replies.

    Yields:
        Replies, error replies included, in order of arrival.
    """
    yield from arriving(grid, grid.push_messages(messages), timeout)


def arriving(grid: Grid, message_ids: Iterable[str], timeout: float) -> Iterator[Message]:
    """Yield each reply to messages that were sent, as `exchange` does.

    Args:
        grid: Flower's grid.
        message_ids: What `push_messages` gave; an empty id stands for a message that was not taken.
        timeout: Seconds to wait for replies.

    Yields:
        Replies, error replies included, in order of arrival.
    """
    deadline = time.monotonic() + timeout
    pending = [message_id for message_id in message_ids if message_id]
    pause = FIRST_PAUSE
    while pending:
        arrived = set()
        for start in range(0, len(pending), PULL_AT_ONCE):
            for reply in grid.pull_messages(pending[start : start + PULL_AT_ONCE]):
                arrived.add(reply.metadata.reply_to_message_id)
                yield reply
        pending = [message_id for message_id in pending if message_id not in arrived]
        if not pending or time.monotonic() > deadline:
            return
        pause = FIRST_PAUSE if arrived else min(LONGEST_PAUSE, pause * 1.5)
        time.sleep(pause)


class GridWrapper(Grid):
    """A grid that hands everything to another one; subclasses override what they change.

    Args:
        inner: The grid that does the work.
    """

    def __init__(self, inner: Grid) -> None:
        self.inner = inner

    @override
    def set_run(self, run: Run) -> None:
        self.inner.set_run(run)

    @property
    @override
    def run(self) -> Run:
        return self.inner.run

    @override
    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    @override
    def get_node_ids(self) -> Iterable[int]:
        return self.inner.get_node_ids()

    @override
    def get_nodes(self) -> Iterable[NodeInfo]:
        return self.inner.get_nodes()

    @override
    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        return self.inner.push_messages(messages)

    @override
    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return self.inner.pull_messages(message_ids)

    @override
    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        return list(exchange(self, list(messages), timeout if timeout is not None else float("inf")))


def is_remote(grid: Grid) -> bool:
    """Tell whether the nodes are machines of their own, connected to a SuperLink, whatever the grid is wrapped in."""
    while isinstance(grid, GridWrapper):
        grid = grid.inner
    from flwr.superlink.grid import HttpGrid  # With a database and a web server: a second, which workers never need.

    return isinstance(grid, HttpGrid)
