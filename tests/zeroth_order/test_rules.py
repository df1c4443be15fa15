from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fedapps.zeroth_order import rules
from fedapps.zeroth_order.directions import Distribution, direction
from fedapps.zeroth_order.errors import DirectionError
from fedapps.zeroth_order.number_formats import NumberFormat, narrow, widen
from fedapps.zeroth_order.rules import RULES, UpdateRule, apply_round, displace
from fedapps.zeroth_order.scheme import HessianUpdate, LocalStep, Probe, Record, Scheme


def stored(values: list[float], dtype: str) -> np.ndarray:
    return narrow(np.array(values, np.float32), NumberFormat(dtype))


def test_known_probe_points(known: dict[str, Any]) -> None:
    for case in known["probe_points"]:
        theta, state = stored(case["theta"], case["dtype"]), {"H": np.array(case["H"], np.float32)}
        for sign, name in ((1, "plus"), (-1, "minus")):
            probe = Probe(case["step"], case["probe"], case["mu"], sign)
            point = displace(theta, state, Scheme(int(case["seed"])), offset=0, probe=probe)
            assert widen(point).tolist() == case[name], (case["dtype"], name)


def test_known_rounds(known: dict[str, Any]) -> None:
    for case in known["rounds"]:
        policy, distribution = HessianUpdate(case["hessian-update"]), Distribution(case["distribution"])
        scheme = Scheme(int(case["seed"]), "hiso", distribution, policy)
        theta = stored(case["theta0"], case["dtype"])
        state: Any = RULES["hiso"].init(theta.size)
        for number, row in enumerate(case["rounds"], 1):
            scalars = tuple(map(tuple, row["scalars"]))
            record = Record(number, row["first-step"], row["lr"], 1e-3, row["nu"], row["eps"], scalars, 1)
            theta, state = apply_round(theta, state, record, scheme, offset=0)
        assert widen(theta).tolist() == case["theta"], (policy, distribution, case["dtype"])
        assert state["H"].tolist() == case["H"], (policy, distribution, case["dtype"])


def record_of(scalars: Any, **changes: Any) -> Record:
    values = tuple(tuple(float(np.float32(v)) for v in row) for row in scalars)
    return dataclasses.replace(Record(1, 20, 0.05, 1e-3, 0.3, 1e-3, values, 2), **changes)


@pytest.mark.parametrize("method", ["decomfl", "hiso", "hiso-momentum"])
@pytest.mark.parametrize("policy", list(HessianUpdate))
def test_a_round_follows_the_equations(method: str, policy: HessianUpdate) -> None:
    """The whole round in float64 from the equations; float32 rounds each of some 20 operations by 2^-24 of its size."""
    random = np.random.default_rng(0)
    n, beta = 200, 0.8
    theta, H, m = random.standard_normal(n), random.uniform(0.5, 2, n), random.standard_normal(n)
    record = record_of(random.standard_normal((3, 2)), momentum=beta if method == "hiso-momentum" else None)
    scheme = Scheme(9, method, hessian_update=policy)
    state = {slot: {"H": H, "m": m}[slot].astype(np.float32) for slot in RULES[method].slots}
    found, after = apply_round(theta.astype(np.float32), state, record, scheme, offset=100)

    scale = 1 if method == "decomfl" else np.sqrt(H)
    expected_H, seen = H.copy(), []
    for k in range(3):
        z = [direction(9, 20 + k, p, 100, 100 + n).astype(np.float64) / scale for p in range(2)]
        D = (record.scalars[k][0] * z[0] + record.scalars[k][1] * z[1]) / 2
        m = beta * m + (1 - beta) * D
        theta = theta - 0.05 * (m if method == "hiso-momentum" else D)
        seen.append(D)
    for D in {"every-step": seen, "last-step": seen[-1:], "round-mean": [sum(seen) / 3]}[policy]:
        expected_H = 0.7 * expected_H + 0.3 * (D * D + 1e-3)
    np.testing.assert_allclose(found, theta, rtol=0, atol=2e-6)
    if method != "decomfl":
        np.testing.assert_allclose(after["H"], expected_H, rtol=3e-6)
    if method == "hiso-momentum":
        np.testing.assert_allclose(after["m"], m, rtol=0, atol=2e-6)


def test_hiso_without_learning_is_decomfl() -> None:
    theta = np.linspace(-1, 1, 99, dtype=np.float32)
    record = record_of([[0.3, -2.0]], nu=0.0)
    hiso, state = apply_round(theta, RULES["hiso"].init(99), record, Scheme(4, "hiso"), offset=0)
    plain, _ = apply_round(theta, {}, record, Scheme(4, "decomfl"), offset=0)
    np.testing.assert_array_equal(hiso, plain)
    np.testing.assert_array_equal(state["H"], 1)
    assert not np.array_equal(hiso, theta)


