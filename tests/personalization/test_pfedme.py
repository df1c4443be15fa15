"""pFedMe: which of its models is which, and Algorithm 1 by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedapps.errors import SettingsError
from fedapps.personalization.pfedme import PFedMeConfig, local_step, server_step, train_client
from fedapps.personalization.proximal import descend
from fedapps.personalization.quadratic import Quadratic, global_minimiser


def parabola(center: float) -> Quadratic:
    """F = (x - center)^2 / 2."""
    return Quadratic(np.eye(1), np.array([center]), center**2 / 2)


def test_two_local_rounds_by_hand() -> None:
    """F = (x - 4)^2/2, w = 1, lambda = 2, eta = 0.25, one inner step of 0.1, R = 2.

    theta = 1 - 0.1 * ((1-4) + 2 (1-1)) = 1.3;        w_i = 1 - 0.5 (1 - 1.3) = 1.15
    theta = 1.3 - 0.1 * ((1.3-4) + 2 (1.3-1.15)) = 1.54; w_i = 1.15 - 0.5 (1.15 - 1.54) = 1.345
    """
    result = train_client([parabola(4)] * 2, np.array([1.0]), None, PFedMeConfig(2.0, 0.25, 0.1, 1))
    np.testing.assert_allclose(result.theta, [1.54], rtol=1e-14)
    np.testing.assert_allclose(result.local, [1.345], rtol=1e-14)


def test_inner_problem_starts_from_the_last_personal_model() -> None:
    config = PFedMeConfig(2.0, 0.25, 0.1, 1)
    result = train_client([parabola(4)], np.array([1.0]), np.array([3.0]), config)
    np.testing.assert_allclose(result.theta, [3 - 0.1 * ((3 - 4) + 2 * (3 - 1))], rtol=1e-14)


def test_received_and_stored_models_are_not_modified() -> None:
    received, theta = np.array([1.0]), np.array([3.0])
    train_client([parabola(4)] * 3, received, theta, PFedMeConfig(2.0, 0.25, 0.1, 2))
    assert received[0] == 1.0
    assert theta[0] == 3.0


def test_beta_one_is_one_plain_average() -> None:
    locals_ = np.random.default_rng(0).standard_normal((3, 4))
    mean = np.mean(locals_, axis=0)
    np.testing.assert_array_equal(server_step(np.full(4, 9.0), mean, 1.0), mean)
    np.testing.assert_allclose(server_step(np.full(4, 9.0), mean, 0.25), 0.75 * 9.0 + 0.25 * mean)


def test_without_pull_the_personal_model_is_local_train() -> None:
    random = np.random.default_rng(1)
    client = Quadratic(np.diag([1.0, 3.0]), random.standard_normal(2))
    start = random.standard_normal(2)
    result = train_client([client] * 4, start, None, PFedMeConfig(0.0, 0.1, 0.05, 5))
    np.testing.assert_array_equal(result.theta, descend([client] * 20, start, 0.05))
    np.testing.assert_array_equal(result.local, start)


def test_with_a_strong_pull_the_personal_model_is_about_the_global_one() -> None:
    lam, w, theta = 1e4, np.array([1.0]), [None, None]
    config = PFedMeConfig(lam, 1e-5, 5e-5, 20)
    for _ in range(50):
        results = [train_client([parabola(a)], w, theta[i], config) for i, a in enumerate((0.0, 4.0))]
        theta = [result.theta for result in results]
        w = server_step(w, np.mean([result.local for result in results], axis=0), 1.0)
    for personal in theta:
        np.testing.assert_allclose(personal, w, atol=1e-3)


@pytest.mark.parametrize("lam", [0.5, 2.0])
@pytest.mark.parametrize("beta", [0.5, 1.0])
def test_fixed_point_of_two_parabolas(lam: float, beta: float) -> None:
    """With f_i = (x - a_i)^2/2, a = (0, 4): w = 2 and theta_i = (a_i + lambda w)/(1 + lambda)."""
    config = PFedMeConfig(lam, 0.4 / lam, 0.3, 60)
    w, theta = np.array([-3.0]), [None, None]
    for _ in range(300):
        results = [train_client([parabola(a)], w, theta[i], config) for i, a in enumerate((0.0, 4.0))]
        theta = [result.theta for result in results]
        w = server_step(w, np.mean([result.local for result in results], axis=0), beta)
    np.testing.assert_allclose(w, [2.0], atol=1e-8)
    np.testing.assert_allclose(np.ravel(theta), [(a + lam * 2) / (1 + lam) for a in (0, 4)], atol=1e-8)


def test_full_steps_towards_exact_personal_models_descend_on_the_moreau_envelopes() -> None:
    """One local round with eta = 1/lambda makes w_i = theta_i, so the server step is FedCLUP's with gamma = 1/lambda.

    On clients of one curvature its fixed point is the pooled minimiser, for any lambda.
    """
    A = np.diag([1.0, 2.0])
    clients = [Quadratic(A, np.array([1.0, 0.0])), Quadratic(A, np.array([0.0, 3.0]))]
    w = np.zeros(2)
    for _ in range(200):
        results = [train_client([c], w, None, PFedMeConfig(1.5, 1 / 1.5, 0.25, 100)) for c in clients]
        w = server_step(w, np.mean([result.local for result in results], axis=0), 1.0)
    np.testing.assert_allclose(w, global_minimiser(clients, np.array([0.5, 0.5])), atol=1e-10)


def test_local_step_takes_torch_tensors() -> None:
    moved = local_step(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 0.0]), 0.1, 2.0)
    torch.testing.assert_close(moved, torch.tensor([1.4, 1.6]))


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        pytest.param((-1.0, 0.1, 0.1, 1), "lambda", id="negative lambda"),
        pytest.param((2.0, 0.6, 0.1, 1), "at most 1/lambda", id="local copy jumps past the personal model"),
        pytest.param((2.0, 0.0, 0.1, 1), "eta", id="no local step"),
        pytest.param((2.0, 0.1, 0.0, 1), "personal-lr above 0", id="no inner step size"),
        pytest.param((2.0, 0.1, 0.1, 0), "at least one inner step", id="no inner steps"),
    ],
)
def test_impossible_settings_are_refused(numbers: tuple[float, float, float, int], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        PFedMeConfig(*numbers)


def test_beta_must_be_positive() -> None:
    with pytest.raises(SettingsError, match="pFedMe, beta"):
        server_step(np.zeros(1), np.ones(1), 0.0)
