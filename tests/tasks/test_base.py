from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from scipy.sparse import csr_array

from fedapps.errors import TaskError
from fedapps.tasks import Data, PartitionConfig, PartitionKind, Task, TaskConfig, setting


class Counting(Task):
    """Inputs are the numbers of the examples, so that their way can be followed; no model."""

    class Options(Task.Options):
        examples: int = setting(100, "number of examples", ge=0)
        rate: float = setting(0.5, "a rate")
        word: str = setting("a", "text")
        test_rate: float = setting(0.0, "another rate")

    loads = 0

    def load(self):
        self.loads += 1
        n = self.options.examples
        train = Data(np.arange(n), np.arange(n) % 4, {"site": np.array([f"s{i % 3}" for i in range(n)])})
        return train, Data(np.arange(1000, 1020), np.arange(20) % 4)

    def initial_arrays(self, seed):
        return {}

    def evaluate(self, arrays, data, device="cpu"):
        return {}


def clients(task: Task, num_partitions: int) -> list:
    return [task.client_data(i, num_partitions) for i in range(num_partitions)]


@pytest.mark.parametrize("num_partitions", [1, 3, 4, 5])
def test_clients_and_validation_share_the_pool_and_nothing_else(num_partitions):
    """No data unused or used twice.

    For any number of clients each example of the pool is used exactly once, and the test set never.
    """
    task = Counting(TaskConfig(validation_fraction=0.1, client_validation_fraction=0.2, client_test_fraction=0.1))
    parts = [part for c in clients(task, num_partitions) for part in (c.train, c.validation, c.test)]
    used = np.concatenate([part.inputs for part in parts] + [task.server_data().validation.inputs])
    assert np.array_equal(np.sort(used), np.arange(100))
    assert np.array_equal(task.server_data().test.inputs, np.arange(1000, 1020))


def test_columns_and_targets_follow_their_examples():
    task = Counting(TaskConfig(partition=PartitionConfig(PartitionKind.COLUMN, column="site")))
    for i, client in enumerate(clients(task, 3)):
        assert set(client.train.columns["site"]) == {f"s{i}"}
        assert np.array_equal(client.train.targets, client.train.inputs % 4)


def test_server_validation_is_stratified_and_cut_before_the_split():
    validations = []
    for num_partitions in (2, 5):
        task = Counting(TaskConfig(validation_fraction=0.2))
        clients(task, num_partitions)
        validations.append(task.server_data().validation)
    assert np.bincount(validations[0].targets).tolist() == [5, 5, 5, 5]
    assert np.array_equal(validations[0].inputs, validations[1].inputs)


def test_validation_leaves_every_client_of_a_column_something():
    """A split by column leaves tiny clients: of 12 clients, six have one example; none of those goes to the server."""
    site = np.concatenate([np.arange(6), 6 + np.arange(94) % 6])

    class Sites(Counting):
        def load(self):
            train, test = super().load()
            return Data(train.inputs, train.targets, {"site": site}), test

    config = PartitionConfig(PartitionKind.COLUMN, column="site")
    for seed in range(5):
        task = Sites(TaskConfig(partition=config, validation_fraction=0.5, seed=seed))
        assert [len(c.train) for c in clients(task, 12)][:6] == [1] * 6
        assert len(task.server_data().validation) >= 45


def test_the_seed_draws_validation_and_split():
    first, again, other = (Counting(TaskConfig(seed=seed, validation_fraction=0.2)) for seed in (1, 1, 2))
    for part in (lambda t: t.server_data().validation, lambda t: t.client_data(0, 3).train):
        assert part(first).sha256() == part(again).sha256() != part(other).sha256()


def test_by_default_a_client_trains_on_all_it_has():
    client = Counting(TaskConfig()).client_data(0, 4)
    assert len(client.train) > 0
    assert (len(client.validation), len(client.test)) == (0, 0)


def test_client_shares_are_of_what_the_client_has():
    task = Counting(
        TaskConfig(
            partition=PartitionConfig(PartitionKind.IID), client_validation_fraction=0.3, client_test_fraction=0.3
        )
    )
    client = task.client_data(1, 5)  # 20 examples
    assert (len(client.train), len(client.validation), len(client.test)) == (8, 6, 6)


