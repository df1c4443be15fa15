"""Known answers, and random problems on which every path must agree with the reference bit for bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fedapps.zeroth_order.directions import Distribution
from fedapps.zeroth_order.number_formats import NumberFormat, narrow
from fedapps.zeroth_order.rules import rule_of
from fedapps.zeroth_order.scheme import HessianUpdate, LocalStep, Probe, Record, Scheme

SEEDS = (0, 1, 12345678901234567, 2**63, 2**64 - 1)


@dataclass(frozen=True)
class Problem:
    scheme: Scheme
    theta: NDArray[Any]
    state: dict[str, NDArray[np.float32]]
    records: list[Record]
    steps: list[LocalStep]
    probe: Probe
    offset: int


@pytest.fixture(scope="session")
def known() -> dict[str, Any]:
    return json.loads((Path(__file__).parent / "direction-vectors.json").read_text(encoding="utf-8"))


@pytest.fixture
def make_problem() -> Callable[..., Problem]:
    return problem


def scalars_of(random: np.random.Generator, tau: int, num_probes: int) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(row) for row in random.standard_normal((tau, num_probes)).astype(np.float32).tolist())


def problem(
    case: int, *, method: str, number_format: NumberFormat, distribution: Distribution, size: int | None = None
) -> Problem:
    """A window of random size and place, parameters over many magnitudes (subnormals too), rounds of all shapes."""
    random = np.random.default_rng([case, *method.encode(), *number_format.encode()])
    n = int(random.integers(1, 9000)) if size is None else size
    policy = list(HessianUpdate)[case % 3]
    scheme = Scheme(SEEDS[case % len(SEEDS)], method, distribution, policy)
    exponents = random.choice([-42.0, -7.0, -4.0, 0.0, 3.0], n)
    theta = narrow((random.standard_normal(n) * 10.0**exponents).astype(np.float32), number_format)
    state = rule_of(scheme).init(n)
    if "H" in state:
        state["H"] = (10.0 ** random.uniform(-8, 2, n)).astype(np.float32)
    if "m" in state:
        state["m"] = random.standard_normal(n).astype(np.float32)
    momentum = 0.9 if rule_of(scheme).momentum else None
    records, step = [], int(random.integers(2**32 - 100))
    for index, nu in enumerate((0.1, 0.0, 0.7)):
        tau, num_probes = (int(value) for value in random.integers(1, 4, 2))
        lr = float(10.0 ** random.uniform(-4, 0))
        scalars = scalars_of(random, tau, num_probes)
        records.append(Record(index + 1, step, lr, 1e-3, nu, 1e-6, scalars, 2, None, momentum))
        step += tau
    steps = [LocalStep(step + k, scalars_of(random, 1, 2)[0], 0.1) for k in range(case % 3)]
    probe = Probe(step + 5, case % 4, 10.0 ** -(case % 5), 1 if case % 2 else -1)
    return Problem(scheme, theta, state, records, steps, probe, int(random.integers(2**36)))
