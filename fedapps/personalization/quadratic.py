r"""Quadratic clients, and the joint minimiser of the personalised objective: the oracle that tests compare with.

With :math:`L_i(v) = \tfrac12 v'A_i v - b_i'v + c_i` (least squares: ``A_i = X_i'X_i/n_i``, ``b_i = X_i'y_i/n_i``) the
minimiser of :math:`\sum_i p_i (L_i(w_i) + \tfrac{\lambda}{2}|w - w_i|^2)` satisfies

.. math:: w_i = (A_i + \lambda I)^{-1}(b_i + \lambda w), \qquad
          \Big[\sum_i p_i (A_i + \lambda I)^{-1} A_i\Big] w = \sum_i p_i (A_i + \lambda I)^{-1} b_i .

The second equation is ``w = sum p_i w_i`` with the terms that cancel for large ``lambda`` cancelled by hand.

Other smooth convex losses are solved by Newton steps, each of which is such a problem (`newton_joint_minimiser`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedapps.errors import FedAppsError
from fedapps.personalization.proximal import Matrix, Objective, Vector, check_lambda


@dataclass(frozen=True)
class Quadratic:
    r"""The objective :math:`\tfrac12 v'Av - b'v + c`."""

    A: Matrix  # ``(d, d)``, symmetric, positive semi-definite
    b: Vector  # ``(d,)``
    c: float = 0.0  # constant

    def loss(self, theta: Vector) -> float:
        """Compute the value."""
        return float(0.5 * theta @ self.A @ theta - self.b @ theta + self.c)

    def gradient(self, theta: Vector) -> Vector:
        """Compute ``A theta - b``, ``(d,)``."""
        return self.A @ theta - self.b

    def hessian(self, theta: Vector) -> Matrix:
        """Give ``A``, ``(d, d)``."""
        return self.A

    def hessian_product(self, theta: Vector, v: Vector) -> Vector:
        """Compute ``A v``, ``(d,)``."""
        return self.A @ v


@dataclass(frozen=True, kw_only=True)
class LeastSquares(Quadratic):
    r"""The objective :math:`|Xv - y|^2/(2n) + \frac{\lambda}{2} |v|^2`; it knows of the targets what ``b`` and ``c`` hold."""

    X: Matrix  # ``(n, d)``
    lam: float = 0.0

    def sampled_gradient(self, theta: Vector, random: np.random.Generator) -> Vector:
        """Compute the gradient, ``(d,)``, without the penalty, at targets drawn from ``N(X theta, I)``.

        Of that distribution the loss is the negative log-likelihood.
        """
        n = len(self.X)
        return np.asarray(-self.X.T @ random.standard_normal(n) / n)

    def square_root(self, theta: Vector) -> Matrix:
        r"""Give :math:`X / \sqrt n`, ``(n, d)``: its Gram matrix is the Hessian without the penalty."""
        return np.asarray(self.X / np.sqrt(len(self.X)))


@dataclass(frozen=True)
class JointMinimiser:
    """The solution of the personalised problem."""

    model: Vector  # ``w``, ``(d,)``
    personal: Matrix  # ``w_i``, ``(N, d)``


def least_squares(X: Matrix, y: Vector, lam: float = 0.0) -> LeastSquares:
    r"""Build the client of a linear regression, :math:`L(v) = |Xv - y|^2/(2n) + \frac{\lambda}{2} |v|^2`.

    ``X`` is ``(n, d)``, ``y`` ``(n,)``.
    """
    n = len(y)
    A = X.T @ X / n + lam * np.eye(X.shape[1])
    return LeastSquares(A, X.T @ y / n, float(y @ y) / (2 * n), X=X, lam=lam)


def random_quadratics(num_clients: int, dimension: int, *, mu: float, L: float, seed: int) -> list[Quadratic]:
    """Draw clients with different minimisers and differently oriented curvature of one known range.

    Args:
        num_clients: ``N``.
        dimension: ``d``, at least 2.
        mu: Least eigenvalue of every client.
        L: Greatest eigenvalue of every client; those between are spread evenly on a log scale.
        seed: Seed.
    """
    random = np.random.default_rng(seed)
    spectrum = np.geomspace(mu, L, dimension)
    clients = []
    for _ in range(num_clients):
        basis, _ = np.linalg.qr(random.standard_normal((dimension, dimension)))
        A = (basis * spectrum) @ basis.T
        A = (A + A.T) / 2
        clients.append(Quadratic(A, A @ random.standard_normal(dimension)))
    return clients


def joint_minimiser(clients: Sequence[Quadratic], weights: Vector, lam: float) -> JointMinimiser:
    """Solve the personalised problem of ``N`` quadratic clients in closed form.

    Every ``A_i + lambda I`` must be positive definite, ``lambda > 0``, and the weights ``p_i`` sum to 1.

    References:
        arXiv 2410.08934, stationarity of its problem (1).
    """
    check_lambda(lam, positive=True)
    A = np.stack([client.A for client in clients])  # (N, d, d)
    b = np.stack([client.b for client in clients])  # (N, d)
    return _solve_joint(A, b, np.asarray(weights, dtype=np.float64), lam)


def local_minimisers(clients: Sequence[Quadratic]) -> Matrix:
    """Solve every client's own problem, ``(N, d)``; ``A_i`` positive definite: LocalTrain, the limit of small ``lambda``."""
    return np.stack([np.linalg.solve(client.A, client.b) for client in clients])


