from __future__ import annotations

import random
import subprocess
import sys
import time

import numpy as np
import pytest

from fedapps.errors import TaskError
from fedapps.tasks.partitioning import (
    PartitionConfig,
    PartitionKind,
    PartitionRow,
    partition_indices,
    partition_summary,
    partition_table,
)

LABELS = np.random.default_rng(7).integers(0, 10, 1000)
SITES = np.array([f"site-{i % 7}" for i in range(1000)])

CONFIGS = [
    pytest.param(PartitionConfig(PartitionKind.IID), 7, id="iid"),
    pytest.param(PartitionConfig(PartitionKind.DIRICHLET, alpha=0.1), 7, id="dirichlet"),
    pytest.param(PartitionConfig(PartitionKind.DIRICHLET, alpha=1e-300, min_size=3), 300, id="dirichlet-extreme"),
    pytest.param(PartitionConfig(PartitionKind.DIRICHLET, alpha=1e6, min_size=140), 7, id="dirichlet-even"),
    pytest.param(PartitionConfig(PartitionKind.CLASSES, classes_per_client=2), 7, id="classes"),
    pytest.param(PartitionConfig(PartitionKind.CLASSES, classes_per_client=10), 7, id="all-classes"),
    pytest.param(PartitionConfig(PartitionKind.CLASSES, classes_per_client=2), 5, id="classes-fewer-clients"),
    pytest.param(PartitionConfig(PartitionKind.COLUMN, column="site"), 7, id="column"),
    pytest.param(PartitionConfig(PartitionKind.IID), 1, id="one-client"),
]


def split(config: PartitionConfig, num_partitions: int, seed: int = 0) -> tuple[np.ndarray, ...]:
    return partition_indices(LABELS, num_partitions, config, seed, {"site": SITES})


@pytest.mark.parametrize(("config", "num_partitions"), CONFIGS)
def test_every_example_goes_to_exactly_one_client(config, num_partitions):
    """No data unused or used twice: the union of the indices is the whole set, and no client is empty."""
    parts = split(config, num_partitions)
    assert len(parts) == num_partitions
    assert min(len(part) for part in parts) >= 1
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(1000))
    assert all(np.all(np.diff(part) > 0) for part in parts)


@pytest.mark.parametrize(("config", "num_partitions"), CONFIGS)
def test_the_split_depends_on_its_seed_alone(config, num_partitions):
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002 - the global generator is what must not matter
    before = (random.getstate(), str(np.random.get_state()))  # noqa: NPY002
    first = split(config, num_partitions)
    assert (random.getstate(), str(np.random.get_state())) == before  # noqa: NPY002
    np.random.seed(2)  # noqa: NPY002
    again = split(config, num_partitions)
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    if config.kind is not PartitionKind.COLUMN and num_partitions > 1:
        other = split(config, num_partitions, seed=1)
        assert not all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.slow
