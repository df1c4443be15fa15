from __future__ import annotations

import numpy as np

from fedapps.tasks.split_table import PartitionRow, partition_summary, partition_table

TARGETS = np.array([-1.0, -1.0, 1.0, 1.0, 1.0])


def test_rows_count_examples_and_classes():
    rows = partition_summary(TARGETS, (np.array([0, 2, 3]), np.array([1]), np.array([4])))
    assert rows == [
        PartitionRow(0, 3, {"-1": 1, "1": 2}),
        PartitionRow(1, 1, {"-1": 1}),
        PartitionRow(2, 1, {"1": 1}),
    ]


def test_targets_that_are_not_labels_are_only_counted():
    assert partition_summary(np.zeros((4, 2)), (np.arange(4),)) == [PartitionRow(0, 4, {})]


def test_table():
    table = partition_table([PartitionRow(0, 12, {"0": 2, "10": 10}), PartitionRow(1, 3, {"2": 3})])
    assert table.splitlines() == [
        "client  examples  0  2  10",
        "     0        12  2  .  10",
        "     1         3  .  3   .",
        "smallest 3, median 7.5, largest 12 examples",
    ]


def test_many_clients_and_many_classes_stay_compact():
    rows = [PartitionRow(i, i + 1, {str(c): 1 for c in range(i + 1)}) for i in range(100)]
    lines = partition_table(rows).splitlines()
    assert len(lines) == 22
    assert lines[0].split() == ["client", "examples", "classes"]
    assert lines[-3].split() == ["18", "19", "19"]
    assert lines[-2] == "... and 81 more clients"
    assert lines[-1] == "smallest 1, median 50.5, largest 100 examples"