def global_minimiser(clients: Sequence[Quadratic], weights: Vector) -> Vector:
    """Solve the pooled problem, ``(d,)``, for positive definite ``sum p_i A_i``: GlobalTrain, the limit of large ``lambda``."""
    A = sum(p * client.A for p, client in zip(weights, clients, strict=True))
    b = sum(p * client.b for p, client in zip(weights, clients, strict=True))
    return np.asarray(np.linalg.solve(np.asarray(A), np.asarray(b)), dtype=np.float64)


def newton_joint_minimiser(
    objectives: Sequence[Objective],
    weights: Vector,
    lam: float,
    start: JointMinimiser,
    *,
    tolerance: float = 1e-10,
    max_steps: int = 50,
) -> JointMinimiser:
    """Solve the personalised problem of ``N`` smooth convex clients by Newton's method with step halving.

    The solution's last step is shorter than ``tolerance``, in the norm of all models together; without such a step within
    ``max_steps`` it is a FedAppsError.

    Raises:
        SettingsError: ``lam`` is not above 0.
        FedAppsError: The steps do not become short; a client's loss may have no minimum.
    """
    check_lambda(lam, positive=True)
    model, personal = start.model, start.personal
    weights = np.asarray(weights, dtype=np.float64)
    value = _joint_loss(objectives, weights, lam, model, personal)
    for _ in range(max_steps):
        A = np.stack([f.hessian(w_i) for f, w_i in zip(objectives, personal, strict=True)])
        g: Matrix = np.stack([f.gradient(w_i) for f, w_i in zip(objectives, personal, strict=True)])
        # The quadratic that touches L_i at w_i has b_i = A_i w_i - g_i.
        target = _solve_joint(A, np.einsum("nij,nj->ni", A, personal) - g, weights, lam)
        step_w, step_i = target.model - model, target.personal - personal
        length = float(np.sqrt(np.sum(step_w**2) + np.sum(step_i**2)))
        scale = 1.0
        while length * scale > tolerance:
            moved = _joint_loss(objectives, weights, lam, model + scale * step_w, personal + scale * step_i)
            if moved <= value + 1e-14 * abs(value):
                value = moved
                break
            scale /= 2
        model = np.asarray(model + scale * step_w, dtype=np.float64)
        personal = np.asarray(personal + scale * step_i, dtype=np.float64)
        if length < tolerance:
            return JointMinimiser(model, personal)
    raise FedAppsError(
        "joint minimiser",
        expected=f"Newton steps shorter than {tolerance:g} within {max_steps} steps",
        got=f"a step of length {length:g}",
        do="add regularisation: a client's classes may be separable",
    )


def _solve_joint(A: Matrix, b: Matrix, weights: Vector, lam: float) -> JointMinimiser:
    shifted = A + lam * np.eye(A.shape[1])
    pulled = np.linalg.solve(shifted, np.concatenate([A, b[:, :, None]], axis=2))  # (N, d, d + 1)
    system = np.einsum("n,nij->ij", weights, pulled)
    model = np.asarray(np.linalg.solve(system[:, :-1], system[:, -1]), dtype=np.float64)
    personal = np.linalg.solve(shifted, (b + lam * model)[:, :, None])[:, :, 0]
    return JointMinimiser(model, np.asarray(personal, dtype=np.float64))


def _joint_loss(objectives: Sequence[Objective], weights: Vector, lam: float, model: Vector, personal: Matrix) -> float:
    losses = np.array([f.loss(w_i) for f, w_i in zip(objectives, personal, strict=True)])
    return float(weights @ (losses + 0.5 * lam * np.sum((personal - model) ** 2, axis=1)))
