"""The reference in tiles gives the bits of the rules on the whole tensor, and its windows those of their place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fedapps.zeroth_order import backend_reference, rules
from fedapps.zeroth_order.directions import Distribution
from fedapps.zeroth_order.number_formats import NumberFormat

METHODS = ["decomfl", "hiso", "hiso-momentum"]


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend_reference, "_TILE", 37)


@pytest.fixture(params=METHODS)
def problem(request: pytest.FixtureRequest, make_problem: Callable[..., Any]) -> Any:
    return make_problem(
        1, method=request.param, number_format=NumberFormat.FLOAT32, distribution=Distribution.GAUSSIAN, size=200
    )


def test_rounds_are_applied_in_place(problem: Any) -> None:
    theta, state = problem.theta.copy(), {slot: values.copy() for slot, values in problem.state.items()}
    for record in problem.records:
        theta, state = rules.apply_round(theta, state, record, problem.scheme, offset=problem.offset)
    backend_reference.apply(problem.theta, problem.state, problem.scheme, problem.records, problem.offset, 1)
    assert problem.theta.tobytes() == theta.tobytes()
    for slot, values in state.items():
        assert problem.state[slot].tobytes() == values.tobytes()


def test_windows_lie_end_to_end_and_know_their_place(problem: Any) -> None:
    whole = rules.displace(
        problem.theta, problem.state, problem.scheme, offset=problem.offset, steps=problem.steps, probe=problem.probe
    )
    starts, width = np.array([150, 0, 100]), 50
    out = np.empty(150, np.float32)
    backend_reference.displace(
        problem.theta, problem.state, problem.scheme, problem.steps, problem.probe, problem.offset, starts, width, out, 1
    )  # fmt: skip
    expected = np.concatenate([whole[start : start + width] for start in starts])
    assert out.tobytes() == expected.tobytes()
    assert whole.tobytes() != problem.theta.tobytes()
