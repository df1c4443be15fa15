"""The handshake: what a node says of itself when the server asks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flwr.app import ConfigRecord, RecordDict

from fedapps.errors import MessageError

NODE = "node"
"""Record of a query reply."""

MOST_PARTITIONS = 10_000_000
"""Partitions that a node may speak of."""


LONGEST_NAME = 100
"""Characters of a node's name or device."""

LONGEST_SHOWN = 200
"""Characters that a line shows of what a node told."""

MOST_TOLD = 10_000_000
"""Characters that a node may tell of its data."""

TOLD = ("examples", "features", "classes", "dtype")
"""What every task tells of a node's data; results and checks show it."""


@dataclass(frozen=True)
class NodeFacts:
    """What a node says of itself in the handshake.

    Attributes:
        partition: Partition id of its data; -1 for a node with data of its own that has none.
        num_partitions: Number of partitions that it believes there are; 0 likewise.
        num_examples: Training examples that it holds.
        version: Version of this package on the node.
        method: Method that the node is set up for.
        device: Device that it computes on.
        layout: Which tensors would be preconditioned, as `Layout.to_json`; empty for methods without curvature.
        kernel: Checksum of known directions as the node draws and applies them; empty for methods without replicas.
        name: What its configuration calls it, or empty; nodes with data of their own are known by it.
        told: What it tells of data of its own (`fedapps.tasks.base.Task.tell`).
    """

    partition: int
    num_partitions: int
    num_examples: int
    version: str
    method: str
    device: str
    layout: str
    kernel: str = ""
    name: str = ""
    told: Mapping[str, Any] = field(default_factory=dict)

    def to_record(self) -> ConfigRecord:
        """Pack into a record."""
        return ConfigRecord(
            {
                "partition-id": self.partition,
                "num-partitions": self.num_partitions,
                "num-examples": self.num_examples,
                "version": self.version,
                "method": self.method,
                "device": self.device,
                "layout": self.layout,
                "kernel": self.kernel,
                "name": self.name,
                "told": json.dumps(dict(self.told)),
            }
        )

    @classmethod
    def from_content(cls, content: RecordDict, where: str) -> NodeFacts:
        """Unpack from the content of a query reply.

        Args:
            content: The content.
            where: Which node, for the error message.

        Returns:
            The facts.

        Raises:
            MessageError: The record is absent or a field is absent or of another type.
        """
        record = content.get(NODE)
        if not isinstance(record, ConfigRecord):
            raise MessageError(
                where, expected=f"a record '{NODE}'", got=", ".join(content) or "nothing", do="update the node"
            )
        try:
            facts = cls(
                partition=int(record["partition-id"]),  # type: ignore[arg-type]
                num_partitions=int(record["num-partitions"]),  # type: ignore[arg-type]
                num_examples=int(record["num-examples"]),  # type: ignore[arg-type]
                version=str(record["version"]),
                method=str(record["method"]),
                device=_printable(record["device"]),
                layout=str(record["layout"]),
                kernel=str(record["kernel"]),
                name=_printable(record.get("name", "")),
                told=_told(str(record.get("told", "{}"))),
            )
            if not 0 <= facts.num_partitions <= MOST_PARTITIONS or facts.num_examples < 0:
                raise ValueError(f"{facts.num_partitions} partitions, {facts.num_examples} examples")
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
            held = str(dict(record))[:200]
            raise MessageError(
                where, expected="the facts of a node", got=f"{held} ({error})", do="update the node"
            ) from error
        return facts


def _printable(value: object) -> str:
    """Give a text as a line of the log can show it."""
    text = str(value)
    if len(text) > LONGEST_NAME or not text.isprintable():
        raise ValueError(f"{text[:LONGEST_NAME]!r} is no text of at most {LONGEST_NAME} printable characters")
    return text


def shown(value: object) -> str:
    """Give what a node told, which may be anything, as a line of the log can show it."""
    text = value if isinstance(value, str) and value.isprintable() else repr(value)
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}..."


def _told(text: str) -> dict[str, Any]:
    if len(text) > MOST_TOLD:
        raise ValueError(f"{len(text)} characters told of its data, at most {MOST_TOLD} are read")
    told = json.loads(text)
    if not isinstance(told, dict):
        raise TypeError(f"told {type(told).__name__}")
    return told
