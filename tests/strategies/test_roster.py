"""The handshake: who is there, who is refused, and why."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

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
from fedapps.tasks import PartitionConfig, PartitionKind, Task, TaskConfig
from fedapps.tasks.libsvm import LibsvmTask
from fedapps.tasks.synthetic import SyntheticLinearTask

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


def make_roster(num_clients: int = 2, node_wait: float = 0.05) -> Roster:
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


def test_nodes_are_hailed_without_waiting_and_only_those_that_came_since_are_asked_again() -> None:
    grid, roster = FakeGrid({1: FACTS}), make_roster()
    roster.hail(grid)
    assert (grid.queried, roster.node_of) == ([1], {})
    grid.nodes[2] = replace(FACTS, partition=1)
    assert refresh(grid, roster).node_of == {0: 1, 1: 2}
    assert grid.queried == [1, 2]


def test_a_hailed_node_that_does_not_answer_is_asked_again_and_one_that_is_gone_is_not_waited_for() -> None:
    grid, roster = FakeGrid({1: FACTS, 2: None}), make_roster(node_wait=1.0)
    roster.hail(grid)
    grid.nodes = {2: None, 3: FACTS}
    looked_for: list[int] = []

    def answers_later(message_ids: Iterable[str]) -> Iterable[Message]:
        ids = list(message_ids)
        looked_for.extend(grid._sent[i].metadata.dst_node_id for i in ids)
        if len(looked_for) > 4:
            grid.nodes[2] = replace(FACTS, partition=1)
        return FakeGrid.pull_messages(grid, ids)

    grid.pull_messages = answers_later  # type: ignore[method-assign]
    assert refresh(grid, roster).node_of == {0: 3, 1: 2}
    assert set(looked_for) == {2, 3}


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
    with pytest.raises(RosterError, match=r"expected at least 4 nodes, got 3 usable after 0\.05 s"):
        refresh(FakeGrid({30: SILENT, 10: SILENT, 20: SILENT}), make_roster(num_clients=4))


def test_nobody_there_ends_the_wait_with_advice() -> None:
    with pytest.raises(
        RosterError, match=r"expected at least 2 nodes, got 0 usable.*start more nodes, raise node-wait"
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
    roster = Roster(node_wait=0.05, num_clients=2, timeout=0.05, first_stays=True)
    refresh(grid, roster)
    assert roster.node_of == {0: 1, 1: 2}
    assert "held by node 1" in roster.refused[3]


class Registered(FakeGrid):
    """Nodes as a SuperLink lists them: node id -> what its entry says beside its id."""

    def __init__(self, nodes: dict[int, NodeFacts | Error | None], entries: dict[int, dict[str, Any]]) -> None:
        super().__init__(nodes)
        self.entries = entries

    def get_nodes(self) -> Iterable[NodeInfo]:
        usual = {"registered_at": "2026-01-01T00:00:00", "last_activated_at": "2026-01-01T00:00:09"}
        return [NodeInfo(node_id=n, **{**usual, **self.entries.get(n, {})}) for n in self.nodes]


def own(name: str, n: int = 5, **told: Any) -> NodeFacts:
    told = {"features": [3], "dtype": "float64", "classes": [-1, 1]} | told
    return replace(FACTS, partition=-1, num_partitions=0, num_examples=n, name=name, told=told, layout="")


def own_roster(wanted: int = 2, task: Task | None = None, node_wait: float = 0.05) -> Roster:
    roster = make_roster(wanted, node_wait)
    roster.task = task or SyntheticLinearTask(TaskConfig(partition=PartitionConfig(PartitionKind.LOCAL)))
    return roster


def test_nodes_with_data_of_their_own_are_numbered_by_name() -> None:
    """Not by partition, id or order of arrival; the number of a name with more digits comes later."""
    nodes = {5: own("site-10"), 6: own("site-2"), 7: own("site-1")}
    roster = refresh(FakeGrid(nodes), own_roster(3))
    assert roster.names == ["site-1", "site-2", "site-10"]
    assert roster.node_of == {0: 7, 1: 6, 2: 5}
    assert roster.num_partitions == 3
    assert roster.agreed == {"features": [3]}


def test_the_start_waits_for_as_many_nodes_as_are_wanted() -> None:
    with pytest.raises(RosterError, match=r"expected 3 or more \(min-available-nodes\), got 2 after 0\.05 s \(a, b\)"):
        refresh(FakeGrid({1: own("b"), 2: own("a")}), own_roster(3))


def test_a_newcomer_gets_the_next_number_and_one_that_returns_its_own() -> None:
    grid = FakeGrid({1: own("b"), 2: own("c")})
    roster = refresh(grid, own_roster())
    del grid.nodes[1]
    grid.nodes |= {3: own("a")}
    refresh(grid, roster)
    assert (roster.names, roster.node_of, roster.num_partitions) == (["b", "c", "a"], {1: 2, 2: 3}, 3)
    grid.nodes |= {4: own("b")}
    refresh(grid, roster)
    assert roster.node_of == {0: 4, 1: 2, 2: 3}


def test_where_the_server_sums_over_all_clients_a_newcomer_waits_for_the_next_run() -> None:
    grid = FakeGrid({1: own("b"), 2: own("c")})
    roster = own_roster()
    roster.newcomers = False
    refresh(grid, roster)
    grid.nodes |= {3: own("a")}
    refresh(grid, roster)
    assert roster.num_partitions == 2
    assert "expected one of the 2 nodes of the first round" in roster.refused[3]


def test_while_all_nodes_are_away_a_round_waits_and_then_says_so() -> None:
    grid = FakeGrid({1: own("b"), 2: own("c")})
    roster = refresh(grid, own_roster())
    grid.nodes = {}
    with pytest.raises(RosterError, match=r"expected at least one, got 0 after 0\.05 s \(none\)"):
        refresh(grid, roster)


def test_an_earlier_refusal_is_no_reason_to_give_up_nodes_that_are_away(monkeypatch: pytest.MonkeyPatch) -> None:
    grid = FakeGrid({1: own("b"), 2: own("c"), 3: own("wide", features=[4])})
    roster = refresh(grid, own_roster(node_wait=5.0))
    grid.nodes = {}
    monkeypatch.setattr(roster_module.time, "sleep", lambda _: grid.nodes.update({1: own("b")}))
    refresh(grid, roster)
    assert roster.node_of == {0: 1}


def test_a_node_whose_data_do_not_fit_is_refused_by_name_and_the_others_go_on() -> None:
    grid = FakeGrid({1: own("a"), 2: own("wide", features=[4]), 3: own("c")})
    roster = refresh(grid, own_roster())
    assert roster.names == ["a", "c"]
    assert "(wide), its data: expected inputs of shape (3) as the other nodes have, got (4)" in roster.refused[2]
    grid.nodes |= {4: own("late", features=[2])}
    refresh(grid, roster)
    assert "(late), its data: expected inputs of shape (3)" in roster.refused[4]
    assert roster.names == ["a", "c"]


@pytest.mark.parametrize("told", [{}, {"features": 7}, {"features": {"a": [None]}}, {"features": [10**30]}])
def test_what_a_node_tells_of_its_data_may_be_anything(told: dict[str, Any]) -> None:
    liar = replace(own("liar"), told=told)
    for task in (None, LibsvmTask(TaskConfig(partition=PartitionConfig(PartitionKind.LOCAL)))):
        roster = refresh(FakeGrid({1: own("a"), 2: liar, 3: own("c")}), own_roster(task=task))
        assert roster.names == ["a", "c"]
        assert "(liar)" in roster.refused[2]


def test_sparse_files_agree_on_the_widest_and_a_wider_newcomer_is_refused() -> None:
    local = PartitionConfig(PartitionKind.LOCAL)
    grid = FakeGrid({1: own("a"), 2: own("b", features=[5])})
    roster = refresh(grid, own_roster(task=LibsvmTask(TaskConfig(partition=local))))
    assert roster.agreed == {"features": [5]}
    grid.nodes |= {3: own("late", features=[6]), 4: own("narrow", features=[2])}
    refresh(grid, roster)
    assert "expected at most 5 features as in the run, got 6" in roster.refused[3]
    assert roster.names == ["a", "b", "narrow"]
    stated = LibsvmTask(TaskConfig(partition=local, options={"num-features": 9}))
    assert refresh(FakeGrid({1: own("a"), 2: own("b")}), own_roster(task=stated)).agreed == {"features": [9]}


@pytest.mark.parametrize("name", ["", "x" * 101, "a\x1b[2J"])
def test_a_node_with_data_of_its_own_needs_a_name_or_a_key(name: str) -> None:
    roster = refresh(FakeGrid({1: own("a"), 2: own(name), 3: own("c")}), own_roster())
    assert roster.names == ["a", "c"]
    assert ("printable" if name else "start the SuperNode with --node-config") in roster.refused[2]
    assert "\x1b" not in roster.refused[2]
    keyed = Registered({1: own("a"), 2: own("")}, {2: {"public_key": b"key"}})
    digest = hashlib.sha256(b"key").hexdigest()[:16]
    assert refresh(keyed, own_roster()).names == ["a", f"key-{digest}"]


def test_the_name_that_the_superlinks_owner_gave_counts_and_its_key_may_be_renewed() -> None:
    entries = {1: {"name": "hospital", "public_key": b"old"}, 2: {"public_key": b"other"}}
    grid = Registered({1: own("whatever"), 2: own("b")}, entries)
    roster = refresh(grid, own_roster())
    assert roster.names == ["b", "hospital"]
    del grid.nodes[1]
    grid.nodes |= {3: own("hospital"), 4: own("x")}
    entries |= {3: {"public_key": b"thief"}, 4: {"name": "hospital", "public_key": b"new"}}
    refresh(grid, roster)
    assert "the key of the node that was this client first" in roster.refused[3]
    assert roster.node_of == {0: 2, 1: 4}
    assert roster.key_of(1) == hashlib.sha256(b"new").hexdigest()[:16]


def test_a_key_that_a_node_made_for_itself_binds_nobody() -> None:
    """Without authentication every start of a SuperNode makes another one: a restarted node is the same client."""
    at_once = {"registered_at": "2026-01-01T00:00:00.1", "last_activated_at": "2026-01-01T00:00:00.2"}
    for facts, roster in ((FACTS, make_roster()), (own("a"), own_roster())):
        other = replace(FACTS, partition=1) if roster.task is None else own("b")
        grid = Registered({1: facts, 2: other}, {n: {**at_once, "public_key": b"%d" % n} for n in (1, 2, 3)})
        refresh(grid, roster)
        grid.nodes = {2: other, 3: facts}
        refresh(grid, roster)
        assert roster.node_of == {0: 3, 1: 2}
        assert not roster.refused


def test_a_node_that_has_connected_anew_is_asked_again() -> None:
    """Its data may have grown while it was away; by its key it has the same id."""
    entries: dict[int, dict[str, Any]] = {}
    grid = Registered({1: own("a"), 2: own("b")}, entries)
    roster = refresh(grid, own_roster())
    grid.nodes[2] = own("b", n=9)
    entries[2] = {"last_activated_at": "2026-01-02T00:00:00"}
    refresh(grid, roster)
    assert grid.queried == [1, 2, 2]
    assert roster.facts[1].num_examples == 9
    assert roster.node_of == {0: 1, 1: 2}


def test_a_resumed_roster_knows_names_keys_and_what_was_agreed() -> None:
    entries = {n: {"public_key": b"%d" % n} for n in (1, 2)}
    first = refresh(Registered({1: own("b"), 2: own("c")}, entries), own_roster())
    state = json.loads(json.dumps(first.state()))
    entries |= {7: entries[1], 8: entries[2], 9: {"public_key": b"thief"}}
    again = own_roster()
    again.load_state(state)
    refresh(
        Registered({8: own("c"), 7: own("b"), 5: own("a"), 6: own("wide", features=[4]), 9: own("b")}, entries), again
    )
    assert (again.names, again.node_of) == (["b", "c", "a"], {0: 7, 1: 8, 2: 5})
    assert again.agreed == {"features": [3]}
    assert set(again.refused) == {6, 9}
    assert make_roster().state() == {}


def test_a_resume_weighs_nodes_that_are_away_and_takes_no_newcomer_into_a_sum() -> None:
    first = refresh(FakeGrid({1: own("b", n=3), 2: own("c", n=7)}), own_roster())
    again = own_roster()
    again.load_state(json.loads(json.dumps(first.state())))
    again.newcomers = False
    refresh(FakeGrid({8: own("a", n=9), 7: own("b", n=3), 6: own("c", n=7)}), again)
    assert again.names == ["b", "c"]
    assert "expected one of the 2 nodes of the first round" in again.refused[8]
    alone = own_roster(1)
    alone.load_state(json.loads(json.dumps(first.state())))
    refresh(FakeGrid({7: own("b", n=3)}), alone)
    assert {number: facts.num_examples for number, facts in alone.facts.items()} == {0: 3, 1: 7}
    assert alone.node_of == {0: 7}


def test_what_a_refused_node_said_stays_on_its_line() -> None:
    forged = Error(2, "x" * 10 + "\x1b[2Jhospital-a refused")
    roster = refresh(FakeGrid({1: own("a"), 2: forged, 3: own("c")}), own_roster())
    assert roster.refused[2] == "x" * 10 + "\\x1b[2Jhospital-a refused"
    wide = refresh(FakeGrid({1: own("a"), 2: own("b", features=["\n" * 10_000]), 3: own("c")}), own_roster())
    assert len(wide.refused[2]) < 400
    assert "\n" not in wide.refused[2]
