"""Solving with a curvature block: Cholesky, never an inverse, and damping that rises when the factorisation fails.

A singular block may pass the factorisation with a tiny pivot that rounding left, and the solution is then noise. So a
block counts as singular, too, if a pivot is not well above the rounding of the block. Both are measured on the block
scaled to a unit diagonal, ``C``, so that features of very different size are no obstacle: the smallest pivot of ``C`` has
to exceed `PIVOT_MARGIN` ``epsilon |C|_F``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import LinAlgError, cho_factor, cho_solve

from fedapps.errors import CurvatureError

FIRST_DAMPING = 1e-8
"""The first damping that is tried when a block cannot be factorised, relative to the mean of its diagonal."""

LAST_DAMPING = 1.0
"""The last one: with more, the step would follow the damping and not the curvature."""


PIVOT_MARGIN = 10.0
"""How far above the rounding a pivot must be: at 10, rounding changes a solution by less than a tenth."""


class Solution(NamedTuple):
    """What `solve_spd` gives."""

    x: NDArray[Any]  # the solution, in the shape of the right-hand side, float32 or float64
    added_damping: float  # what had to be added to the diagonal of ``P``; 0 almost always


def damping_ladder(mean_diagonal: float, epsilon: float) -> Iterator[float]:
    """List the dampings to try, by tens: 0 first, then from `FIRST_DAMPING` to `LAST_DAMPING`.

    Args:
        mean_diagonal: Mean of the diagonal of the block, the unit of the ladder; without a positive one the ladder
            ends at 0.
        epsilon: Machine epsilon of the arithmetic; rungs below it would be rounded away and are left out.

    Yields:
        Dampings, rising.
    """
    yield 0.0
    if mean_diagonal > 0:
        rungs = round(np.log10(LAST_DAMPING / FIRST_DAMPING)) + 1
        for rung in range(rungs):
            relative = FIRST_DAMPING * 10.0**rung
            if relative > epsilon:
                yield relative * mean_diagonal


def solve_spd(P: NDArray[Any], rhs: NDArray[Any], *, where: str) -> Solution:
    """Solve ``(P + d I) x = rhs`` with the smallest damping ``d`` of the ladder that makes ``P + d I`` positive definite.

    Args:
        P: ``(n, n)``; symmetrised before use. float32 and float64 are solved as they are, anything else in float64.
        rhs: ``(n,)`` or ``(n, m)``.
        where: What is solved, for messages, such as ``"layer 'fc1', client 3"``.

    Raises:
        CurvatureError: An input is not finite, the shapes do not fit, ``P`` is zero everywhere, or it is not positive
            definite even with the last damping of the ladder.
    """
    if P.ndim != 2 or P.shape[0] != P.shape[1] or rhs.shape[:1] != P.shape[:1]:
        raise CurvatureError(
            where,
            expected="P of shape (n, n) and a right-hand side with n rows",
            got=f"{P.shape} and {rhs.shape}",
            do="fold the bias on both ends or on neither",
        )
    dtype = np.float32 if P.dtype == rhs.dtype == np.float32 else np.float64
    P, rhs = P.astype(dtype, copy=False), rhs.astype(dtype, copy=False)
    if not (np.isfinite(P).all() and np.isfinite(rhs).all()):
        raise not_finite(where)
    P = (P + P.T) / 2
    mean_diagonal = float(np.mean(P.diagonal()))
    for damping in damping_ladder(mean_diagonal, float(np.finfo(dtype).eps)):
        factor = _cholesky(_damped(P, damping))
        if factor is not None:
            x = cho_solve((factor, True), rhs, check_finite=False)
            if np.isfinite(x).all():
                return Solution(x, damping)
    raise not_definite(where, mean_diagonal, is_zero=not P.any())


def _damped(P: NDArray[Any], damping: float) -> NDArray[Any]:
    P = P.copy()
    np.einsum("ii->i", P)[...] += damping
    return P


def _cholesky(P: NDArray[Any]) -> NDArray[Any] | None:
    """Give the lower factor of ``P`` (its upper triangle is noise), or None for a block that counts as singular."""
    try:
        factor, _ = cho_factor(P, lower=True, check_finite=False)
    except LinAlgError:
        return None
    scale = 1 / np.sqrt(P.diagonal())
    rounding = PIVOT_MARGIN * np.finfo(P.dtype).eps * np.linalg.norm(scale[:, None] * P * scale)
    return factor if (factor.diagonal() * scale).min() ** 2 > rounding else None


def not_finite(where: str) -> CurvatureError:
    """Compose the error for NaN or infinity in a block or a gradient."""
    return CurvatureError(
        where,
        expected="finite curvature and a finite right-hand side",
        got="NaN or infinity",
        do="lower the learning rate, raise the damping, or check the data",
    )


def not_definite(where: str, mean_diagonal: float, *, is_zero: bool) -> CurvatureError:
    """Compose the error for a block that no damping of the ladder makes positive definite, or that is zero everywhere."""
    got = (
        "one that is zero everywhere"
        if is_zero
        else f"one that is not, even with {LAST_DAMPING * max(mean_diagonal, 0.0):.1e} added to its diagonal"
    )
    return CurvatureError(
        where, expected="a positive definite curvature block", got=got, do="set a damping > 0, or a larger one"
    )
