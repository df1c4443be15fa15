r"""Newton steps with the full Hessian, for convex models in float64.

A FedPM or LocalNewton client takes ``K`` of them (arXiv 2511.09100, the client's part of equation 8):

.. math:: \theta_i \leftarrow \theta_i - \eta\, P_i^{-1} \nabla f_i(\theta_i), \qquad
          P_i = \nabla^2 f_i(\theta_i) + \text{damping} \cdot I
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import repeat
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from fedapps.curvature.solve import solve_spd
from fedapps.errors import CurvatureError, explain

Vector = NDArray[np.float64]
"""``(d,)``."""

Matrix = NDArray[np.float64]
"""``(d, d)``."""

SUFFICIENT_DECREASE = 1e-4
"""Armijo's constant: share of the decrease promised by the slope that a step must reach."""

SHORTEST_STEP = 2.0**-30
"""Backtracking gives up below this share of the Newton step."""


MOST_DENSE_BYTES = 2**31
"""A dense matrix of more bytes is not attempted: a Newton step holds several, and a client sends half of one."""


class Objective(Protocol):
    """A twice differentiable convex function of ``theta`` ``(d,)``, in float64."""

    def loss(self, theta: Vector) -> float:
        """Compute the value."""

    def gradient(self, theta: Vector) -> Vector:
        """Compute the gradient, ``(d,)``."""

    def hessian(self, theta: Vector) -> Matrix:
        """Compute the Hessian, ``(d, d)``."""


class Labelled(Objective, Protocol):
    """An objective of examples whose labels the model gives a distribution: its loss is their mean negative log-likelihood."""

    def sampled_gradient(self, theta: Vector, random: np.random.Generator) -> Vector:
        """Compute the gradient, ``(d,)``, without regularisation, at labels drawn from the model at ``theta``."""


class Rooted(Objective, Protocol):
    """An objective that knows a square root of its Hessian's data term."""

    def square_root(self, theta: Vector) -> Matrix:
        r"""Compute ``R``, ``(rows, d)``, with :math:`R'R` the Hessian at ``theta`` less that of the regularisation."""


def check_dense(d: int, where: str, *, do: str) -> None:
    """Refuse a dense ``(d, d)`` matrix in float64 of more than `MOST_DENSE_BYTES`, before allocating it; ``do`` is the way out.

    Raises:
        CurvatureError: It is too large.
    """
    if 8 * d**2 > MOST_DENSE_BYTES:
        most = math.isqrt(MOST_DENSE_BYTES // 8)
        raise CurvatureError(
            where,
            expected=f"at most {most} weights for a full Hessian ({MOST_DENSE_BYTES / 2**30:g} GiB)",
            got=f"{d} weights, whose Hessian has {8 * d**2 / 2**30:.1f} GiB",
            do=do,
        )


def hessian_product(objective: Objective, theta: Vector, v: Vector, where: str, *, do: str) -> Vector:
    """Compute the Hessian at ``theta`` times ``v``, both ``(d,)``.

    By the objective's own ``hessian_product(theta, v)`` if it has one, which no matrix is made for, else by its Hessian.

    Raises:
        CurvatureError: It has none, and its Hessian is too large; see `check_dense`.
    """
    product = getattr(objective, "hessian_product", None)
    if product is not None:
        return np.asarray(product(theta, v))
    check_dense(len(theta), where, do=do)
    return objective.hessian(theta) @ v


class NewtonSteps(NamedTuple):
    """What `newton_steps` gives."""

    theta: Vector  # ``(d,)`` after the last step
    P: Matrix  # ``(d, d)``, the matrix that the last step divided by, damping included; the one that travels
    added_damping: float  # the largest damping that a step needed beyond the one asked for; 0 almost always


def newton_steps(
    objective: Objective,
    theta: Vector,
    *,
    num_steps: int,
    lr: float,
    damping: float,
    where: str,
    curvatures: Iterable[Objective] | None = None,
    search: bool = False,
) -> NewtonSteps:
    """Take ``K`` local Newton steps, the Hessian evaluated anew at each.

    Args:
        objective: The client's objective.
        theta: ``(d,)``, where to start.
        num_steps: ``K``, at least 1.
        lr: ``eta``; 1 is the full step.
        damping: Added to the diagonal of the Hessian, >= 0.
        where: Whose steps, for messages, such as ``"client 3"``.
        curvatures: One for each step, whose Hessian it takes: that of a sub-sample; None for the objective's own.
        search: Whether each step is ``lr`` times the longest of 1, 1/2, 1/4, ... by which the objective falls enough (Armijo).

    References:
        arXiv 2511.09100, the client's part of equation 8. Sub-sampled Hessians and local line search: arXiv 2105.07320.

    Raises:
        ValueError: ``num_steps`` is below 1 or ``damping`` is negative.
        CurvatureError: A Hessian cannot be solved; the message names the step.
    """
    if num_steps < 1 or not damping >= 0:
        raise ValueError(explain(where, expected="num_steps >= 1 and damping >= 0", got=f"{num_steps} and {damping}"))
    identity = np.eye(len(theta))
    largest = 0.0
    for k, sampled in zip(range(num_steps), repeat(objective) if curvatures is None else curvatures, strict=False):
        P = sampled.hessian(theta) + damping * identity
        gradient = objective.gradient(theta)
        step, added = solve_spd(P, gradient, where=f"{where}, local step {k}")
        length = _step_length(objective, theta, lr * step, lr * float(gradient @ step)) if search else 1.0
        theta = theta - lr * length * step
        largest = max(largest, added)
    return NewtonSteps(theta, P + added * identity, largest)


def minimise(objective: Objective, theta: Vector, *, tol: float = 1e-10, max_steps: int = 100) -> Vector:
    """Find the minimiser by Newton's method with backtracking, for reference optima.

    Args:
        objective: A strictly convex objective.
        theta: ``(d,)``, where to start.
        tol: The norm of the gradient at which backtracking ends. One full step follows, which squares the error that is left,
            so the result is good to rounding.
        max_steps: Steps after which to give up.
    """
    for _ in range(max_steps):
        gradient = objective.gradient(theta)
        step = solve_spd(objective.hessian(theta), gradient, where="minimiser").x
        if np.linalg.norm(gradient) <= tol:
            return np.asarray(theta - step)
        theta = theta - _step_length(objective, theta, step, float(gradient @ step)) * step
    norm = np.linalg.norm(objective.gradient(theta))
    raise _no_minimum(f"a gradient of norm {tol:.1e} within {max_steps} steps", f"{norm:.1e}")


def _step_length(objective: Objective, theta: Vector, step: Vector, decrease: float) -> float:
    """Halve the step until the loss falls by enough (Armijo)."""
    start = objective.loss(theta)
    # Close to the minimum the decrease drowns in the rounding of the loss: that much is forgiven.
    rounding = 8 * np.finfo(np.float64).eps * abs(start)
    length = 1.0
    while length >= SHORTEST_STEP:
        if objective.loss(theta - length * step) <= start - SUFFICIENT_DECREASE * length * decrease + rounding:
            return length
        length /= 2
    raise _no_minimum("a loss that falls along the Newton direction", "one that does not, however short the step")


def _no_minimum(expected: str, got: str) -> CurvatureError:
    return CurvatureError(
        "minimiser",
        expected=expected,
        got=got,
        do="check that the objective is strictly convex, with the right gradient and Hessian",
    )
