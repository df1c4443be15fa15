"""Where every method ends on a strongly convex quadratic that is split over unequal clients.

Some reach the optimum of the mean loss. Methods of several local steps end at a fixed point of their own, which a loop in NumPy
finds here. Those that measure slopes along random directions end at a floor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedapps.methods import METHODS
from fedapps.tasks import TaskConfig, load_task

from ..simulation.runs import client_states, short_run

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("own_module")]

SIZES, K, LR = (6, 18, 9), 4, 0.2
OPTIONS = """
sizes = '6,18,9'
clients = 3
heterogeneity = 2.0
regularisation = 0.0
"""
CONVEX: Mapping[str, Any] = {
    "task": "fedapps_testing:Lines", "task-options": OPTIONS, "weighting": "examples", "batch-size": 0,
    "local-epochs": K, "lr": LR, "num-server-rounds": 40, "client-test-fraction": 0.0, "client-evaluation": "none",
    "evaluate-every": 0,
}  # fmt: skip
SCALARS: Mapping[str, Any] = {
    **CONVEX, "task": "fedapps_testing:TorchLines", "task-options": "sizes = '6,18,9'", "local-steps": 1, "lr": 0.4,
    "num-server-rounds": 25,
}  # fmt: skip


@dataclass(frozen=True)
class Client:
    """``f_i(x) = x'A x/2 - b'x``."""

    A: np.ndarray
    b: np.ndarray

    def descend(
        self, x: np.ndarray, steps: int, lr: float, lam: float = 0.0, w: np.ndarray | float = 0.0
    ) -> np.ndarray:
        for _ in range(steps):
            x = x - lr * (self.A @ x - self.b + lam * (x - w))
        return x


def clients() -> list[Client]:
    options = {"sizes": "6,18,9", "clients": 3, "heterogeneity": 2.0}
    data = load_task("fedapps_testing:Lines", TaskConfig(options=options)).load()[0]
    found = []
    for i, n in enumerate(SIZES):
        mine = np.flatnonzero(data.columns["site"] == i)
        X, y = np.asarray(data.inputs)[mine], np.asarray(data.targets)[mine]
        assert len(y) == n
        found.append(Client(X.T @ X / n, X.T @ y / n))
    return found


P = np.array(SIZES) / sum(SIZES)


def mean(values: list[np.ndarray]) -> np.ndarray:
    return np.asarray(sum(p * value for p, value in zip(P, values, strict=True)))


def optimum(all_: list[Client]) -> np.ndarray:
    return np.linalg.solve(mean([f.A for f in all_]), mean([f.b for f in all_]))


def fixed(step: Callable[[np.ndarray], np.ndarray], rounds: int = 3000) -> np.ndarray:
    x = np.zeros(3)
    for _ in range(rounds):
        x = step(x)
    return x


def of_local_steps(all_: list[Client]) -> np.ndarray:
    """FedAvg's fixed point."""
    return fixed(lambda x: mean([f.descend(x, K, LR) for f in all_]))


def pulled(all_: list[Client], mu: float = 0.5) -> np.ndarray:
    """FedProx's."""
    return fixed(lambda x: mean([f.descend(x, K, LR, mu, x) for f in all_]))


def of_newton_steps(all_: list[Client]) -> np.ndarray:
    """LocalNewton's: the mean of the clients' own minimisers."""
    return mean([np.linalg.solve(f.A, f.b) for f in all_])


def of_envelopes(all_: list[Client], lam: float = 0.5) -> np.ndarray:
    """FedCLUP's: ``w = sum p_i w_i`` with ``w_i = (A_i + lambda I)^-1 (b_i + lambda w)``."""
    inverses = [np.linalg.inv(f.A + lam * np.eye(3)) for f in all_]
    M = np.eye(3) - mean([lam * inverse for inverse in inverses])
    return np.linalg.solve(M, mean([inverse @ f.b for inverse, f in zip(inverses, all_, strict=True)]))


def of_pfedme(all_: list[Client], lam: float = 0.5, eta: float = 1.0, inner: int = 5) -> np.ndarray:
    w, theta = np.zeros(3), [np.zeros(3) for _ in all_]
    for _ in range(2000):
        copies = []
        for i, f in enumerate(all_):
            copy = w
            for _ in range(K):
                theta[i] = f.descend(theta[i], inner, 1 / (1 / LR + lam), lam, copy)
                copy = copy - eta * lam * (copy - theta[i])
            copies.append(copy)
        w = mean(copies)
    return w


def of_first_rows(all_: list[Client], damping: float = 1.0) -> np.ndarray:
    """LTDA's: gradients divided by ``max(h_1j^2 / h_11, damping)``."""
    scales = [np.maximum(f.A[0] ** 2 / f.A[0, 0], damping) for f in all_]

    def local(x: np.ndarray, f: Client, scale: np.ndarray) -> np.ndarray:
        for _ in range(K):
            x = x - LR * (f.A @ x - f.b) / scale
        return x

    return fixed(lambda x: mean([local(x, f, scale) for f, scale in zip(all_, scales, strict=True)]))


