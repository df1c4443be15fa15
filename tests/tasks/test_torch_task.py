from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.sparse import csr_array
from torch import nn
from torch.nn import functional

from fedapps.errors import TaskError
from fedapps.tasks import Data, TaskConfig
from fedapps.tasks import torch_task as module_under_test
from fedapps.tasks.torch_task import TorchTask

NUM_CLASSES = 3


class Made(TorchTask):
    """Random inputs and labels; a net with batch normalisation, dropout and a frozen layer."""

    def load(self) -> tuple[Data, Data]:
        generator = np.random.default_rng(0)
        data = Data(generator.normal(size=(30, 4)), generator.integers(0, NUM_CLASSES, 30))
        return data.take(np.arange(20)), data.take(np.arange(20, 30))

    def build_model(self) -> nn.Module:
        frozen = nn.Linear(4, 6).requires_grad_(False)
        return nn.Sequential(frozen, nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, NUM_CLASSES))


@pytest.fixture
def task() -> Made:
    return Made(TaskConfig())


def test_initial_arrays_depend_on_the_seed_alone_and_leave_the_generator_alone(task):
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first = task.initial_arrays(3)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(6)
    again, other = task.initial_arrays(3), task.initial_arrays(4)
    assert all(np.array_equal(first[name], again[name]) for name in first)
    assert not np.array_equal(first["3.weight"], other["3.weight"])
    assert len(task.initial_arrays(2**63 - 1)) == len(first)


def test_what_does_not_travel_is_equal_on_all_ends(task):
    arrays = task.initial_arrays(0)
    state = torch.get_rng_state()
    server = task.module(arrays)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(10)
    client = Made(TaskConfig()).module(arrays)
    assert "0.weight" not in arrays
    assert torch.equal(server[0].weight, client[0].weight)
    assert server.training


def test_the_initial_module_is_that_of_the_initial_arrays(task):
    class Warm(Made):
        def initial_arrays(self, seed):
            return {name: value + 1 for name, value in super().initial_arrays(seed).items()}

    for made in (task, Warm(TaskConfig())):
        expected = made.module(made.initial_arrays(0)).state_dict()
        found = made.initial_module().state_dict()
        assert list(found) == list(expected)
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_evaluation_equals_a_sum_over_single_examples(task, monkeypatch):
    """Means over examples, not over batches of 7, 7, 7, 7 and 2; reference in float64, one example at a time."""
    monkeypatch.setattr(module_under_test, "EVALUATION_BATCH", 7)
    train, test = task.load()
    data = Data(np.concatenate([train.inputs, test.inputs]), np.concatenate([train.targets, test.targets]))
    arrays = task.initial_arrays(1)
    model = task.module(arrays).double().eval()
    outputs = [model(torch.tensor(row)[None])[0].detach().numpy() for row in data.inputs]
    losses = [np.log(np.exp(o).sum()) - o[y] for o, y in zip(outputs, data.targets, strict=True)]
    hits = [o.argmax() == y for o, y in zip(outputs, data.targets, strict=True)]
    result = task.evaluate(arrays, data)
    assert result == {"loss": pytest.approx(np.mean(losses), rel=1e-6), "accuracy": pytest.approx(np.mean(hits))}
    assert task.evaluate(arrays, data) == result


def test_no_examples_no_metrics(task):
    """No division by a total of zero: evaluation with 0 examples leaves the metrics out."""
    empty = task.load()[0].take(np.empty(0, dtype=np.intp))
    assert task.evaluate(task.initial_arrays(0), empty) == {}
    assert task.evaluate_module(task.module(task.initial_arrays(0)), empty) == {}


def test_one_example_and_batch_normalisation(task):
    """A last batch of one: evaluation mode uses running statistics, so a batch of one works."""
    one = task.load()[0].take(np.array([3]))
    assert np.isfinite(task.evaluate(task.initial_arrays(0), one)["loss"])


def test_evaluation_changes_nothing_in_the_model(task):
    model = task.module(task.initial_arrays(0))
    model[1].eval()  # a submodule whose mode differs from the model's
    before = {name: value.clone() for name, value in model.state_dict().items()}
    task.evaluate_module(model, task.load()[0])
    assert model.training
    assert [m.training for m in model] == [True, False, True, True]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


