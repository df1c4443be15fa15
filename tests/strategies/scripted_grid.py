"""A grid whose nodes answer with what a test says, and rounds over it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.proto.node_pb2 import NodeInfo

from fedapps.messages import pack_arrays
from fedapps.strategies import RoundStrategy
from fedapps.strategies.exchange import GridWrapper, exchange

FIRST_NODE = 70
"""Node of partition 0; the others follow."""

Answer = RecordDict | Error | None


class ScriptedGrid(GridWrapper):
    """Nodes that answer messages with content, an error, or nothing (None).

    Args:
        answer: Partition, message -> answer.

    Attributes:
        sent: Every message, in order.
    """

    def __init__(self, answer: Callable[[int, Message], Answer]) -> None:
        super().__init__(None)  # type: ignore[arg-type]
        self._answer = answer
        self.sent: list[Message] = []

    def get_nodes(self) -> Iterable[NodeInfo]:
        return []

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        first = len(self.sent)
        self.sent += messages
        for number, message in enumerate(self.sent[first:], first):
            message.metadata.__dict__["_message_id"] = str(number)
        return [message.metadata.message_id for message in self.sent[first:]]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        replies = []
        for message in (self.sent[int(message_id)] for message_id in message_ids):
            answer = self._answer(message.metadata.dst_node_id - FIRST_NODE, message)
            if answer is not None:
                replies.append(Message(answer, reply_to=message))
        return replies


def seat(strategy: RoundStrategy, clients: int) -> None:
    """Enter nodes for all partitions, as the handshake would."""
    strategy.roster.node_of = {p: FIRST_NODE + p for p in range(clients)}
    strategy.roster.num_partitions, strategy.roster.asks = clients, True
    strategy.roster.refresh = lambda grid: None  # type: ignore[method-assign]


def train(
    strategy: RoundStrategy, grid: ScriptedGrid, server_round: int, model: Mapping[str, np.ndarray], **config: Any
) -> tuple[dict[str, np.ndarray] | None, MetricRecord | None]:
    """A round by Flower's own two calls."""
    messages = strategy.configure_train(server_round, pack_arrays(model), ConfigRecord(config), grid)
    replies = list(exchange(grid, messages, strategy.settings.round_timeout))
    arrays, metrics = strategy.aggregate_train(server_round, replies)
    return None if arrays is None else {name: array.numpy() for name, array in arrays.items()}, metrics


def evaluate(
    strategy: RoundStrategy, grid: ScriptedGrid, server_round: int, model: Mapping[str, np.ndarray]
) -> tuple[dict[int, dict[str, float]], dict[int, int]]:
    """An evaluation by the clients."""
    messages = strategy.configure_evaluate(server_round, pack_arrays(model), ConfigRecord({}), grid)
    return strategy.evaluation_results(list(exchange(grid, messages, strategy.settings.round_timeout)))
