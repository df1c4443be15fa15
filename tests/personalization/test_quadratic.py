"""The joint minimiser: closed form against the dense system, its limits, and Newton for other losses."""

from __future__ import annotations

import numpy as np
import pytest

from fedapps.errors import FedAppsError, SettingsError
from fedapps.personalization.quadratic import (
    JointMinimiser,
    Quadratic,
    global_minimiser,
    joint_minimiser,
    least_squares,
    local_minimisers,
    newton_joint_minimiser,
    random_quadratics,
)
from fedapps.personalization.synthetic import Logistic


def test_least_squares_is_half_the_mean_square() -> None:
    random = np.random.default_rng(0)
    X, y, v = random.standard_normal((7, 3)), random.standard_normal(7), random.standard_normal(3)
    client = least_squares(X, y)
    assert client.loss(v) == pytest.approx(np.sum((X @ v - y) ** 2) / 14)
    np.testing.assert_allclose(client.gradient(v), X.T @ (X @ v - y) / 7, atol=1e-13)
    np.testing.assert_allclose(client.hessian(v), X.T @ X / 7)


@pytest.mark.parametrize("lam", [0.01, 1.0, 100.0])
def test_joint_minimiser_solves_the_dense_system(clients: list[Quadratic], weights: np.ndarray, lam: float) -> None:
    """One linear system in (w, w_1, ..., w_N): p_i (A_i w_i - b_i + lam (w_i - w)) = 0 and sum p_i lam (w - w_i) = 0."""
    N, d = len(clients), len(clients[0].b)
    system, right = np.zeros(((N + 1) * d, (N + 1) * d)), np.zeros((N + 1) * d)
    system[:d, :d] = lam * np.eye(d)
    for i, (p, client) in enumerate(zip(weights, clients, strict=True)):
        block = slice((i + 1) * d, (i + 2) * d)
        system[block, block] = p * (client.A + lam * np.eye(d))
        system[block, :d] = system[:d, block] = -p * lam * np.eye(d)
        right[block] = p * client.b
    dense = np.linalg.solve(system, right).reshape(N + 1, d)
    found = joint_minimiser(clients, weights, lam)
    np.testing.assert_allclose(found.model, dense[0], atol=1e-10)
    np.testing.assert_allclose(found.personal, dense[1:], atol=1e-10)
    np.testing.assert_allclose(found.model, weights @ found.personal, atol=1e-10)


def test_small_lambda_tends_to_local_train(clients: list[Quadratic], weights: np.ndarray) -> None:
    local = local_minimisers(clients)
    gaps = [np.abs(joint_minimiser(clients, weights, lam).personal - local).max() for lam in (1e-3, 1e-6)]
    assert gaps[1] < 1e-5
    assert gaps[0] / gaps[1] == pytest.approx(1000, rel=0.01)  # the gap is of first order in lambda


def test_large_lambda_tends_to_global_train(clients: list[Quadratic], weights: np.ndarray) -> None:
    pooled = global_minimiser(clients, weights)
    gaps = [np.abs(joint_minimiser(clients, weights, lam).personal - pooled).max() for lam in (1e3, 1e6)]
    assert gaps[1] < 1e-4
    assert gaps[0] / gaps[1] == pytest.approx(1000, rel=0.01)


def test_global_minimiser_is_that_of_the_pooled_examples() -> None:
    random = np.random.default_rng(1)
    X, y = random.standard_normal((30, 3)), random.standard_normal(30)
    parts = [least_squares(X[:10], y[:10]), least_squares(X[10:], y[10:])]
    np.testing.assert_allclose(
        global_minimiser(parts, np.array([1 / 3, 2 / 3])), np.linalg.lstsq(X, y, rcond=None)[0], atol=1e-12
    )


def test_random_quadratics_have_the_curvature_asked_for() -> None:
    for client in random_quadratics(3, 5, mu=0.2, L=7.0, seed=2):
        spectrum = np.linalg.eigvalsh(client.A)
        np.testing.assert_allclose(spectrum[[0, -1]], [0.2, 7.0])


def test_newton_finds_the_closed_form_of_quadratics(clients: list[Quadratic], weights: np.ndarray) -> None:
    exact = joint_minimiser(clients, weights, 0.3)
    found = newton_joint_minimiser(clients, weights, 0.3, JointMinimiser(np.zeros(8), np.zeros((8, 8))))
    np.testing.assert_allclose(found.personal, exact.personal, atol=1e-9)


def test_newton_finds_a_stationary_point_of_logistic_clients() -> None:
    random = np.random.default_rng(5)
    objectives = [Logistic(random.standard_normal((30, 3)), np.sign(random.standard_normal(30))) for _ in range(3)]
    p, lam = np.array([0.2, 0.3, 0.5]), 0.05
    far = JointMinimiser(np.full(3, 4.0), np.full((3, 3), -4.0))
    found = newton_joint_minimiser(objectives, p, lam, far)
    for objective, w_i in zip(objectives, found.personal, strict=True):
        np.testing.assert_allclose(objective.gradient(w_i) + lam * (w_i - found.model), 0, atol=1e-9)
    np.testing.assert_allclose(found.model, p @ found.personal, atol=1e-9)


def test_newton_says_when_there_is_no_minimum() -> None:
    """One client with one class: the loss falls for ever, and so does the joint one."""
    separable = [Logistic(np.ones((4, 1)), np.ones(4))]
    with pytest.raises(FedAppsError, match="classes may be separable"):
        newton_joint_minimiser(separable, np.ones(1), 0.1, JointMinimiser(np.zeros(1), np.zeros((1, 1))), max_steps=8)


def test_zero_lambda_has_no_joint_problem(clients: list[Quadratic], weights: np.ndarray) -> None:
    with pytest.raises(SettingsError, match="above 0"):
        joint_minimiser(clients, weights, 0.0)
