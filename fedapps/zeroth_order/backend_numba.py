"""The compiled CPU path: numba kernels over slices of a window, one slice a thread.

Threads are our own, not numba's: the kernels release the interpreter lock, and a pool that is made anew in a forked
process is safe in workers, where OpenMP's is not.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from fedapps.zeroth_order import kernels_cpu
from fedapps.zeroth_order.directions import Distribution
from fedapps.zeroth_order.gaussian_table import SIGNED
from fedapps.zeroth_order.number_formats import F32, NumberFormat, Stored, format_of
from fedapps.zeroth_order.program import Program, compile_steps, probe_ints, signed_mu
from fedapps.zeroth_order.rules import rule_of
from fedapps.zeroth_order.scheme import LocalStep, Probe, Scheme

NAME = "numba"

_FORMAT_CODES = {
    NumberFormat.FLOAT32: kernels_cpu.FLOAT32,
    NumberFormat.BFLOAT16: kernels_cpu.BFLOAT16,
    NumberFormat.FLOAT16: kernels_cpu.FLOAT16,
}
_RULE_CODES = {"decomfl": kernels_cpu.PLAIN, "hiso": kernels_cpu.HISO, "hiso-momentum": kernels_cpu.HISO_MOMENTUM}
_NO_FLOATS = np.empty(0, np.float32)
_NO_PATTERNS = np.empty(0, np.uint16)
_SMALLEST_SLICE = 1 << 15  # elements; less is not worth a thread

_pools: dict[tuple[int, int], ThreadPoolExecutor] = {}


def displace(
    theta: Stored,
    state: Mapping[str, F32],
    scheme: Scheme,
    steps: Sequence[LocalStep],
    probe: Probe | None,
    offset: int,
    starts: NDArray[np.int64],
    width: int,
    out: Stored,
    threads: int,
) -> None:
    """Write where a client stands: `backend_reference.displace`, compiled, on so many threads."""
    H = state.get("H", _NO_FLOATS) if _RULE_CODES[rule_of(scheme).name] != kernels_cpu.PLAIN else _NO_FLOATS
    program = compile_steps(steps, scheme)
    numbers = (program.keys, _table(scheme), program.ints, program.floats, program.coefficients)
    tail = (*probe_ints(probe), signed_mu(probe))

    def one_window(begin: int, end: int) -> None:
        at = np.array([starts[0] + begin], np.int64)
        kernels_cpu.displace(*_views(theta, out[begin:end]), H, offset, at, end - begin, *numbers, *tail)

    def some_windows(begin: int, end: int) -> None:
        part = out[begin * width : end * width]
        kernels_cpu.displace(*_views(theta, part), H, offset, starts[begin:end], width, *numbers, *tail)

    if len(starts) == 1:
        _in_slices(one_window, width, 1, threads)
    else:
        _in_slices(some_windows, len(starts), max(1, width), threads)


def apply(theta: Stored, state: Mapping[str, F32], program: Program, offset: int, threads: int) -> None:
    """Apply the steps of many rounds in place, as `backend_reference.apply` does, in one pass over memory."""
    wide, packed, _, _, code = _views(theta, theta)
    rule = _RULE_CODES[rule_of(program.scheme).name]
    H, m = state.get("H", _NO_FLOATS), state.get("m", _NO_FLOATS)
    numbers = (program.keys, _table(program.scheme), program.ints, program.floats, program.coefficients)

    def part(begin: int, end: int) -> None:
        kernels_cpu.apply(wide, packed, code, rule, H, m, offset, begin, end, *numbers)

    _in_slices(part, theta.size, 1, threads)


def _views(theta: Stored, out: Stored) -> tuple[F32, NDArray[np.uint16], F32, NDArray[np.uint16], int]:
    code = _FORMAT_CODES[format_of(theta)]
    if code == kernels_cpu.FLOAT32:
        return theta, _NO_PATTERNS, out, _NO_PATTERNS, code
    return _NO_FLOATS, theta.view(np.uint16), _NO_FLOATS, out.view(np.uint16), code


def _table(scheme: Scheme) -> F32:
    return SIGNED if scheme.distribution is Distribution.GAUSSIAN else _NO_FLOATS


def _in_slices(work: Callable[[int, int], None], count: int, weight: int, threads: int) -> None:
    """Run `work(begin, end)` over `0..count-1`, each unit `weight` elements, in as many slices as is worth it."""
    parts = max(1, min(threads, count * weight // _SMALLEST_SLICE))
    if parts == 1:
        work(0, count)
        return
    edges = [count * i // parts for i in range(parts + 1)]
    waiting = [_pool(threads).submit(work, edges[i], edges[i + 1]) for i in range(1, parts)]
    try:
        work(edges[0], edges[1])
    finally:
        for part in waiting:
            part.result()


def _pool(threads: int) -> ThreadPoolExecutor:
    key = (os.getpid(), threads)
    if key not in _pools:
        _pools[key] = ThreadPoolExecutor(threads, thread_name_prefix="fedapps-kernels")
    return _pools[key]