def test_the_split_is_the_same_in_another_process():
    code = (
        "import numpy as np; from fedapps.tasks.partitioning import *;"
        "labels = np.random.default_rng(7).integers(0, 10, 1000);"
        "kinds = [PartitionConfig(k) for k in (PartitionKind.IID, PartitionKind.DIRICHLET, PartitionKind.CLASSES)];"
        "print([p.tolist() for c in kinds for p in partition_indices(labels, 7, c, 3)])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    kinds = [PartitionConfig(k) for k in (PartitionKind.IID, PartitionKind.DIRICHLET, PartitionKind.CLASSES)]
    assert out.strip() == str([p.tolist() for c in kinds for p in split(c, 7, seed=3)])


def test_dirichlet_follows_the_drawn_shares():
    """One class, many examples: the sizes are the shares, whose mean is 1/N and variance (N-1)/(N^2 (N alpha + 1)).

    500 splits of N = 4 clients give a Monte Carlo error of the variance below 10 % (standard error about 5 %).
    """
    n, num_partitions, alpha = 1000, 4, 0.5
    config = PartitionConfig(alpha=alpha, min_size=1)
    labels = np.zeros(n, dtype=int)
    shares = np.array([[len(p) / n for p in partition_indices(labels, 4, config, seed)] for seed in range(500)])
    variance = (num_partitions - 1) / (num_partitions**2 * (num_partitions * alpha + 1))
    assert shares.mean(axis=0) == pytest.approx([0.25] * 4, abs=4 * np.sqrt(variance / 500))
    assert shares.var() == pytest.approx(variance, rel=0.1)


def test_small_alpha_gives_clients_few_classes():
    few, many = (
        np.mean([len(np.unique(LABELS[p])) for p in split(PartitionConfig(alpha=alpha), 10)]) for alpha in (0.01, 100)
    )
    assert few < 4
    assert many == 10


def test_an_infeasible_minimum_is_refused_at_once():
    """A split that cannot be met is refused at once, not sought for ever: 100 samples, 50 clients, minimum 10."""
    start = time.perf_counter()
    with pytest.raises(TaskError, match="50 x 10 > 100"):
        partition_indices(LABELS[:100], 50, PartitionConfig(min_size=10), 0)
    assert time.perf_counter() - start < 2


@pytest.mark.parametrize("seed", range(5))
def test_a_hard_dirichlet_split_ends(seed):
    """A hard split ends in bounded time: 1000 samples, 100 clients, alpha 0.05, minimum 1."""
    start = time.perf_counter()
    parts = partition_indices(LABELS, 100, PartitionConfig(alpha=0.05, min_size=1), seed)
    assert time.perf_counter() - start < 5
    assert min(len(part) for part in parts) >= 1
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(1000))


def test_the_tightest_feasible_minimum_is_met():
    parts = partition_indices(LABELS[:100], 50, PartitionConfig(alpha=0.01, min_size=2), 0)
    assert {len(part) for part in parts} == {2}


def test_repair_takes_from_the_largest_and_leaves_the_rest_alone():
    small = split(PartitionConfig(alpha=0.05, min_size=1), 20)
    repaired = split(PartitionConfig(alpha=0.05, min_size=5), 20)
    largest = int(np.argmax([len(part) for part in small]))
    assert len(repaired[largest]) < len(small[largest])
    kept = [i for i, part in enumerate(small) if len(part) >= 5]
    assert all(set(repaired[i]) <= set(small[i]) for i in kept)
    assert min(len(part) for part in repaired) == 5


def test_only_the_split_by_classes_needs_flwr_datasets_and_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "flwr_datasets", None)
    for kind in (PartitionKind.DIRICHLET, PartitionKind.IID):
        assert len(split(PartitionConfig(kind), 7)) == 7
    with pytest.raises(TaskError, match=r"flwr-datasets.*install fedapps\[torch\]"):
        split(PartitionConfig(PartitionKind.CLASSES), 7)


@pytest.mark.parametrize(
    ("config", "num_partitions", "message"),
    [
        pytest.param(PartitionConfig(), 0, "at least 1 client, got 0", id="no-clients"),
        pytest.param(PartitionConfig(PartitionKind.IID), 1001, "1001 x 1 > 1000", id="more-clients-than-examples"),
    ],
)
def test_impossible_splits_are_refused(config, num_partitions, message):
    with pytest.raises(TaskError, match=message):
        split(config, num_partitions)


def test_targets_that_are_not_labels_need_another_split():
    targets = np.zeros((20, 2))
    with pytest.raises(TaskError, match=r"one label for each example.*got targets of shape \(20, 2\)"):
        partition_indices(targets, 2, PartitionConfig(), 0)
    assert len(partition_indices(targets, 2, PartitionConfig(PartitionKind.IID), 0)) == 2


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"alpha": 0.0}, "alpha: expected a finite number > 0"),
        ({"alpha": float("nan")}, "alpha"),
        ({"min_size": 0}, "partition-min-size"),
        ({"classes_per_client": 0}, "classes-per-client"),
        ({"kind": PartitionKind.COLUMN}, "partition-column: expected the name of a column"),
        ({"kind": "random"}, "one of iid, dirichlet, classes, column, local, got random"),
    ],
    ids=["alpha-zero", "alpha-nan", "minimum-zero", "no-classes", "no-column", "unknown-kind"],
)
def test_a_config_out_of_range_is_refused(fields, message):
    with pytest.raises(TaskError, match=message):
        PartitionConfig(**fields)


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
