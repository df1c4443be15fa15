"""One round of one client, as data: what a train message and the node's context amount to."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from flwr.app import Context, Message, MetricRecord

from fedapps.client_apps.rules import NodeRules
from fedapps.client_apps.store import ClientStore
from fedapps.compute import choose_device, generator
from fedapps.errors import MessageError, SettingsError
from fedapps.messages.schema import (
    AGREED,
    ARRAYS,
    CLIENT,
    CONFIG,
    NUM_EXAMPLES,
    SERVER_ROUND,
    Arrays,
    Entries,
    Records,
    missing_record,
    unpack,
)
from fedapps.settings import Settings

if TYPE_CHECKING:
    from fedapps.tasks.base import ClientData, Task


@dataclass(frozen=True)
class Node:
    """Who this client is, from its node's config.

    Attributes:
        partition: Partition id, the client's identity. Where nodes have data of their own, the number that the server knows
            this one by: -1 before it has given one.
        num_partitions: Number of partitions; 0 where nodes have data of their own.
        state_dir: Folder for the client's persistent state, or None.
        rules: What the node allows.
        name: What its configuration calls it.
    """

    partition: int
    num_partitions: int
    state_dir: Path | None
    rules: NodeRules = field(default_factory=NodeRules)
    name: str = ""

    @classmethod
    def of(cls, context: Context, settings: Settings, rules: NodeRules, config: Entries | None = None) -> Node:
        """Read a node's config.

        Args:
            context: Flower's context of the node.
            settings: The settings of the run.
            rules: The rules of the node.
            config: What the server says in its message.

        Returns:
            The node.

        Raises:
            SettingsError: Where the run cuts common data into partitions, ``partition-id`` or ``num-partitions`` is absent or
                not an integer in range.
            MessageError: The server does not say which client the node is.
        """
        if settings.partition == "local":
            partition, num_partitions = -1 if config is None else int(_entry(config, CLIENT)), 0
        else:
            partition, num_partitions = _partition_of(context)
        name = rules.name or str(context.node_config.get("partition-id", ""))
        return cls(
            partition, num_partitions, Path(rules.state_dir).expanduser() if rules.state_dir else None, rules, name
        )


def _partition_of(context: Context) -> tuple[int, int]:
    """Read ``partition-id`` and ``num-partitions``."""
    numbers = []
    for key in ("partition-id", "num-partitions"):
        value = context.node_config.get(key)
        if not (str(value).isascii() and str(value).isdigit()):
            raise SettingsError(
                f"node {context.node_id}, node config '{key}'",
                expected="an integer from 0, since the run cuts the data into partitions",
                got="nothing" if value is None else repr(value),
                do="start the SuperNode with --node-config 'partition-id=0 num-partitions=2', or run with partition=local",
            )
        numbers.append(int(str(value)))
    partition, num_partitions = numbers
    if partition >= num_partitions:
        raise SettingsError(
            f"node {context.node_id}",
            expected=f"a partition-id below num-partitions = {num_partitions}",
            got=str(partition),
            do="count partitions from 0",
        )
    return partition, num_partitions


@dataclass(frozen=True)
class ClientWork:
    """One round of one client.

    Attributes:
        settings: The settings of the run.
        task: The task.
        node: Who this client is.
        data: The client's own data.
        arrays: The model that the server sent, by name; read-only.
        server_round: The round.
        lr: Learning rate in force.
        last_folded: Last round in which the server folded this client's reply; 0 if none.
        experiment: Identity of the experiment.
        run_dir: The run folder as the server names it; it may lie on another machine.
        config: All entries of the message's config, those of one method included.
        records: The message's other records by name: arrays or entries.
    """

    settings: Settings
    task: Task
    node: Node
    data: ClientData
    arrays: Arrays
    server_round: int
    lr: float
    last_folded: int
    experiment: str
    run_dir: str
    config: Entries = field(default_factory=dict)
    records: Records = field(default_factory=dict)

    @property
    def where(self) -> str:
        """Name the client for messages."""
        return f"client {self.node.partition}"

    @cached_property
    def device(self) -> str:
        """The device to compute on."""
        return choose_device(self.settings.device)

    @cached_property
    def store(self) -> ClientStore:
        """The client's persistent state: beside the node if it names a folder, else in a run folder of the same user."""
        if self.node.state_dir is not None:
            root = self.node.state_dir
        elif self.node.rules.trust_server and self.run_dir and Path(self.run_dir).is_dir():
            root = Path(self.run_dir) / "clients"
        else:
            root = self.node.rules.state_folder
        return ClientStore(root, self.experiment, self.node.partition)

    @property
    def num_examples(self) -> int:
        """Examples that the client trains on."""
        return len(self.data.train)

    @property
    def torch_seed(self) -> int:
        """Seed of torch's generator for this round of this client."""
        return int(generator(self.settings.seed, self.server_round, self.node.partition, 1).integers(2**63))

    def augmentation(self) -> np.random.Generator:
        """Open the random stream from which this round of this client augments its batches."""
        return generator(self.settings.seed, self.server_round, self.node.partition, 3)

    def labels(self) -> np.random.Generator:
        """Open the random stream from which this round of this client draws labels from the model."""
        return generator(self.settings.seed, self.server_round, self.node.partition, 5)

    def batches(self, examples: np.ndarray | None = None, *, num_steps: int = 0) -> Iterator[np.ndarray]:
        """Draw the batches of the round.

        Every epoch is a new permutation; the last batch of an epoch may be smaller, and a client with fewer examples than
        a batch takes all of them.

        Args:
            examples: Indices of the examples to draw from, for as many steps as with all; None for all.
            num_steps: Number of batches; 0 for the round's.

        Yields:
            Indices into the client's training data, shape (examples in the batch,).
        """
        n = self.num_examples if examples is None else len(examples)
        size = min(self.settings.batch_size or n, n)
        random = generator(self.settings.seed, self.server_round, self.node.partition, 0)
        steps_left = num_steps or self.num_steps
        while True:
            order = random.permutation(n)
            for start in range(0, n, size):
                batch = order[start : start + size]
                yield batch if examples is None else examples[batch]
                steps_left -= 1
                if steps_left == 0:
                    return

    def samples(self, share: float) -> Iterator[np.ndarray]:
        """Draw sub-samples of the training data without end: indices of ``share`` of the examples, at least one, rising."""
        random = generator(self.settings.seed, self.server_round, self.node.partition, 4)
        size = max(1, round(share * self.num_examples))
        while True:
            yield np.sort(random.choice(self.num_examples, size, replace=False))

    def all_examples(self) -> Iterator[np.ndarray]:
        """Give every example once, in order, in batches as large as the round's: indices as `batches` gives them."""
        size = min(self.settings.batch_size or self.num_examples, self.num_examples)
        for start in range(0, self.num_examples, size):
            yield np.arange(start, min(start + size, self.num_examples))

    @property
    def num_steps(self) -> int:
        """Number of local steps ``K`` of the round."""
        n = self.num_examples
        size = min(self.settings.batch_size or n, n)
        return self.settings.local_steps or self.settings.local_epochs * -(-n // size)

    def metrics(self, **values: float) -> MetricRecord:
        """Pack the metrics record of a reply.

        Args:
            **values: Metrics, with ``_`` for ``-``.

        Returns:
            The record, with the number of examples.
        """
        return MetricRecord(
            {NUM_EXAMPLES: self.num_examples, **{name.replace("_", "-"): float(v) for name, v in values.items()}}
        )


def unpack_work(message: Message, context: Context) -> ClientWork:
    """Turn a message and a context into a round of work.

    Args:
        message: A train or evaluate message.
        context: Flower's context of the node.

    Returns:
        The work.

    Raises:
        SettingsError: The run config or the node's is wrong, or the node does not allow what is asked.
        TaskError: The task is wrong, or the client has no examples.
        MessageError: A record or an entry of the message is absent.
    """
    rules = NodeRules.of_node(context)
    settings = rules.resolve(context.run_config)
    records = unpack(message.content, "server's message")
    for name in (ARRAYS, CONFIG):
        if name not in records:
            raise missing_record("server's message", name, "record", message.content)
    arrays, config = records.pop(ARRAYS), records.pop(CONFIG)
    node = Node.of(context, settings, rules, config)
    task = rules.load_task(settings, _agreed(config))
    data = task.client_data(node.partition, node.num_partitions)
    return ClientWork(
        settings=settings,
        task=task,
        node=node,
        data=data,
        arrays=arrays,
        server_round=int(_entry(config, SERVER_ROUND)),
        lr=float(_entry(config, "lr")),
        last_folded=int(_entry(config, "last-folded")),
        experiment=str(config.get("experiment", "")),
        run_dir=str(config.get("run-dir", "")),
        config=config,
        records=records,
    )


def _agreed(config: Entries) -> dict[str, Any]:
    """Read what nodes with data of their own have agreed on; nothing where the run has partitions."""
    text = config.get(AGREED, "{}")
    try:
        agreed = json.loads(str(text))
    except (ValueError, RecursionError):
        agreed = None
    if not isinstance(agreed, dict):
        raise MessageError(
            f"server's message, entry '{AGREED}'",
            expected="a JSON object",
            got=repr(text)[:200],
            do="run the same version of fedapps on both ends",
        )
    return agreed


def _entry(config: Entries, key: str) -> float:
    value = config.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise MessageError(
            f"server's message, entry '{key}'",
            expected="a number",
            got=repr(value),
            do="run the same version of fedapps on both ends",
        )
    return value
