"""What a run fixes once (`Scheme`), what a round adds (`Record`), and what a client does in between.

All replicas of a run are functions of the initial model, the scheme and the records.

| symbol | identifier | shape | unit |
|---|---|---|---|
| `G[k,p]` | `scalars` | (tau, P) | directional derivative, a float32 value |
| `eta` | `lr` | () | |
| `mu`, `nu`, `eps` | `mu`, `nu`, `eps` | () | float64 as set; rounded to float32 before use |
| `beta` | `momentum` | () | only for rules with momentum |

References:
    HiSo, arXiv 2506.02370, Algorithm 1; DeComFL, arXiv 2405.15861.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

import numpy as np

from fedapps.zeroth_order.directions import STEP_LIMIT, Distribution, check_below, check_seed
from fedapps.zeroth_order.errors import DirectionError, ScalarError

Scalars: TypeAlias = tuple[tuple[float, ...], ...]
"""`tau` rows of `P` float32 values."""


class HessianUpdate(StrEnum):
    """Which directions `D` of a round the diagonal `H` learns from (HiSo, arXiv 2506.02370)."""

    EVERY_STEP = "every-step"
    """Each of the `tau` values of `D`, in order: `tau` updates a round."""

    LAST_STEP = "last-step"
    """The last one: one update a round."""

    ROUND_MEAN = "round-mean"
    """Their mean: one update a round."""


@dataclass(frozen=True)
class Scheme:
    """What is constant over a run."""

    seed: int  # the run's seed, 0 to 2^64 - 1
    method: str = "hiso"  # name of the update rule
    distribution: Distribution = Distribution.GAUSSIAN  # of the directions
    hessian_update: HessianUpdate = HessianUpdate.EVERY_STEP  # policy for `H`; without effect for rules that have none

    def __post_init__(self) -> None:
        check_seed(self.seed)


@dataclass(frozen=True)
class LocalStep:
    """A step that a client took: `x <- x - eta (1/P) sum_p g_p z_p`. With `H_r` it says where the client stands."""

    step: int  # global step
    scalars: tuple[float, ...]  # the client's own `g`, (P,)
    lr: float  # `eta`

    def __post_init__(self) -> None:
        check_below("step", self.step, STEP_LIMIT, "start a new run: a run has 2^32 steps")
        if not self.scalars:
            raise ScalarError("local step", expected="at least one scalar", got="none", do="use P >= 1 probes")


@dataclass(frozen=True)
class Probe:
    """The point `x + sign (mu z)` at which a loss is asked for."""

    step: int  # global step
    probe: int  # probe within the step
    mu: float  # radius
    sign: int = 1  # +1, or -1 for the second point of a central difference

    def __post_init__(self) -> None:
        check_below("step", self.step, STEP_LIMIT, "start a new run: a run has 2^32 steps")
        check_below("probe", self.probe, STEP_LIMIT, "use fewer probes a step")
        if self.sign not in (1, -1):
            raise DirectionError("probe", expected="sign +1 or -1", got=repr(self.sign), do="pass one of them")


@dataclass(frozen=True)
class Record:
    """One applied round, as the journal holds it."""

    round: int  # number of the round, from 1
    first_step: int  # global step of row 0 of the scalars
    lr: float  # `eta`, as set
    mu: float  # radius of the probes, as set
    nu: float  # weight of what is new in `H`, as set; 0 leaves `H` alone
    eps: float  # floor of what `H` learns, as set
    scalars: Scalars  # `G`, `tau` rows of `P` float32 values
    participants: int  # number of clients behind the scalars
    fingerprint: str | None = None  # of the state after this round, or None
    momentum: float | None = None  # `beta`, for rules with momentum only

    def __post_init__(self) -> None:
        where = f"record of round {self.round}"
        check_scalars(self.scalars, where=where)
        if not 0 <= self.first_step <= STEP_LIMIT - self.tau:
            raise DirectionError(
                where, expected="steps from 0 to 2^32 - 1", got=str(self.first_step), do="start a new run"
            )
        _check_record_numbers(self, where)

    @property
    def tau(self) -> int:
        """Number of local steps."""
        return len(self.scalars)

    @property
    def num_probes(self) -> int:
        """Number of probes a step, `P`."""
        return len(self.scalars[0])

    @property
    def end_step(self) -> int:
        """One past the last global step of the round."""
        return self.first_step + self.tau


def radius(mu: float, mu_decay: float, server_round: int) -> float:
    """Give the radius of a round's probes, ``mu * mu_decay ** (round - 1)``; rounds count from 1."""
    return mu * mu_decay ** (server_round - 1)


def check_scalars(scalars: Scalars, *, where: str, shape: tuple[int, int] | None = None) -> None:
    """Refuse scalars that are no finite `tau x P` matrix of float32 values.

    Args:
        scalars: Rows of numbers.
        where: Whose they are, for the message.
        shape: `(tau, P)` that was asked for; None takes any.
    """
    widths = {len(row) for row in scalars}
    if len(widths) != 1 or 0 in widths or (shape is not None and (len(scalars), *widths) != shape):
        wanted = "tau rows of P numbers" if shape is None else f"{shape[0]} rows of {shape[1]} numbers"
        got = f"{len(scalars)} rows of {sorted(widths)} numbers" if scalars else "no rows"
        raise ScalarError(where, expected=wanted, got=got, do="send one scalar a step and probe")
    flat = [value for row in scalars for value in row]
    bad = [value for value in flat if not math.isfinite(value)]
    if bad:
        do = "lower the learning rate or mu, or look for a loss that overflows"
        raise ScalarError(where, expected="finite scalars", got=f"{bad[0]} among {len(flat)}", do=do)
    if not all(_is_float32(value) for value in flat):
        raise ScalarError(where, expected="float32 values", got="other numbers", do="round each to float32 once")


def _is_float32(value: float) -> bool:
    with np.errstate(over="ignore"):
        return float(np.float32(value)) == value


def _check_record_numbers(record: Record, where: str) -> None:
    def refuse(name: str, expected: str, got: object) -> None:
        raise DirectionError(f"{where}, {name}", expected=expected, got=repr(got))

    for name in ("lr", "mu", "nu", "eps"):
        value = getattr(record, name)
        if not math.isfinite(value) or value < 0:
            refuse(name, "a finite number that is not negative", value)
    if record.nu > 1:
        refuse("nu", "at most 1", record.nu)
    if record.nu > 0 and not np.float32(record.eps) > 0:
        refuse("eps", "a number above 0 when nu > 0 (else H can reach 0)", record.eps)
    if record.momentum is not None and not 0 <= record.momentum < 1:
        refuse("momentum", "a number in [0, 1)", record.momentum)
    if record.round < 1 or record.participants < 1:
        refuse("round and participants", "at least 1", (record.round, record.participants))
