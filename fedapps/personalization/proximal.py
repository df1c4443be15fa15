r"""The proximal objective that every personalised method minimises, in float64 NumPy, and gradient descent on it.

.. math:: L_i(w_i) + \frac{\lambda}{2}\,|w_i - w|^2, \qquad w_i \leftarrow w_i - \eta\,(\nabla L_i(w_i) + \lambda (w_i - w))

FedCLUP, arXiv 2410.08934, equation of the local problem; pFedMe, arXiv 2006.08848; Ditto, arXiv 2012.04221.

========== ================ ======= =====================================================
symbol     identifier       shape   meaning
========== ================ ======= =====================================================
L_i        ``objective``            a client's loss; twice differentiable
w          ``anchor``       (d,)    the model that pulls; constant
w_i        ``start``        (d,)    the model that moves
lambda     ``lam``                  pull, in units of the curvature of ``L_i``
eta        ``eta``                  step size, inverse curvature
L, mu      ``L``, ``mu``            greatest and least curvature of ``L_i``
========== ================ ======= =====================================================

Departures: none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fedapps.errors import SettingsError

Vector = NDArray[np.float64]
"""A model, ``(d,)``."""

Matrix = NDArray[np.float64]
"""A curvature matrix, ``(d, d)``, or a design matrix, ``(n, d)``."""


class Objective(Protocol):
    """A twice differentiable function of a vector ``(d,)``, all float64."""

    def loss(self, theta: Vector) -> float:
        """Compute the value."""

    def gradient(self, theta: Vector) -> Vector:
        """Compute the gradient, ``(d,)``."""

    def hessian(self, theta: Vector) -> Matrix:
        """Compute the Hessian, ``(d, d)``."""


@dataclass(frozen=True)
class Proximal:
    r"""An objective with a pull to an anchor, :math:`L_i(v) + \frac{\lambda}{2}|v - w|^2`; itself an `Objective`.

    Raises:
        SettingsError: ``lam`` is negative or not finite.
    """

    objective: Objective  # the loss ``L_i``
    anchor: Vector  # ``w``, ``(d,)``; copied, so that no later step can move it
    lam: float  # ``lambda >= 0``

    def __post_init__(self) -> None:
        check_lambda(self.lam)
        # An anchor that is the moving model itself would make the pull 0 for ever.
        frozen = np.array(self.anchor, dtype=np.float64)
        frozen.flags.writeable = False
        object.__setattr__(self, "anchor", frozen)

    def loss(self, theta: Vector) -> float:
        """Compute ``L_i(theta) + (lambda/2) |theta - w|^2``."""
        offset = theta - self.anchor
        return self.objective.loss(theta) + 0.5 * self.lam * float(offset @ offset)

    def gradient(self, theta: Vector) -> Vector:
        """Compute ``grad L_i(theta) + lambda (theta - w)``, ``(d,)``."""
        return self.objective.gradient(theta) + self.lam * (theta - self.anchor)

    def hessian(self, theta: Vector) -> Matrix:
        """Compute ``hess L_i(theta) + lambda I``, ``(d, d)``."""
        return self.objective.hessian(theta) + self.lam * np.eye(len(theta))


def descend(
    objectives: Iterable[Objective],
    start: Vector,
    eta: float,
    *,
    shift: Vector | float = 0.0,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    accuracy: float = 0.0,
) -> Vector:
    r"""Take one gradient step on each objective in turn; ``start`` ``(d,)`` is not modified.

    .. math:: m \leftarrow \beta\, m + \nabla f_k(v) + s + \gamma v, \qquad v \leftarrow v - \eta\, m, \quad k = 0, \dots, K-1

    from :math:`m = 0`. The same objective ``K`` times is full-batch descent, one a mini-batch is stochastic descent.

    Args:
        objectives: ``f_k``.
        start: ``v`` at the start.
        eta: The step.
        shift: ``s``, ``(d,)``: a constant that is added to every gradient.
        momentum: ``beta``, share of the last step's direction that is kept.
        weight_decay: ``gamma``, as if the loss had a penalty :math:`\frac{\gamma}{2} |v|^2`.
        accuracy: ``nu``: no step is taken once :math:`|\nabla f_k(v)|^2 \le \nu`; 0 for as many steps as objectives.
    """
    theta = np.array(start, dtype=np.float64)
    direction = np.zeros_like(theta)
    for objective in objectives:
        gradient = objective.gradient(theta)
        if accuracy and gradient @ gradient <= accuracy:
            break
        direction = momentum * direction + (gradient + shift + weight_decay * theta)
        theta -= eta * direction
    return theta


def pulled_step(lr: float, lambda_: float, personal_lr: float = 0.0) -> float:
    r"""Give the step on a loss with a pull, :math:`\eta = 1/(1/\text{lr} + \lambda)`; a ``personal_lr`` is taken as it is.

    With ``lr = 1/L`` it is the theory's ``1/(L + lambda)`` (arXiv 2410.08934): one learning rate fits every pull. A step of
    it is an implicit step on the pull, :math:`(\theta - \text{lr}\, g + \text{lr} \lambda w) / (1 + \text{lr} \lambda)`.
    """
    return personal_lr or 1.0 / (1.0 / lr + lambda_)


def safe_step(L: float, lam: float) -> float:
    r"""Give the theory's step on the proximal objective, :math:`\eta = 1/(L + \lambda)` (arXiv 2410.08934).

    Twice as much is where descent stops being stable.
    """
    return 1.0 / (L + lam)


def step_warning(eta: float, L: float, lam: float) -> str | None:
    """Say what is wrong with a local step size, with the bound that is passed; None if the theory covers it.

    ``L`` is the greatest curvature of ``L_i``, known or estimated.
    """
    bound = safe_step(L, lam)
    if eta <= bound * (1 + 1e-9):
        return None
    limits = f"the theory asks for eta <= 1/(L + lambda) = {bound:g} with L = {L:g} and lambda = {lam:g}"
    if eta >= 2 * bound:
        return f"local step eta = {eta:g} is unstable: it is not below 2/(L + lambda) = {2 * bound:g}; {limits}"
    return f"local step eta = {eta:g} is larger than the theory covers: {limits}"


def unstable_step(limit: float) -> str:
    """Say, as it is told of a client's first round, that a step is beyond ``2/(L + lambda)``, below which descent is stable."""
    return (
        f"the step of the personal model is unstable: it is not below 2/(L + lambda) = {limit:g}, with L of the client's loss"
        " at its first round; lower lr or personal-lr"
    )


