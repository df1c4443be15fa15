"""The handshake: who is there, who is refused, and why."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
from flwr.app import Error, Message, RecordDict
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid

import fedapps
from fedapps.curvature.layout import BlockSpec, Layout
from fedapps.errors import RosterError
from fedapps.messages.node_facts import NodeFacts
from fedapps.strategies import roster as roster_module
from fedapps.strategies.exchange import GridWrapper
from fedapps.strategies.roster import Roster

LAYOUT = Layout((BlockSpec("fc", ("fc.weight",), 2, 3),)).to_json()
FACTS = NodeFacts(
    partition=0, num_partitions=2, num_examples=5, version=fedapps.__version__, method="fedpm", device="cpu",
    layout=LAYOUT,
)  # fmt: skip
SILENT = Error(2, "Traceback ...\nValueError: No query function registered with name 'default'")


class FakeGrid(GridWrapper):
    """Nodes that answer queries with what the test says: facts, an error, or nothing (None)."""

    def __init__(self, nodes: dict[int, NodeFacts | Error | None]) -> None:
        super().__init__(None)  # type: ignore[arg-type]
        self.nodes = nodes
        self.activated = {node_id: f"2026-01-01T00:00:{n:02d}" for n, node_id in enumerate(nodes)}
        self.queried: list[int] = []
        self._sent: dict[str, Message] = {}

    def get_nodes(self) -> Iterable[NodeInfo]:
        return [NodeInfo(node_id=n, last_activated_at=self.activated.get(n, "2027")) for n in self.nodes]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        ids = []
        for number, message in enumerate(messages):
            message_id = f"{len(self.queried)}-{number}"
            message.metadata.__dict__["_message_id"] = message_id
            self._sent[message_id] = message
            ids.append(message_id)
        self.queried += [self._sent[i].metadata.dst_node_id for i in ids]
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        replies = []
        for message_id in message_ids:
            message = self._sent[message_id]
            answer = self.nodes[message.metadata.dst_node_id]
            if isinstance(answer, Error):
                replies.append(Message(answer, reply_to=message))
            elif answer is not None:
                replies.append(Message(RecordDict({"node": answer.to_record()}), reply_to=message))
        return replies


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roster_module, "NODE_POLL", 0.01)


def make_roster(num_clients: int = 0, node_wait: float = 0.05) -> Roster:
    roster = Roster(node_wait=node_wait, num_clients=num_clients, timeout=0.05)
    roster.method, roster.experiment = "fedpm", "e"
    return roster


def refresh(grid: Grid, roster: Roster | None = None) -> Roster:
    roster = roster or make_roster()
    roster.refresh(grid)
    return roster


def test_nodes_are_known_by_partition_whatever_their_ids() -> None:
    roster = refresh(FakeGrid({7: replace(FACTS, partition=1), 99: FACTS}))
    assert roster.node_of == {1: 7, 0: 99}
    assert (roster.partition_of(7), roster.partition_of(99), roster.partition_of(5)) == (1, 0, None)
    assert roster.num_partitions == 2
    assert roster.facts[0].layout == LAYOUT


def test_a_node_is_asked_once_and_only_new_ones_later() -> None:
    grid = FakeGrid({1: FACTS, 2: replace(FACTS, partition=1)})
    roster = refresh(grid)
    refresh(grid, roster)
    assert grid.queried == [1, 2]
    grid.nodes = {1: FACTS, 3: replace(FACTS, partition=1)}
    refresh(grid, roster)
    assert grid.queried == [1, 2, 3]
    assert roster.node_of == {0: 1, 1: 3}


def test_of_two_nodes_for_a_partition_the_newer_wins() -> None:
    grid = FakeGrid({5: FACTS, 4: FACTS, 6: replace(FACTS, partition=1)})
    grid.activated = {5: "2026-01-01T00:00:01", 4: "2026-01-01T00:00:09", 6: "2026-01-01T00:00:05"}
    assert refresh(grid).node_of[0] == 4  # the newer one, though its id is smaller


def test_fewer_clients_than_partitions_names_both_numbers() -> None:
    """Two numbers for one fact: the nodes say 4 partitions, 3 are there."""
    nodes = {n: replace(FACTS, partition=n, num_partitions=4) for n in range(3)}
    with pytest.raises(RosterError, match=r"expected 4 \(num-partitions of the nodes\), got 3 .* missing partitions 3"):
        refresh(FakeGrid(nodes))


def test_more_clients_than_partitions_are_refused_by_name() -> None:
    """Two numbers for one fact: the nodes say 2 partitions, one of them counts 3."""
    nodes = {n: replace(FACTS, partition=n) for n in range(2)} | {9: replace(FACTS, partition=2, num_partitions=3)}
    roster = refresh(FakeGrid(nodes))
    assert roster.num_partitions == 2
    assert "expected a partition of 2, got partition-id=2 num-partitions=3" in roster.refused[9]


@pytest.mark.parametrize(
    ("answer", "match"),
    [
        (replace(FACTS, version="0.0.1"), r"expected fedapps .* as on the server, got fedapps 0\.0\.1"),
        (replace(FACTS, method="fedavg"), "expected method 'fedpm', got 'fedavg'"),
        (Error(2, "Traceback\nfedapps.errors.TaskError: node config 'partition-id': ..."), "TaskError: node config"),
        (None, "missing partitions 0"),
    ],
    ids=["another version", "another method", "an exception", "no answer"],
)
def test_a_node_that_does_not_fit_is_refused_with_the_reason(answer: NodeFacts | Error | None, match: str) -> None:
    with pytest.raises(RosterError, match=match):
        refresh(FakeGrid({1: answer, 2: replace(FACTS, partition=1)}))


def test_without_query_handlers_nodes_are_used_in_the_order_of_their_ids() -> None:
    roster = refresh(FakeGrid({30: SILENT, 10: SILENT, 20: SILENT}))
    assert roster.node_of == {0: 10, 1: 20, 2: 30}
    with pytest.raises(RosterError, match=r"expected 4 nodes, got 3 usable after 0\.05 s"):
        refresh(FakeGrid({30: SILENT, 10: SILENT, 20: SILENT}), make_roster(num_clients=4))


def test_nobody_there_ends_the_wait_with_advice() -> None:
    with pytest.raises(
        RosterError, match=r"expected at least 2 nodes, got 0 usable.*start more nodes or raise node-wait"
    ):
        refresh(FakeGrid({}))


def test_a_malformed_answer_is_refused() -> None:
    record = FACTS.to_record()
    del record["num-partitions"]
    grid = FakeGrid({1: FACTS, 2: replace(FACTS, partition=1)})
    bad = NodeFacts.from_content
    with pytest.raises(Exception, match="expected the facts of a node"):
        bad(RecordDict({"node": record}), "node 1")
    with pytest.raises(Exception, match="expected a record 'node'"):
        bad(RecordDict(), "node 1")
    assert refresh(grid).num_partitions == 2


def test_where_every_node_is_refused_nobody_waits() -> None:
    bad = replace(FACTS, version="0.0.1")
    nodes: dict[int, NodeFacts | Error | None] = {n: replace(bad, partition=n, num_partitions=9) for n in range(9)}
    roster = make_roster(node_wait=3600.0)
    with pytest.raises(RosterError, match=r"Refused: node 0: .*got fedapps 0\.0\.1.*; and 4 more\."):
        roster.refresh(FakeGrid(nodes))
