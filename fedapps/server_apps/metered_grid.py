"""The bytes of every message of a run."""

from __future__ import annotations

from collections.abc import Iterable
from logging import getLogger
from typing import Any, cast

from flwr.app import Message
from flwr.serverapp import Grid
from typing_extensions import override

from fedapps.results.ledger import Direction, Kind, message_row
from fedapps.strategies.base import RoundStrategy
from fedapps.strategies.exchange import GridWrapper

logger = getLogger("flwr")


class MeteredGrid(GridWrapper):
    """A grid that writes down every message that passes.

    Args:
        inner: The grid that does the work.
    """

    def __init__(self, inner: Grid) -> None:
        super().__init__(inner)
        self.server_round = 0
        self._rows: list[tuple[int, dict[str, Any]]] = []

    @override
    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        messages = list(messages)
        for message in messages:
            self._note(message, message.metadata.dst_node_id, "down")
        return self.inner.push_messages(messages)

    @override
    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        replies = list(self.inner.pull_messages(message_ids))
        for reply in replies:
            self._note(reply, reply.metadata.src_node_id, "up")
        return replies

    def _note(self, message: Message, node_id: int, direction: Direction) -> None:
        kind = cast(Kind, message.metadata.message_type)
        try:
            row = message_row(message, server_round=self.server_round, partition=None, direction=direction, kind=kind)
        except Exception as problem:  # A message that cannot be measured must not end a run; the strategy judges it.
            logger.warning("ledger: a message of node %d cannot be measured (%s)", node_id, problem)
            row = {
                "round": self.server_round, "partition": None, "direction": direction, "kind": kind, "payload": {},
                "objects": 0, "object-tree": 0, "serialised": 0, "unreadable": str(problem)[:200],
            }  # fmt: skip
        self._rows.append((node_id, row))

    def take_rows(self, strategy: RoundStrategy) -> list[dict[str, Any]]:
        """Hand over the rows since the last call, with the partitions that the roster knows by now.

        Args:
            strategy: The strategy, for its roster.

        Returns:
            Ledger rows.
        """
        rows = [{**row, "partition": strategy.roster.partition_of(node_id)} for node_id, row in self._rows]
        self._rows = []
        return rows
