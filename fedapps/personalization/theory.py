r"""What theory predicts: statistical rates, the server's contraction, rounds, local steps.

Symbols: ``s2`` noise variance per example (squared units of the targets, times those of inverse curvature for other
losses), ``d`` personalised parameters, ``n`` examples a client, ``m`` clients, ``R2`` squared distance of a client's true
parameters from their mean, ``mu`` and ``L`` least and greatest curvature, ``lam`` the pull ``lambda``. Errors are squared
distances to the true parameters. The paper's ``O(1/n)`` stands for ``s2 d / n`` here.

Source: arXiv 2410.08934 unless a function says otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import StrEnum

import numpy as np

from fedapps.errors import SettingsError
from fedapps.personalization.proximal import Matrix, Vector


class Side(StrEnum):
    """Which term of the minimax rate a problem is limited by."""

    NOISE = "noise"
    """``R^2`` is above the local error: clients differ more than their own data leaves uncertain; small ``lambda``."""
    HETEROGENEITY = "heterogeneity"
    """``R^2`` is below the local error: clients are alike and gain from each other; large ``lambda``."""


def local_error(s2: float, d: int, n: float) -> float:
    """Predict LocalTrain's error, ``s2 d / n``: the limit ``lambda -> 0`` of Theorem 1's second bound."""
    return s2 * d / n


def global_error(R2: float, s2: float, d: int, n: float, m: int) -> float:
    """Predict GlobalTrain's error, ``s2 d / (m n) + R2``: the limit ``lambda -> infinity`` of Theorem 1's first bound."""
    return s2 * d / (m * n) + R2


def minimax_rate(R2: float, s2: float, d: int, n: float, m: int) -> float:
    """Give the best possible error up to constants, ``s2 d / (m n) + min(R2, s2 d / n)`` (Corollary 1)."""
    return s2 * d / (m * n) + min(R2, s2 * d / n)


def minimax_side(R2: float, s2: float, d: int, n: float) -> Side:
    """Say which term of the minimax rate is active, ``R2`` or ``s2 d / n`` (Corollary 1's two cases)."""
    return Side.NOISE if local_error(s2, d, n) < R2 else Side.HETEROGENEITY


def personal_error(lam: float, R2: float, s2: float, d: int, n: float, m: int) -> float:
    r"""Predict the error of the personal models for covariates of identity covariance, to leading order in ``1/n``.

    .. math:: \frac{(s_2 d/n)\,(1 + (2\lambda + \lambda^2)/m) + \lambda^2 R^2 (1 - 1/m)}{(1 + \lambda)^2}

    Derivation: ``A_i = I`` gives ``w_i = (v_i + lambda w)/(1 + lambda)`` and ``w = mean v_i``, with independent local
    errors of mean square ``s2 d / n`` and offsets of mean square ``R2``. It is Theorem 1 with its constants for this case:
    between `local_error` and (but for ``R2/m``) `global_error`, least near ``lambda = s2 d / (n R2)``.
    """
    noise = local_error(s2, d, n) * (1 + (2 * lam + lam**2) / m)
    return (noise + lam**2 * R2 * (1 - 1 / m)) / (1 + lam) ** 2


def envelope_smoothness(L: float, lam: float) -> float:
    """Give the smoothness of a client's Moreau envelope, ``lambda L / (lambda + L)``; the theory's ``gamma`` is its inverse."""
    return lam * L / (lam + L)


def envelope_convexity(mu: float, lam: float) -> float:
    """Give the strong convexity of a client's Moreau envelope, ``lambda mu / (lambda + mu)``."""
    return lam * mu / (lam + mu)


def outer_curvature(hessians: Sequence[Matrix], weights: Vector, lam: float) -> tuple[float, float]:
    r"""Compute the range ``(mu_F, L_F)`` of curvature that the server descends on, for quadratics with ``A_i`` ``(d, d)``.

    .. math:: \text{eigenvalues of } \sum_i p_i\, \lambda A_i (A_i + \lambda I)^{-1}
    """
    d = len(hessians[0])
    # lambda A (A + lambda I)^-1, symmetric since both factors share their eigenvectors.
    terms = [p * lam * np.linalg.solve(A + lam * np.eye(d), A) for p, A in zip(weights, hessians, strict=True)]
    total = np.sum(terms, axis=0)
    eigenvalues = np.linalg.eigvalsh((total + total.T) / 2)
    return float(eigenvalues[0]), float(eigenvalues[-1])


def contraction(gamma: float, mu_F: float) -> float:
    """Give the factor by which a round with exact local solutions shrinks the distance, ``1 - gamma mu_F``.

    It holds for ``gamma`` at most the theory's step, where the fastest direction never overshoots.
    """
    return 1 - gamma * mu_F


def num_rounds(eps: float, factor: float) -> float:
    r"""Give the rounds to shrink a distance to the share ``eps``, :math:`\log(1/\epsilon) / -\log(\text{factor})`.

    At least 1; infinite for a contraction ``factor`` of 1 or more, and 1 for 0 or less, which is solved at once.

    Raises:
        SettingsError: ``eps`` is not in (0, 1).
    """
    if not 0 < eps < 1:
        raise SettingsError("eps", expected="a number in (0, 1)", got=f"{eps:g}", do="take for example 1e-6")
    if factor >= 1:
        return math.inf
    return 1.0 if factor <= eps else math.log(1 / eps) / -math.log(factor)


def num_rounds_bound(eps: float, lam: float, mu: float, L: float, gamma: float | None = None) -> float:
    r"""Bound the rounds with exact local solutions, :math:`O(\kappa \frac{\lambda+\mu}{\lambda+L} \log \frac1\epsilon)`.

    The worst case puts every client's least curvature in one direction, ``mu_F = lambda mu / (lambda + mu)``. With the
    theory's ``gamma``, ``1/lambda + 1/L``, which None stands for, the bound grows with ``lambda`` up to
    ``kappa log(1/eps)``; with ``gamma = 1/lambda`` it grows as ``(lambda + mu)/mu`` without end.
    """
    step = 1 / envelope_smoothness(L, lam) if gamma is None else gamma
    return num_rounds(eps, contraction(step, envelope_convexity(mu, lam)))


def num_local_steps(lam: float, mu: float, L: float) -> int:
    r"""Give the local steps, at least 1, with which total work hardly depends on ``lambda``.

    .. math:: K = \Big\lceil \frac{L + \lambda}{\mu + \lambda} \Big\rceil
    """
    # A quotient that rounding left just above an integer is that integer.
    return max(1, math.ceil((L + lam) / (mu + lam) - 1e-9))
