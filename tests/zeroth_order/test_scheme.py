from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from fedapps.errors import FedAppsError
from fedapps.zeroth_order.scheme import LocalStep, Probe, Record, Scheme, check_scalars

GOOD = Record(3, 10, 0.01, 1e-3, 0.1, 1e-6, ((0.5, -1.0), (2.0, 0.25)), 2)


def test_a_record_knows_its_shape_and_steps() -> None:
    assert (GOOD.tau, GOOD.num_probes, GOOD.end_step) == (2, 2, 12)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scalars": ()}, "record of round 3: expected tau rows of P numbers, got no rows"),
        ({"scalars": ((),)}, "expected tau rows of P numbers"),
        ({"scalars": ((0.5,), (1.0, 2.0))}, r"got 2 rows of \[1, 2\] numbers"),
        ({"scalars": ((math.nan,),)}, "expected finite scalars, got nan"),
        ({"scalars": ((1.0, -math.inf),)}, "expected finite scalars, got -inf among 2"),
        ({"scalars": ((0.1,),)}, "expected float32 values"),
        ({"scalars": ((1e39,),)}, "expected float32 values"),
        ({"first_step": 2**32 - 1}, r"expected steps from 0 to 2\^32 - 1"),
        ({"first_step": -1}, "expected steps from 0"),
        ({"lr": math.nan}, "record of round 3, lr: expected a finite number"),
        ({"mu": -1.0}, "mu: expected a finite number that is not negative"),
        ({"nu": 1.5}, "nu: expected at most 1"),
        ({"eps": 0.0}, "eps: expected a number above 0 when nu > 0"),
        ({"eps": 1e-60}, "eps: expected a number above 0"),  # rounds to 0 in float32
        ({"momentum": 1.0}, r"momentum: expected a number in \[0, 1\)"),
        ({"participants": 0}, "expected at least 1"),
        ({"round": 0}, "expected at least 1"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_a_bad_record_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(FedAppsError, match=message):
        dataclasses.replace(GOOD, **change)


def test_without_hessian_eps_may_be_zero() -> None:
    assert dataclasses.replace(GOOD, nu=0.0, eps=0.0).eps == 0


def test_scalars_of_another_shape_than_asked_for_are_refused() -> None:
    value = float(np.float32(0.1))
    check_scalars(((value, value),), where="client 4", shape=(1, 2))
    with pytest.raises(FedAppsError, match="client 4: expected 2 rows of 1 numbers, got 1 rows of"):
        check_scalars(((value, value),), where="client 4", shape=(2, 1))


@pytest.mark.parametrize(
    "build",
    [
        lambda: Scheme(2**64),
        lambda: LocalStep(2**32, (1.0,), 0.1),
        lambda: LocalStep(0, (), 0.1),
        lambda: Probe(2**32, 0, 1e-3),
        lambda: Probe(0, -1, 1e-3),
        lambda: Probe(0, 0, 1e-3, 0),
    ],
    ids=["seed", "step", "no scalars", "step of a probe", "probe", "sign"],
)
def test_steps_and_probes_outside_the_definition_are_refused(build: Any) -> None:
    with pytest.raises(FedAppsError, match="expected"):
        build()
