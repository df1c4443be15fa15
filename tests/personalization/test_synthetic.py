"""Synthetic problems: the stated distributions, seeds, and the logistic loss."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fedapps.errors import SettingsError
from fedapps.personalization.quadratic import Quadratic
from fedapps.personalization.synthetic import Logistic, Regression, SyntheticConfig, draw_problem, statistical_error


def test_truth_lies_at_the_stated_distance() -> None:
    problem = draw_problem(SyntheticConfig(heterogeneity=0.7, norm=2.0, num_clients=9))
    assert np.linalg.norm(problem.center) == pytest.approx(2.0)
    np.testing.assert_allclose(np.linalg.norm(problem.truth - problem.center, axis=1), 0.7)
    assert problem.X.shape == (9, 50, 15)
    assert problem.y.shape == (9, 50)


def test_covariates_have_the_stated_spectrum() -> None:
    """120,000 draws: standard errors of a variance are 0.4 %."""
    problem = draw_problem(SyntheticConfig(num_clients=60, num_examples=2000, dimension=4, decay=1.5))
    rows = problem.X.reshape(-1, 4)
    np.testing.assert_allclose(rows.T @ rows / len(rows), np.diag(np.arange(1.0, 5.0) ** -1.5), atol=0.015)


def test_linear_targets_have_the_stated_noise() -> None:
    problem = draw_problem(SyntheticConfig(num_examples=400, noise=0.5))
    residuals = problem.y - np.einsum("mnd,md->mn", problem.X, problem.truth)
    assert residuals.std() == pytest.approx(0.5, rel=0.02)
    assert isinstance(problem.objectives()[0], Quadratic)


def test_logistic_targets_have_the_stated_probability() -> None:
    """Where the signal is between 0.9 and 1.1, about 0.73 of the targets are +1."""
    problem = draw_problem(SyntheticConfig(Regression.LOGISTIC, num_examples=2000, norm=1.0))
    signal = np.einsum("mnd,md->mn", problem.X, problem.truth)
    near = np.abs(signal - 1.0) < 0.1
    assert (problem.y[near] == 1).mean() == pytest.approx(1 / (1 + np.exp(-1)), abs=0.02)
    assert set(np.unique(problem.y)) == {-1.0, 1.0}


def test_the_seed_decides_everything() -> None:
    config = SyntheticConfig(seed=3)
    one, same, other = draw_problem(config), draw_problem(config), draw_problem(replace(config, seed=4))
    np.testing.assert_array_equal(one.X, same.X)
    np.testing.assert_array_equal(one.y, same.y)
    assert not np.array_equal(one.truth, other.truth)


def test_logistic_loss_matches_its_definition_and_derivatives() -> None:
    random = np.random.default_rng(0)
    X, y, theta = random.standard_normal((6, 3)), np.sign(random.standard_normal(6)), random.standard_normal(3)
    objective = Logistic(X, y, 0.3)
    assert objective.loss(theta) == pytest.approx(np.mean(np.log(1 + np.exp(-y * (X @ theta)))) + 0.15 * theta @ theta)
    for direction in np.eye(3):
        h = 1e-5 * direction
        slope = (objective.loss(theta + h) - objective.loss(theta - h)) / 2e-5
        assert slope == pytest.approx(float(objective.gradient(theta) @ direction), abs=1e-8)
        bend = (objective.gradient(theta + h) - objective.gradient(theta - h)) / 2e-5
        np.testing.assert_allclose(bend, objective.hessian(theta) @ direction, atol=1e-8)
    one = Logistic(X[:1], y[:1], 0.3)
    np.testing.assert_allclose(objective.example_gradients(theta)[0], one.gradient(theta))


def test_logistic_loss_of_huge_margins_is_finite() -> None:
    objective = Logistic(np.array([[1e4]]), np.array([-1.0]))
    assert objective.loss(np.ones(1)) == pytest.approx(1e4)
    assert np.isfinite(objective.gradient(np.ones(1))).all()


def test_statistical_error_is_a_mean_of_squared_distances() -> None:
    truth = np.array([[0.0, 0.0], [3.0, 4.0]])
    assert statistical_error(np.zeros((2, 2)), truth) == 12.5
    assert statistical_error(np.zeros(2), truth) == 12.5


@pytest.mark.parametrize(
    ("name", "value"), [("num_clients", 0), ("dimension", 0), ("heterogeneity", -1.0), ("noise", float("nan"))]
)
def test_impossible_problems_are_refused(name: str, value: float) -> None:
    with pytest.raises(SettingsError, match=name.replace("_", "-")):
        SyntheticConfig(**{name: value})
