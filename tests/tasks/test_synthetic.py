"""The synthetic tasks: one problem a client, whose truth is known."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fedapps.errors import TaskError
from fedapps.methods import resolve_settings
from fedapps.personalization.local_fits import fit_of_gradients, fit_of_least_squares
from fedapps.tasks import PartitionConfig, PartitionKind, TaskConfig
from fedapps.tasks.from_settings import load_task_of
from fedapps.tasks.synthetic import SyntheticLinearTask, SyntheticLogisticTask

COLUMN = PartitionConfig(PartitionKind.COLUMN, column="client")
OPTIONS = {"clients": 3, "examples": 8, "test-examples": 5, "dimension": 4, "heterogeneity": 2.0}
TASKS = [SyntheticLinearTask, SyntheticLogisticTask]


def task_of(cls: Any, **config: Any) -> Any:
    return cls(TaskConfig(options=OPTIONS, partition=COLUMN, **config))


@pytest.mark.parametrize("cls", TASKS)
def test_partition_i_is_client_i_with_its_own_test_examples(cls: Any) -> None:
    task = task_of(cls)
    for i in range(3):
        data = task.client_data(i, 3)
        assert set(data.train.columns["client"]) == set(data.test.columns["client"]) == {i}
        assert (len(data.train), len(data.validation), len(data.test)) == (8, 0, 5)
        np.testing.assert_array_equal(data.train.inputs, task.problem.X[i, :8])
        np.testing.assert_array_equal(data.test.targets, task.problem.y[i, 8:])
    cut = task_of(cls, client_test_fraction=0.25).client_data(0, 3)
    assert (len(cut.train), len(cut.test)) == (6, 2)  # Asked for: cut from its own examples.


@pytest.mark.parametrize("cls", TASKS)
def test_the_statistical_error_is_to_the_truth_of_the_examples_client(cls: Any) -> None:
    task = task_of(cls)
    truth = task.problem.truth
    w = np.arange(4.0)
    errors = np.sum((truth - w) ** 2, axis=1)
    for i in range(3):
        assert task.evaluate({"weights": w}, task.client_data(i, 3).test)["statistical-error"] == pytest.approx(
            errors[i]
        )
    metrics = task.evaluate({"weights": w}, task.server_data().test)
    assert metrics["statistical-error"] == pytest.approx(errors.mean())
    assert ("accuracy" in metrics) == (cls is SyntheticLogisticTask)
    assert task.evaluate({"weights": w}, task.server_data().validation) == {}
    center = np.mean(truth, axis=0)
    assert np.linalg.norm(truth - task.problem.center, axis=1) == pytest.approx([2.0] * 3)
    assert center.shape == (4,)


def test_the_linear_loss_is_half_the_mean_square_with_its_penalty() -> None:
    task = SyntheticLinearTask(TaskConfig(options={**OPTIONS, "regularisation": 0.3}, partition=COLUMN))
    data, w = task.client_data(1, 3).train, np.arange(4.0)
    expected = np.mean((data.inputs @ w - data.targets) ** 2) / 2 + 0.15 * w @ w
    assert task.objective(data).loss(w) == pytest.approx(expected, rel=1e-12)
    assert task.evaluate({"weights": w}, data)["loss"] == pytest.approx(expected, rel=1e-12)


def test_fits_are_measured_by_least_squares_or_by_the_sandwich() -> None:
    linear, logistic = task_of(SyntheticLinearTask), task_of(SyntheticLogisticTask)
    v, w = np.array([0.1, 0.2, -0.3, 0.4]), np.zeros(4)
    data = linear.client_data(0, 3).train
    assert linear.local_fit(data, v, w, 0.5) == fit_of_least_squares(data.inputs, data.targets, v, w, 0.5)
    data, eps = logistic.client_data(0, 3).train, 1e-6
    alone = [logistic.objective(data.take([j])) for j in range(8)]
    gradients = [[(f.loss(v + eps * e) - f.loss(v - eps * e)) / (2 * eps) for e in np.eye(4)] for f in alone]
    expected = fit_of_gradients(logistic.objective(data).hessian(v), np.array(gradients), v, w, 0.5)
    fit = logistic.local_fit(data, v, w, 0.5)
    assert (fit.noise, fit.variance) == pytest.approx((expected.noise, expected.variance), rel=1e-6)


def test_data_depend_on_the_seed_and_on_nothing_else() -> None:
    same, other = task_of(SyntheticLinearTask), task_of(SyntheticLinearTask, seed=1)
    assert same.checksums() == task_of(SyntheticLinearTask).checksums() != other.checksums()


@pytest.mark.parametrize("name", ["synthetic-linear", "synthetic-logistic"])
def test_the_settings_split_by_client_unless_told_otherwise(name: str) -> None:
    settings = resolve_settings({"method": "fedclup", "task": name})
    assert (settings.partition, settings.partition_column, settings.client_test_fraction) == ("column", "client", 0.0)
    assert len(load_task_of(settings).client_data(9, 10).test) == 50
    assert resolve_settings({"method": "fedclup", "task": name, "partition": "iid"}).partition == "iid"


@pytest.mark.parametrize(("option", "value"), [("noise", -1.0), ("dimension", 0), ("heterogeneity", -0.5)])
def test_an_option_out_of_range_is_named(option: str, value: float) -> None:
    with pytest.raises(TaskError, match=rf"task-options: synthetic problem, {option}: .*number from"):
        SyntheticLinearTask(TaskConfig(options={option: value}, partition=COLUMN)).load()


def test_another_number_of_clients_is_told() -> None:
    with pytest.raises(TaskError, match="set the number of clients to 3"):
        task_of(SyntheticLinearTask).client_data(0, 4)