@pytest.mark.parametrize("size", [1, 3, 8, 9])
def test_small_clients_keep_something_to_train_on(size):
    """Smaller than a batch: clients of 1, 3, 8 and 9 examples work; the one example of a client is trained on."""
    config = TaskConfig(
        options={"examples": size}, client_validation_fraction=0.5, client_test_fraction=0.4, validation_fraction=0.0
    )
    client = Counting(config).client_data(0, 1)
    sizes = [len(client.train), len(client.validation), len(client.test)]
    assert sum(sizes) == size
    assert sizes[0] >= 1


def test_sizes_are_numbers_of_examples():
    """What a client reports as its size is its number of examples, not of batches, here 10 and 90 by the column."""

    class Uneven(Counting):
        def load(self):
            train, test = super().load()
            return Data(train.inputs, train.targets, {"site": np.repeat([0, 1], [10, 90])}), test

    task = Uneven(TaskConfig(partition=PartitionConfig(PartitionKind.COLUMN, column="site")))
    assert [len(c.train) for c in clients(task, 2)] == [10, 90]


@pytest.mark.parametrize(
    ("partition", "num_partitions"), [(4, 4), (-1, 4), (0, 0)], ids=["one-too-many", "negative", "no-partitions"]
)
def test_a_partition_outside_the_split_is_refused_with_both_numbers(partition, num_partitions):
    """A partition that does not exist: the message names the partition id and the number of partitions."""
    with pytest.raises(TaskError, match=f"partition {partition}.*num-partitions is {num_partitions}"):
        Counting(TaskConfig()).client_data(partition, num_partitions)


def test_more_clients_than_examples_are_refused():
    with pytest.raises(TaskError, match="101 x 1 > 100"):
        Counting(TaskConfig()).client_data(0, 101)


def test_an_empty_training_set_is_refused():
    """No empty splits: nobody can train on nothing."""
    with pytest.raises(TaskError, match=r"task 'Counting': .*one training example, got none"):
        Counting(TaskConfig(options={"examples": 0})).client_data(0, 1)


def test_data_is_loaded_once():
    task = Counting(TaskConfig(validation_fraction=0.1))
    clients(task, 3)
    task.server_data()
    task.checksums()
    task.summary(3)
    assert task.loads == 1


def test_summary_says_who_got_what():
    config = TaskConfig(partition=PartitionConfig(PartitionKind.COLUMN, column="site"), seed=4)
    lines = Counting(config, "counting").summary(3).splitlines()
    assert lines[0] == (
        "task counting: 100 training examples over 3 clients (column 'site', seed 4); server: 0 validation, 20 test"
    )
    assert lines[1:3] == ["client  examples  0  1  2  3", "     0        34  9  8  8  9"]
    assert len(lines) == 6


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (PartitionConfig(alpha=0.1, min_size=2), "(dirichlet, alpha 0.1, at least 2 example(s) a client, seed 0)"),
        (PartitionConfig(PartitionKind.CLASSES, classes_per_client=3), "(classes, 3 a client, seed 0)"),
        (PartitionConfig(PartitionKind.IID), "(iid, seed 0)"),
    ],
    ids=lambda value: str(value.kind) if isinstance(value, PartitionConfig) else "",
)
def test_summary_names_the_split(config, text):
    assert text in Counting(TaskConfig(partition=config)).summary(2)


class More(Counting):
    """Another option on top, and another default."""

    class Options(Counting.Options):
        extra: bool = setting(True, "a switch")
        rate: float = setting(0.1, "another default")


