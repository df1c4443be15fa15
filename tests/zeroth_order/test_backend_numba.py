from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fedapps.zeroth_order import backend_reference
from fedapps.zeroth_order.directions import Distribution
from fedapps.zeroth_order.number_formats import NumberFormat, narrow
from fedapps.zeroth_order.program import compile_records
from fedapps.zeroth_order.scheme import HessianUpdate, Record, Scheme

pytest.importorskip("numba", reason="the compiled CPU path needs numba")

from fedapps.zeroth_order import backend_numba

GRID = pytest.mark.parametrize("method", ["decomfl", "hiso", "hiso-momentum"])
FORMATS = pytest.mark.parametrize("number_format", list(NumberFormat))
DISTRIBUTIONS = pytest.mark.parametrize("distribution", list(Distribution))


def copies(problem: Any) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    return problem.theta.copy(), {slot: values.copy() for slot, values in problem.state.items()}


def assert_same_bits(found: Any, expected: Any, what: str) -> None:
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found.view(np.uint8), expected.view(np.uint8), err_msg=what)


@GRID
@FORMATS
@DISTRIBUTIONS
def test_rounds_have_the_bits_of_the_reference(
    method: str, number_format: NumberFormat, distribution: Distribution, make_problem: Callable[..., Any]
) -> None:
    for case in range(6):
        problem = make_problem(case, method=method, number_format=number_format, distribution=distribution)
        expected, found = copies(problem), copies(problem)
        backend_reference.apply(*expected, problem.scheme, problem.records, problem.offset, 1)
        backend_numba.apply(*found, compile_records(problem.records, problem.scheme), problem.offset, 1)
        assert_same_bits(found[0], expected[0], f"theta, case {case}")
        for slot, values in expected[1].items():
            assert_same_bits(found[1][slot], values, f"{slot}, case {case}")


@FORMATS
@DISTRIBUTIONS
@pytest.mark.parametrize("policy", list(HessianUpdate))
@pytest.mark.parametrize(
    "scalars",
    [
        (0.75, 1e-40, 2.0, -3.5),
        (0.0, -0.0),
    ],  # A scalar of 0 makes steps of both zeros, and a parameter of -0 shows which.
)
@pytest.mark.parametrize(
    ("size", "offset"), [(1, 8), (63, 0), (64, 5), (193, 2**33), (4096, 7), (4097, 16), (9001, 2**36 + 3)]
)
def test_rounds_of_one_step_and_probe_have_the_bits_of_the_reference(
    size: int,
    offset: int,
    scalars: tuple[float, ...],
    policy: HessianUpdate,
    number_format: NumberFormat,
    distribution: Distribution,
) -> None:
    random = np.random.default_rng(size)
    theta = narrow(
        (random.standard_normal(size) * 10.0 ** random.uniform(-42, 2, size)).astype(np.float32), number_format
    )
    theta[random.random(size) < 0.2] = -0.0
    H = (10.0 ** random.uniform(-8, 2, size)).astype(np.float32)
    records = [
        Record(r + 1, 7 + r, 0.01, 1e-3, nu, 1e-6, ((float(np.float32(scalar)),),), 2)
        for r, (scalar, nu) in enumerate(zip(scalars, (0.3, 0.1, 0.0, 0.7), strict=False))
    ]
    scheme = Scheme(3, "hiso", distribution, policy)
    expected, found = (theta.copy(), {"H": H.copy()}), (theta.copy(), {"H": H.copy()})
    backend_reference.apply(*expected, scheme, records, offset, 1)
    backend_numba.apply(*found, compile_records(records, scheme), offset, 1)
    assert_same_bits(found[0], expected[0], "theta")
    assert_same_bits(found[1]["H"], expected[1]["H"], "H")


@GRID
@FORMATS
@DISTRIBUTIONS
def test_displaced_windows_have_the_bits_of_the_reference(
    method: str, number_format: NumberFormat, distribution: Distribution, make_problem: Callable[..., Any]
) -> None:
    for case in range(6):
        problem = make_problem(case, method=method, number_format=number_format, distribution=distribution)
        width = max(1, problem.theta.size // 7)
        rows = [0] if case % 2 else [0, 3, 1, 6]
        starts = np.array([row * width for row in rows if (row + 1) * width <= problem.theta.size], np.int64)
        for steps, probe in ((problem.steps, problem.probe), (problem.steps, None), ([], problem.probe)):
            expected = np.zeros(len(starts) * width, problem.theta.dtype)
            found = expected.copy()
            rest = (problem.theta, problem.state, problem.scheme, steps, probe, problem.offset, starts, width)
            backend_reference.displace(*rest, expected, 1)
            backend_numba.displace(*rest, found, 1)
            if steps or probe:
                assert_same_bits(found, expected, f"case {case}")


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_the_bits_do_not_depend_on_the_number_of_threads(threads: int, make_problem: Callable[..., Any]) -> None:
    problem = make_problem(
        4, method="hiso", number_format=NumberFormat.FLOAT32, distribution=Distribution.GAUSSIAN, size=300_001
    )
    program = compile_records(problem.records[:2], problem.scheme)
    one, many = copies(problem), copies(problem)
    backend_numba.apply(*one, program, problem.offset, 1)
    backend_numba.apply(*many, program, problem.offset, threads)
    assert_same_bits(many[0], one[0], "theta")
    assert_same_bits(many[1]["H"], one[1]["H"], "H")
    for starts, width in ((np.array([5], np.int64), 300_001 - 5), (np.arange(0, 300_000, 1000), 1000)):
        outs = [np.empty(len(starts) * width, np.float32) for _ in range(2)]
        for out, count in zip(outs, (1, threads), strict=True):
            rest = (problem.scheme, problem.steps, problem.probe, problem.offset, starts, width, out, count)
            backend_numba.displace(problem.theta, problem.state, *rest)
        assert_same_bits(outs[1], outs[0], "point")


def test_a_forked_process_makes_threads_of_its_own(make_problem: Callable[..., Any]) -> None:
    problem = make_problem(
        4, method="hiso", number_format=NumberFormat.FLOAT32, distribution=Distribution.GAUSSIAN, size=200_000
    )
    program = compile_records(problem.records, problem.scheme)
    backend_numba.apply(*copies(problem), program, 0, 3)
    child = os.fork()
    if child == 0:
        try:
            backend_numba.apply(*copies(problem), program, 0, 3)
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_an_error_in_a_slice_is_not_lost() -> None:
    def fails(begin: int, end: int) -> None:
        if begin:
            raise RuntimeError("in a thread")

    with pytest.raises(RuntimeError, match="in a thread"):
        backend_numba._in_slices(fails, 1 << 20, 1, 2)
