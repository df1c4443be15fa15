"""The step of the global line search, against values worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from fedapps.curvature.line_search import along, choose_step

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("losses", "weights", "expected"),
    [
        pytest.param({0: [4.0, 1.0, 2.0]}, {0: 1.0}, (1.0, 1.0, 4.0), id="the least loss"),
        pytest.param(
            {0: [4.0, 9.0, 2.0]}, {0: 1.0}, (0.5, 2.0, 4.0), id="a shorter step where the full one overshoots"
        ),
        pytest.param({0: [1.0, 9.0, 2.0]}, {0: 1.0}, (0.0, 1.0, 1.0), id="none where every step is worse"),
        # (3 * 4 + 1 * 0) / 4 = 3, (3 * 1 + 1 * 12) / 4 = 3.75, (3 * 3 + 1 * 1) / 4 = 2.5
        pytest.param({1: [0.0, 12.0, 1.0], 0: [4.0, 1.0, 3.0]}, {0: 3.0, 1: 1.0}, (0.5, 2.5, 3.0), id="weights"),
        pytest.param({0: [4.0, NAN, 2.0], 1: [4.0, 0.0, 2.0]}, {0: 1.0, 1: 1.0}, (0.5, 2.0, 4.0), id="NaN rules out"),
        pytest.param({0: [NAN, 3.0, 2.0]}, {0: 1.0}, (0.5, 2.0, NAN), id="NaN at the start"),
        pytest.param({0: [4.0, INF, INF]}, {0: 1.0}, (0.0, 4.0, 4.0), id="nothing but infinity"),
        pytest.param({0: [1.0, 1.0 + 4e-16, 1.0]}, {0: 1.0}, (1.0, 1.0 + 4e-16, 1.0), id="the longest of equal ones"),
    ],
)
def test_the_step_has_the_least_mean_loss(
    losses: dict[int, list[float]], weights: dict[int, float], expected: tuple[float, float, float]
) -> None:
    assert choose_step((1.0, 0.5), losses, weights) == pytest.approx(expected, rel=1e-15, nan_ok=True)


def test_the_order_of_the_answers_changes_no_bit() -> None:
    random = np.random.default_rng(0)
    losses = {client: list(random.random(3)) for client in range(7)}
    weights = {client: float(random.random()) for client in range(7)}
    backwards = {client: losses[client] for client in reversed(range(7))}
    assert choose_step((1.0, 0.5), losses, weights) == choose_step((1.0, 0.5), backwards, weights)


@pytest.mark.parametrize("losses", [{}, {0: [1.0, 2.0]}], ids=["no client", "too few"])
def test_losses_that_do_not_fit_are_refused(losses: dict[int, list[float]]) -> None:
    with pytest.raises(ValueError, match="expected 3 losses from at least one client"):
        choose_step((1.0, 0.5), losses, {0: 1.0})


def test_tensors_without_a_direction_stay_and_dtypes_are_kept() -> None:
    theta = {"w": np.array([1.0, 2.0], np.float32), "count": np.array(7)}
    moved = along(theta, {"w": np.array([4.0, -2.0], np.float32)}, 0.25)
    assert list(moved) == ["w", "count"]
    assert moved["w"].dtype == np.float32
    np.testing.assert_array_equal(moved["w"], np.array([2.0, 1.5], np.float32))
    assert moved["count"] is theta["count"]