class Failing(nn.Module):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("in evaluation" if not self.training else "in training")


def test_modes_come_back_after_an_error(task):
    model = nn.Sequential(nn.Dropout(), nn.BatchNorm1d(2).eval(), Failing())
    with pytest.raises(RuntimeError, match="in evaluation"):
        task.evaluate_module(model, Data(np.zeros((2, 2)), np.zeros(2)))
    assert [m.training for m in model.modules()] == [True, True, False, True]


def test_loss_is_the_mean_cross_entropy_and_has_a_gradient(task):
    train = task.load()[0]
    model = task.module(task.initial_arrays(0)).eval()
    inputs, targets = task.tensors(train)
    loss = task.loss(model, inputs, targets)
    logits = model(inputs).detach().double().numpy()
    expected = np.mean(np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(20), train.targets])
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    loss.backward()
    assert model[3].weight.grad.abs().sum() > 0


def test_half_precision_outputs_are_reduced_in_float32(task):
    outputs = torch.tensor([[0.0, 20.0, 3.0]] * 4, dtype=torch.float16)
    loss = task.criterion(outputs, torch.tensor([1, 1, 1, 2]))
    assert loss.dtype == torch.float32
    # log-sum-exp of (0, 20, 3) is 20 + 4.3e-8: three losses of 4.3e-8 and one of 17; 4.25 is exact in float32.
    assert loss.item() == pytest.approx(17 / 4, rel=1e-6)
    assert task.criterion(outputs.double(), torch.tensor([1, 1, 1, 2])).dtype == torch.float64


@pytest.mark.parametrize(
    ("array", "dtype"),
    [
        (np.zeros((2, 3)), torch.float32),
        (np.zeros((2, 3), dtype=np.float16), torch.float32),
        (np.zeros((2, 3), dtype=np.uint8), torch.int64),
        (np.zeros((2, 3), dtype=np.int32), torch.int64),
    ],
    ids=lambda value: str(value.dtype) if isinstance(value, np.ndarray) else "",
)
def test_tensor_dtypes(task, array, dtype):
    array.flags.writeable = False
    inputs, targets = task.tensors(Data(array, array[:, 0]))
    assert (inputs.dtype, targets.dtype) == (dtype, dtype)
    assert inputs.shape == array.shape


def test_sparse_inputs_are_refused(task):
    with pytest.raises(TaskError, match="expected a dense NumPy array, got csr_array"):
        task.tensors(Data(csr_array(np.eye(2)), np.zeros(2)))


