"""Cholesky with rising damping."""

from __future__ import annotations

import numpy as np
import pytest

from fedapps.curvature.solve import damping_ladder, solve_spd
from fedapps.errors import CurvatureError


def _rank_deficient(n: int, rank: int, dtype: type) -> np.ndarray:
    rows = np.random.default_rng(0).normal(size=(rank, n)).astype(dtype)
    return rows.T @ rows / dtype(rank)


@pytest.mark.parametrize("shape", [(5,), (5, 3)], ids=["a vector", "a matrix"])
@pytest.mark.parametrize(("dtype", "rtol"), [(np.float32, 1e-4), (np.float64, 1e-11)], ids=["float32", "float64"])
def test_solves_without_damping_a_block_that_is_positive_definite(
    shape: tuple[int, ...], dtype: type, rtol: float
) -> None:
    """Tolerances: condition number (below 1e2 here) times epsilon, with room."""
    generator = np.random.default_rng(1)
    rows = generator.normal(size=(40, 5))
    P, rhs = rows.T @ rows / 40, generator.normal(size=shape)
    x, added = solve_spd(P.astype(dtype), rhs.astype(dtype), where="test")
    assert added == 0
    assert x.dtype == dtype
    assert x.shape == shape
    np.testing.assert_allclose(x, np.linalg.solve(P, rhs), rtol=rtol)


def test_uses_both_triangles_of_a_block_that_is_symmetric_up_to_rounding() -> None:
    P = np.array([[2.0, 1.0 + 1e-9], [1.0 - 1e-9, 3.0]])
    expected = np.linalg.solve([[2.0, 1.0], [1.0, 3.0]], [1.0, 2.0])
    np.testing.assert_allclose(solve_spd(P, np.array([1.0, 2.0]), where="test").x, expected, rtol=1e-14)


@pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("n", [3, 30, 200], ids="n={}".format)
def test_singular_block_is_damped_by_the_least_rung_that_rounding_allows(n: int, dtype: type) -> None:
    """``A = a a'`` and right-hand side ``a``: the solution is ``a / (a'a + d)``, close to the pseudo-inverse's.

    Rounding of ``A``, about ``eps a'a``, turns the solution out of the span of ``a`` by a share of ``eps a'a / d``, some per
    cent in float32 for a damping well chosen. A damping below the noise leaves a wrong solution, one too high a short one.
    """
    P = _rank_deficient(n, 1, dtype)
    a = P[0] / np.sqrt(P[0, 0])
    x, added = solve_spd(P, a, where="test")
    assert added > 0
    assert np.linalg.norm(x - a / (a @ a)) < (0.1 if dtype is np.float32 else 1e-5) * np.linalg.norm(a / (a @ a))


def test_badly_scaled_block_is_not_mistaken_for_a_singular_one() -> None:
    P = np.diag([1e24, 1.0, 1e-12])
    x, added = solve_spd(P, np.array([1.0, 1.0, 1.0]), where="test")
    assert added == 0
    np.testing.assert_allclose(x, [1e-24, 1.0, 1e12], rtol=1e-12)


def test_half_precision_is_solved_in_double() -> None:
    x, _ = solve_spd(np.diag([2.0, 4.0]).astype(np.float16), np.ones(2, np.float16), where="test")
    assert x.dtype == np.float64
    np.testing.assert_allclose(x, [0.5, 0.25], rtol=1e-15)


def test_inputs_are_left_alone() -> None:
    P, rhs = _rank_deficient(4, 2, np.float64), np.ones(4)
    P.setflags(write=False)
    rhs.setflags(write=False)
    assert np.isfinite(solve_spd(P, rhs, where="test").x).all()


@pytest.mark.parametrize(
    ("P", "rhs", "message"),
    [
        (
            np.zeros((3, 3)),
            np.ones(3),
            r"layer 'fc1', client 3: expected .*got one that is zero everywhere; set a damping > 0",
        ),
        (np.diag([1.0, -5.0]), np.ones(2), "layer 'fc1', client 3: expected a positive definite curvature block"),
        (np.diag([1.0, -1.0]), np.ones(2), r"not, even with 0\.0e\+00 added"),
        (np.diag([3.0, -2.0]), np.ones(2), r"not, even with 5\.0e-01 added"),
        (np.diag([1.0, np.nan]), np.ones(2), "layer 'fc1', client 3: expected finite curvature"),
        (np.eye(2), np.array([1.0, np.inf]), "got NaN or infinity"),
        (np.eye(3), np.ones(2), r"got \(3, 3\) and \(2,\); fold the bias on both ends or on neither"),
        (np.ones((2, 3)), np.ones(2), r"expected P of shape \(n, n\)"),
    ],
    ids=[
        "zero",
        "negative",
        "indefinite, trace 0",
        "indefinite",
        "NaN in P",
        "infinity in rhs",
        "other width",
        "not square",
    ],
)
def test_what_cannot_be_solved_is_named(P: np.ndarray, rhs: np.ndarray, message: str) -> None:
    with pytest.raises(CurvatureError, match=message):
        solve_spd(P, rhs, where="layer 'fc1', client 3")


def test_ladder_rises_by_tens_to_the_mean_diagonal() -> None:
    np.testing.assert_allclose(list(damping_ladder(2.0, 2e-16)), [0.0, *(2 * 10.0**k for k in range(-8, 1))])


def test_ladder_leaves_out_rungs_below_epsilon() -> None:
    assert list(damping_ladder(1.0, 1.2e-7))[1] == pytest.approx(1e-6)
