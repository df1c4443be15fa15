"""Logistic regression against central differences and written-out sums, in float64."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse

from fedapps.curvature.logistic import LogisticRegression

N, D, LAM = 23, 4, 0.05


@pytest.fixture
def data() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    X = generator.normal(size=(N, D)) * (generator.uniform(size=(N, D)) < 0.6)
    return X, generator.choice([-1, 1], N), generator.normal(size=D)


def test_loss_is_the_formula(data: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
    X, y, theta = data
    terms = [np.log(1 + np.exp(-y_j * float(x_j @ theta))) for x_j, y_j in zip(X, y, strict=True)]
    expected = sum(terms) / N + LAM / 2 * sum(t**2 for t in theta)
    assert LogisticRegression(X, y, LAM).loss(theta) == pytest.approx(expected, rel=1e-14)


def test_gradient_equals_central_differences(data: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
    """Step 1e-6: truncation about 1e-12, rounding about 1e-16 / 1e-6 = 1e-10."""
    X, y, theta = data
    f = LogisticRegression(X, y, LAM)
    h = 1e-6
    expected = [(f.loss(theta + h * e) - f.loss(theta - h * e)) / (2 * h) for e in np.eye(D)]
    np.testing.assert_allclose(f.gradient(theta), expected, atol=2e-9)


def test_hessian_equals_central_differences_of_the_gradient(data: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
    X, y, theta = data
    f = LogisticRegression(X, y, LAM)
    h = 1e-6
    expected = [(f.gradient(theta + h * e) - f.gradient(theta - h * e)) / (2 * h) for e in np.eye(D)]
    np.testing.assert_allclose(f.hessian(theta), expected, atol=2e-9)
    np.testing.assert_array_equal(f.hessian(theta), f.hessian(theta).T)


@pytest.mark.parametrize("form", [scipy.sparse.csr_array, scipy.sparse.csr_matrix, scipy.sparse.coo_array])
def test_sparse_inputs_give_what_dense_ones_give(form: type, data: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
    X, y, theta = data
    dense, sparse = LogisticRegression(X, y, LAM), LogisticRegression(form(X), y, LAM)
    assert sparse.loss(theta) == pytest.approx(dense.loss(theta), rel=1e-14)
    np.testing.assert_allclose(sparse.gradient(theta), dense.gradient(theta), rtol=1e-13, atol=1e-16)
    np.testing.assert_allclose(sparse.hessian(theta), dense.hessian(theta), rtol=1e-13, atol=1e-16)
    np.testing.assert_array_equal(sparse.hessian(theta), sparse.hessian(theta).T)


def test_far_margins_neither_overflow_nor_vanish() -> None:
    """At margins of +-800: ``log(1 + e^800) = 800`` and ``log(1 + e^-800) = 0``; slopes 1 and 0."""
    f = LogisticRegression(np.array([[800.0], [800.0]]), np.array([1, -1]), 0.0)
    theta = np.ones(1)
    with np.errstate(all="raise", under="ignore"):
        assert f.loss(theta) == 400.0
        np.testing.assert_array_equal(f.gradient(theta), [400.0])
        np.testing.assert_array_equal(f.hessian(theta), [[0.0]])


def test_integer_and_single_inputs_are_taken_in_double() -> None:
    f = LogisticRegression(np.array([[1, 2], [3, 4]], np.int8), np.array([1.0, -1.0], np.float32), 0.1)
    assert f.hessian(np.zeros(2)).dtype == np.float64


@pytest.mark.parametrize(
    ("X", "y", "lam", "message"),
    [
        (np.ones((3, 2)), np.array([1, 0, 1]), 0.1, r"expected labels -1 and \+1, got 0"),
        (np.ones((3, 2)), np.array([1, 1]), 0.1, r"got \(3, 2\) and \(2,\)"),
        (np.ones((0, 2)), np.ones(0), 0.1, "with n >= 1"),
        (np.ones(3), np.ones(3), 0.1, r"X of shape \(n, d\)"),
        (np.ones((1, 2)), np.ones(1), -0.1, "expected lam >= 0, got -0.1"),
    ],
    ids=["labels 0 and 1", "too few labels", "no example", "vector", "negative penalty"],
)
def test_bad_input_is_refused(X: np.ndarray, y: np.ndarray, lam: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LogisticRegression(X, y, lam)
