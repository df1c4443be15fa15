"""Rounds and local steps flattened to arrays, one row a step, for the compiled paths.

A compiled kernel walks the rows for one tile of elements before it goes to the next tile. What differs between policies
of `H` is settled here: a row only says what to do with its `D`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from fedapps.zeroth_order.number_formats import F32
from fedapps.zeroth_order.philox import round_keys
from fedapps.zeroth_order.rules import coefficients, momentum_of, rule_of
from fedapps.zeroth_order.scheme import HessianUpdate, LocalStep, Probe, Record, Scheme


class Learn(IntEnum):
    """What a step does for `H`."""

    NOTHING = 0
    FROM_STEP = 1
    """Update `H` from this step's `D`."""

    COLLECT = 2
    """Add `D` to the round's sum."""

    FROM_MEAN = 3
    """Add `D` to the round's sum, then update `H` from the sum divided by `tau`."""


INT_COLUMNS = ("step", "num_probes", "starts_round", "learn")
FLOAT_COLUMNS = ("lr", "one_minus_nu", "nu", "eps", "beta", "one_minus_beta", "tau")


@dataclass(frozen=True)
class Program:
    """What a kernel reads."""

    scheme: Scheme
    keys: NDArray[np.uint64]  # keys of the generator's rounds, (10, 2)
    ints: NDArray[np.int64]  # rows of `INT_COLUMNS`, (steps, 4)
    floats: F32  # rows of `FLOAT_COLUMNS`, (steps, 7)
    coefficients: F32  # `c_p` of all steps end to end, (sum of P,)


def compile_records(records: Sequence[Record], scheme: Scheme) -> Program:
    """Flatten rounds of a journal, in order, to one row a local step.

    Raises:
        DirectionError: The method has momentum and a record has none.
    """
    rule = rule_of(scheme)
    ints: list[tuple[int, int, bool, Learn]] = []
    floats: list[tuple[float, ...]] = []
    flat: list[np.float32] = []
    for record in records:
        beta = momentum_of(record) if rule.momentum else 0.0
        nu = record.nu if "H" in rule.slots else 0.0
        numbers = (record.lr, 1.0 - nu, nu, record.eps, beta, 1.0 - beta, record.tau)
        for k, scalars in enumerate(record.scalars):
            learn = _learn(k, record.tau, nu, scheme.hessian_update)
            ints.append((record.first_step + k, len(scalars), k == 0, learn))
            floats.append(numbers)
            flat.extend(coefficients(scalars))
    return _program(scheme, ints, floats, flat)


def compile_steps(steps: Sequence[LocalStep], scheme: Scheme) -> Program:
    """Flatten a client's local steps to one row each: plain steps that share one scale and teach `H` nothing."""
    ints = [(taken.step, len(taken.scalars), k == 0, Learn.NOTHING) for k, taken in enumerate(steps)]
    floats: list[tuple[float, ...]] = [(taken.lr, 1.0, 0.0, 0.0, 0.0, 1.0, 1.0) for taken in steps]
    return _program(scheme, ints, floats, [c for taken in steps for c in coefficients(taken.scalars)])


def probe_ints(probe: Probe | None) -> tuple[int, int, int]:
    """Flatten a probe for a kernel: whether there is one, its step, its number."""
    return (0, 0, 0) if probe is None else (1, probe.step, probe.probe)


def signed_mu(probe: Probe | None) -> np.float32:
    """Give a probe's radius its sign, or 0 without a probe: `x + ((-mu) z)` and `x - (mu z)` have the same bits."""
    return np.float32(0) if probe is None else np.float32(probe.sign) * np.float32(probe.mu)


def _learn(k: int, tau: int, nu: float, policy: HessianUpdate) -> Learn:
    if np.float32(nu) == 0:
        return Learn.NOTHING
    if policy is HessianUpdate.EVERY_STEP:
        return Learn.FROM_STEP
    last = k == tau - 1
    if policy is HessianUpdate.LAST_STEP:
        return Learn.FROM_STEP if last else Learn.NOTHING
    return Learn.FROM_MEAN if last else Learn.COLLECT


def _program(
    scheme: Scheme, ints: list[tuple[int, int, bool, Learn]], floats: list[tuple[float, ...]], flat: list[np.float32]
) -> Program:
    return Program(
        scheme,
        round_keys(scheme.seed),
        np.array(ints, np.int64).reshape(-1, len(INT_COLUMNS)),
        np.array(floats, np.float64).astype(np.float32).reshape(-1, len(FLOAT_COLUMNS)),
        np.array(flat, np.float32),
    )
