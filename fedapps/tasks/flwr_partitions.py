"""The splits of flwr-datasets' partitioners: iid, by column, and k classes a client.

flwr-datasets takes about two seconds to load, in every process of a run. So only the split by classes runs its
partitioner, on an in-memory table of labels and positions; the others are a line of NumPy that gives the same parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedapps.errors import TaskError, did_you_mean
from fedapps.tasks.splits import Indices

if TYPE_CHECKING:
    from flwr_datasets.partitioner import Partitioner


def iid_parts(num_examples: int, num_partitions: int, generator: np.random.Generator) -> list[Indices]:
    """Shuffle the examples and cut them into parts whose sizes differ by at most one."""
    # IidPartitioner cuts the same contiguous shards and leaves the shuffling to its caller.
    return np.array_split(generator.permutation(num_examples), num_partitions)


def column_parts(columns: Mapping[str, NDArray[Any]], num_partitions: int, column: str) -> list[Indices]:
    """Give each value of a column, in ascending order, to one client; there must be as many as clients."""
    if column not in columns:
        raise TaskError(
            f"partition by column '{column}'",
            expected="one of the columns " + ", ".join(columns) if columns else "a task whose data has columns",
            got="no such column",
            do=did_you_mean(column, columns, "name a column of the task, or choose another partition"),
        )
    values, clients = np.unique(columns[column], return_inverse=True)
    if len(values) != num_partitions:
        raise TaskError(
            f"partition by column '{column}'",
            expected=f"{num_partitions} different values, one for each client",
            got=f"{len(values)} values",
            do=f"set the number of clients to {len(values)}",
        )
    return [np.flatnonzero(clients == client) for client in range(num_partitions)]


def class_parts(
    labels: Indices, num_partitions: int, classes_per_client: int, generator: np.random.Generator
) -> list[Indices]:
    """Cut each class into equal shards and deal them out, k shards of different classes to each client.

    With k classes a partition, `PathologicalPartitioner` draws the classes at random and drops those that nobody drew.
    With one class a partition it takes the classes in turn (shard ``j`` has class ``j mod C``), so that none is lost;
    which client gets which shards is then drawn here. ``labels`` are classes numbered 0, 1, ..., ``(n,)``.

    Raises:
        TaskError: Some class would have no client, or has fewer examples than clients.
    """
    sizes = np.bincount(labels)
    num_classes, num_shards = len(sizes), num_partitions * classes_per_client
    rank = generator.permutation(num_classes)  # by lot, since the first classes may be cut once more than the last
    shards_per_rank = np.bincount(np.arange(num_shards) % num_classes, minlength=num_classes)
    _check_classes(sizes, shards_per_rank[rank], num_partitions, classes_per_client)
    order = generator.permutation(len(labels))
    partitioner = _partitioners().PathologicalPartitioner(
        num_shards, "label", 1, class_assignment_mode="deterministic", shuffle=False
    )
    shards = [order[shard] for shard in _run(partitioner, rank[labels[order]])]
    used = np.zeros(num_classes, dtype=np.intp)
    parts = []
    for ranks in _deal(shards_per_rank, num_partitions, classes_per_client, generator):
        parts.append(np.concatenate([shards[r + num_classes * used[r]] for r in ranks]))
        used[ranks] += 1
    return parts


def _check_classes(sizes: Indices, shards_per_class: Indices, num_partitions: int, classes_per_client: int) -> None:
    num_classes, num_shards = len(sizes), num_partitions * classes_per_client
    where = f"partition with {classes_per_client} classes a client"
    if classes_per_client > num_classes or num_shards < num_classes:
        raise TaskError(
            where,
            expected=f"at most {num_classes} classes a client, and at least {num_classes} over all clients so that"
            " no class is left over",
            got=f"{num_partitions} clients x {classes_per_client} = {num_shards}",
            do="change classes-per-client or the number of clients",
        )
    for number in np.flatnonzero(sizes < shards_per_class):
        raise TaskError(
            f"{where}, class {number} counted from 0 in ascending order",
            expected=f"at least {shards_per_class[number]} examples, one for each client that has the class",
            got=f"{sizes[number]}",
            do="take fewer clients or fewer classes a client",
        )


def _deal(
    shards_per_rank: Indices, num_partitions: int, classes_per_client: int, generator: np.random.Generator
) -> list[Indices]:
    """Draw the classes of each client: those with most shards left, ties by lot, which never gets stuck."""
    left = shards_per_rank.copy()
    dealt = []
    for _ in range(num_partitions):
        ranks = np.lexsort((generator.random(len(left)), -left))[:classes_per_client]
        left[ranks] -= 1
        dealt.append(ranks)
    return dealt


def _partitioners() -> Any:
    try:
        from flwr_datasets import partitioner
    except ImportError as error:
        raise TaskError(
            "partition",
            expected="the package flwr-datasets, which makes the classes partition",
            got=f"an import error ({error})",
            do="install fedapps[torch], or choose another partition; they do without",
        ) from error
    return partitioner


def _run(partitioner: Partitioner, labels: Indices) -> list[Indices]:
    """Run a partitioner of flwr-datasets on a table that holds only labels and positions."""
    from datasets import Dataset

    partitioner.dataset = Dataset.from_dict({"position": np.arange(len(labels)), "label": labels})
    return [
        np.asarray(partitioner.load_partition(i)["position"], dtype=np.intp) for i in range(partitioner.num_partitions)
    ]