def of_momentum(all_: list[Client], beta: float = 0.5) -> np.ndarray:
    """FedSophia's where ``eps`` bounds every division: local steps with a momentum that clients keep over rounds."""
    x, m = np.zeros(3), [np.zeros(3) for _ in all_]
    for _ in range(2000):
        ends = []
        for i, f in enumerate(all_):
            y = x
            for _ in range(K):
                m[i] = beta * m[i] + (1 - beta) * (f.A @ y - f.b)
                y = y - LR * m[i]
            ends.append(y)
        x = mean(ends)
    return x


@dataclass(frozen=True)
class End:
    """Where a method ends.

    Attributes:
        at: Gives the point.
        config: What differs from `CONVEX`.
        within: Greatest distance to it.
        apart: Least distance to the optimum of the mean loss; 0 for methods that reach it.
    """

    at: Callable[[list[Client]], np.ndarray]
    config: Mapping[str, Any] = field(default_factory=dict)
    within: float = 1e-8
    apart: float = 0.0


LOCAL = End(of_local_steps, apart=0.02)

ENDS: Mapping[str, End] = {
    "psgd": End(optimum, {"lr": 0.5, "local-epochs": 1}, within=1e-6),
    "scaffold": End(optimum),
    "fedpm": End(optimum, {"lr": 1.0, "num-server-rounds": 2}),
    "localnewton": End(of_newton_steps, {"lr": 1.0, "num-server-rounds": 2}, apart=0.02),
    "fednl": End(optimum, {"lr": 1.0, "num-server-rounds": 12, "fednl.initial": "zero"}),
    "fednew": End(optimum, {"lr": 1.0, "fednew.alpha": 0.2, "fednew.rho": 0.7}, within=1e-6),
    "fedns": End(optimum, {"lr": 0.5}),
    "ltda": End(of_first_rows, {"ltda.damping": 1.0}, apart=0.02),
    "fedsophia": End(
        of_momentum, {"fedsophia.beta-1": 0.5, "fedsophia.eps": 1e3, "fedsophia.rho": 1e3, "lr": 1e3 * LR}, apart=0.02
    ),
    "fedavg": LOCAL,
    "globaltrain": LOCAL,
    "ditto": LOCAL,
    "fedavgm": End(of_local_steps, {"fedavgm.momentum": 0.5}, within=1e-6, apart=0.02),
    "fedprox": End(pulled, {"fedprox.mu": 0.5}, within=1e-6, apart=0.02),
    # Adaptive steps of a constant rate come near their fixed point, and stay within the length of a step.
    "fedadam": End(of_local_steps, {"fedadam.server-lr": 0.1}, within=0.1, apart=0.02),
    "fedyogi": End(of_local_steps, {"fedyogi.server-lr": 0.1}, within=0.1, apart=0.02),
    "fedadagrad": End(of_local_steps, {"fedadagrad.server-lr": 0.5}, within=0.02, apart=0.02),
    "fedclup": End(of_envelopes, {"fedclup.lambda": 0.5, "local-epochs": 10}, apart=0.02),
    "pfedme": End(of_pfedme, {"pfedme.lambda": 0.5, "pfedme.eta": 1.0}, apart=0.02),
    # No model travels: the server's stays where it began.
    "localtrain": End(lambda _: np.zeros(3), {"local-epochs": 10}, apart=0.1),
    "decomfl": End(optimum, {**SCALARS, "decomfl.num-probes": 40}, within=0.02),
    # Its clients' own gradients, measured along directions of their own, do not vanish at the optimum.
    "fedzo": End(optimum, {**SCALARS, "fedzo.num-probes": 40}, within=0.25),
    "hiso": End(optimum, {**SCALARS, "hiso.num-probes": 40, "hiso.nu": 0.01}, within=0.02),
    "hiso-momentum": End(optimum, {**SCALARS, "hiso-momentum.num-probes": 40, "hiso-momentum.nu": 0.01}, within=0.02),
}


def test_every_method_of_the_registry_has_an_end() -> None:
    assert ENDS.keys() == {row.name for row in METHODS}


@pytest.mark.parametrize("method", ENDS)
def test_a_method_ends_where_its_mathematics_says(tmp_path: Path, method: str) -> None:
    end = ENDS[method]
    left = short_run(tmp_path / "run", {**CONVEX, **end.config, "method": method})
    found = next(iter(left.model.values())).ravel()
    all_ = clients()
    assert np.linalg.norm(found - end.at(all_)) <= end.within
    assert np.linalg.norm(end.at(all_) - optimum(all_)) >= end.apart
    if method == "localtrain":
        for i, state in client_states(left.folder.path).items():
            np.testing.assert_allclose(state["personal/weights"], np.linalg.solve(all_[i].A, all_[i].b), atol=1e-6)
