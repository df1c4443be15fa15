"""Sketches against their matrices: orthogonal where they are whole, the identity on average."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.linalg import hadamard

from fedapps.curvature.sketches import Sketch, sketch, walsh_hadamard

KINDS = pytest.mark.parametrize("kind", list(Sketch))


def matrix(kind: Sketch, k: int, n: int, random: np.random.Generator) -> np.ndarray:
    """``S``, ``(k, n)``: the sketch of the identity."""
    return sketch(np.eye(n), k, kind, random)


@pytest.mark.parametrize("N", [1, 2, 8, 64])
def test_the_fast_transform_is_the_product_with_the_matrix(N: int) -> None:
    X = np.random.default_rng(0).normal(size=(N, 3))
    np.testing.assert_allclose(walsh_hadamard(X), hadamard(N) @ X, rtol=1e-13, atol=1e-13)


@KINDS
@pytest.mark.parametrize(
    ("k", "n"), [(3, 8), (5, 6), (7, 3)], ids=["few rows", "no power of two", "more rows than there are"]
)
def test_the_gram_matrix_is_the_identity_on_average(kind: Sketch, k: int, n: int) -> None:
    """The mean of 4,000 draws of S'S, in every entry within five deviations of that mean; the seed is fixed."""
    random = np.random.default_rng(1)
    draws = np.stack([S.T @ S for S in (matrix(kind, k, n, random) for _ in range(4000))])
    deviation = draws.std(axis=0, ddof=1) / np.sqrt(len(draws))
    assert (np.abs(draws.mean(axis=0) - np.eye(n)) <= 5 * deviation + 1e-12).all()
    assert deviation.max() < 0.05


@KINDS
def test_a_sketch_is_its_matrix_times_the_rows(kind: Sketch) -> None:
    R = np.random.default_rng(2).normal(size=(11, 4))
    Y = sketch(R, 5, kind, np.random.default_rng(3))
    assert Y.shape == (5, 4)
    np.testing.assert_allclose(Y, matrix(kind, 5, 11, np.random.default_rng(3)) @ R, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("n", [16, 11])
def test_a_whole_srht_is_orthogonal(n: int) -> None:
    """16 rows of 16 (or of 11, padded to 16): S'S = I exactly."""
    S = matrix(Sketch.SRHT, 16, n, np.random.default_rng(4))
    np.testing.assert_allclose(S.T @ S, np.eye(n), atol=1e-14)


def test_a_count_sketch_has_one_sign_a_column() -> None:
    S = matrix(Sketch.COUNT, 4, 50, np.random.default_rng(5))
    assert (np.abs(S).sum(axis=0) == 1).all()
    assert set(S.ravel()) == {-1.0, 0.0, 1.0}
    assert (np.abs(S).sum(axis=1) > 0).all()


@pytest.mark.parametrize("kind", [Sketch.GAUSSIAN, Sketch.COUNT])
def test_one_stream_sketches_the_first_rows_of_a_longer_matrix_alike(kind: Sketch) -> None:
    short, long = (matrix(kind, 4, n, np.random.default_rng(6)) for n in (5, 9))
    np.testing.assert_array_equal(short, long[:, :5])
