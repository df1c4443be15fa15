"""The ledger: how many bytes each message holds, and how many Flower moves for it.

*Payload* is what a method must send: the data of arrays, without the ``.npy`` header that Flower puts before each, and
the serialised values of scalar records. *Serialised* is what Flower's Fleet API moves: the objects into which a message
is cut, each distinct one once, and the tree of their ids. Both are read off the message itself, never derived from
the model. A SuperLink that holds an object already does not take it again, so that the measured traffic of messages
with equal content can be less than the sum of these rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from flwr.app import ArrayRecord, Message, RecordDict
from flwr.app.message import make_message
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    no_object_id_recompute,
)

from fedapps.messages.schema import payload_bytes
from fedapps.results.storage import Row

Direction = Literal["down", "up"]
Kind = Literal["train", "evaluate", "query"]


def message_row(message: Message, *, server_round: int, partition: int | None, direction: Direction, kind: Kind) -> Row:
    """Measure one message for the ledger. The message is not changed, not even its caches.

    Args:
        message: A message that is to be sent, or a reply; an error reply has no payload.
        server_round: The round.
        partition: Partition id of the client; None before it is known.
        direction: ``"down"`` to the client, ``"up"`` from it.
        kind: What the message asks for.

    Returns:
        ``round``, ``partition``, ``direction``, ``kind``; ``payload``: record -> bytes; ``objects`` and
        ``object-tree``: bytes; ``serialised``: their sum; ``error``: Flower's code, on an error reply.
    """
    row: Row = {"round": server_round, "partition": partition, "direction": direction, "kind": kind}
    if message.has_error():
        row["error"] = message.error.code
    content = message.content if message.has_content() else RecordDict()
    row["payload"] = payload_bytes(content)
    row["objects"], row["object-tree"] = _serialised(message)
    row["serialised"] = row["objects"] + row["object-tree"]
    return row


def _serialised(message: Message) -> tuple[int, int]:
    """Count the bytes of the distinct objects, and of the tree of their ids."""
    # Ids of large arrays are hashes over their data: one pass, without recomputing. One object is copied at a time.
    with no_object_id_recompute():
        view = _uncached(message)
        objects = get_all_nested_objects(view)
        return sum(len(item.deflate()) for item in objects.values()), get_object_tree(view).ByteSize()


def _uncached(message: Message) -> Message:
    """Share the data of a message under new objects: Flower caches slices in an array, which cannot be pickled then."""
    if not message.has_content():
        return message
    content = RecordDict(
        {
            name: ArrayRecord(dict(record)) if isinstance(record, ArrayRecord) else record
            for name, record in message.content.items()
        }
    )
    return make_message(metadata=message.metadata, content=content)


def sum_bytes(rows: Iterable[Row]) -> dict[str, int]:
    """Add up ledger rows for a row of ``metrics.jsonl``.

    Args:
        rows: Rows of `message_row`.

    Returns:
        ``payload-down``, ``payload-up``, ``wire-down``, ``wire-up``; bytes, over all records.
    """
    totals = dict.fromkeys(("payload-down", "payload-up", "wire-down", "wire-up"), 0)
    for row in rows:
        totals[f"payload-{row['direction']}"] += sum(row["payload"].values())
        totals[f"wire-{row['direction']}"] += row["serialised"]
    return totals