@pytest.mark.parametrize(
    ("task", "given", "expected"),
    [
        (Counting, {}, {"examples": 100, "rate": 0.5, "word": "a", "test_rate": 0.0}),
        (Counting, {"examples": 7, "rate": 2}, {"examples": 7, "rate": 2.0, "word": "a", "test_rate": 0.0}),
        (Counting, {"examples": 3.0, "test-rate": 1.5}, {"examples": 3, "rate": 0.5, "word": "a", "test_rate": 1.5}),
        (More, {}, {"examples": 100, "rate": 0.1, "word": "a", "test_rate": 0.0, "extra": True}),
        (More, {"extra": False}, {"examples": 100, "rate": 0.1, "word": "a", "test_rate": 0.0, "extra": False}),
    ],
    ids=["defaults", "given", "integral number", "derived", "derived and given"],
)
def test_options(task, given, expected):
    options = task(TaskConfig(options=given)).options.model_dump()
    assert options == expected
    assert {name: type(value) for name, value in options.items()} == {k: type(v) for k, v in expected.items()}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"exampels": 3}, "task 'made', option 'exampels'.*did you mean 'examples'"),
        ({"zzz": 3}, "one of examples, rate, word, test-rate, got an unknown key; remove it"),
        ({"test_rate": 1.0}, "option 'test_rate'.*did you mean 'test-rate'"),
        ({"examples": 3.5}, r"option 'examples': expected a value of type int, got 3.5 .*\(number of examples\)"),
        ({"examples": True}, "expected a value of type int, got True"),
        ({"examples": -1}, "option 'examples': expected a finite number >= 0, got -1"),
        ({"examples": 2**63}, "option 'examples': expected an integer of at most 64 bits, got 9223372036854775808"),
        ({"word": 3}, "expected a value of type str, got 3"),
        ({"rate": "x"}, "expected a value of type float, got 'x'.*for example rate = 0.5"),
        ({"rate": float("nan")}, "option 'rate': expected a finite number, got nan"),
    ],
    ids=[
        "misspelt", "unknown", "by its Python name", "float for int", "bool for int", "too small", "too large", "int for text",
        "text for float", "not a number",
    ],
)  # fmt: skip
def test_wrong_options_are_refused(given, message):
    with pytest.raises(TaskError, match=message):
        Counting(TaskConfig(options=given), "made")


def test_a_task_without_options_says_so():
    class Bare(Task):
        load, initial_arrays, evaluate = Counting.load, Counting.initial_arrays, Counting.evaluate

    with pytest.raises(TaskError, match="task 'Bare', option 'a': expected nothing"):
        Bare(TaskConfig(options={"a": 1}))


def test_options_that_lose_those_of_the_base_are_refused_where_the_class_is_written():
    with pytest.raises(
        TaskError, match=r"task 'Lost', class Options: expected one derived from Counting\.Options, got"
    ):

        class Lost(Counting):
            class Options(Task.Options):
                extra: bool = setting(True, "a switch")


@pytest.mark.parametrize(
    ("shares", "name"),
    [
        ({"validation_fraction": 1.0}, "^validation-fraction"),
        ({"client_test_fraction": -0.1}, "^client-test-fraction"),
        (
            {"client_validation_fraction": 0.6, "client_test_fraction": 0.4},
            r"^client-validation-fraction \+ client-test-fraction",
        ),
    ],
    ids=["all-validation", "negative", "nothing-left-to-train-on"],
)
def test_impossible_shares_are_refused(shares, name):
    with pytest.raises(TaskError, match=name):
        TaskConfig(**shares)


def test_data_folder_is_the_setting_else_the_environment(monkeypatch, tmp_path):
    monkeypatch.delenv("FEDAPPS_DATA", raising=False)
    assert Counting(TaskConfig()).data_dir is None
    monkeypatch.setenv("FEDAPPS_DATA", str(tmp_path))
    assert Counting(TaskConfig()).data_dir == tmp_path
    assert Counting(TaskConfig(data_dir=Path("/elsewhere"))).data_dir == Path("/elsewhere")


