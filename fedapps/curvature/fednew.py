r"""FedNew: one pass of ADMM a round for the Newton direction that the clients agree on, so that no Hessian travels.

Elgabli et al., ICML 2022, arXiv 2206.08829. The direction minimises :math:`\sum_i p_i (\frac12 y'(H_i + \alpha I) y - y'g_i)`;
each client has a copy :math:`y_i` of it, and a dual variable :math:`\lambda_i` for :math:`y_i = y`:

.. math:: y_i = (H_i + (\alpha + \rho) I)^{-1} (g_i - \lambda_i + \rho\, y), \qquad y \leftarrow \sum_i p_i y_i, \qquad
          \lambda_i \leftarrow \lambda_i + \rho\,(y_i - y)

Since ``y`` is the mean of the :math:`y_i` of a round, :math:`\sum_i p_i \lambda_i` stays zero if each client takes for its
dual the ``y`` of the round that its :math:`y_i` was part of.
"""

from __future__ import annotations

import numpy as np

from fedapps.curvature.newton import Matrix, Vector
from fedapps.curvature.solve import Solution, solve_spd


def primal(hessian: Matrix, g: Vector, dual: Vector, y: Vector, *, alpha: float, rho: float, where: str) -> Solution:
    r"""Compute :math:`y_i`, equation 9 of the paper.

    Args:
        hessian: ``H_i``, ``(d, d)``.
        g: ``g_i``, ``(d,)``.
        dual: ``lambda_i``, ``(d,)``.
        y: The last direction of the clients, ``(d,)``.
        alpha: Damping of the direction, >= 0.
        rho: Penalty of differing from ``y``, > 0.
        where: Whose it is, for messages.

    Raises:
        CurvatureError: ``H_i`` is not positive definite even with much more damping.
    """
    return solve_spd(hessian + (alpha + rho) * np.eye(len(g)), g - dual + rho * y, where=where)


def next_dual(dual: Vector, y_i: Vector, y: Vector, rho: float) -> Vector:
    r"""Compute :math:`\lambda_i + \rho\,(y_i - y)`, all of one round."""
    return dual + rho * (y_i - y)
