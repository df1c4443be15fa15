r"""What one local fit says about noise: the scalars from which ``lambda`` is chosen (`fedapps.personalization.choose_lambda`).

A client fits ``v_i`` to its own data (one round with ``lambda`` at its lower bound) and reports, beside its usual reply,
how far ``v_i`` is from the received ``w`` and how uncertain it is:

.. math:: q_i = \frac1{n_i}\,\mathrm{tr}(A_i^{-1} J_i A_i^{-1}), \qquad s_i^2 = \frac1d\,\mathrm{tr}(A_i^{-1} J_i)

with ``A_i`` the Hessian and ``J_i`` the covariance of per-example gradients at ``v_i``. For linear regression ``J = s2 A``,
so ``s_i^2`` is the residual variance; where it is not, this is what balances noise against heterogeneity along each direction.

Three ways to the same two scalars: least squares exactly, any convex loss from its gradients, and any model at all from
fits to parts of the data.

Departures from the plain formulas: ``A_i + lambda I`` stands for ``A_i`` where the fit had that pull, and residuals are
scaled by ``n / (n - tr(A_i (A_i + lambda I)^-1))`` for the degrees of freedom that the fit took, without which noise looks
too small.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedapps.errors import MessageError
from fedapps.personalization.proximal import Matrix, Vector
from fedapps.personalization.quadratic import Quadratic, least_squares


@dataclass(frozen=True)
class LocalFit:
    """One client's report, five scalars at most.

    Raises:
        MessageError: A number is not finite or negative.
    """

    num_examples: float  # ``n_i``, at least 1
    distance2: float  # ``|v_i - w|^2`` to the received ``w``
    noise: float  # ``q_i``, the expected ``|v_i - E v_i|^2``
    variance: float  # ``s_i^2``

    def __post_init__(self) -> None:
        numbers = (self.distance2, self.noise, self.variance)
        if self.num_examples < 1 or not all(np.isfinite(x) and x >= 0 for x in numbers):
            raise MessageError(
                "local fit",
                expected="at least one example, and three finite numbers from 0",
                got=f"{self.num_examples} examples and {numbers}",
                do="lower the local step; the fit may have diverged",
            )


def fit_of_least_squares(X: Matrix, y: Vector, v: Vector, received: Vector, lam: float) -> LocalFit:
    r"""Measure a fit of linear regression, whose gradients have covariance ``J = s2 A``; ``s2`` is unbiased for ``lambda = 0``.

    .. math:: s^2 = \frac{|Xv - y|^2}{n - \mathrm{tr}(A A_\lambda^{-1})}, \qquad
              q = \frac{s^2}{n}\,\mathrm{tr}(A_\lambda^{-1} A A_\lambda^{-1}), \qquad A_\lambda = A + \lambda I

    Args:
        X: Inputs, ``(n, d)``.
        y: Targets, ``(n,)``.
        v: The fit, ``(d,)``: minimiser of ``|Xv - y|^2/(2n) + (lambda/2)|v - w|^2``.
        received: ``w``, ``(d,)``.
        lam: ``lambda >= 0`` of the fit; above 0 if ``n < d``.
    """
    client: Quadratic = least_squares(X, y)
    n, residuals = len(y), X @ v - y
    shrink = _shrinkage(client.A, lam)  # (d, d), A (A + lambda I)^-1
    variance = float(residuals @ residuals) / _free(n, float(np.trace(shrink)))
    noise = variance * float(np.trace(np.linalg.solve(_shifted(client.A, lam), shrink))) / n
    return LocalFit(n, _distance2(v, received), noise, variance)


def fit_of_gradients(hessian: Matrix, example_gradients: Matrix, v: Vector, received: Vector, lam: float) -> LocalFit:
    r"""Measure a fit of any convex loss by the sandwich, :math:`q = \mathrm{tr}(A_\lambda^{-1} J A_\lambda^{-1})/n`.

    It needs no model of the noise, and holds when the loss is not the true likelihood.

    Args:
        hessian: ``A`` at ``v``, ``(d, d)``, without the pull.
        example_gradients: Gradient of each example's loss at ``v``, ``(n, d)``, without the pull.
        v: The fit, ``(d,)``.
        received: ``w``, ``(d,)``.
        lam: ``lambda >= 0`` of the fit.
    """
    n, d = example_gradients.shape
    centred = example_gradients - example_gradients.mean(axis=0)
    shrink = _shrinkage(hessian, lam)
    J = centred.T @ centred / _free(n, float(np.trace(shrink)))
    left = np.linalg.solve(_shifted(hessian, lam), J)  # A_lambda^-1 J
    noise = float(np.trace(np.linalg.solve(_shifted(hessian, lam), left.T))) / n
    return LocalFit(n, _distance2(v, received), noise, float(np.trace(left)) / d)


def fit_of_folds(
    fits: Sequence[Vector], gradients: Sequence[Vector], v: Vector, received: Vector, num_examples: int
) -> LocalFit:
    r"""Measure a fit of any model by refitting without each ``1/K`` of the data in turn; needs no Hessian.

    .. math:: q = \frac{K-1}{K} \sum_k |v_k - \bar v|^2, \qquad
              \frac{s^2 d}{n} = \frac{K-1}{K} \sum_k (v_k - \bar v)' A\, (v_k - \bar v)

    where ``A (v_k - v_mean)`` comes from differences of gradients. This is the delete-a-group jackknife; two halves are its
    cheapest form. More folds cost more fits and are worth it for few examples a parameter: a fit to half of 50 examples
    of 15 parameters is far more than twice as noisy as one to all, and makes noise look twice what it is. Too small for
    fits that stop long before a minimum, since all then stay near where they started.

    Args:
        fits: ``v_k``, each ``(d,)``, at least 2, from the same start by the same steps.
        gradients: Gradient of the loss over *all* the client's examples at each ``v_k``.
        v: The fit to all the data, ``(d,)``.
        received: ``w``, ``(d,)``.
        num_examples: ``n`` of the whole.

    Returns:
        The report; curvature that is negative over the fits counts as none.

    References:
        Shao & Wu, The Annals of Statistics 17 (1989): the jackknife that deletes groups.
    """
    offsets = np.stack(fits) - np.mean(fits, axis=0)  # (K, d)
    factor = (len(fits) - 1) / len(fits)
    noise = factor * float(np.sum(offsets**2))
    bend = factor * float(np.sum(offsets * np.stack(gradients)))  # offsets sum to 0, so the mean gradient drops out
    return LocalFit(num_examples, _distance2(v, received), noise, max(0.0, bend) * num_examples / len(v))


def _shifted(A: Matrix, lam: float) -> Matrix:
    return A + lam * np.eye(len(A))


def _shrinkage(A: Matrix, lam: float) -> Matrix:
    return np.asarray(np.linalg.solve(_shifted(A, lam), A))


def _free(n: int, used: float) -> float:
    # A fit that takes every degree of freedom leaves no residuals to scale: one example's worth is the least.
    return max(n - used, 1.0)


def _distance2(v: Vector, received: Vector) -> float:
    return float(np.sum((v - received) ** 2))