def test_take_copies_dense_and_sparse_inputs():
    dense = np.arange(12.0).reshape(4, 3)
    for inputs in (dense, csr_array(dense)):
        data = Data(inputs, np.arange(4), {"c": np.array(list("abcd"))})
        taken = data.take(np.array([2, 0]))
        assert len(taken) == 2
        assert type(taken.inputs) is type(inputs)
        assert np.array_equal(csr_array(taken.inputs).toarray(), dense[[2, 0]])
        assert (taken.targets.tolist(), taken.columns["c"].tolist()) == ([2, 0], ["c", "a"])
        assert len(data.take(np.empty(0, dtype=np.intp))) == 0
        taken.targets[:] = 9
        assert data.targets.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"inputs": np.zeros((3, 2))}, "data, inputs: expected as many rows as targets, 4, got 3"),
        ({"columns": {"site": np.zeros(5)}}, "data, site: expected as many rows as targets, 4, got 5"),
        ({"targets": [0, 1, 2, 3]}, "data, targets: expected a NumPy array.*got list"),
        ({"columns": {"site": np.array(["a", "b", "c", None])}}, "data, site.*got ndarray of object"),
    ],
    ids=["inputs", "column", "list", "objects"],
)
def test_data_of_the_wrong_form_is_refused(fields, message):
    with pytest.raises(TaskError, match=message):
        Data(**{"inputs": np.zeros((4, 2)), "targets": np.zeros(4), **fields})


def test_checksum_sees_every_part_and_no_more():
    def make(inputs=np.zeros((2, 2)), targets=np.zeros(2), columns=None):  # noqa: B008 - never modified
        return Data(inputs, targets, columns or {}).sha256()

    sparse = csr_array(np.eye(2))
    wide = csr_array((sparse.data, sparse.indices.astype(np.int64), sparse.indptr.astype(np.int64)), shape=(2, 2))
    assert make() == make()
    assert make(sparse) == make(wide)
    different = [
        make(),
        make(np.ones((2, 2))),
        make(np.zeros((2, 2), dtype=np.float32)),
        make(np.zeros((2, 2), dtype=np.int64)),
        make(np.zeros((2, 4))),
        make(targets=np.ones(2)),
        make(columns={"a": np.zeros(2)}),
        make(sparse),
        make(csr_array(2 * np.eye(2))),
    ]
    assert len(set(different)) == len(different)


def test_local_data_are_all_the_clients_and_none_the_servers():
    """What a node loads is not cut; its test set is its own, and held-out shares are drawn as from a partition."""
    local = PartitionConfig(PartitionKind.LOCAL)
    task = Counting(TaskConfig(partition=local, client_validation_fraction=0.2, client_test_fraction=0.5))
    for partition in (0, 4):
        mine = task.client_data(partition, 5)
        assert np.array_equal(np.sort(np.concatenate([mine.train.inputs, mine.validation.inputs])), np.arange(100))
        assert len(mine.validation) == 20
        assert np.array_equal(mine.test.inputs, np.arange(1000, 1020))
    assert (len(task.server_data().validation), len(task.server_data().test)) == (0, 0)
    assert "each of 5 clients trains on all data of its own machine" in task.summary(5)


class Untested(Counting):
    """The same without a test set."""

    def load(self):
        train, test = super().load()
        return train, test.take([])


def test_what_a_node_holds_out_of_its_own_data_does_not_depend_on_how_many_nodes_there_are():
    local = PartitionConfig(PartitionKind.LOCAL)
    fractions = {"client_validation_fraction": 0.2, "client_test_fraction": 0.25}
    early, late = (Untested(TaskConfig(partition=local, **fractions)).client_data(*w) for w in ((-1, 0), (4, 9)))
    alone = Untested(TaskConfig(partition=PartitionConfig(PartitionKind.IID), **fractions)).client_data(0, 1)
    for part in ("train", "validation", "test"):
        inputs = [np.sort(getattr(data, part).inputs, axis=None) for data in (early, late, alone)]
        assert np.array_equal(inputs[0], inputs[1])
        assert len(inputs[0]) == len(inputs[2])
    with pytest.raises(TaskError, match="partition"):
        Untested(TaskConfig(**fractions)).client_data(-1, 0)


def test_a_node_without_examples_is_told():
    with pytest.raises(TaskError, match="expected at least one training example"):
        Counting(TaskConfig(partition=PartitionConfig(PartitionKind.LOCAL), options={"examples": 0})).client_data(0, 2)
