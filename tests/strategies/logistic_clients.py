"""Logistic regression on three unequal clients, with gradient and Hessian computed here in float64."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedapps.methods import resolve_settings
from fedapps.tasks.from_settings import load_task_of

D = 12
REGULARISATION = 1e-2
LOGISTIC: dict[str, Any] = {
    "task": "synthetic-logistic",
    "task-options": f"clients = 6\nexamples = 40\ndimension = {D}\nnorm = 2.0\nregularisation = {REGULARISATION}",
    "partition": "dirichlet", "partition-column": "", "alpha": 0.7, "weighting": "examples", "batch-size": 0, "lr": 1.0,
    "evaluate-every": 0, "num-server-rounds": 6,
}  # fmt: skip
"""240 examples. No two numbers are equal, so that Top-k has no choice."""


class Part:
    """The loss of one client: ``mean log(1 + exp(-y x'theta)) + reg/2 |theta|^2``."""

    def __init__(self, X: np.ndarray, y: np.ndarray) -> None:
        self.X, self.y = X, y

    def loss(self, theta: np.ndarray) -> float:
        return float(np.mean(np.log1p(np.exp(-self.y * (self.X @ theta)))) + REGULARISATION / 2 * theta @ theta)

    def gradient(self, theta: np.ndarray) -> np.ndarray:
        pull = self.y / (1 + np.exp(self.y * (self.X @ theta)))
        return -self.X.T @ pull / len(self.y) + REGULARISATION * theta

    def hessian(self, theta: np.ndarray) -> np.ndarray:
        s = 1 / (1 + np.exp(-self.X @ theta))
        return (self.X.T * (s * (1 - s))) @ self.X / len(self.y) + REGULARISATION * np.eye(D)


def parts() -> tuple[list[Part], np.ndarray]:
    """The clients' losses, and their weights ``p_i``."""
    task = load_task_of(resolve_settings({**LOGISTIC, "method": "fedavg"}))
    found = [task.client_data(i, 3).train for i in range(3)]
    n = np.array([len(part) for part in found])
    assert len(set(n)) == 3
    return [Part(np.asarray(part.inputs), part.targets) for part in found], n / n.sum()
