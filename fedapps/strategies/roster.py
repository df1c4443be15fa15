"""The roster: which node is which client.

Flower's node ids are random and change with every start, so clients are known by partition id. Before round 1, and to
every node id not seen before at a round's start, the server sends a query; the node answers who it is.

Where nodes have data of their own they are known by name, which their first key pins, and have numbers in place of partition
ids: those of the start in the order of their names, those that come later the next ones. In the handshake they agree on what
their task must share, such as the number of features, and a node whose data do not fit is refused.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from itertools import islice
from logging import getLogger
from typing import TYPE_CHECKING, Any

from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid

import fedapps
from fedapps.curvature.layout import Layout, layout_from_json
from fedapps.errors import FedAppsError, MessageError, RosterError, explain
from fedapps.messages.node_facts import NodeFacts
from fedapps.messages.schema import CONFIG
from fedapps.strategies.exchange import arriving

if TYPE_CHECKING:
    from fedapps.tasks.base import Task

logger = getLogger("flwr")

CLIENT_RAISED = 2
"""Flower's error code for a ClientApp that raised, or that has no handler for the message."""

LEAST_QUERY_WAIT = 60.0
"""Seconds that the answers to a query may take at least: a node starts a process for it, which imports torch."""

MOST_MISSES = 2
"""Queries that a node may leave without an answer; it is asked again only after it has connected anew."""

MOST_REFUSALS = 5
"""Refused nodes that an error message lists."""

LONGEST_REASON = 2000
"""Characters of the reason for a refusal."""

REGISTERS_ITSELF = 2.0
"""Seconds from registration to activation below which a node has registered itself."""

NODE_POLL = 1.0
"""Seconds between two looks at the connected nodes while clients are missing."""


def _key(node: NodeInfo) -> bytes:
    """Give the public key of a node that the SuperLink's owner registered; nothing for one that registered itself.

    Without authentication a SuperNode makes a key for itself at every start, which says nothing of who it is. Flower does not
    tell the two apart, but such a node is active as soon as it is registered, and one whose key was registered before it was
    started is not.
    """
    try:
        waited = datetime.fromisoformat(node.last_activated_at) - datetime.fromisoformat(node.registered_at)
    except ValueError:
        return node.public_key
    return b"" if waited.total_seconds() < REGISTERS_ITSELF else node.public_key


def fingerprint(key: bytes) -> str:
    """Give the first 16 hexadecimal digits of the SHA-256 of a public key."""
    return hashlib.sha256(key).hexdigest()[:16]