def curvature_by_differences(gradient: Callable[[Vector], Vector], theta: Vector, *, num_iterations: int = 5) -> float:
    r"""Estimate the greatest curvature roughly, from gradients alone.

    .. math:: H u \approx \frac{g(\theta + h u) - g(\theta)}{h}, \qquad u \leftarrow \frac{H u}{|H u|}, \qquad
              L \approx \max u^\top H u

    Power iterations from the gradient itself, where descent goes first; ``h`` is a thousandth of ``theta``'s length, or
    0.001 near 0, which single precision bears. ``u' H u`` approaches ``L`` from below, so that a step that is called
    unstable by it is unstable.

    Args:
        gradient: Computes the gradient, ``(d,)``, of the same loss at every call.
        theta: The point, ``(d,)``.
        num_iterations: Differences; each costs a gradient, beside the one at ``theta``.

    Returns:
        The estimate; 0 where nothing is known, since the gradient is 0 or the loss has no curvature along it.
    """
    h = 1e-3 * max(1.0, float(np.linalg.norm(theta)))
    slope = direction = gradient(theta)
    curvature = 0.0
    for _ in range(num_iterations):
        length = float(np.linalg.norm(direction))
        if not 0 < length < np.inf:
            break
        u = direction / length
        direction = (gradient(theta + h * u) - slope) / h
        curvature = max(curvature, float(u @ direction))
    return curvature


def curvature_range(objective: Objective, theta: Vector) -> tuple[float, float]:
    """Compute the least and the greatest curvature ``(mu, L)`` of an objective at a point: extreme eigenvalues of its Hessian.

    For quadratics the point does not matter. The Hessian of logistic regression is greatest at 0, so ``theta = 0`` gives
    a bound ``L`` for every point there.
    """
    eigenvalues = np.linalg.eigvalsh(objective.hessian(theta))
    return float(eigenvalues[0]), float(eigenvalues[-1])


def check_lambda(lam: float, *, positive: bool = False) -> None:
    """Refuse a pull that is not finite or negative, or, where it must be positive, 0, which is LocalTrain."""
    if not np.isfinite(lam) or lam < 0 or (positive and lam == 0):
        raise SettingsError(
            "lambda",
            expected=f"a finite number {'above' if positive else 'not below'} 0",
            got=f"{lam:g}",
            do="take a small positive one, or the method localtrain for models that share nothing",
        )
