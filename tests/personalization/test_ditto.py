"""Ditto: two models that must not be mixed up."""

from __future__ import annotations

import numpy as np
import pytest

from fedapps.errors import SettingsError
from fedapps.personalization.ditto import train_client
from fedapps.personalization.proximal import descend
from fedapps.personalization.quadratic import Quadratic, global_minimiser

CLIENTS = [
    Quadratic(np.diag([1.0, 2.0]), np.array([1.0, 0.0])),
    Quadratic(np.diag([2.0, 1.0]), np.array([0.0, 4.0])),
]


def test_one_step_by_hand() -> None:
    """F = (x - 4)^2/2, w = 1, v = 2, lambda = 3: w_i = 1 + 0.1 * 3; v = 2 - 0.2 * ((2-4) + 3 (2-1)) = 1.8."""
    f = Quadratic(np.eye(1), np.array([4.0]))
    result = train_client([f], np.array([1.0]), np.array([2.0]), lam=3.0, eta=0.1, personal_lr=0.2)
    np.testing.assert_allclose(result.local, [1.3], rtol=1e-15)
    np.testing.assert_allclose(result.personal, [1.8], rtol=1e-15)


def test_the_pull_is_to_the_received_model_not_to_the_copy_in_training() -> None:
    """Two steps with f = (x - 4)^2/2, w = 0, lambda = 1: v1 = 0.4; v2 = 0.4 - 0.1 * (-3.6 + (0.4 - 0)) = 0.72."""
    f = Quadratic(np.eye(1), np.array([4.0]))
    result = train_client([f, f], np.array([0.0]), None, lam=1.0, eta=0.5, personal_lr=0.1)
    np.testing.assert_allclose(result.personal, [0.72], rtol=1e-15)


def test_the_global_copy_is_fedavg_whatever_the_personal_model_does() -> None:
    w = np.array([0.3, -0.2])
    for lam, personal in ((0.0, None), (5.0, np.array([9.0, 9.0]))):
        result = train_client([CLIENTS[0]] * 3, w, personal, lam=lam, eta=0.1, personal_lr=0.05)
        np.testing.assert_array_equal(result.local, descend([CLIENTS[0]] * 3, w, 0.1))
    np.testing.assert_array_equal(w, [0.3, -0.2])


def test_without_pull_the_personal_model_is_local_train() -> None:
    start = np.array([0.5, 0.5])
    result = train_client([CLIENTS[1]] * 4, np.zeros(2), start, lam=0.0, eta=0.1, personal_lr=0.2)
    np.testing.assert_array_equal(result.personal, descend([CLIENTS[1]] * 4, start, 0.2))


def test_fixed_point_is_the_proximal_point_of_the_fedsgd_solution() -> None:
    """With one step a round the global model reaches the pooled minimiser, and v_i = (A_i + lam I)^-1 (b_i + lam w)."""
    lam, w, personal = 0.7, np.zeros(2), [None, None]
    for _ in range(600):
        results = [
            train_client([f], w, v, lam=lam, eta=0.3, personal_lr=0.3) for f, v in zip(CLIENTS, personal, strict=True)
        ]
        w, personal = np.mean([r.local for r in results], axis=0), [r.personal for r in results]
    np.testing.assert_allclose(w, global_minimiser(CLIENTS, np.array([0.5, 0.5])), atol=1e-10)
    for f, v in zip(CLIENTS, personal, strict=True):
        np.testing.assert_allclose(v, np.linalg.solve(f.A + lam * np.eye(2), f.b + lam * w), atol=1e-10)


def test_negative_lambda_is_refused_also_without_batches() -> None:
    with pytest.raises(SettingsError, match="lambda"):
        train_client([], np.zeros(2), None, lam=-0.1, eta=0.1, personal_lr=0.1)
