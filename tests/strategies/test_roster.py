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


def test_the_number_of_partitions_is_what_most_nodes_say() -> None:
    """The node that is wrong connected first; it refuses nobody but itself."""
    nodes = {
        1: replace(FACTS, num_partitions=7),
        **{n: replace(FACTS, partition=n - 2, num_partitions=3) for n in (2, 3, 4)},
    }
    roster = refresh(FakeGrid(nodes))
    assert roster.node_of == {0: 2, 1: 3, 2: 4}
    assert "expected a partition of 3, got partition-id=0 num-partitions=7" in roster.refused[1]


def test_an_absurd_number_of_partitions_is_refused_at_once() -> None:
    with pytest.raises(RosterError, match="1000000000 partitions"):
        refresh(FakeGrid({1: replace(FACTS, num_partitions=10**9)}))


def test_a_node_that_leaves_queries_without_an_answer_holds_up_two_rounds_at_most() -> None:
    grid = FakeGrid({1: FACTS, 2: replace(FACTS, partition=1)})
    roster = refresh(grid)
    grid.nodes[9] = None
    for _ in range(5):
        refresh(grid, roster)
    assert grid.queried == [1, 2, 9, 9]
    grid.activated[9] = "2028"  # It has connected anew.
    refresh(grid, roster)
    assert grid.queried == [1, 2, 9, 9, 9]


class KeyedGrid(FakeGrid):
    """Nodes with keys: node id -> key."""

    keys: dict[int, bytes]

    def get_nodes(self) -> Iterable[NodeInfo]:
        for node in super().get_nodes():
            node.public_key = self.keys[node.node_id]
            yield node


def test_where_nodes_have_keys_the_first_one_keeps_its_partition() -> None:
    """Also once it is gone: its own restart, with another node id, gets the partition back."""
    grid = KeyedGrid({1: FACTS, 2: replace(FACTS, partition=1)})
    grid.keys = {1: b"a", 2: b"b", 3: b"thief", 4: b"a"}
    roster = refresh(grid)
    del grid.nodes[1]
    grid.nodes[3] = FACTS
    refresh(grid, roster)
    assert roster.node_of == {1: 2}
    assert "the key of the node that was this client first" in roster.refused[3]
    grid.nodes[4] = FACTS
    refresh(grid, roster)
    assert roster.node_of == {0: 4, 1: 2}


def test_without_keys_a_setting_says_which_of_two_nodes_stays() -> None:
    grid = FakeGrid({1: FACTS, 2: replace(FACTS, partition=1), 3: FACTS})
    roster = Roster(node_wait=0.05, num_clients=0, timeout=0.05, first_stays=True)
    refresh(grid, roster)
    assert roster.node_of == {0: 1, 1: 2}
    assert "held by node 1" in roster.refused[3]