class Regression(Made):
    """Another loss and another metric."""

    def criterion(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(outputs[:, 0], targets.float())

    def metrics(self, model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.loss(model, inputs, targets), "bias": (model(inputs)[:, 0] - targets).mean()}


class OnlyLoss(Made):
    """A loss that evaluation would not report."""

    def loss(self, model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return 2 * super().loss(model, inputs, targets)


def test_loss_and_metrics_of_ones_own():
    result = Regression(TaskConfig()).evaluate(Regression(TaskConfig()).initial_arrays(0), Made(TaskConfig()).load()[1])
    assert set(result) == {"loss", "bias"}
    assert result["loss"] >= result["bias"] ** 2


def test_a_loss_that_evaluation_would_not_report_is_refused():
    with pytest.raises(TaskError, match=r"expected metrics\(\) overridden together with loss\(\)"):
        OnlyLoss(TaskConfig())


@pytest.mark.gpu
def test_evaluation_on_a_gpu_agrees_with_the_cpu(task):
    arrays, data = task.initial_arrays(0), task.load()[0]
    assert task.evaluate(arrays, data, "cuda") == pytest.approx(task.evaluate(arrays, data), rel=1e-5)


class Padded(Made):
    """Two embeddings with a padding row, of which one is also the output layer."""

    def build_model(self):
        model = nn.ModuleDict({"own": nn.Embedding(5, 2, padding_idx=3), "tied": nn.Embedding(4, 2, padding_idx=0)})
        model["frozen"] = nn.EmbeddingBag(3, 2, padding_idx=1).requires_grad_(False)
        model["head"] = nn.Linear(2, 4)
        model["head"].weight = model["tied"].weight
        return model


def test_the_padding_rows_that_no_gradient_moves_are_fixed():
    assert Padded(TaskConfig()).fixed_elements() == {"own.weight": ((6, 8),)}
    assert Made(TaskConfig()).fixed_elements() == {}


def test_a_task_says_which_elements_no_gradient_moves():
    class Masked(Padded):
        def unmoved(self, model):
            mask = torch.zeros(4, 2, dtype=torch.bool)
            mask[0, 1] = mask[1, 0] = mask[3, 1] = True
            return {**super().unmoved(model), model["tied"].weight: mask}

    class Misshapen(Padded):
        def unmoved(self, model):
            return {model["own"].weight: torch.zeros(5, dtype=torch.bool)}

    assert Masked(TaskConfig()).fixed_elements() == {"own.weight": ((6, 8),), "tied.weight": ((1, 3), (7, 8))}
    with pytest.raises(TaskError, match=r"unmoved\(\) for 'own.weight': expected .* \(5, 2\), got \(5,\)"):
        Misshapen(TaskConfig()).fixed_elements()


def _with_targets(targets, outputs=3, criterion=None):
    class Own(TorchTask):
        def load(self):
            data = Data(np.ones((len(targets), 4), np.float32), np.asarray(targets))
            return data, data.take(np.arange(2))

        def build_model(self):
            return nn.Linear(4, outputs)

    if criterion is not None:
        Own.criterion = lambda self, outputs, targets: criterion(outputs, targets)
    return Own(TaskConfig(), name="own")


RANGE = r"targets of the training pool: expected integers from 0 to 2, a class of the model's 3 outputs, of shape \(n,\), got "


@pytest.mark.parametrize(
    ("targets", "match"),
    [
        ([1, 2, 3, 1], RANGE + r"1 to 3 \(int64, shape \(4,\)\)"),
        ([0, -1, 2, 1], RANGE + "-1 to 2"),
        ([0.0, 1.0, 2.0, 0.5], RANGE + r"0\.0 to 2\.0 \(float64"),
        ([[0], [1], [2], [0]], RANGE + r"0 to 2 \(int64, shape \(4, 1\)\)"),
        (
            ["cat", "dog", "cat", "emu"],
            r"targets of the training pool: expected numbers, got 'cat', 'dog', 'cat' \(<U3",
        ),
    ],
    ids=["from 1", "negative", "float", "column", "text"],
)
def test_labels_that_are_no_classes_are_told_when_they_are_loaded(targets, match):
    with pytest.raises(TaskError, match=match):
        _with_targets(targets).server_data()


@pytest.mark.parametrize("dtype", [">i4", ">u2", "<i8", np.uint8, bool])
def test_labels_of_any_integer_type_and_order_of_bytes_are_classes(dtype):
    task = _with_targets(np.array([0, 1, 1, 0]).astype(dtype))
    assert task.tensors(task.client_data(0, 1).train)[1].tolist() == [0, 1, 1, 0]
    assert task.evaluate(task.initial_arrays(0), task.server_data().test)["loss"] > 0


@pytest.mark.parametrize(
    ("targets", "outputs", "match"),
    [
        (np.array([1, 2, 3, 4]), 1, r"got 1 to 4 \(int64, shape \(4,\)\) for outputs of shape \(n, 1,?\)"),
        (np.array([0.5, 2, 3, 4]), 1, r"got 0\.5 to 4\.0 \(float64, shape \(4,\)\)"),
        (np.array([[0.5], [2], [3], [4]]), 2, r"shape \(4, 1\)\) for outputs of shape \(n, 2,?\)"),
        (np.array(["a", "b", "c", "d"]), 1, "expected numbers, got 'a', 'b', 'c'"),
    ],
    ids=["integers", "row", "column", "text"],
)
def test_targets_that_a_loss_of_ones_own_cannot_take_are_told_when_they_are_loaded(targets, outputs, match):
    """Squares of one output and one target each; torch only warns where it would take all pairs."""
    with pytest.raises(TaskError, match=match):
        _with_targets(targets, outputs, functional.mse_loss).server_data()
    fits = _with_targets(np.array([[0.5], [2], [3], [4]], ">f8"), 1, functional.mse_loss)
    assert fits.tensors(fits.server_data().test)[1].tolist() == [[0.5], [2.0]]
