"""The scalars of a local fit: against their formulas, and against the noise of many fits."""

from __future__ import annotations

import numpy as np
import pytest

from fedapps.errors import MessageError
from fedapps.personalization.local_fits import LocalFit, fit_of_folds, fit_of_gradients, fit_of_least_squares
from fedapps.personalization.quadratic import least_squares


def draw(seed: int, n: int = 40, d: int = 5, noise: float = 0.7) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    X = random.standard_normal((n, d)) * np.arange(1, d + 1)
    return X, X @ np.ones(d) + noise * random.standard_normal(n), np.full(d, 0.5)


def ridge(X: np.ndarray, y: np.ndarray, w: np.ndarray, lam: float) -> np.ndarray:
    n, d = X.shape
    return np.linalg.solve(X.T @ X / n + lam * np.eye(d), X.T @ y / n + lam * w)


def test_least_squares_without_pull_is_the_textbook_formula() -> None:
    X, y, w = draw(0)
    v = ridge(X, y, w, 0.0)
    fit = fit_of_least_squares(X, y, v, w, 0.0)
    s2 = np.sum((y - X @ v) ** 2) / (40 - 5)
    assert fit.variance == pytest.approx(s2)
    assert fit.noise == pytest.approx(s2 * np.trace(np.linalg.inv(X.T @ X)))
    assert fit.distance2 == pytest.approx(np.sum((v - w) ** 2))
    assert fit.num_examples == 40


@pytest.mark.parametrize("lam", [0.0, 0.5])
def test_noise_is_the_scatter_of_fits_to_fresh_noise(lam: float) -> None:
    """2,000 draws of the noise on one design leave about 2 % of Monte Carlo error; the pull is to the truth, so unbiased."""
    X, w = draw(1, n=30)[0], np.ones(5)
    random = np.random.default_rng(2)
    targets = X @ np.ones(5) + 0.7 * random.standard_normal((2000, 30))
    fits = np.stack([ridge(X, y, w, lam) for y in targets])
    scatter = np.mean(np.sum((fits - fits.mean(axis=0)) ** 2, axis=1))
    reported = [fit_of_least_squares(X, y, v, w, lam) for y, v in zip(targets, fits, strict=True)]
    assert np.mean([fit.noise for fit in reported]) == pytest.approx(scatter, rel=0.05)
    assert np.mean([fit.variance for fit in reported]) == pytest.approx(0.49, rel=0.05)


def test_fewer_examples_than_parameters_give_finite_numbers() -> None:
    X, y, w = draw(3, n=3, d=5)
    fit = fit_of_least_squares(X, y, ridge(X, y, w, 1e-3), w, 1e-3)
    assert np.isfinite([fit.noise, fit.variance]).all()


@pytest.mark.parametrize("lam", [0.0, 0.3])
def test_sandwich_matches_its_formula(lam: float) -> None:
    """tr(P J P)/n and tr(P J)/d with P = (A + lam I)^-1 and J scaled by the degrees of freedom, by dense inverses."""
    X, y, w = draw(4)
    v = ridge(X, y, w, lam)
    A, gradients = X.T @ X / 40, X * (X @ v - y)[:, None]
    P = np.linalg.inv(A + lam * np.eye(5))
    J = np.cov(gradients.T, bias=True) * 40 / (40 - np.trace(A @ P))
    fit = fit_of_gradients(A, gradients, v, w, lam)
    assert fit.noise == pytest.approx(np.trace(P @ J @ P) / 40)
    assert fit.variance == pytest.approx(np.trace(P @ J) / 5)


def test_sandwich_agrees_with_least_squares_for_many_examples() -> None:
    X, y, w = draw(5, n=20000)
    v = ridge(X, y, w, 0.0)
    plain = fit_of_least_squares(X, y, v, w, 0.0)
    sandwich = fit_of_gradients(X.T @ X / len(y), X * (X @ v - y)[:, None], v, w, 0.0)
    assert sandwich.noise == pytest.approx(plain.noise, rel=0.03)
    assert sandwich.variance == pytest.approx(plain.variance, rel=0.03)


@pytest.mark.parametrize("folds", [2, 5])
def test_folds_agree_with_least_squares_on_average(folds: int) -> None:
    """200 draws of 200 examples: about 5 % of Monte Carlo error for two halves, and 5 % of bias from smaller fits."""
    noise, variance = [], []
    for seed in range(200):
        X, y, w = draw(seed, n=200)
        whole, v = least_squares(X, y), ridge(X, y, w, 0.0)
        parts = np.array_split(np.arange(200), folds)
        fits = [ridge(np.delete(X, rows, 0), np.delete(y, rows), w, 0.0) for rows in parts]
        fit = fit_of_folds(fits, [whole.gradient(v_k) for v_k in fits], v, w, 200)
        plain = fit_of_least_squares(X, y, v, w, 0.0)
        noise.append(fit.noise / plain.noise)
        variance.append(fit.variance / plain.variance)
    assert np.mean(noise) == pytest.approx(1.0, abs=0.15)
    assert np.mean(variance) == pytest.approx(1.0, abs=0.15)


def test_two_folds_by_hand() -> None:
    """Fits 1 and 3, gradients 5 and 11: q = (1/2)(1 + 1) = 1 and s2 d/n = (1/2)(-1 * 5 + 1 * 11) = 3, with n = 8, d = 1."""
    fit = fit_of_folds(
        [np.array([1.0]), np.array([3.0])], [np.array([5.0]), np.array([11.0])], np.ones(1), np.zeros(1), 8
    )
    assert fit == LocalFit(8, 1.0, 1.0, 24.0)


def test_negative_curvature_counts_as_none() -> None:
    fit = fit_of_folds([np.zeros(1), np.ones(1)], [np.ones(1), np.zeros(1)], np.ones(1), np.zeros(1), 8)
    assert fit.variance == 0.0


@pytest.mark.parametrize(
    "numbers",
    [
        pytest.param((0, 1.0, 1.0, 1.0), id="no examples"),
        pytest.param((5, float("nan"), 1.0, 1.0), id="diverged"),
        pytest.param((5, 1.0, -1.0, 1.0), id="negative"),
    ],
)
def test_impossible_reports_are_refused(numbers: tuple[int, float, float, float]) -> None:
    with pytest.raises(MessageError, match=r"local fit: .*one example"):
        LocalFit(*numbers)
