"""Who got what: counts of examples and classes for each client, as rows and as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedapps.tasks.splits import Indices

MAX_CLASS_COLUMNS = 12
"""Most classes that get a column each; with more, a client's number of classes is shown."""


@dataclass(frozen=True)
class PartitionRow:
    """What one client got.

    Attributes:
        partition: Partition id.
        examples: Number of training examples.
        counts: Label -> number of examples; classes that the client lacks are left out.
    """

    partition: int
    examples: int
    counts: Mapping[str, int]


def partition_summary(targets: NDArray[Any], parts: Sequence[Indices]) -> list[PartitionRow]:
    """Count who got what.

    Args:
        targets: Labels, ``(n,)``; for targets of another shape no classes are counted.
        parts: For each partition id the indices of its examples.

    Returns:
        A row for each partition, in order.
    """
    rows = []
    for partition, part in enumerate(parts):
        counts: dict[str, int] = {}
        if targets.ndim == 1:
            labels, numbers = np.unique(targets[part], return_counts=True)
            counts = {_text(label): int(number) for label, number in zip(labels, numbers, strict=True)}
        rows.append(PartitionRow(partition, len(part), counts))
    return rows


def partition_table(rows: Sequence[PartitionRow], max_rows: int = 20) -> str:
    """Draw the rows as a text table.

    Args:
        rows: A row for each partition.
        max_rows: Most clients to list; of more, the first ones are listed and the rest is counted.

    Returns:
        Lines with partition, examples and examples of each class (a dot for none), closed by the smallest, median and
        largest client.
    """
    classes = sorted({label for row in rows for label in row.counts}, key=_numeric_first)
    wide = len(classes) > MAX_CLASS_COLUMNS
    header = ["client", "examples", *(["classes"] if wide else classes)]
    shown = rows if len(rows) <= max_rows else rows[: max_rows - 1]
    lines = [
        [
            str(row.partition),
            str(row.examples),
            *([str(len(row.counts))] if wide else [str(row.counts.get(label, ".")) for label in classes]),
        ]
        for row in shown
    ]
    widths = [max(len(line[i]) for line in [header, *lines]) for i in range(len(header))]
    text = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in [header, *lines]]
    if len(shown) < len(rows):
        text.append(f"... and {len(rows) - len(shown)} more clients")
    sizes = [row.examples for row in rows]
    text.append(f"smallest {min(sizes)}, median {np.median(sizes):g}, largest {max(sizes)} examples")
    return "\n".join(text)


def _text(label: Any) -> str:
    return f"{label:g}" if isinstance(label, np.floating) else str(label)


def _numeric_first(label: str) -> tuple[bool, float, str]:
    try:
        return False, float(label), label
    except ValueError:
        return True, 0.0, label
