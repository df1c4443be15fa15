"""Full-Hessian local steps: closed forms, and FedPM's reduction to the global Newton step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from fedapps.curvature.logistic import LogisticRegression
from fedapps.curvature.mixing import add_block, mix_block, start_block
from fedapps.curvature.newton import NewtonSteps, Objective, minimise, newton_steps
from fedapps.curvature.packing import pack_upper
from fedapps.errors import CurvatureError

D, LAM = 4, 0.05


@dataclass
class Quadratic:
    """``f(theta) = theta' H theta / 2 - b' theta``: the minimiser is ``H^-1 b``."""

    H: np.ndarray
    b: np.ndarray

    def loss(self, theta: np.ndarray) -> float:
        return float(theta @ self.H @ theta / 2 - self.b @ theta)

    def gradient(self, theta: np.ndarray) -> np.ndarray:
        return self.H @ theta - self.b

    def hessian(self, theta: np.ndarray) -> np.ndarray:
        return self.H


@pytest.fixture
def pool() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    generator = np.random.default_rng(3)
    return generator.normal(size=(90, D)), generator.choice([-1, 1], 90), generator.normal(size=D)


def _mix(theta: np.ndarray, replies: list[tuple[float, NewtonSteps]]) -> np.ndarray:
    sums = start_block(1, len(theta))
    for weight, reply in replies:
        product = (reply.theta - theta) @ reply.P
        add_block(sums, weight, pack_upper(reply.P), product[None], where="test")
    return mix_block(theta[None], sums, where="test").W[0]


def _step(objective: Objective, theta: np.ndarray, **changes: float) -> NewtonSteps:
    settings = {"num_steps": 1, "lr": 1.0, "damping": 0.0, **changes}
    return newton_steps(objective, theta, where="client 3", **settings)  # type: ignore[arg-type]


def test_one_full_step_solves_a_quadratic() -> None:
    f = Quadratic(np.array([[3.0, 1.0], [1.0, 2.0]]), np.array([1.0, -1.0]))
    np.testing.assert_allclose(_step(f, np.array([5.0, 7.0])).theta, np.linalg.solve(f.H, f.b), rtol=1e-13)


def test_learning_rate_and_damping_enter_as_in_the_formula(pool: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
    """Three steps written out; the ``P`` that travels is the third's, taken where that step started."""
    X, y, theta = pool
    f = LogisticRegression(X, y, LAM)
    reply = _step(f, theta, num_steps=3, lr=0.7, damping=0.2)
    for _ in range(3):
        P = f.hessian(theta) + 0.2 * np.eye(D)
        theta = theta - 0.7 * np.linalg.inv(P) @ f.gradient(theta)
    np.testing.assert_allclose(reply.theta, theta, rtol=1e-12)
    np.testing.assert_allclose(reply.P, P, rtol=1e-13)
    assert reply.added_damping == 0


@pytest.mark.parametrize("uniform", [False, True], ids=["weights n_i", "uniform weights"])
@pytest.mark.parametrize("damping", [0.0, 0.3], ids="damping {}".format)
def test_one_local_step_is_the_global_newton_step(
    uniform: bool, damping: float, pool: tuple[np.ndarray, np.ndarray, np.ndarray]
) -> None:
    """K = 1: ``theta - eta [sum p_i P_i]^-1 sum p_i g_i`` for splits of 5, 25 and 60 (arXiv 2511.09100, equation 6).

    With weights ``n_i`` the sums are the pooled Hessian and gradient, since each is a mean over examples plus the same
    penalty.
    """
    X, y, theta = pool
    parts = np.split(np.arange(90), [5, 30])
    fs = [LogisticRegression(X[part], y[part], LAM) for part in parts]
    weights = [1.0 if uniform else float(len(part)) for part in parts]
    eta = 0.8
    mixed = _mix(theta, [(w, _step(f, theta, lr=eta, damping=damping)) for w, f in zip(weights, fs, strict=True)])
    g = np.average([f.gradient(theta) for f in fs], axis=0, weights=weights)
    P = np.average([f.hessian(theta) for f in fs], axis=0, weights=weights) + damping * np.eye(D)
    np.testing.assert_allclose(mixed, theta - eta * np.linalg.solve(P, g), rtol=1e-10)
    if not uniform:
        pooled = LogisticRegression(X, y, LAM)
        np.testing.assert_allclose(g, pooled.gradient(theta), rtol=1e-12)
        np.testing.assert_allclose(P, pooled.hessian(theta) + damping * np.eye(D), rtol=1e-12)


def test_many_steps_on_quadratics_are_one_scaled_newton_step() -> None:
    """Each step leaves ``1 - eta`` of the error, so ``theta_i - theta = -(1 - (1 - eta)^K) H_i^-1 g_i``."""
    generator = np.random.default_rng(4)
    fs = []
    for _ in range(3):
        rows = generator.normal(size=(9, D))
        fs.append(Quadratic(rows.T @ rows, generator.normal(size=D)))
    theta, weights = generator.normal(size=D), [2.0, 5.0, 1.0]
    mixed = _mix(theta, [(w, _step(f, theta, num_steps=3, lr=0.4)) for w, f in zip(weights, fs, strict=True)])
    H = np.average([f.H for f in fs], axis=0, weights=weights)
    g = np.average([f.gradient(theta) for f in fs], axis=0, weights=weights)
    np.testing.assert_allclose(mixed, theta - (1 - 0.6**3) * np.linalg.solve(H, g), rtol=1e-10)


