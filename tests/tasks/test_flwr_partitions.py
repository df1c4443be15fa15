from __future__ import annotations

import sys

import numpy as np
import pytest
from datasets import Dataset
from flwr_datasets.partitioner import IidPartitioner, NaturalIdPartitioner

from fedapps.errors import TaskError
from fedapps.tasks.flwr_partitions import class_parts, column_parts, iid_parts

LABELS = np.random.default_rng(7).integers(0, 10, 1000)
SITES = np.array([f"site-{i % 7}" for i in range(1000)])


def generator() -> np.random.Generator:
    return np.random.default_rng(0)


def test_iid_parts_have_equal_size_and_are_shuffled():
    parts = iid_parts(1000, 7, generator())
    assert {len(part) for part in parts} == {142, 143}
    # Without the shuffle a part is a run of neighbours; drawn at random its mean is 500 +- 24.
    assert all(abs(part.mean() - 500) < 100 for part in parts)


@pytest.mark.parametrize(("num_partitions", "k"), [(5, 2), (7, 2), (10, 1), (10, 3), (23, 4), (7, 10)])
def test_each_client_has_exactly_k_classes_and_no_class_is_lost(num_partitions, k):
    parts = class_parts(LABELS, num_partitions, k, generator())
    assert [len(np.unique(LABELS[part])) for part in parts] == [k] * num_partitions
    holders = [sum(c in LABELS[part] for part in parts) for c in range(10)]
    assert max(holders) - min(holders) <= 1
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(1000))


def test_which_classes_are_cut_once_more_is_drawn():
    """14 shards of 10 classes: four classes have two holders, others for other seeds."""
    doubled = set()
    for seed in range(5):
        parts = class_parts(LABELS, 7, 2, np.random.default_rng(seed))
        doubled.add(tuple(c for c in range(10) if sum(c in LABELS[part] for part in parts) == 2))
    assert all(len(classes) == 4 for classes in doubled)
    assert len(doubled) > 1


def test_a_class_is_shared_equally_by_its_clients():
    parts = class_parts(LABELS, 10, 3, generator())
    for c in range(10):
        shares = [number for part in parts if (number := np.sum(LABELS[part] == c))]
        assert len(shares) == 3
        assert max(shares) - min(shares) <= 1


def test_pairs_of_classes_are_drawn():
    """20 clients of 2 among 10 classes: with classes dealt in turn only 5 pairs would occur."""
    pairs = {tuple(np.unique(LABELS[part])) for part in class_parts(LABELS, 20, 2, generator())}
    assert len(pairs) > 10


def test_column_values_are_clients_in_ascending_order():
    parts = column_parts({"other": LABELS, "site": SITES}, 7, "site")
    assert [set(SITES[part]) for part in parts] == [{f"site-{i}"} for i in range(7)]


def partitions_of(partitioner, labels):
    partitioner.dataset = Dataset.from_dict({"position": np.arange(len(labels)), "label": labels})
    return [partitioner.load_partition(i)["position"] for i in range(partitioner.num_partitions)]


@pytest.mark.parametrize(("num_examples", "num_partitions"), [(1000, 7), (10, 5), (3, 3), (9, 4)])
def test_iid_parts_are_those_of_flwr_datasets(num_examples, num_partitions):
    order = generator().permutation(num_examples)
    expected = partitions_of(IidPartitioner(num_partitions), np.zeros(num_examples))
    for part, positions in zip(iid_parts(num_examples, num_partitions, generator()), expected, strict=True):
        np.testing.assert_array_equal(part, order[positions])


def test_column_parts_are_those_of_flwr_datasets():
    """Its natural ids are in ascending order where the column holds client numbers."""
    numbers = np.random.default_rng(1).integers(0, 7, 1000)
    expected = partitions_of(NaturalIdPartitioner("label"), numbers)
    for part, positions in zip(column_parts({"site": numbers}, 7, "site"), expected, strict=True):
        np.testing.assert_array_equal(part, positions)


@pytest.mark.parametrize(
    ("values", "ascending"),
    [
        pytest.param(np.array([30, 4, 30, 4]), [4, 30], id="integers-as-numbers"),
        pytest.param(np.array([0.5, -1.0, 0.5, 0.5]), [-1.0, 0.5], id="floats"),
        pytest.param(np.array([True, False, True, True]), [False, True], id="booleans"),
    ],
)
def test_column_of_any_type(values, ascending):
    parts = column_parts({"c": values}, 2, "c")
    assert [values[part][0] for part in parts] == ascending
    assert sum(len(part) for part in parts) == 4


@pytest.mark.parametrize(
    ("call", "message"),
    [
        pytest.param(
            lambda: column_parts({"site": SITES}, 7, "sites"),
            "one of the columns site.*did you mean 'site'",
            id="misspelt",
        ),
        pytest.param(lambda: column_parts({}, 7, "site"), "a task whose data has columns", id="no-columns"),
        pytest.param(
            lambda: column_parts({"site": SITES}, 4, "site"),
            "expected 4 different values.*got 7 values; set the number of clients to 7",
            id="other-number-of-values",
        ),
        pytest.param(lambda: class_parts(LABELS, 7, 11, generator()), "at most 10 classes", id="too-many-classes"),
        pytest.param(lambda: class_parts(LABELS, 4, 2, generator()), "4 clients x 2 = 8", id="classes-left-over"),
        pytest.param(
            lambda: class_parts(np.repeat([0, 1], [50, 3]), 4, 2, generator()),
            "class 1 counted from 0.*at least 4 examples.*got 3",
            id="class-smaller-than-its-holders",
        ),
    ],
)
def test_impossible_splits_are_refused(call, message):
    with pytest.raises(TaskError, match=message):
        call()


def test_without_flwr_datasets(monkeypatch):
    monkeypatch.setitem(sys.modules, "flwr_datasets", None)
    with pytest.raises(TaskError, match=r"flwr-datasets.*install fedapps\[torch\]"):
        class_parts(np.repeat([0, 1], 5), 2, 1, generator())
