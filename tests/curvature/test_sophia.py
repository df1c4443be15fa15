"""Sophia's averages and step, on NumPy arrays and torch tensors alike, and what they become at their limits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from fedapps.curvature.sophia import average, bartlett, step

KINDS = pytest.mark.parametrize(
    "kind", [np.asarray, lambda x: torch.tensor(x, dtype=torch.float64)], ids=["numpy", "torch"]
)


@KINDS
def test_averages_have_no_correction_of_their_bias(kind: Callable[[Any], Any]) -> None:
    m = {"a": kind([0.0, 0.0])}
    for g in ([1.0, -2.0], [3.0, 0.0]):
        m = average(m, {"a": kind(g)}, 0.75)
    np.testing.assert_allclose(m["a"], [0.75 * 0.25 * 1 + 0.25 * 3, 0.75 * 0.25 * -2], rtol=1e-15)


@KINDS
def test_the_estimate_is_the_square_times_the_examples(kind: Callable[[Any], Any]) -> None:
    assert list(bartlett({"a": kind([0.5, -3.0])}, 4)["a"]) == [1.0, 36.0]


@KINDS
def test_a_step_is_the_formula(kind: Callable[[Any], Any]) -> None:
    """By hand, with lr = 1/2, weight decay 1/10 and rho = 1.

    m/v = 3 is clipped to 1, -1/4 is not, -1e-3/1e-12 is clipped to -1; 0.95 of the weights is left.
    """
    theta = {"a": kind([2.0, 2.0]), "b": kind([[1.0]])}
    m, v = {"a": kind([3.0, -0.5]), "b": kind([[-1e-3]])}, {"a": kind([1.0, 2.0]), "b": kind([[0.0]])}
    moved = step(theta, m, v, lr=0.5, weight_decay=0.1, rho=1.0, eps=1e-12)
    np.testing.assert_allclose(moved["a"], [1.9 - 0.5, 1.9 + 0.125], rtol=1e-15)
    np.testing.assert_allclose(moved["b"], [[0.95 + 0.5]], rtol=1e-15)
    assert list(theta["a"]) == [2.0, 2.0]


@KINDS
def test_with_a_huge_eps_it_is_momentum_with_the_step_lr_over_eps(kind: Callable[[Any], Any]) -> None:
    random = np.random.default_rng(0)
    theta, m = {"a": kind(np.ones(5))}, {"a": kind(np.zeros(5))}
    x, momentum = np.ones(5), np.zeros(5)
    for _ in range(4):
        g, v = random.normal(size=5), {"a": kind(random.uniform(size=5))}
        m = average(m, {"a": kind(g)}, 0.9)
        theta = step(theta, m, v, lr=3.0, weight_decay=0.0, rho=1.0, eps=1e3)
        momentum = 0.9 * momentum + 0.1 * g
        x = x - 3.0 / 1e3 * momentum
    np.testing.assert_allclose(theta["a"], x, rtol=1e-14)


@KINDS
def test_without_curvature_and_with_a_tiny_eps_it_is_the_sign(kind: Callable[[Any], Any]) -> None:
    m = np.array([1e-6, -2.0, 0.0])
    moved = step({"a": kind(np.zeros(3))}, {"a": kind(m)}, {"a": kind(np.zeros(3))},
                 lr=1.0, weight_decay=0.0, rho=0.04, eps=1e-30)  # fmt: skip
    np.testing.assert_allclose(moved["a"], -0.04 * np.sign(m), rtol=1e-15)
