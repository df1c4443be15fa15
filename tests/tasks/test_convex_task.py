from __future__ import annotations

import numpy as np
import pytest
from scipy.sparse import csr_array

from fedapps.errors import TaskError
from fedapps.tasks import Data, TaskConfig
from fedapps.tasks.convex_task import ConvexTask

GENERATOR = np.random.default_rng(0)
INPUTS = GENERATOR.normal(size=(40, 5)) * (GENERATOR.random((40, 5)) < 0.5)
TARGETS = GENERATOR.choice([-1.0, 1.0], 40)
THETA = GENERATOR.normal(size=5)


class Made(ConvexTask):
    """Random sparse-ish inputs and labels."""

    def load(self):
        data = Data(INPUTS, TARGETS)
        return data, data.take(np.empty(0, dtype=np.intp))


@pytest.fixture(params=["dense", "sparse"])
def data(request) -> Data:
    return Data(INPUTS if request.param == "dense" else csr_array(INPUTS), TARGETS)


def test_loss_and_accuracy_equal_the_formulas(data):
    task = Made(TaskConfig(options={"regularisation": 0.3}))
    loss = np.mean([np.log(1 + np.exp(-y * (x @ THETA))) for x, y in zip(INPUTS, TARGETS, strict=True)])
    loss += 0.15 * THETA @ THETA
    hits = np.mean([(x @ THETA >= 0) == (y > 0) for x, y in zip(INPUTS, TARGETS, strict=True)])
    assert task.evaluate({"weights": THETA}, data) == {
        "loss": pytest.approx(loss, rel=1e-12),
        "accuracy": pytest.approx(hits),
    }


def test_gradient_and_hessian_are_those_of_the_loss(data):
    """Central differences in float64: error about 1e-10 (step 1e-5 squared, and rounding 1e-16 / 1e-5)."""
    objective = Made(TaskConfig(options={"regularisation": 0.3})).objective(data)
    steps = 1e-5 * np.eye(5)
    gradient = [(objective.loss(THETA + s) - objective.loss(THETA - s)) / 2e-5 for s in steps]
    hessian = [(objective.gradient(THETA + s) - objective.gradient(THETA - s)) / 2e-5 for s in steps]
    assert objective.gradient(THETA) == pytest.approx(np.array(gradient), abs=1e-8)
    assert objective.hessian(THETA) == pytest.approx(np.array(hessian), abs=1e-8)
    assert np.asarray(objective.hessian(THETA)).dtype == np.float64


def test_default_regularisation(data):
    objective = Made(TaskConfig()).objective(data)
    zero = Made(TaskConfig(options={"regularisation": 0})).objective(data)
    assert objective.loss(THETA) - zero.loss(THETA) == pytest.approx(0.5e-3 * THETA @ THETA)


def test_training_starts_from_zero_for_every_seed():
    for seed in (0, 7):
        arrays = Made(TaskConfig()).initial_arrays(seed)
        assert list(arrays) == ["weights"]
        assert arrays["weights"].dtype == np.float64
        assert arrays["weights"].tolist() == [0] * 5


def test_zero_counts_as_plus_one(data):
    assert Made(TaskConfig()).evaluate({"weights": np.zeros(5)}, data)["accuracy"] == np.mean(TARGETS == 1)
    assert Made(TaskConfig()).evaluate({"weights": np.zeros(5)}, data)["loss"] == pytest.approx(np.log(2))


def test_no_examples_no_metrics():
    """No division by a total of zero: evaluation with 0 examples leaves the metrics out."""
    task = Made(TaskConfig())
    assert task.evaluate(task.initial_arrays(0), task.server_data().test) == {}


def test_one_example_is_enough(data):
    """The smallest client: the objective of one example is finite, and so are its derivatives."""
    objective = Made(TaskConfig()).objective(data.take(np.array([3])))
    assert np.isfinite([objective.loss(THETA), *objective.gradient(THETA), *np.ravel(objective.hessian(THETA))]).all()


def test_targets_other_than_plus_and_minus_one_are_refused(data):
    with pytest.raises(TaskError, match=r"expected -1 or \+1 .* got 0.*map the two classes"):
        Made(TaskConfig()).objective(Data(data.inputs, (TARGETS + 1) / 2))


def test_a_negative_penalty_is_refused():
    with pytest.raises(TaskError, match=r"option 'regularisation': expected a finite number >= 0, got -0\.1"):
        Made(TaskConfig(options={"regularisation": -0.1}))


@pytest.mark.parametrize(
    ("targets", "got"),
    [
        (np.array([1, 2, 1, 2]), r"1 to 2 \(int64, shape \(4,\)\)"),
        (np.array(["yes", "no", "no", "no"]), r"'yes', 'no', 'no' \(<U3"),
        (np.array([[1], [-1], [1], [1]]), r"-1 to 1 \(int64, shape \(4, 1\)\)"),
    ],
    ids=["1 and 2", "text", "column"],
)
def test_targets_that_are_no_signs_are_told_when_they_are_loaded(targets: np.ndarray, got: str) -> None:
    class Own(ConvexTask):
        def load(self) -> tuple[Data, Data]:
            data = Data(np.ones((4, 2)), targets)
            return data, data

    with pytest.raises(
        TaskError, match=rf"targets of the training pool: expected -1 or \+1 for each example.*got {got}"
    ):
        Own(TaskConfig()).server_data()