def test_momentum_without_memory_is_hiso() -> None:
    theta = np.linspace(-1, 1, 99, dtype=np.float32)
    record = record_of([[0.3, -2.0], [1.0, 0.5]], momentum=0.0)
    rows = [(method, RULES[method].init(99)) for method in ("hiso", "hiso-momentum")]
    (a, one), (b, two) = (apply_round(theta, state, record, Scheme(4, name), offset=0) for name, state in rows)
    np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(one["H"], two["H"])


def test_local_steps_and_a_probe_are_what_rounds_without_learning_give() -> None:
    """A client's local steps equal the round that the journal would hold if it were the only client."""
    theta = np.linspace(-1, 1, 99, dtype=np.float32)
    state, scheme = {"H": np.linspace(0.1, 3, 99, dtype=np.float32)}, Scheme(4)
    record = record_of([[0.3, -2.0], [1.0, 0.5]], nu=0.0)
    steps = [LocalStep(20 + k, record.scalars[k], 0.05) for k in range(2)]
    there = displace(theta, state, scheme, offset=7, steps=steps)
    np.testing.assert_array_equal(there, apply_round(theta, state, record, scheme, offset=7)[0])
    moved = displace(theta, state, scheme, offset=7, steps=steps, probe=Probe(22, 0, 0.5))
    z = direction(4, 22, 0, 7, 106) / np.sqrt(state["H"])
    np.testing.assert_array_equal(moved, there + np.float32(0.5) * z)


def test_half_precision_is_rounded_after_every_step() -> None:
    """One step moves a bfloat16 weight near 1 by less than half its spacing: two such steps still leave it alone."""
    theta = narrow(np.ones(64, np.float32), NumberFormat.BFLOAT16)
    record = record_of([[1.0], [1.0]], lr=5e-4)
    found, _ = apply_round(theta, {}, record, Scheme(1, "decomfl", Distribution.RADEMACHER), offset=0)
    np.testing.assert_array_equal(found, theta)


def test_arguments_are_left_alone(make_problem: Callable[..., Any]) -> None:
    problem = make_problem(
        1, method="hiso-momentum", number_format=NumberFormat.FLOAT16, distribution=Distribution.GAUSSIAN
    )
    theta, state = problem.theta.copy(), {slot: values.copy() for slot, values in problem.state.items()}
    apply_round(problem.theta, problem.state, problem.records[0], problem.scheme, offset=3)
    np.testing.assert_array_equal(problem.theta, theta)
    for slot, values in state.items():
        np.testing.assert_array_equal(problem.state[slot], values)


def test_a_rule_of_ones_own_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sign descent: no scale, a step of the size of the learning rate."""

    def step(theta: Any, state: Any, D: Any, learn_from: Any, record: Record) -> Any:
        return rules.descend(theta, np.sign(D), record.lr), state

    monkeypatch.setitem(RULES, "sign", UpdateRule("sign", {}, lambda state: None, step))
    theta = np.zeros(50, np.float32)
    found, _ = apply_round(theta, {}, record_of([[2.0]]), Scheme(4, "sign"), offset=0)
    np.testing.assert_array_equal(found, -np.float32(0.05) * np.sign(direction(4, 20, 0, 0, 50)))


def test_an_unknown_method_and_a_missing_momentum_are_refused() -> None:
    with pytest.raises(DirectionError, match=r"method: expected one of .*'hiso'.*, got 'hisso'"):
        rules.rule_of(Scheme(0, "hisso"))
    with pytest.raises(DirectionError, match="record of round 1: expected 'momentum'"):
        apply_round(
            np.ones(3, np.float32),
            RULES["hiso-momentum"].init(3),
            record_of([[1.0]]),
            Scheme(0, "hiso-momentum"),
            offset=0,
        )


def test_at_a_constant_rate_hiso_stops_at_a_floor_that_shrinks_with_the_rate() -> None:
    """As D shrinks so does H, and the step grows; DeComFL, without H, goes on to rounding."""
    A = np.array([[1.6, 0.15, 0.45], [0.15, 0.35, -0.01], [0.45, -0.01, 0.8]])
    b = np.array([1.0, 0.2, 0.3])
    best = np.linalg.solve(A, b)

    def floor(lr: float, nu: float) -> float:
        theta, H, distances = np.zeros(3, np.float32), np.ones(3, np.float32), []
        for step in range(1500):
            zs = [direction(1, step, p, 0, 3) / np.sqrt(H) for p in range(4)]
            D = rules.mean_direction(rules.coefficients([float((A @ theta - b) @ z) for z in zs]), zs, 3)
            theta = rules.descend(theta, D, lr)
            if nu:
                H = rules.learn_hessian(H, D, nu, 1e-6)
            distances.append(np.log(np.linalg.norm(theta - best)))
        return float(np.exp(np.mean(distances[750:])))

    assert floor(0.2, 0.0) < 1e-6
    assert 1e-3 < floor(0.05, 0.1) < floor(0.2, 0.1) / 3
