r"""L2-regularised logistic regression in float64, with gradient and Hessian.

.. math:: f(\theta) = \frac1n \sum_j \log(1 + e^{-y_j x_j'\theta}) + \frac{\lambda}{2} |\theta|^2

with labels :math:`y_j \in \{-1, +1\}`; with :math:`s = 1/(1 + e^{-X\theta})` the Hessian is
:math:`\frac1n X' \mathrm{diag}(s (1 - s)) X + \lambda I` (arXiv 2511.09100, Test 1).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.sparse
from numpy.typing import NDArray
from scipy.special import expit

from fedapps.errors import explain


class LogisticRegression:
    """The objective of some examples.

    Args:
        X: ``(n, d)`` inputs, dense or sparse (CSR), at least one row.
        y: ``(n,)`` labels, -1 or +1.
        lam: Weight of the penalty, >= 0.

    Example:
        >>> LogisticRegression(np.eye(2), np.array([1, -1]), lam=0.0).gradient(np.zeros(2))
        array([-0.25,  0.25])

    Raises:
        ValueError: A shape does not fit, a label is neither -1 nor +1, or ``lam`` is negative.
    """

    def __init__(self, X: Any, y: NDArray[Any], lam: float) -> None:
        sparse = scipy.sparse.issparse(X)
        self._X: Any = scipy.sparse.csr_array(X, dtype=np.float64) if sparse else np.asarray(X, np.float64)
        self._y = np.asarray(y, np.float64)
        self._lam = float(lam)
        if self._X.ndim != 2 or self._X.shape[0] == 0 or self._y.shape != self._X.shape[:1]:
            raise ValueError(
                explain(
                    "logistic regression",
                    expected="X of shape (n, d) with n >= 1 and y of shape (n,)",
                    got=f"{self._X.shape} and {self._y.shape}",
                    do="give one label for each example",
                )
            )
        if not np.isin(self._y, (-1, 1)).all():
            raise ValueError(
                explain(
                    "logistic regression",
                    expected="labels -1 and +1",
                    got=f"{self._y[~np.isin(self._y, (-1, 1))][0]}",
                    do="map the two classes to -1 and +1",
                )
            )
        if not self._lam >= 0:
            raise ValueError(
                explain("logistic regression", expected="lam >= 0", got=f"{lam}", do="choose a positive penalty")
            )

    def loss(self, theta: NDArray[np.float64]) -> float:
        """Compute the value at ``theta``, ``(d,)``."""
        # logaddexp(0, -m) = log(1 + exp(-m)) without overflow.
        return float(np.logaddexp(0.0, -self._margins(theta)).mean() + 0.5 * self._lam * (theta @ theta))

    def gradient(self, theta: NDArray[np.float64]) -> NDArray[np.float64]:
        """Compute the gradient, ``(d,)``."""
        slopes = -self._y * expit(-self._margins(theta)) / len(self._y)
        gradient: NDArray[np.float64] = self._X.T @ slopes + self._lam * theta
        return gradient

    def sampled_gradient(self, theta: NDArray[np.float64], random: np.random.Generator) -> NDArray[np.float64]:
        """Compute the gradient, ``(d,)``, without the penalty, at labels drawn with ``P(y_j = 1) = s_j``."""
        s = expit(self._X @ theta)
        gradient: NDArray[np.float64] = self._X.T @ (s - (random.random(len(s)) < s)) / len(s)
        return gradient

    def hessian(self, theta: NDArray[np.float64]) -> NDArray[np.float64]:
        """Compute the Hessian, ``(d, d)``, dense and symmetric."""
        R = self._root(theta)
        hessian: NDArray[np.float64] = _dense(R.T @ R) + self._lam * np.eye(self._X.shape[1])
        return hessian

    def square_root(self, theta: NDArray[np.float64]) -> NDArray[np.float64]:
        r"""Compute :math:`R = \mathrm{diag}(\sqrt{s (1 - s) / n})\, X`, ``(n, d)``: :math:`R'R + \lambda I` is the Hessian."""
        return _dense(self._root(theta))

    def _root(self, theta: NDArray[np.float64]) -> Any:
        # With it the Hessian is exactly symmetric.
        roots = np.sqrt(self._weights(theta))
        return (
            roots[:, None] * self._X if isinstance(self._X, np.ndarray) else scipy.sparse.diags_array(roots) @ self._X
        )

    def hessian_product(self, theta: NDArray[np.float64], v: NDArray[np.float64]) -> NDArray[np.float64]:
        """Compute the Hessian times ``v``, both ``(d,)``, without the matrix."""
        product: NDArray[np.float64] = self._X.T @ (self._weights(theta) * (self._X @ v)) + self._lam * v
        return product

    def _weights(self, theta: NDArray[np.float64]) -> NDArray[np.float64]:
        """Compute :math:`s (1 - s) / n` of every example, ``(n,)``."""
        margins = self._margins(theta)
        # expit(m) expit(-m) = s (1 - s) without cancellation.
        weights: NDArray[np.float64] = expit(margins) * expit(-margins) / len(self._y)
        return weights

    def _margins(self, theta: NDArray[np.float64]) -> NDArray[np.float64]:
        margins: NDArray[np.float64] = self._y * (self._X @ theta)
        return margins


def _dense(matrix: Any) -> NDArray[np.float64]:
    dense: NDArray[np.float64] = matrix if isinstance(matrix, np.ndarray) else matrix.toarray()
    return dense
