"""LTDA's diagonal and step, on NumPy arrays and torch tensors alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from fedapps.curvature.ltda import diagonal, step

KINDS = pytest.mark.parametrize("kind", [np.asarray, torch.tensor], ids=["numpy", "torch"])


@KINDS
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_diagonal_of_a_hessian_of_rank_one_is_exact(kind: Callable[[Any], Any], sign: float) -> None:
    """H = sign x x', over two tensors."""
    x = np.random.default_rng(0).normal(size=5)
    H = sign * np.outer(x, x)
    d = diagonal({"a": kind(H[0, :2].reshape(1, 2)), "b": kind(H[0, 2:])}, 1e-8)
    assert d is not None
    np.testing.assert_allclose(np.concatenate([np.ravel(d["a"]), d["b"]]), np.diagonal(H), rtol=1e-14)


def test_the_diagonal_of_a_positive_definite_hessian_is_never_above_its_own() -> None:
    R = np.random.default_rng(1).normal(size=(9, 6))
    H = R.T @ R
    d = diagonal({"a": H[0]}, 1e-8)
    assert d is not None
    assert (d["a"] <= np.diagonal(H) * (1 + 1e-14)).all()
    assert d["a"][0] == pytest.approx(H[0, 0], rel=1e-14)


@KINDS
def test_a_step_divides_by_the_absolute_diagonal_and_by_the_damping_at_least(kind: Callable[[Any], Any]) -> None:
    theta, gradient = {"a": kind([1.0, 1.0, 1.0])}, {"a": kind([2.0, 2.0, 2.0])}
    moved = step(theta, gradient, {"a": kind([4.0, -4.0, 0.1])}, lr=0.5, damping=0.5)
    np.testing.assert_allclose(moved["a"], [0.75, 0.75, -1.0], rtol=1e-15)
    assert list(theta["a"]) == [1.0, 1.0, 1.0]


@KINDS
@pytest.mark.parametrize("h_11", [0.0, 1e-9, -1e-9, np.nan])
def test_without_a_first_entry_the_step_is_a_plain_one(kind: Callable[[Any], Any], h_11: float) -> None:
    d = diagonal({"a": kind([h_11, 3.0])}, 1e-8)
    assert d is None
    moved = step({"a": kind([1.0, 1.0])}, {"a": kind([2.0, -4.0])}, d, lr=0.5, damping=10.0)
    assert list(moved["a"]) == [0.0, 3.0]
