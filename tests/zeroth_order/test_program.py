"""Rounds as rows of numbers: what each step does to `H` under each policy, and which coefficients belong to it."""

from __future__ import annotations

import numpy as np
import pytest

from fedapps.errors import FedAppsError
from fedapps.zeroth_order.philox import round_keys
from fedapps.zeroth_order.program import (
    FLOAT_COLUMNS,
    INT_COLUMNS,
    Learn,
    compile_records,
    compile_steps,
    probe_ints,
    signed_mu,
)
from fedapps.zeroth_order.rules import coefficients
from fedapps.zeroth_order.scheme import HessianUpdate, LocalStep, Probe, Record, Scheme

TWO = ((1.0, 2.0), (3.0, -4.0), (0.5, 0.25))
ONE = ((7.0,),)


def record(
    number: int, first_step: int, scalars: tuple[tuple[float, ...], ...], nu: float, beta: float | None
) -> Record:
    return Record(number, first_step, 0.5, 1e-3, nu, 1e-6, scalars, 2, None, beta)


@pytest.mark.parametrize(
    ("policy", "learns"),
    [
        (HessianUpdate.EVERY_STEP, [Learn.FROM_STEP] * 3),
        (HessianUpdate.LAST_STEP, [Learn.NOTHING, Learn.NOTHING, Learn.FROM_STEP]),
        (HessianUpdate.ROUND_MEAN, [Learn.COLLECT, Learn.COLLECT, Learn.FROM_MEAN]),
    ],
)
def test_a_row_a_step_says_what_the_policy_does_with_it(policy: HessianUpdate, learns: list[Learn]) -> None:
    """Three steps of two probes, then a round of one step of one probe that learns nothing (nu = 0)."""
    scheme = Scheme(7, "hiso", hessian_update=policy)
    program = compile_records([record(1, 10, TWO, 0.1, None), record(2, 13, ONE, 0.0, None)], scheme)
    columns = dict(zip(INT_COLUMNS, program.ints.T.tolist(), strict=True))
    assert columns == {
        "step": [10, 11, 12, 13],
        "num_probes": [2, 2, 2, 1],
        "starts_round": [1, 0, 0, 1],
        "learn": [*learns, Learn.NOTHING],
    }
    floats = dict(zip(FLOAT_COLUMNS, program.floats.T, strict=True))
    expected = {
        "lr": [0.5] * 4,
        "nu": [0.1] * 3 + [0],
        "one_minus_nu": [0.9] * 3 + [1],
        "eps": [1e-6] * 4,
        "tau": [3, 3, 3, 1],
    }
    for name, values in expected.items():
        np.testing.assert_array_equal(floats[name], np.float32(values), err_msg=name)
    flat = [c for scalars in (*TWO, *ONE) for c in coefficients(scalars)]
    np.testing.assert_array_equal(program.coefficients, np.array(flat, np.float32))
    np.testing.assert_array_equal(program.keys, round_keys(7))


def test_one_minus_a_number_is_taken_before_it_is_rounded() -> None:
    """float32(1 - x) and 1 - float32(x) differ at 0.999: the reference takes the first."""
    program = compile_records([record(1, 0, ONE, 0.999, 0.999)], Scheme(7, "hiso-momentum"))
    floats = dict(zip(FLOAT_COLUMNS, program.floats[0], strict=True))
    assert floats["one_minus_nu"] == floats["one_minus_beta"] == np.float32(1.0 - 0.999)
    assert floats["one_minus_nu"] != np.float32(1) - np.float32(0.999)


def test_a_method_without_h_learns_nothing_and_one_with_momentum_needs_it() -> None:
    program = compile_records([record(1, 0, TWO, 0.1, None)], Scheme(7, "decomfl"))
    assert set(program.ints[:, INT_COLUMNS.index("learn")]) == {Learn.NOTHING}
    with pytest.raises(FedAppsError, match="momentum"):
        compile_records([record(1, 0, TWO, 0.1, None)], Scheme(7, "hiso-momentum"))


def test_local_steps_share_one_scale_and_teach_nothing() -> None:
    program = compile_steps([LocalStep(4, (1.0, 2.0), 0.1), LocalStep(5, (3.0, 4.0), 0.1)], Scheme(7, "hiso"))
    assert program.ints.tolist() == [[4, 2, 1, Learn.NOTHING], [5, 2, 0, Learn.NOTHING]]
    np.testing.assert_array_equal(program.floats, np.float32([[0.1, 1, 0, 0, 0, 1, 1]] * 2))
    assert compile_steps([], Scheme(7, "hiso")).ints.shape == (0, len(INT_COLUMNS))


def test_a_probe_is_a_flag_a_place_and_a_signed_radius() -> None:
    assert (probe_ints(None), signed_mu(None)) == ((0, 0, 0), 0)
    behind = Probe(9, 2, 0.1, -1)
    assert probe_ints(behind) == (1, 9, 2)
    assert signed_mu(behind) == -np.float32(0.1)
