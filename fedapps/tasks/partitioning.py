"""Splits of the training examples among the clients, and who got what as text.

Every split uses each example exactly once, depends only on its arguments, and leaves global random generators alone.
The iid, classes and column splits are those of flwr-datasets (`fedapps.tasks.flwr_partitions`). The Dirichlet split is
ours: it first checks that the minimum size can be met, draws once, and repairs what came out too
small, so it always ends.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedapps.errors import TaskError
from fedapps.tasks.flwr_partitions import class_parts, column_parts, iid_parts
from fedapps.tasks.splits import Indices, Purpose, stream


class PartitionKind(StrEnum):
    """How the training examples are split among the clients."""

    IID = "iid"
    """Shuffled and cut into parts of equal size (flwr-datasets' `IidPartitioner`)."""
    DIRICHLET = "dirichlet"
    """For each class, shares drawn from a symmetric Dirichlet distribution (Hsu et al. 2019, arXiv 1909.06335)."""
    CLASSES = "classes"
    """Each client has the same number of classes (flwr-datasets' `PathologicalPartitioner`, arXiv 2102.02079)."""
    COLUMN = "column"
    """One client for each value of a column, values ascending (flwr-datasets' `NaturalIdPartitioner`)."""
    LOCAL = "local"
    """Not at all: what the task loads on a client's machine is that client's own, all of it."""


@dataclass(frozen=True)
class PartitionConfig:
    """How to split the training examples."""

    kind: PartitionKind = PartitionKind.DIRICHLET  # the kind of split; the other fields each belong to one kind
    alpha: float = 0.1  # Dirichlet: concentration, > 0; small values give clients few classes
    classes_per_client: int = 2  # Classes: number of classes of each client, >= 1
    column: str = ""  # Column: name of the column whose values are the clients
    min_size: int = 1  # Dirichlet: least number of examples of a client, >= 1

    def __post_init__(self) -> None:
        column_missing = self.kind is PartitionKind.COLUMN and not self.column
        checks = [
            (isinstance(self.kind, PartitionKind), "partition", "one of " + ", ".join(PartitionKind), self.kind),
            (math.isfinite(self.alpha) and self.alpha > 0, "alpha", "a finite number > 0", self.alpha),
            (self.classes_per_client >= 1, "classes-per-client", "a number >= 1", self.classes_per_client),
            (self.min_size >= 1, "partition-min-size", "a number >= 1", self.min_size),
            (not column_missing, "partition-column", "the name of a column", "''"),
        ]
        for right, name, expected, got in checks:
            if not right:
                raise TaskError(f"partition, {name}", expected=expected, got=str(got))

    def describe(self) -> str:
        """Name the split and what shapes it, such as ``"dirichlet, alpha 0.1, at least 1 example(s) a client"``."""
        details = {
            PartitionKind.DIRICHLET: f", alpha {self.alpha:g}, at least {self.min_size} example(s) a client",
            PartitionKind.CLASSES: f", {self.classes_per_client} a client",
            PartitionKind.COLUMN: f" '{self.column}'",
        }
        return f"{self.kind}{details.get(self.kind, '')}"


def partition_indices(
    targets: NDArray[Any],
    num_partitions: int,
    config: PartitionConfig,
    seed: int,
    columns: Mapping[str, NDArray[Any]] | None = None,
) -> tuple[Indices, ...]:
    """Split the examples among the clients.

    Args:
        targets: Labels, ``(n,)``; the iid and column splits use only their number.
        num_partitions: Number of clients.
        config: How to split.
        seed: Seed of the split, >= 0.
        columns: Further columns of the examples, ``(n,)`` each, for the column split.

    Returns:
        For each partition id the indices of its examples, ascending; together every index once, none empty.

    Raises:
        TaskError: The split cannot be made: too few examples, a class or a column that does not fit, or flwr-datasets
            is not installed, which the split by classes needs.
    """
    _check_feasible(len(targets), num_partitions, config)
    generator = stream(Purpose.PARTITION, seed)
    if config.kind is PartitionKind.IID:
        parts = iid_parts(len(targets), num_partitions, generator)
    elif config.kind is PartitionKind.COLUMN:
        parts = column_parts(columns or {}, num_partitions, config.column)
    elif config.kind is PartitionKind.CLASSES:
        labels = _labels(targets, config.kind)
        parts = class_parts(labels, num_partitions, config.classes_per_client, generator)
    else:
        labels = _labels(targets, config.kind)
        parts = _dirichlet_parts(labels, num_partitions, config.alpha, generator)
        parts = _repair(parts, config.min_size)
    return tuple(np.sort(part) for part in parts)


def _check_feasible(num_examples: int, num_partitions: int, config: PartitionConfig) -> None:
    if num_partitions < 1:
        raise TaskError("partition", expected="at least 1 client", got=str(num_partitions), do="set num-partitions")
    least = config.min_size if config.kind is PartitionKind.DIRICHLET else 1
    if num_partitions * least > num_examples:
        raise TaskError(
            "partition",
            expected=f"at least {least} training example(s) for each of {num_partitions} clients",
            got=f"{num_examples} in all: {num_partitions} x {least} > {num_examples}",
            do="take fewer clients" + (" or a smaller partition-min-size" if least > 1 else ""),
        )


def _labels(targets: NDArray[Any], kind: PartitionKind) -> Indices:
    """Number the classes of the examples 0, 1, ... in ascending order of their labels."""
    if targets.ndim != 1:
        raise TaskError(
            f"partition '{kind}'",
            expected="one label for each example, targets of shape (n,)",
            got=f"targets of shape {targets.shape}",
            do="choose the iid or the column partition",
        )
    labels: Indices = np.unique(targets, return_inverse=True)[1]
    return labels


def _dirichlet_parts(
    labels: Indices, num_partitions: int, alpha: float, generator: np.random.Generator
) -> list[Indices]:
    r"""Cut each class at the cumulated shares :math:`q \sim \mathrm{Dir}(\alpha, ..., \alpha)` of the clients."""
    owner = np.empty(len(labels), dtype=np.intp)
    for label in range(int(labels.max()) + 1):
        members = generator.permutation(np.flatnonzero(labels == label))
        shares = generator.dirichlet(np.full(num_partitions, alpha))
        cuts = np.rint(np.cumsum(shares)[:-1] * len(members))
        owner[members] = np.searchsorted(cuts, np.arange(len(members)), side="right")
    # A random order within each part, so that a repair moves examples of all classes.
    order = generator.permutation(len(labels))
    return [order[owner[order] == client] for client in range(num_partitions)]


def _repair(parts: list[Indices], min_size: int) -> list[Indices]:
    """Move examples from the largest client (the first of equals) to those below the minimum.

    Each move either satisfies a client or brings a donor down to the minimum, so there are at most 2N moves.
    """
    parts = list(parts)
    for client in range(len(parts)):
        while (missing := min_size - len(parts[client])) > 0:
            donor = int(np.argmax([len(part) for part in parts]))
            moved = min(missing, len(parts[donor]) - min_size)
            parts[client] = np.concatenate([parts[client], parts[donor][:moved]])
            parts[donor] = parts[donor][moved:]
    return parts


MAX_CLASS_COLUMNS = 12
"""Most classes that get a column each; with more, a client's number of classes is shown."""


@dataclass(frozen=True)
class PartitionRow:
    """What one client got."""

    partition: int
    examples: int  # number of training examples
    counts: Mapping[str, int]  # label -> number of examples; classes that the client lacks are left out


def partition_summary(targets: NDArray[Any], parts: Sequence[Indices]) -> list[PartitionRow]:
    """Count who got what, a row for each partition; for targets of another shape than ``(n,)`` no classes are counted."""
    rows = []
    for partition, part in enumerate(parts):
        counts: dict[str, int] = {}
        if targets.ndim == 1:
            labels, numbers = np.unique(targets[part], return_counts=True)
            counts = {_text(label): int(number) for label, number in zip(labels, numbers, strict=True)}
        rows.append(PartitionRow(partition, len(part), counts))
    return rows


def partition_table(rows: Sequence[PartitionRow], max_rows: int = 20) -> str:
    """Draw the rows as a text table, closed by the smallest, median and largest client.

    A line has partition, examples and examples of each class (a dot for none). Of more than ``max_rows`` clients the first ones
    are listed and the rest is counted.
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