class Roster:
    """The nodes of a run, by partition.

    Args:
        node_wait: Seconds to wait for all partitions to be there.
        num_clients: Least number of clients before round 1, where the nodes do not say how many there are.
        timeout: Seconds to wait for the answers to a query; at most `node_wait` or `LEAST_QUERY_WAIT`, since a node that does
            not answer holds up the others.
        asks: Whether nodes are asked who they are. Of those that are not, the first are numbered by their ids, and each later
            one gets the next number.
        first_stays: Whether, of two nodes for one partition, the first stays. Where nodes have keys the first key always does.

    Attributes:
        method: Method of the run; nodes set up for another are refused. Any may take part where it is empty.
        experiment: Identity of the experiment, sent with the query.
        kernel: Checksum of known directions that every node must draw, or empty.
        task: The task, where nodes have data of their own; None where they have partitions of common data.
        newcomers: Whether such a node may join after the first round.
        names: Their names, by number.
        agreed: What they agreed on (`fedapps.tasks.base.Task.agree`).
        own_layout: What the agreed model preconditions, in place of what nodes say.
    """

    def __init__(
        self, *, node_wait: float, num_clients: int, timeout: float, first_stays: bool = False, asks: bool = True
    ) -> None:
        self.method = ""
        self.experiment = ""
        self._node_wait = node_wait
        self._num_clients = num_clients
        self._timeout = min(timeout, max(node_wait, LEAST_QUERY_WAIT))
        self._first_stays = first_stays
        self.asks = asks
        # Ids of nodes that are not asked, by number.
        self._numbered: list[int] = []
        self._misses: Counter[tuple[int, str]] = Counter()
        self._key_of: dict[int, bytes] = {}
        self.kernel = ""
        self.task: Task | None = None
        self.newcomers = True
        self.names: list[str] = []
        self.agreed: dict[str, Any] = {}
        self.own_layout = ""
        self._known_names = 0
        self._seen: set[tuple[int, str]] = set()
        self._silent: set[int] = set()
        # Id of the query by node, of nodes whose answer nobody has looked for.
        self._hailed: dict[int, str] = {}
        self.facts: dict[int, NodeFacts] = {}
        self.refused: dict[int, str] = {}
        self.node_of: dict[int, int] = {}
        self.num_partitions = 0

    def partition_of(self, node_id: int) -> int | None:
        """Give the partition of a node.

        Args:
            node_id: Flower's id of the node.

        Returns:
            The partition id, or None for a node without one.
        """
        return next((partition for partition, node in self.node_of.items() if node == node_id), None)

    def layout(self) -> Layout | None:
        """Give what most nodes say that they precondition; None if none has said it."""
        if self.own_layout:
            return layout_from_json(self.own_layout, "server")
        votes = Counter(facts.layout for _, facts in sorted(self.facts.items()) if facts.layout)
        return layout_from_json(votes.most_common(1)[0][0], "handshake") if votes else None

    def hail(self, grid: Grid) -> None:
        """Ask the nodes that are there without waiting for answers, which `refresh` takes: they read their data meanwhile.

        Args:
            grid: Flower's grid.
        """
        self._hailed = self._ask(grid, [node.node_id for node in grid.get_nodes()])

    def refresh(self, grid: Grid) -> None:
        """Greet new nodes; at the first call wait until every partition has one.

        Of nodes with data of their own as many as are wanted are waited for, and at later calls one; of nodes that are not
        asked, as many as are wanted at every call, as Flower does.

        Args:
            grid: Flower's grid.

        Raises:
            RosterError: Clients are missing after the wait, or the nodes contradict each other.
            TaskError: Nodes with data of their own cannot agree.
        """
        deadline = time.monotonic() + self._node_wait
        while True:
            self._greet_new_nodes(grid)
            if self._enough() if self.num_partitions else self._complete():
                return
            # Where every node was refused at the start, more time brings nothing: the cause is in their answers.
            hopeless = bool(self.refused) and not (self.num_partitions or self.node_of or self._silent)
            if hopeless or time.monotonic() > deadline:
                raise RosterError(self._what_is_missing())
            time.sleep(NODE_POLL)

    @property
    def fixed(self) -> bool:
        """Whether the clients are those of the first round, and the others are sampled without looking who is there."""
        return self.task is None and (self.asks or not self.newcomers)

    def _enough(self) -> bool:
        if not self.asks:
            return len(self.node_of) >= self._num_clients
        return self.task is None or bool(self.node_of)

    def _number(self, online: Iterable[int]) -> None:
        """Give nodes that are not asked their numbers; those that came before keep theirs."""
        new = sorted(set(online) - set(self._numbered) - self._silent)
        if self.num_partitions and not self.newcomers:
            for node_id in new:
                self._silent.add(node_id)
                logger.warning(
                    "node %d came after the first round, and takes no part: the method sums over all clients", node_id
                )
        elif self.num_partitions:
            self._numbered += new
            self.num_partitions = len(self._numbered)
        else:
            self._numbered = sorted(online)
        self.node_of = {number: node for number, node in enumerate(self._numbered) if node in online}

    def _greet_new_nodes(self, grid: Grid) -> None:
        online = {node.node_id: node for node in grid.get_nodes()}
        for partition, node_id in list(self.node_of.items()):
            if node_id not in online:
                del self.node_of[partition]
                self._seen = {seen for seen in self._seen if seen[0] != node_id}  # It is asked again when it is back.
                logger.warning("client %d: its node %d is gone", partition, node_id)
        self._silent &= set(online)
        if not self.asks:
            self._number(online)
            return
        # In order of activation, so that the newer of two nodes for one partition is entered last.
        new = sorted(
            (
                node
                for node in online.values()
                if (node.node_id, node.last_activated_at) not in self._seen and not self._gave_up(node)
            ),
            key=lambda node: (node.last_activated_at, node.node_id),
        )
        if not new:
            return
        answers = self._answers(grid, [node.node_id for node in new])
        told = [(node, facts) for node in new if (facts := self._read(node, answers.get(node.node_id))) is not None]
        # What most nodes say, so that one that is wrong does not refuse the others.
        votes = Counter(facts.num_partitions for facts in (*self.facts.values(), *(facts for _, facts in told)))
        for node, facts in told:
            self._enter(node, facts, agreed=self.num_partitions or votes.most_common(1)[0][0])

    def _gave_up(self, node: NodeInfo) -> bool:
        return self._misses[node.node_id, node.last_activated_at] >= MOST_MISSES

    def _answers(self, grid: Grid, node_ids: Sequence[int]) -> dict[int, Message]:
        """Wait for the answers of nodes; those that were not hailed are asked now."""
        hailed, self._hailed = self._hailed, {}
        queries = {node_id: hailed[node_id] for node_id in node_ids if node_id in hailed}
        queries |= self._ask(grid, [node_id for node_id in node_ids if node_id not in queries])
        arrived = {r.metadata.reply_to_message_id: r for r in arriving(grid, queries.values(), self._timeout)}
        return {node_id: arrived[query] for node_id, query in queries.items() if query in arrived}

    def _ask(self, grid: Grid, node_ids: Sequence[int]) -> dict[int, str]:
        """Send the query, and give its id for each node."""
        query = ConfigRecord({"version": fedapps.__version__, "method": self.method, "experiment": self.experiment})
        messages = [
            Message(RecordDict({CONFIG: query}), dst_node_id=node_id, message_type=MessageType.QUERY)
            for node_id in node_ids
        ]
        return dict(zip(node_ids, grid.push_messages(messages), strict=True))

    def _read(self, node: NodeInfo, reply: Message | None) -> NodeFacts | None:
        """Read what a node says of itself; None for one that says nothing, or nothing usable."""
        node_id = node.node_id
        if reply is None or (reply.has_error() and reply.error.code != CLIENT_RAISED):
            self._misses[node_id, node.last_activated_at] += 1
            again = "when it has connected anew" if self._gave_up(node) else "next round"
            logger.warning("node %d did not answer the query; it is asked again %s", node_id, again)
            return None
        self._seen.add((node_id, node.last_activated_at))
        if reply.has_error():
            reason = reply.error.reason or ""
            if "No query function registered" in reason:
                self._silent.add(node_id)
            else:
                self._refuse(node_id, reason.strip().splitlines()[-1][-500:] if reason else "it raised an error")
            return None
        try:
            return NodeFacts.from_content(reply.content, f"node {node_id}")
        except MessageError as error:
            self._refuse(node_id, str(error))
            return None

    def _enter(self, node: NodeInfo, facts: NodeFacts, *, agreed: int) -> None:
        node_id = node.node_id
        try:
            self._check(node_id, facts, agreed)
            partition = facts.partition if self.task is None else self._number_of(self.task, node, facts)
            self._check_key(node, partition)
        except FedAppsError as error:
            self._refuse(node_id, str(error))
            return
        if (older := self.node_of.get(partition, node_id)) != node_id:
            stays = older if self._first_stays and not _key(node) else node_id
            logger.warning(
                "client %d: nodes %d and %d both hold its partition; %d is used", partition, older, node_id, stays
            )
            if stays == older:
                self._refuse(node_id, f"partition {partition} is held by node {older} (second-node = refused)")
                return
        self.node_of[partition] = node_id
        self.facts[partition] = facts
        if key := _key(node):
            self._key_of[partition] = key

    # Nodes with data of their own -------------------------------------------------------------------

    def _number_of(self, task: Task, node: NodeInfo, facts: NodeFacts) -> int:
        """Give the number of a node with data of its own; a name not heard of yet gets the next one."""
        key = _key(node)
        name = node.name or facts.name or (f"key-{fingerprint(key)}" if key else "")
        if not name:
            raise RosterError(
                f"node {node.node_id}",
                expected="a name or a key, since every node has data of its own",
                got="neither",
                do="start the SuperNode with --node-config 'name=\"hospital-a\"', or register its key with --name",
            )
        if self.num_partitions and (reason := self._misfit(task, facts)):
            raise RosterError(f"node {node.node_id} ({name}), {reason}")
        if name in self.names:
            return self.names.index(name)
        if (self.num_partitions or self._known_names) and not self.newcomers:
            raise RosterError(
                f"node {node.node_id} ({name})",
                expected=f"one of the {len(self.names)} nodes of the first round, which method '{self.method}' sums over",
                got="a newcomer",
                do="let it wait for the next run, or choose a method that takes newcomers, such as fedpm or fedavg",
            )
        self.names.append(name)
        if self.num_partitions:
            self.num_partitions = len(self.names)
        return len(self.names) - 1

    def _agree(self, task: Task) -> bool:
        """Let the nodes agree, refuse those that do not fit, and number the others; False if too few are left.

        At a resume they have agreed already.
        """
        if not self._known_names:
            self._refuse_unless(lambda facts: self._alone(task, facts))
            self.agreed = self._agreement(task)
        if self._refuse_unless(lambda facts: self._misfit(task, facts)) and not self._known_names:
            self.agreed = self._agreement(task)  # without them
        if len(self.node_of) < self._num_clients:
            return False
        self._renumber()
        return True

    def _agreement(self, task: Task) -> dict[str, Any]:
        told = {self.names[number]: self.facts[number].told for number in sorted(self.node_of)}
        return task.agree(told) if told else {}

    def _alone(self, task: Task, facts: NodeFacts) -> str:
        """Say what is wrong with what a node tells, which may be anything: it must agree with itself at least."""
        try:
            task.agree({facts.name: facts.told})
        except Exception as error:
            return f"what it tells of its data: {error if isinstance(error, FedAppsError) else repr(error)}"
        return ""

    def _misfit(self, task: Task, facts: NodeFacts) -> str:
        try:
            return task.misfit(facts.told, self.agreed)
        except Exception as error:
            return f"what it tells of its data: {error!r}"

    def _refuse_unless(self, fault: Callable[[NodeFacts], str]) -> bool:
        """Refuse every node that has a fault, and tell whether there was one."""
        faults = {number: reason for number in sorted(self.node_of) if (reason := fault(self.facts[number]))}
        for number, reason in faults.items():
            node_id = self.node_of.pop(number)
            self._refuse(node_id, f"node {node_id} ({self.names[number]}), {reason}")
        return bool(faults)

    def _renumber(self) -> None:
        """Number the nodes of the start by their names; the shorter first, so that site-2 comes before site-10."""
        fixed = self.names[: self._known_names]
        new = sorted((self.names[n] for n in self.node_of if n >= len(fixed)), key=lambda name: (len(name), name))
        old = {name: number for number, name in enumerate(self.names)}
        self.names = fixed + new
        now = {old[name]: number for number, name in enumerate(self.names)}
        self.node_of = {now[n]: node_id for n, node_id in self.node_of.items()}
        self.facts = {now[n]: facts for n, facts in self.facts.items() if n in now}
        self._key_of = {now[n]: key for n, key in self._key_of.items() if n in now}

    def state(self) -> dict[str, Any]:
        """Give who the nodes with data of their own are, and what they agreed on, for a checkpoint; nothing of others."""
        if self.task is None:
            return {}
        keys = {str(number): key.hex() for number, key in sorted(self._key_of.items())}
        # Sums over all clients weigh those that are away, too.
        facts = {str(number): {**asdict(facts), "told": {}} for number, facts in sorted(self.facts.items())}
        return {"names": list(self.names), "keys": keys, "facts": facts, "agreed": self.agreed}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take back what `state` gave."""
        self.names, self.agreed = list(state.get("names", [])), dict(state.get("agreed", {}))
        self._known_names = len(self.names)
        self._key_of = {int(number): bytes.fromhex(key) for number, key in state.get("keys", {}).items()}
        self.facts = {int(number): NodeFacts(**facts) for number, facts in state.get("facts", {}).items()}

    # Every node --------------------------------------------------------------------------------------

    def key_of(self, partition: int) -> str:
        """Give the fingerprint of a client's key; ``""`` where nodes have none."""
        key = self._key_of.get(partition, b"")
        return fingerprint(key) if key else ""

    def _check_key(self, node: NodeInfo, partition: int) -> None:
        """Refuse another key for a client: the first one keeps it over the run, unless the SuperLink's owner named the node."""
        pinned = self._key_of.get(partition)
        if pinned and pinned != _key(node) and not (self.task and node.name):
            raise RosterError(
                f"node {node.node_id} ({self.names[partition] if self.task else f'partition {partition}'})",
                expected="the key of the node that was this client first",
                got="another key",
                do="give every node its own partition-id or name, or start a new run",
            )

    def _refuse(self, node_id: int, reason: str) -> None:
        # It may quote what a node said, which is to stay on its line.
        reason = "".join(c if c.isprintable() else repr(c)[1:-1] for c in reason[:LONGEST_REASON])
        self.refused[node_id] = reason
        logger.error("node %d refused: %s", node_id, reason)

    def _check(self, node_id: int, facts: NodeFacts, agreed: int) -> None:
        where = f"node {node_id} ({facts.name if self.task else f'partition {facts.partition}'})"
        if facts.version != fedapps.__version__:
            raise RosterError(
                where,
                expected=f"fedapps {fedapps.__version__} as on the server",
                got=f"fedapps {facts.version}",
                do="install the same version on every machine",
            )
        if self.method and facts.method != self.method:
            raise RosterError(
                where,
                expected=f"method '{self.method}'",
                got=f"'{facts.method}'",
                do="start the node's app with the settings of the run",
            )
        if self.kernel and facts.kernel != self.kernel:
            raise RosterError(
                f"{where}, kernel",
                expected=f"directions with checksum {self.kernel[:16]} as on the server",
                got=facts.kernel[:16] or "none",
                do="its replica would go astray at the first step: update fedapps, numba or the GPU's software there",
            )
        if self.task is None and (facts.num_partitions != agreed or not 0 <= facts.partition < facts.num_partitions):
            raise RosterError(
                where,
                expected=f"a partition of {agreed}",
                got=f"partition-id={facts.partition} num-partitions={facts.num_partitions}",
                do="give every node the same num-partitions and its own partition-id below it",
            )

    def _complete(self) -> bool:
        if self.task is not None:
            if len(self.node_of) < self._num_clients or not self._agree(self.task):
                return False
            self.num_partitions = len(self.names)
            return True
        if not self.asks:
            if not self._enough():
                return False
            self.num_partitions = len(self._numbered)
            return True
        if self.facts:
            expected = next(iter(self.facts.values())).num_partitions
            if len(self.node_of) == expected:
                self.num_partitions = expected
                return True
            return False
        # Nobody answers queries: partitions are the places in the sorted list of node ids.
        if len(self._silent) >= self._num_clients:
            self.node_of = dict(enumerate(sorted(self._silent)))
            self.num_partitions = len(self.node_of)
            logger.info("the nodes answer no query: %d are used in the order of their ids", self.num_partitions)
            return True
        return False

    def _what_is_missing(self) -> str:
        shown = list(self.refused.items())[:MOST_REFUSALS]
        refusals = "; ".join(f"node {node}: {reason}" for node, reason in shown)
        more = f"; and {len(self.refused) - len(shown)} more" if len(self.refused) > len(shown) else ""
        told = f" Refused: {refusals}{more}." if refusals else ""
        if self.facts and self._silent:
            told += f" Without a query handler: nodes {', '.join(map(str, sorted(self._silent)))}."
        if self.task is not None:
            there = ", ".join(sorted(self.names[n] for n in self.node_of)[:MOST_REFUSALS]) or "none"
            return (
                explain(
                    "nodes with data of their own",
                    expected="at least one"
                    if self.num_partitions
                    else f"{self._num_clients} or more (min-available-nodes)",
                    got=f"{len(self.node_of)} after {self._node_wait:g} s ({there})",
                    do="start the missing nodes, correct those refused, or lower min-available-nodes",
                )
                + "."
                + told
            )
        if self.facts:
            expected = next(iter(self.facts.values())).num_partitions
            missing = list(islice((p for p in range(expected) if p not in self.node_of), 20))
            return (
                explain(
                    "clients",
                    expected=f"{expected} (num-partitions of the nodes)",
                    got=f"{len(self.node_of)} connected after {self._node_wait:g} s, missing partitions "
                    + ", ".join(map(str, missing)),
                    do="start the missing nodes, or give every node the num-partitions that there really are",
                )
                + "."
                + told
            )
        return (
            explain(
                "clients",
                expected=f"at least {self._num_clients} nodes",
                got=f"{len(self._silent if self.asks else self.node_of)} usable after {self._node_wait:g} s",
                do="start more nodes, raise node-wait or lower min-available-nodes",
            )
            + "."
            + told
        )
