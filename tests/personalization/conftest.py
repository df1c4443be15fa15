"""Shared fixtures: small quadratic problems, and FedCLUP as a loop over its pure functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest

from fedapps.personalization import fedclup
from fedapps.personalization.fedclup import FedClupConfig, ServerState, Stale
from fedapps.personalization.proximal import Proximal, descend, safe_step
from fedapps.personalization.quadratic import Quadratic, least_squares

SIZES = (60, 80, 100, 150, 200, 300, 400, 600)


class Run(NamedTuple):
    """What a loop leaves."""

    state: ServerState
    personal: list[np.ndarray]
    known: list[Any]
    distances: list[float]


@pytest.fixture
def clients() -> list[Quadratic]:
    """Eight least-squares clients of unequal sizes, condition number below 10."""
    random = np.random.default_rng(0)
    found = []
    for n in SIZES:
        X = random.standard_normal((n, 8)) * np.sqrt(np.geomspace(1, 3, 8))
        found.append(least_squares(X, X @ random.standard_normal(8) + random.standard_normal(n)))
    return found


@pytest.fixture
def weights() -> np.ndarray:
    """Weights by examples."""
    return np.array(SIZES) / sum(SIZES)


@pytest.fixture
def run_fedclup() -> Callable[..., Run]:
    """The loop that strategies and clients run, without messages."""
    return _run_fedclup


def _run_fedclup(
    clients: Sequence[Quadratic],
    weights: np.ndarray,
    config: FedClupConfig,
    *,
    num_rounds: int,
    num_steps: int,
    L: float,
    num_sampled: int | None = None,
    loss_rate: float = 0.0,
    target: np.ndarray | None = None,
    dtype: type = np.float64,
) -> Run:
    """Run FedCLUP from zero; ``num_steps`` 0 solves local problems exactly."""
    random = np.random.default_rng(7)
    d, N = len(clients[0].b), len(clients)
    state = fedclup.initial_state({"w": np.zeros(d, dtype)})
    personal: list[Any] = [None] * N
    known: list[Any] = [None] * N
    distances = []
    for _ in range(num_rounds):
        w = state.model["w"]
        for i in sorted(random.choice(N, num_sampled or N, replace=False)):
            if num_steps == 0:
                A, b = clients[i].A, clients[i].b
                w_i = np.linalg.solve(A + config.lam * np.eye(d), b + config.lam * w)
            else:
                inner = Proximal(clients[i], w, config.lam)
                start = w if personal[i] is None else personal[i]
                w_i = descend([inner] * num_steps, start, safe_step(L, config.lam))
            sent = fedclup.send({"w": w}, {"w": w_i.astype(dtype)}, known[i], config.stale)
            if random.random() < loss_rate:
                continue
            first = config.stale is Stale.REPLIES or known[i] is None
            state = fedclup.fold(state, sent.message, weights[i], first=first)
            personal[i] = w_i.astype(dtype)
            known[i] = None if config.stale is Stale.REPLIES else sent.known
        state = fedclup.server_step(state, config)
        if target is not None:
            distances.append(float(np.linalg.norm(state.model["w"] - target)))
    return Run(state, personal, known, distances)
