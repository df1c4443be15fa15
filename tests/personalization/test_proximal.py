"""The proximal objective in NumPy: closed forms, derivatives, and an anchor that stays where it is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fedapps.errors import SettingsError
from fedapps.personalization.proximal import (
    Proximal,
    check_lambda,
    curvature_by_differences,
    curvature_range,
    descend,
    pulled_step,
    safe_step,
    step_warning,
)
from fedapps.personalization.quadratic import Quadratic
from fedapps.personalization.synthetic import Logistic

POINT = Quadratic(np.eye(1), np.array([3.0]), 4.5)
"""f = (x - 3)^2 / 2."""


def test_descent_reaches_the_minimiser_of_field_log_a20() -> None:
    """Anchor 1 and lambda 2 have the minimiser (3 + 2 * 1) / (1 + 2) = 5/3; an unsquared penalty has another."""
    proximal = Proximal(POINT, np.array([1.0]), 2.0)
    found = descend([proximal] * 200, np.array([1.0]), 0.3)
    np.testing.assert_allclose(found, [5 / 3], atol=1e-12)
    assert proximal.loss(np.array([2.0])) == pytest.approx(0.5 + 1.0)  # (2-3)^2/2 + (2/2)(2-1)^2


def test_first_step_from_the_anchor_is_plain_gradient_descent() -> None:
    start = np.array([1.0])
    first = descend([Proximal(POINT, start, 2.0)], start, 0.1)
    assert np.isfinite(first).all()
    np.testing.assert_array_equal(first, descend([POINT], start, 0.1))


def test_anchor_that_is_the_start_itself_still_pulls_and_is_bitwise_unchanged() -> None:
    start = np.array([1.0])
    before = start.tobytes()
    proximal = Proximal(POINT, start, 2.0)
    second = descend([proximal] * 2, start, 0.1)
    assert start.tobytes() == before
    assert proximal.anchor.tobytes() == before
    # x1 = 1 + 0.1*2 = 1.2; x2 = 1.2 - 0.1 * ((1.2 - 3) + 2 * (1.2 - 1)) = 1.34
    np.testing.assert_allclose(second, [1.34], rtol=1e-15)
    start += 5.0
    assert proximal.anchor[0] == 1.0


def test_derivatives_match_central_differences() -> None:
    random = np.random.default_rng(3)
    inner = Logistic(random.standard_normal((9, 4)), np.sign(random.standard_normal(9)), 0.1)
    proximal = Proximal(inner, random.standard_normal(4), 0.7)
    theta, h = random.standard_normal(4), 1e-5
    for direction in np.eye(4):
        up, down = theta + h * direction, theta - h * direction
        slope = (proximal.loss(up) - proximal.loss(down)) / (2 * h)
        assert slope == pytest.approx(float(proximal.gradient(theta) @ direction), abs=1e-8)
        bend = (proximal.gradient(up) - proximal.gradient(down)) / (2 * h)
        np.testing.assert_allclose(bend, proximal.hessian(theta) @ direction, atol=1e-8)


def test_each_batch_gets_one_step() -> None:
    other = Quadratic(2 * np.eye(1), np.array([0.0]))
    # 1 -> 1 - 0.1 * (1 - 3) = 1.2 -> 1.2 - 0.1 * 2 * 1.2 = 0.96
    np.testing.assert_allclose(descend([POINT, other], np.array([1.0]), 0.1), [0.96], rtol=1e-15)


def test_curvature_range_is_that_of_the_spectrum() -> None:
    client = Quadratic(np.diag([2.0, 0.5, 3.0]), np.zeros(3))
    assert curvature_range(client, np.zeros(3)) == pytest.approx((0.5, 3.0))


def test_logistic_curvature_is_greatest_at_zero() -> None:
    random = np.random.default_rng(4)
    X = random.standard_normal((20, 3))
    objective = Logistic(X, np.sign(random.standard_normal(20)))
    bound = curvature_range(objective, np.zeros(3))[1]
    assert bound == pytest.approx(np.linalg.eigvalsh(X.T @ X / 80)[-1])
    assert all(curvature_range(objective, random.standard_normal(3))[1] <= bound for _ in range(20))


def test_steps_are_judged_by_the_theoretical_bound() -> None:
    assert safe_step(3.0, 1.0) == 0.25
    assert step_warning(0.25, 3.0, 1.0) is None
    assert "larger than the theory covers" in (step_warning(0.3, 3.0, 1.0) or "")
    unstable = step_warning(0.5, 3.0, 1.0) or ""
    assert "unstable" in unstable
    assert "1/(L + lambda) = 0.25" in unstable


def test_the_bound_of_stability_is_where_descent_diverges() -> None:
    steep = Proximal(Quadratic(3 * np.eye(1), np.zeros(1)), np.zeros(1), 1.0)
    assert abs(descend([steep] * 100, np.ones(1), 0.49)[0]) < 1
    assert abs(descend([steep] * 100, np.ones(1), 0.51)[0]) > 1


@pytest.mark.parametrize("lam", [-1.0, float("nan"), float("inf")])
def test_impossible_lambda_is_refused(lam: float) -> None:
    with pytest.raises(SettingsError, match=r"lambda: .*finite"):
        Proximal(POINT, np.zeros(1), lam)


def test_zero_lambda_is_refused_where_it_must_be_positive() -> None:
    check_lambda(0.0)
    with pytest.raises(SettingsError, match="above 0"):
        check_lambda(0.0, positive=True)


@pytest.mark.parametrize("seed", range(5))
def test_curvature_by_differences_approaches_the_greatest_from_below_with_six_gradients(seed: int) -> None:
    random = np.random.default_rng(seed)
    X = random.standard_normal((40, 8))
    quadratic = Quadratic(X.T @ X / 40, random.standard_normal(8))
    calls = 0

    def gradient(theta: np.ndarray) -> np.ndarray:
        nonlocal calls
        calls += 1
        return quadratic.gradient(theta)

    L = np.linalg.eigvalsh(quadratic.A)[-1]
    assert 0.7 * L < curvature_by_differences(gradient, 30 * random.standard_normal(8)) <= L * (1 + 1e-9)
    assert calls == 6


def test_curvature_by_differences_is_that_of_the_convex_directions() -> None:
    """A greatest absolute eigenvalue that is negative is no curvature that limits the step."""
    saddle = Quadratic(np.diag([-5.0, 1.0]), np.zeros(2))
    assert curvature_by_differences(saddle.gradient, np.array([1.0, 2.0])) <= 1.0


@pytest.mark.parametrize(
    "gradient", [lambda theta: np.zeros(2), lambda theta: np.ones(2), lambda theta: np.full(2, np.nan)]
)
def test_without_curvature_nothing_is_known(gradient: Any) -> None:
    assert curvature_by_differences(gradient, np.ones(2)) == 0.0


def test_the_pulled_step_is_the_theorys_for_every_pull() -> None:
    for lam in (0.0, 0.1, 10.0):
        assert pulled_step(1 / 4, lam) == pytest.approx(1 / (4 + lam), rel=1e-15)
    assert pulled_step(0.25, 3.0, 0.7) == 0.7