def test_single_example_without_damping_is_solved_with_added_damping_that_travels() -> None:
    """The Hessian of one example has rank one; the damping that was added is in ``P``."""
    f = LogisticRegression(np.array([[1.0, 2.0, 0.0]]), np.array([1]), 0.0)
    reply = _step(f, np.zeros(3))
    assert np.isfinite(reply.theta).all()
    assert reply.added_damping > 0
    np.testing.assert_allclose(reply.P, f.hessian(np.zeros(3)) + reply.added_damping * np.eye(3), rtol=1e-14)


def test_error_names_client_and_step() -> None:
    with pytest.raises(CurvatureError, match=r"client 3, local step 0: expected .* zero everywhere"):
        _step(Quadratic(np.zeros((2, 2)), np.ones(2)), np.zeros(2))


@pytest.mark.parametrize(("key", "value"), [("num_steps", 0), ("damping", -0.1)], ids=["no steps", "negative damping"])
def test_settings_out_of_range_are_refused(key: str, value: float) -> None:
    with pytest.raises(ValueError, match="client 3: expected num_steps >= 1 and damping >= 0"):
        _step(Quadratic(np.eye(2), np.ones(2)), np.zeros(2), **{key: value})


def test_start_is_left_alone() -> None:
    theta = np.ones(2)
    _step(Quadratic(np.eye(2), np.zeros(2)), theta)
    np.testing.assert_array_equal(theta, [1, 1])


def test_minimiser_has_no_gradient(pool: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
    """The last full step leaves rounding only, well below the tolerance at which backtracking ends."""
    X, y, _ = pool
    f = LogisticRegression(X, y, 1e-3)
    assert np.linalg.norm(f.gradient(minimise(f, np.zeros(D), tol=1e-6))) < 1e-11
    assert np.linalg.norm(f.gradient(minimise(f, np.zeros(D)))) < 1e-15


def test_a_step_may_divide_by_the_hessian_of_another_sample_for_each_step() -> None:
    f = Quadratic(np.array([[3.0, 1.0], [1.0, 2.0]]), np.array([1.0, -1.0]))
    samples = [Quadratic(np.diag([4.0, 5.0]), np.zeros(2)), Quadratic(np.diag([2.0, 9.0]), np.zeros(2))]
    theta = np.array([5.0, 7.0])
    found = newton_steps(f, theta, num_steps=2, lr=0.5, damping=0.1, where="client 3", curvatures=samples)
    for sample in samples:
        theta = theta - 0.5 * np.linalg.solve(sample.H + 0.1 * np.eye(2), f.gradient(theta))
    np.testing.assert_allclose(found.theta, theta, rtol=1e-13)
    np.testing.assert_allclose(found.P, samples[1].H + 0.1 * np.eye(2), rtol=1e-15)


def test_the_local_line_search_takes_the_longest_halved_step_that_lowers_the_loss_enough() -> None:
    """Curvature 1 in place of 8: the step of 8 times the way to 0 is halved three times (to the minimum); lr 0.5 is given."""
    f, flat = Quadratic(np.eye(1) * 8, np.zeros(1)), Quadratic(np.eye(1), np.zeros(1))
    for lr, end in ((1.0, 0.0), (0.5, 0.0), (0.1, 2.0 * 0.2)):
        found = newton_steps(
            f, np.array([2.0]), num_steps=1, lr=lr, damping=0.0, where="client 3", curvatures=[flat], search=True
        )
        np.testing.assert_allclose(found.theta, [end], atol=1e-15)


def test_minimiser_is_found_where_full_newton_steps_diverge() -> None:
    """``f = log cosh theta + theta^2 1e-3 / 2``: from 3 the full step overshoots to the other side, ever farther."""

    class LogCosh:
        def loss(self, theta: np.ndarray) -> float:
            return float(np.logaddexp(theta[0], -theta[0]) + 5e-4 * theta[0] ** 2)

        def gradient(self, theta: np.ndarray) -> np.ndarray:
            return np.tanh(theta) + 1e-3 * theta

        def hessian(self, theta: np.ndarray) -> np.ndarray:
            return (1 - np.tanh(theta) ** 2 + 1e-3).reshape(1, 1)

    start = np.array([3.0])
    assert abs(_step(LogCosh(), start).theta[0]) > 10
    assert abs(minimise(LogCosh(), start)[0]) < 1e-12


def test_minimiser_gives_up_with_a_reason(pool: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
    X, y, _ = pool
    with pytest.raises(CurvatureError, match=r"gradient.* 1\.0e-12 .*2 steps"):
        minimise(LogisticRegression(X, y, LAM), np.zeros(D), tol=1e-12, max_steps=2)


def test_minimiser_notices_a_gradient_of_the_wrong_sign() -> None:
    class Wrong(Quadratic):
        def gradient(self, theta: np.ndarray) -> np.ndarray:
            return -super().gradient(theta)

    with pytest.raises(CurvatureError, match=r"loss .*Newton direction"):
        minimise(Wrong(np.eye(2), np.ones(2)), np.zeros(2))
