"""Rates and rounds: limits, agreement between formulas, and the numbers of a hand-made case."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fedapps.errors import SettingsError
from fedapps.personalization import theory
from fedapps.personalization.fedclup import FedClupConfig, default_gamma
from fedapps.personalization.quadratic import Quadratic, joint_minimiser, random_quadratics

LAMBDAS = (0.01, 0.1, 1.0, 10.0)


def test_outer_curvature_of_diagonal_clients() -> None:
    """P = (1/4, 3/4), lambda = 2, A = diag(1, 3) and diag(2, 6): lambda a/(a + lambda) is 2/3, 6/5 and 1, 3/2."""
    hessians = [np.diag([1.0, 3.0]), np.diag([2.0, 6.0])]
    low, high = theory.outer_curvature(hessians, np.array([0.25, 0.75]), 2.0)
    assert low == pytest.approx(0.25 * 2 / 3 + 0.75 * 1)
    assert high == pytest.approx(0.25 * 6 / 5 + 0.75 * 3 / 2)


def test_outer_curvature_is_that_of_the_moreau_envelopes() -> None:
    """The second difference of F(w) = sum p_i min_v L_i(v) + (lam/2)|v - w|^2 along each eigenvector, by the definition."""
    clients, p, lam = random_quadratics(3, 4, mu=0.5, L=5.0, seed=0), np.array([0.2, 0.3, 0.5]), 0.8

    def envelope(w: np.ndarray) -> float:
        minimisers = [np.linalg.solve(c.A + lam * np.eye(4), c.b + lam * w) for c in clients]
        terms = [c.loss(v) + lam / 2 * np.sum((v - w) ** 2) for c, v in zip(clients, minimisers, strict=True)]
        return float(p @ terms)

    hessian = np.empty((4, 4))
    units = np.eye(4)
    for i in range(4):
        for j in range(4):
            corners = [envelope(a * units[i] + b * units[j]) * a * b for a in (-1, 1) for b in (-1, 1)]
            hessian[i, j] = sum(corners) / 4  # exact for quadratics
    expected = np.linalg.eigvalsh(hessian)[[0, -1]]
    np.testing.assert_allclose(theory.outer_curvature([c.A for c in clients], p, lam), expected, rtol=1e-10)


@pytest.mark.parametrize("lam", LAMBDAS)
def test_exact_fedclup_contracts_at_the_predicted_rate(
    clients: list[Quadratic], weights: np.ndarray, run_fedclup: Callable[..., Any], lam: float
) -> None:
    """The last round's shrinkage of the distance is 1 - gamma mu_F, once the slowest direction is left alone."""
    L = max(float(np.linalg.eigvalsh(c.A)[-1]) for c in clients)
    gamma = default_gamma(lam, L, 8, 8)
    target = joint_minimiser(clients, weights, lam).model
    mu_F, L_F = theory.outer_curvature([c.A for c in clients], weights, lam)
    factor = theory.contraction(gamma, mu_F)
    num_rounds = math.ceil(theory.num_rounds(1e-8, factor))
    run = run_fedclup(
        clients, weights, FedClupConfig(lam, gamma), num_rounds=num_rounds, num_steps=0, L=L, target=target
    )
    assert run.distances[-1] / run.distances[-2] == pytest.approx(factor, rel=0.15)
    assert run.distances[-1] / np.linalg.norm(target) < 1e-8
    assert gamma * L_F <= 1 + 1e-12


def test_rounds_over_lambda_grow_and_gradient_evaluations_hardly_do(
    clients: list[Quadratic], weights: np.ndarray, run_fedclup: Callable[..., Any]
) -> None:
    """Over three decades of lambda, rounds with exact local solutions change more than tenfold.

    With K = ceil((L + lambda)/(mu + lambda)) total gradient evaluations change by less than 1.5 times on this problem; other
    draws of it pass 1.5 (see benchmarks/results/fedclup_quadratic.json).
    """
    spectra = [np.linalg.eigvalsh(c.A) for c in clients]
    mu, L = min(s[0] for s in spectra), max(s[-1] for s in spectra)
    assert L / mu < 10
    exact_rounds, predicted, work = [], [], []
    for lam in LAMBDAS:
        target = joint_minimiser(clients, weights, lam).model
        config = FedClupConfig(lam, default_gamma(lam, L, 8, 8))
        K = theory.num_local_steps(lam, mu, L)
        goal = 1e-8 * np.linalg.norm(target)
        for num_steps, found in ((0, exact_rounds), (K, work)):
            run = run_fedclup(clients, weights, config, num_rounds=100, num_steps=num_steps, L=L, target=target)
            found.append((1 + int(np.argmax(np.array(run.distances) < goal))) * max(1, num_steps))
        mu_F, _ = theory.outer_curvature([c.A for c in clients], weights, lam)
        predicted.append(theory.num_rounds(1e-8, theory.contraction(config.gamma, mu_F)))
    assert exact_rounds == sorted(exact_rounds)
    assert exact_rounds[-1] > 10 * exact_rounds[0]
    np.testing.assert_allclose(exact_rounds, predicted, rtol=0.2)
    assert max(work) / min(work) < 1.5


