"""Update rules and the reference arithmetic, in NumPy float32, each operation rounded by itself.

A round from `(theta_r, state_r)`: with `z = u / scale(state_r)` fixed for the round, for `k = 0..tau-1`

    D = sum_p c_p z_p in order of p from 0,  c_p = float32(G[k,p] / P)
    (theta, state) <- apply(theta, state, D, what H learns from)

A rule is one row of `RULES`: three pure functions, so any optimiser that needs only scalars and a state of its own
(HiSo, Algorithm 1) plugs into the same journal, replicas and probes. The compiled paths know the rows of this module;
a row of one's own runs on the reference.

| rule | state | scale | step |
|---|---|---|---|
| `decomfl` | none | 1 | `theta <- theta - (eta D)` |
| `hiso` | `H = 1` | `sqrt(H)` | the same, then `H <- ((1-nu) H) + (nu ((D D) + eps))` |
| `hiso-momentum` | `H = 1`, `m = 0` | `sqrt(H)` | `m <- (beta m) + ((1-beta) D)`, `theta <- theta - (eta m)`, `H` as above |

Departures: the papers leave open when within a round `H` is updated; that is the policy `HessianUpdate`. The papers name
momentum as an extension without defining it; it is the first moment of Adam without bias correction, so that a learning
rate found for HiSo carries over, and `beta = 0` is HiSo. It acts on the aggregated directions only: a client's own local
steps are plain.

References:
    DeComFL, arXiv 2405.15861. HiSo, arXiv 2506.02370, Algorithm 1 and the global learning of the diagonal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from fedapps.zeroth_order.directions import direction
from fedapps.zeroth_order.errors import DirectionError
from fedapps.zeroth_order.number_formats import F32, Stored, format_of, narrow, widen
from fedapps.zeroth_order.scheme import HessianUpdate, LocalStep, Probe, Record, Scheme

RuleState: TypeAlias = Mapping[str, F32]
"""Slot name -> float32 array, as long as the parameters that it belongs to."""


@dataclass(frozen=True)
class UpdateRule:
    """One optimiser as pure functions of arrays of any length.

    Attributes:
        name: The method's name in the journal.
        slots: Slot name -> value at the start.
        scale: `state -> s` with `z = u / s`; None stands for 1.
        apply: `(theta, state, D, learn_from, record) -> (theta, state)`: one step; `learn_from` is what `H` learns from
            after this step, or None.
        momentum: Whether records carry `beta`.
    """

    name: str
    slots: Mapping[str, float]
    scale: Callable[[RuleState], F32 | None]
    apply: Callable[[F32, RuleState, F32, F32 | None, Record], tuple[F32, RuleState]]
    momentum: bool = False

    def init(self, size: int) -> dict[str, F32]:
        """Make the state at the start of a run: slot name -> array, (size,)."""
        return {slot: np.full(size, value, np.float32) for slot, value in self.slots.items()}


# --- the arithmetic; its order is part of the definition; arrays are float32, (n,) -----------------------------------


def probe_point(x: F32, z: F32, mu: float, sign: int) -> F32:
    """Step to a probe's point: `x + (mu z)`, or `x - (mu z)` (HiSo, arXiv 2506.02370, the ascent direction)."""
    move = np.float32(mu) * z
    return x + move if sign > 0 else x - move


def mean_direction(coefficients: Sequence[np.float32], zs: Iterable[F32], size: int) -> F32:
    """Sum `D = D + (c_p z_p)` over the P probes, in order, from 0."""
    total = np.zeros(size, np.float32)
    for c, z in zip(coefficients, zs, strict=True):
        total = total + c * z
    return total


def descend(theta: F32, step: F32, lr: float) -> F32:
    """Take a step: `theta - (eta D)`, or with the momentum in the place of `D`."""
    return theta - np.float32(lr) * step


def learn_hessian(H: F32, D: F32, nu: float, eps: float) -> F32:
    """Update the diagonal: `((1 - nu) H) + (nu ((D D) + eps))`, `1 - nu` computed in float64 (HiSo, arXiv 2506.02370)."""
    return np.float32(1.0 - nu) * H + np.float32(nu) * (D * D + np.float32(eps))


def blend_momentum(m: F32, D: F32, beta: float) -> F32:
    """Update the momentum: `(beta m) + ((1 - beta) D)`, `1 - beta` computed in float64."""
    return np.float32(beta) * m + np.float32(1.0 - beta) * D


def coefficients(scalars: Sequence[float]) -> list[np.float32]:
    """Divide a step's scalars, (P,), by their number: `c_p = float32(g_p / P)`."""
    return [np.float32(value / len(scalars)) for value in scalars]


# --- the rules -----------------------------------------------------------------------------------------------------


def _no_scale(_state: RuleState) -> F32 | None:
    return None


def _root_of_hessian(state: RuleState) -> F32 | None:
    return np.sqrt(state["H"])


def _plain(theta: F32, state: RuleState, D: F32, _learn_from: F32 | None, record: Record) -> tuple[F32, RuleState]:
    return descend(theta, D, record.lr), state


