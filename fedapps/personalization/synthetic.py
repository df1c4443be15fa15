r"""Synthetic linear and logistic regression with known true parameters, as in the paper's experiments.

.. math:: w_i^* = w^* + R\,u_i, \qquad x \sim N(0, \Sigma), \qquad
          y = x'w_i^* + \sigma\epsilon \quad\text{or}\quad P(y = 1) = 1/(1 + e^{-x'w_i^*})

with ``u_i`` uniform on the unit sphere and ``Sigma = diag(j^-decay)``: the identity for ``decay = 0``. Since the truth is
known, statistical error can be measured (`statistical_error`), not only loss.

References: arXiv 2410.08934, section on experiments.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit

from fedapps.errors import SettingsError
from fedapps.personalization.proximal import Matrix, Objective, Vector
from fedapps.personalization.quadratic import least_squares


class Regression(StrEnum):
    """What the targets are."""

    LINEAR = "linear"
    """Real numbers with Gaussian noise; square loss ``|Xv - y|^2/(2n)``."""
    LOGISTIC = "logistic"
    """-1 or +1; logistic loss."""


@dataclass(frozen=True)
class SyntheticConfig:
    """A problem of the paper.

    Raises:
        SettingsError: A number is out of range.
    """

    regression: Regression = Regression.LINEAR  # what the targets are
    num_clients: int = 50  # ``m``, at least 1
    num_examples: int = 50  # ``n`` of each client, at least 1
    dimension: int = 15  # ``d``, at least 1
    heterogeneity: float = 0.5  # ``R >= 0``, distance of each ``w_i*`` from ``w*``
    noise: float = 1.0  # standard deviation of the noise of linear regression, at least 0
    decay: float = 0.0  # exponent of the covariates' spectrum, ``Sigma_jj = j^-decay``; 0 is the identity
    norm: float = 1.0  # length of ``w*``
    regularisation: float = 0.0  # coefficient of ``|v|^2/2`` in the logistic loss
    seed: int = 0  # seed of everything that is drawn

    def __post_init__(self) -> None:
        least = {
            "num_clients": 1,
            "num_examples": 1,
            "dimension": 1,
            "heterogeneity": 0,
            "noise": 0,
            "decay": 0,
            "norm": 0,
            "regularisation": 0,
        }
        for name, minimum in least.items():
            value = getattr(self, name)
            if not (np.isfinite(value) and value >= minimum):
                raise SettingsError(
                    f"synthetic problem, {name.replace('_', '-')}",
                    expected=f"a finite number from {minimum}",
                    got=f"{value:g}",
                )


@dataclass(frozen=True, eq=False)
class SyntheticProblem:
    """Data and truth."""

    X: NDArray[np.float64]  # inputs, ``(m, n, d)``
    y: Matrix  # targets, ``(m, n)``
    truth: Matrix  # ``w_i*``, ``(m, d)``
    center: Vector  # ``w*``, ``(d,)``
    config: SyntheticConfig  # what it was drawn from

    def objectives(self) -> list[Objective]:
        """Build the losses of the ``m`` clients: `fedapps.personalization.quadratic.Quadratic` or `Logistic`."""
        if self.config.regression is Regression.LINEAR:
            return [least_squares(X, y) for X, y in zip(self.X, self.y, strict=True)]
        return [Logistic(X, y, self.config.regularisation) for X, y in zip(self.X, self.y, strict=True)]


@dataclass(frozen=True, eq=False)
class Logistic:
    r"""The objective :math:`\frac1n\sum_j \log(1 + e^{-y_j x_j'v}) + \frac{\text{reg}}{2}|v|^2`."""

    X: Matrix  # inputs, ``(n, d)``
    y: Vector  # targets -1 or +1, ``(n,)``
    regularisation: float = 0.0  # ``reg >= 0``

    def loss(self, theta: Vector) -> float:
        """Compute the value."""
        return float(np.logaddexp(0, -self.y * (self.X @ theta)).mean() + 0.5 * self.regularisation * theta @ theta)

    def gradient(self, theta: Vector) -> Vector:
        """Compute the gradient, ``(d,)``."""
        return np.asarray(self.example_gradients(theta).mean(axis=0))

    def example_gradients(self, theta: Vector) -> Matrix:
        """Compute the gradient of each example's regularised loss, ``(n, d)``."""
        pull = -self.y * expit(-self.y * (self.X @ theta))
        return pull[:, None] * self.X + self.regularisation * theta

    def hessian(self, theta: Vector) -> Matrix:
        """Compute the Hessian, ``(d, d)``."""
        share = expit(self.X @ theta)
        curvature = (self.X * (share * (1 - share))[:, None]).T @ self.X / len(self.y)
        return np.asarray(curvature + self.regularisation * np.eye(len(theta)))


def draw_problem(config: SyntheticConfig) -> SyntheticProblem:
    """Draw a problem, the same for the same config."""
    random = np.random.default_rng(config.seed)
    m, n, d = config.num_clients, config.num_examples, config.dimension
    center = config.norm * _unit(random.standard_normal(d))
    truth = center + config.heterogeneity * _unit(random.standard_normal((m, d)))
    X = random.standard_normal((m, n, d)) * np.arange(1, d + 1) ** (-config.decay / 2)
    signal = np.einsum("mnd,md->mn", X, truth)
    if config.regression is Regression.LINEAR:
        y = signal + config.noise * random.standard_normal((m, n))
    else:
        y = np.where(random.random((m, n)) < expit(signal), 1.0, -1.0)
    return SyntheticProblem(X, y, truth, center, config)


def statistical_error(models: Matrix, truth: Matrix) -> float:
    """Compute the mean over clients of :math:`|w_i - w_i^*|^2`; ``models`` ``(m, d)``, or ``(d,)`` if all clients share one."""
    return float(np.mean(np.sum((models - truth) ** 2, axis=1)))


def _unit(vectors: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(vectors / np.linalg.norm(vectors, axis=-1, keepdims=True))