def test_envelope_constants_bound_the_outer_curvature() -> None:
    clients = random_quadratics(5, 6, mu=0.5, L=8.0, seed=3)
    p = np.full(5, 0.2)
    for lam in LAMBDAS:
        low, high = theory.outer_curvature([c.A for c in clients], p, lam)
        assert low >= theory.envelope_convexity(0.5, lam) - 1e-12
        assert high <= theory.envelope_smoothness(8.0, lam) + 1e-12
        assert 1 / theory.envelope_smoothness(8.0, lam) == pytest.approx(1 / lam + 1 / 8.0)


def test_bound_on_rounds_grows_to_that_of_gradient_descent() -> None:
    mu, L, eps = 1.0, 10.0, 1e-6
    bounds = [theory.num_rounds_bound(eps, lam, mu, L) for lam in (0.01, 1.0, 100.0, 1e6)]
    assert bounds == sorted(bounds)
    assert bounds[-1] == pytest.approx(theory.num_rounds(eps, 1 - mu / L), rel=1e-4)
    # gamma mu_F = (lambda + L) mu / (L (lambda + mu)) at the theory's gamma
    assert bounds[1] == pytest.approx(math.log(1e6) / -math.log(1 - 11 / 20))


def test_plain_averaging_needs_rounds_without_bound() -> None:
    rounds = [theory.num_rounds_bound(1e-6, lam, 1.0, 10.0, gamma=1 / lam) for lam in (10.0, 1e3, 1e5)]
    assert rounds[1] / rounds[0] == pytest.approx(1001 / 11, rel=0.06)
    assert rounds[2] / rounds[1] == pytest.approx(100001 / 1001, rel=0.01)


@pytest.mark.parametrize(
    ("factor", "expected"),
    [
        pytest.param(0.1, 6.0, id="a decade a round"),
        pytest.param(0.0, 1.0, id="solved at once"),
        pytest.param(-0.2, 1.0, id="overshot"),
        pytest.param(1.0, math.inf, id="never"),
    ],
)
def test_num_rounds(factor: float, expected: float) -> None:
    assert theory.num_rounds(1e-6, factor) == pytest.approx(expected)


def test_eps_must_be_a_share() -> None:
    with pytest.raises(SettingsError, match="eps"):
        theory.num_rounds(1.0, 0.5)


@pytest.mark.parametrize(
    ("lam", "mu", "L", "expected"),
    [(0.01, 1.0, 10.0, 10), (1.0, 1.0, 10.0, 6), (10.0, 1.0, 10.0, 2), (1.0, 3.0, 3.0, 1)],
)
def test_num_local_steps(lam: float, mu: float, L: float, expected: int) -> None:
    assert theory.num_local_steps(lam, mu, L) == expected


def test_num_local_steps_is_not_raised_by_rounding() -> None:
    """(0.2 + 0.1)/0.1 is 3, but 3.0000000000000004 in floating point."""
    assert theory.num_local_steps(0.1, 0.0, 0.2) == 3


def test_personal_error_lies_between_its_ends_and_is_least_at_the_rule() -> None:
    R2, s2, d, n, m = 0.3, 1.0, 15, 50, 5000
    assert theory.personal_error(1e-9, R2, s2, d, n, m) == pytest.approx(theory.local_error(s2, d, n))
    assert theory.personal_error(1e9, R2, s2, d, n, m) == pytest.approx(theory.global_error(R2, s2, d, n, m), rel=1e-3)
    rule = s2 * d / (n * R2)
    best = theory.personal_error(rule, R2, s2, d, n, m)
    assert best < min(theory.personal_error(rule * f, R2, s2, d, n, m) for f in (0.9, 1.1))


def test_personal_error_is_the_mean_over_many_draws() -> None:
    """Local fits v_i = w_i* + noise, exactly as the derivation has them; 4,000 draws leave about 1 % of Monte Carlo error."""
    R2, s2, d, n, m, lam = 0.5, 2.0, 6, 30, 4, 0.8
    random = np.random.default_rng(0)
    u = random.standard_normal((4000, m, d))
    truth = math.sqrt(R2) * u / np.linalg.norm(u, axis=2, keepdims=True)
    v = truth + math.sqrt(s2 / n) * random.standard_normal(truth.shape)
    personal = (v + lam * v.mean(axis=1, keepdims=True)) / (1 + lam)
    measured = np.mean(np.sum((personal - truth) ** 2, axis=2))
    assert theory.personal_error(lam, R2, s2, d, n, m) == pytest.approx(measured, rel=0.03)


def test_minimax_rate_and_side() -> None:
    assert theory.minimax_rate(0.1, 1.0, 15, 50, 50) == pytest.approx(15 / 2500 + 0.1)
    assert theory.minimax_rate(9.0, 1.0, 15, 50, 50) == pytest.approx(15 / 2500 + 0.3)
    assert theory.minimax_side(0.1, 1.0, 15, 50) is theory.Side.HETEROGENEITY
    assert theory.minimax_side(0.5, 1.0, 15, 50) is theory.Side.NOISE
