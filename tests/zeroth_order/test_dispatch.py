from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="parameters as torch tensors")

import torch

from fedapps.zeroth_order import backend_reference, dispatch, rules
from fedapps.zeroth_order.directions import Distribution, direction
from fedapps.zeroth_order.dispatch import apply_rounds, kernel_checksum, kernel_name, perturb
from fedapps.zeroth_order.errors import DirectionError
from fedapps.zeroth_order.number_formats import NumberFormat
from fedapps.zeroth_order.rules import RULES, UpdateRule, apply_round, displace
from fedapps.zeroth_order.scheme import LocalStep, Probe, Record, Scheme
from fedapps.zeroth_order.tensors import like, to_numpy

RECORD = Record(1, 4, 0.1, 1e-3, 0.5, 1e-3, ((0.5, -2.0),), 1)
PROBE = Probe(9, 0, 0.25)


@pytest.fixture
def without_numba(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("backend_numba", "backend_triton"):
        monkeypatch.setitem(sys.modules, f"fedapps.zeroth_order.{name}", None)  # Its import raises ImportError.
    dispatch._backend.cache_clear()
    yield
    dispatch._backend.cache_clear()


@pytest.mark.parametrize("number_format", list(NumberFormat))
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_tensors_of_both_kinds_are_perturbed_and_updated_where_they_lie(
    number_format: NumberFormat, kind: str, make_problem: Callable[..., Any]
) -> None:
    p = make_problem(2, method="hiso", number_format=number_format, distribution=Distribution.GAUSSIAN, size=60 * 7)
    state: Any = {slot: values.copy() for slot, values in p.state.items()}
    theta: Any = p.theta.copy().reshape(60, 7)
    if kind == "torch":
        theta = like(theta.reshape(-1), torch.empty(0, dtype=getattr(torch, number_format)), (60, 7))
        state = {"H": torch.from_numpy(p.state["H"].copy()).reshape(60, 7)}
    point = perturb(theta, state, p.scheme, offset=p.offset, steps=p.steps, probe=p.probe)
    expected = displace(p.theta, p.state, p.scheme, offset=p.offset, steps=p.steps, probe=p.probe)
    assert tuple(point.shape) == (60, 7)
    assert isinstance(point, type(theta))
    assert point.dtype == theta.dtype
    assert to_numpy(point).tobytes() == expected.tobytes()
    assert to_numpy(theta).tobytes() == p.theta.tobytes()

    rows = np.array([59, 0, 31], np.int64)
    some = perturb(theta, state, p.scheme, offset=p.offset, steps=p.steps, probe=p.probe, rows=rows)
    assert to_numpy(some).tobytes() == expected.reshape(60, 7)[rows].tobytes()

    apply_rounds(theta, state, p.records, p.scheme, offset=p.offset)
    after, slots = p.theta, p.state
    for record in p.records:
        after, slots = apply_round(after, slots, record, p.scheme, offset=p.offset)
    assert to_numpy(theta).tobytes() == after.tobytes()
    assert to_numpy(state["H"]).tobytes() == slots["H"].tobytes()


RANGES = ((0, 3), (14, 21), (100, 101), (417, 420))
"""Fixed elements of a (60, 7) tensor: part of a row, a whole one, one element, the end."""


@pytest.mark.parametrize("path", ["numba", "numpy"])
@pytest.mark.parametrize("number_format", list(NumberFormat))
@pytest.mark.parametrize("method", ["decomfl", "hiso", "hiso-momentum"])
def test_fixed_elements_stay_and_all_others_move_as_without_them(
    method: str, number_format: NumberFormat, path: str, make_problem: Callable[..., Any], request: Any
) -> None:
    if path == "numpy":
        request.getfixturevalue("without_numba")
    p = make_problem(1, method=method, number_format=number_format, distribution=Distribution.GAUSSIAN, size=60 * 7)
    free = np.ones(420, bool)
    for start, stop in RANGES:
        free[start:stop] = False
    theta, state = p.theta.copy().reshape(60, 7), {slot: values.copy() for slot, values in p.state.items()}
    moved, slots = p.theta.copy(), {slot: values.copy() for slot, values in p.state.items()}
    how: Any = {"offset": p.offset, "steps": p.steps, "probe": p.probe}
    expected = np.where(free, perturb(moved, slots, p.scheme, **how), p.theta).reshape(60, 7)
    point = perturb(theta, state, p.scheme, fixed=RANGES, **how)
    assert point.tobytes() == expected.tobytes()
    rows = np.array([59, 2, 0, 14, 30], np.int64)
    some = perturb(theta, state, p.scheme, fixed=RANGES, rows=rows, **how)
    assert some.tobytes() == expected[rows].tobytes()

    apply_rounds(moved, slots, p.records, p.scheme, offset=p.offset)
    apply_rounds(theta, state, p.records, p.scheme, offset=p.offset, fixed=RANGES)
    assert theta.tobytes() == np.where(free, moved, p.theta).tobytes()
    for slot, values in state.items():
        assert values.tobytes() == np.where(free, slots[slot], p.state[slot]).tobytes()
    assert (moved != p.theta).any()


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_elements_of_another_memory_format_are_numbered_in_their_logical_order(kind: str) -> None:
    plain: Any = np.linspace(-1, 1, 2 * 3 * 4 * 5, dtype=np.float32).reshape(2, 3, 4, 5)
    theta: Any = np.asfortranarray(plain)
    if kind == "torch":
        theta = torch.nn.Parameter(torch.from_numpy(plain.copy()).contiguous(memory_format=torch.channels_last))
    strides = theta.stride() if kind == "torch" else theta.strides
    scheme, how = Scheme(5, "decomfl"), {"offset": 7, "probe": PROBE}
    point = perturb(theta, {}, scheme, **how)
    np.testing.assert_array_equal(to_numpy(point), perturb(plain, {}, scheme, **how))
    some = perturb(theta, {}, scheme, rows=np.array([1]), **how)
    np.testing.assert_array_equal(to_numpy(some), perturb(plain, {}, scheme, rows=np.array([1]), **how))
    for tensor in (theta, plain):
        apply_rounds(tensor, {}, [RECORD], scheme, offset=7)
    np.testing.assert_array_equal(to_numpy(theta), plain)
    assert (theta.stride() if kind == "torch" else theta.strides) == strides
    if kind == "torch":
        assert point.stride() == strides  # so that convolutions take the same path for all probes


def test_a_window_read_at_random_gives_the_same_values() -> None:
    theta = np.linspace(-1, 1, 1000, dtype=np.float32)
    whole = perturb(theta, {}, Scheme(5, "decomfl"), offset=33, probe=PROBE)
    for start, stop in ((0, 1), (5, 6), (501, 1000)):
        part = perturb(theta[start:stop], {}, Scheme(5, "decomfl"), offset=33 + start, probe=PROBE)
        np.testing.assert_array_equal(part, whole[start:stop])


def test_without_steps_and_probe_a_copy_comes_back() -> None:
    for theta in (np.ones((4, 3), np.float32), torch.ones(4, 3, dtype=torch.float16)):
        same = perturb(theta, {}, Scheme(5, "decomfl"))
        rows = perturb(theta, {}, Scheme(5, "decomfl"), rows=np.array([1, 1]))
        assert (to_numpy(same) == 1).all()
        assert same is not theta
        assert (tuple(same.shape), tuple(rows.shape)) == ((4, 3), (2, 3))
        to_numpy(same)[...] = 0
        assert (to_numpy(theta) == 1).all()


def test_a_materialised_tensor_starts_where_torch_would_put_it() -> None:
    point = perturb(np.ones(777, np.float32), {}, Scheme(5, "decomfl"), probe=PROBE)
    assert point.ctypes.data % 64 == 0


@pytest.mark.parametrize("count", [0, 1])
def test_empty_tensors_are_fine(count: int) -> None:
    theta = np.ones((count, 5), np.float32)
    assert perturb(theta, {}, Scheme(5, "decomfl"), probe=PROBE).shape == (count, 5)
    apply_rounds(theta, {}, [RECORD], Scheme(5, "decomfl"))


def test_without_numba_it_works_and_warns_once(without_numba: None, caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("flwr").propagate = True
    theta = np.ones(20, np.float32)
    for _ in range(3):
        point = perturb(theta, {}, Scheme(5, "decomfl"), probe=PROBE)
    np.testing.assert_array_equal(point, 1 + np.float32(0.25) * direction(5, 9, 0, 0, 20))
    assert kernel_name() == "numpy"
    [warning] = [r.message for r in caplog.records if r.levelno == logging.WARNING]
    assert re.fullmatch(
        r"zeroth order: no numba \(import of .*\), so directions take NumPy and many times longer; install fedapps\[fast\]",
        warning,
    )


BROKEN = """
import logging, sys
import numpy as np
from fedapps.zeroth_order import dispatch
from fedapps.zeroth_order.scheme import Probe, Scheme

logging.basicConfig(stream=sys.stdout, format="%(message)s", level="WARNING")
for _ in range(3):
    dispatch.perturb(np.ones(9, np.float32), {}, Scheme(1, "decomfl"), probe=Probe(0, 0, 1e-3))
print(dispatch.kernel_name("cpu"), dispatch.kernel_name("cuda"))
"""


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("raise ImportError('Numba needs NumPy 1.0 or less')", "Numba needs NumPy 1.0 or less"),
        ("raise OSError('no libllvmlite.so\\nin any place')", "no libllvmlite.so"),
        ("", "cannot import name 'njit' from 'numba'"),
    ],
    ids=["version", "library", "empty"],
)
@pytest.mark.slow
def test_packages_that_are_there_but_broken_are_as_good_as_absent(tmp_path: Path, fault: str, reason: str) -> None:
    for package in ("numba", "triton"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text(fault)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    ran = subprocess.run([sys.executable, "-c", BROKEN], env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    for_cpu, for_cuda, names = ran.stdout.splitlines()
    assert for_cpu.startswith(f"zeroth order: no numba ({reason}")
    assert for_cpu.endswith("), so directions take NumPy and many times longer; install fedapps[fast]")
    assert for_cuda.startswith("zeroth order: no triton (")
    assert names == "numpy numpy"


def test_without_triton_tensors_of_a_gpu_are_updated_on_the_cpu(
    without_numba: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("flwr").propagate = True
    monkeypatch.setattr(dispatch, "device_of", lambda tensor: "cuda")
    theta, H = torch.linspace(-1, 1, 50), torch.ones(50)
    after, slots = apply_round(theta.numpy().copy(), {"H": H.numpy().copy()}, RECORD, Scheme(5), offset=0)
    apply_rounds(theta, {"H": H}, [RECORD], Scheme(5))
    np.testing.assert_array_equal(theta.numpy(), after)
    np.testing.assert_array_equal(H.numpy(), slots["H"])
    assert len([r for r in caplog.records if "no triton" in r.message]) == 1


def test_all_paths_have_the_same_checksum(without_numba: None, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = kernel_checksum()
    monkeypatch.undo()
    dispatch._backend.cache_clear()
    assert kernel_checksum() == slow == "ee8f463d3bd70f8505aa79f8f0a88ef02d109c189aa7760b11cf1f2723162891"


def test_the_checksum_sees_another_direction(monkeypatch: pytest.MonkeyPatch, without_numba: None) -> None:
    before = kernel_checksum()
    monkeypatch.setattr(rules, "direction", lambda *a: np.negative(direction(*a)))
    assert kernel_checksum() != before


def test_a_rule_of_ones_own_runs_on_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(theta: Any, state: Any, D: Any, learn_from: Any, record: Record) -> Any:
        return theta - D, {"count": state["count"] + np.float32(1)}

    monkeypatch.setitem(RULES, "own", UpdateRule("own", {"count": 0.0}, lambda state: None, step))
    theta, state = np.zeros(300, np.float32), {"count": np.zeros(300, np.float32)}
    apply_rounds(theta, state, [RECORD, RECORD], Scheme(5, "own"), offset=2)
    np.testing.assert_array_equal(state["count"], 2)
    point = perturb(theta, state, Scheme(5, "own"), offset=2, steps=[LocalStep(1, (1.0,), 0.1)], probe=PROBE)
    expected = displace(theta, state, Scheme(5, "own"), offset=2, steps=[LocalStep(1, (1.0,), 0.1)], probe=PROBE)
    np.testing.assert_array_equal(point, expected)
    assert theta.any()


def test_a_method_that_shares_a_rule_shares_its_compiled_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RULES, "own", RULES["hiso"])
    monkeypatch.setattr(backend_reference, "apply", None)
    monkeypatch.setattr(backend_reference, "displace", None)
    kept = []
    for method in ("hiso", "own"):
        theta, state = np.zeros(300, np.float32), {"H": np.ones(300, np.float32)}
        apply_rounds(theta, state, [RECORD], Scheme(5, method), offset=2)
        kept.append(
            (
                theta.tobytes(),
                state["H"].tobytes(),
                np.asarray(perturb(theta, state, Scheme(5, method), probe=PROBE)).tobytes(),
            )
        )
    assert kept[0] == kept[1]


@pytest.mark.parametrize(
    ("theta", "state", "options", "message"),
    [
        (np.ones(4), {}, {}, "parameters: expected float32, float16"),
        (torch.ones(4, dtype=torch.float64), {}, {}, "parameters: expected float32, float16"),
        (torch.ones(4, device="meta"), {}, {}, "expected device cpu or cuda, got meta"),
        (np.ones(4, np.float32), {"H": np.ones(3, np.float32)}, {}, "state 'H': expected 4 elements of float32, got 3"),
        (np.ones(4, np.float32), {"H": np.ones(4)}, {}, "state 'H': .* got 4 of float64"),
        (np.ones((2, 2), np.float32), {}, {"rows": np.array([2])}, "rows: expected 0 to 1, got 2 to 2"),
        (np.ones(4, np.float32), {}, {"offset": -1}, "elements: expected 0 <= start"),
    ],
    ids=["float64", "torch float64", "device", "size of H", "dtype of H", "rows", "offset"],
)  # fmt: skip
def test_what_does_not_fit_is_refused(theta: Any, state: Any, options: Any, message: str) -> None:
    with pytest.raises(DirectionError, match=message):
        perturb(theta, state, Scheme(5), probe=PROBE, **options)


def test_a_state_without_a_slot_is_refused() -> None:
    with pytest.raises(DirectionError, match="state: expected slot 'H'"):
        apply_rounds(np.ones(4, np.float32), {}, [RECORD], Scheme(5, "hiso"))


@pytest.mark.slow
def test_torch_is_not_imported_for_arrays() -> None:
    """A server that only aggregates needs no torch."""
    code = (
        "import sys, numpy as np\n"
        "from fedapps.zeroth_order import aggregate, dispatch, journal, replica, store\n"
        "from fedapps.zeroth_order.scheme import Probe, Scheme\n"
        "dispatch.perturb(np.ones(9, np.float32), {}, Scheme(1, 'decomfl'), probe=Probe(0, 0, 1e-3))\n"
        "sys.exit('torch' in sys.modules or 'flwr' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