def _hiso(theta: F32, state: RuleState, D: F32, learn_from: F32 | None, record: Record) -> tuple[F32, RuleState]:
    theta = descend(theta, D, record.lr)
    return theta, _with_hessian(state, learn_from, record)


def _hiso_momentum(
    theta: F32, state: RuleState, D: F32, learn_from: F32 | None, record: Record
) -> tuple[F32, RuleState]:
    m = blend_momentum(state["m"], D, momentum_of(record))
    theta = descend(theta, m, record.lr)
    return theta, _with_hessian({**state, "m": m}, learn_from, record)


def _with_hessian(state: RuleState, learn_from: F32 | None, record: Record) -> RuleState:
    if learn_from is None or np.float32(record.nu) == 0:
        return state
    return {**state, "H": learn_hessian(state["H"], learn_from, record.nu, record.eps)}


def momentum_of(record: Record) -> float:
    """Read `beta` from a record of a rule with momentum.

    Raises:
        DirectionError: The record has none.
    """
    if record.momentum is None:
        raise DirectionError(
            f"record of round {record.round}",
            expected="'momentum', since the method has it",
            got="none",
            do="use the journal of this method",
        )
    return record.momentum


RULES: dict[str, UpdateRule] = {
    rule.name: rule
    for rule in (
        UpdateRule("decomfl", {}, _no_scale, _plain),
        UpdateRule("hiso", {"H": 1.0}, _root_of_hessian, _hiso),
        UpdateRule("hiso-momentum", {"H": 1.0, "m": 0.0}, _root_of_hessian, _hiso_momentum, momentum=True),
    )
}
"""Every method whose rounds a journal can hold. Add a row to add a method."""


def rule_of(scheme: Scheme) -> UpdateRule:
    """Look up a scheme's row of `RULES`.

    Raises:
        DirectionError: There is no such row.
    """
    if scheme.method not in RULES:
        raise DirectionError(
            "method", expected=f"one of {sorted(RULES)}", got=repr(scheme.method), do="add its row to RULES"
        )
    return RULES[scheme.method]


# --- whole steps and rounds ----------------------------------------------------------------------------------------


def displace(
    theta: Stored,
    state: RuleState,
    scheme: Scheme,
    *,
    offset: int,
    steps: Sequence[LocalStep] = (),
    probe: Probe | None = None,
) -> Stored:
    """Compute where a client stands after its local steps, and a probe's point from there.

    Each local step and the probe's point are rounded to the parameters' format once; all `z` use the same state.

    Args:
        theta: A window of the parameters, (n,).
        state: The rule's state for the same window at the round's start.
        scheme: The run's scheme.
        offset: Place of the window's first element.
        steps: Local steps taken so far, in order.
        probe: The probe, or None to stay.

    Returns:
        The point in the parameters' format, (n,).
    """
    scale, size = rule_of(scheme).scale(state), theta.size

    def z(step: int, index: int) -> F32:
        return _scaled(scheme, step, index, offset, size, scale)

    point = theta.copy()
    for taken in steps:
        c = coefficients(taken.scalars)
        D = mean_direction(c, (z(taken.step, p) for p in range(len(c))), size)
        point = narrow(descend(widen(point), D, taken.lr), format_of(theta))
    if probe is not None:
        moved = probe_point(widen(point), z(probe.step, probe.probe), probe.mu, probe.sign)
        point = narrow(moved, format_of(theta))
    return point


def apply_round(
    theta: Stored, state: RuleState, record: Record, scheme: Scheme, *, offset: int
) -> tuple[Stored, RuleState]:
    """Apply one round of the journal.

    Args:
        theta: A window of the parameters, (n,).
        state: The rule's state for the same window.
        record: The round.
        scheme: The run's scheme.
        offset: Place of the window's first element.

    Returns:
        New parameters and state; nothing is changed in place.
    """
    rule, scale, size = rule_of(scheme), rule_of(scheme).scale(state), theta.size
    total = np.zeros(size, np.float32)
    for k, scalars in enumerate(record.scalars):
        c = coefficients(scalars)
        zs = (_scaled(scheme, record.first_step + k, p, offset, size, scale) for p in range(len(c)))
        D = mean_direction(c, zs, size)
        total = total + D
        learn_from = _learn_from(D, total, k, record.tau, scheme.hessian_update)
        wide, state = rule.apply(widen(theta), state, D, learn_from, record)
        theta = narrow(wide, format_of(theta))
    return theta, state


def _scaled(scheme: Scheme, step: int, probe: int, offset: int, size: int, scale: F32 | None) -> F32:
    u = direction(scheme.seed, step, probe, offset, offset + size, scheme.distribution)
    return u if scale is None else u / scale


def _learn_from(D: F32, total: F32, k: int, tau: int, policy: HessianUpdate) -> F32 | None:
    if policy is HessianUpdate.EVERY_STEP:
        return D
    if k < tau - 1:
        return None
    return D if policy is HessianUpdate.LAST_STEP else total / np.float32(tau)
