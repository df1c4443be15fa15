"""Run by `test_backend_triton.py` in a process of its own, with TRITON_INTERPRET=1: kernels against the reference."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))

from conftest import problem

from fedapps.zeroth_order import backend_reference, backend_triton, kernels_cuda
from fedapps.zeroth_order.directions import Distribution
from fedapps.zeroth_order.number_formats import NumberFormat
from fedapps.zeroth_order.program import compile_records
from fedapps.zeroth_order.tensors import like, to_numpy


def to_torch(array: np.ndarray) -> torch.Tensor:
    dtype = torch.bfloat16 if array.dtype == np.uint16 else torch.from_numpy(array[:0]).dtype
    return like(array.copy(), torch.empty(0, dtype=dtype), array.shape)


def check(case: int, method: str, number_format: NumberFormat, distribution: Distribution) -> None:
    p = problem(case, method=method, number_format=number_format, distribution=distribution, size=150 + 101 * case)
    name = f"{method}, {number_format}, {distribution}"
    theta, state = p.theta.copy(), {slot: values.copy() for slot, values in p.state.items()}
    found, slots = to_torch(theta), {slot: to_torch(values) for slot, values in state.items()}
    backend_reference.apply(theta, state, p.scheme, p.records, p.offset, 1)
    backend_triton.apply(found, slots, compile_records(p.records, p.scheme), p.offset, 1)
    assert to_numpy(found).tobytes() == theta.tobytes(), f"theta: {name}"
    for slot, values in state.items():
        assert to_numpy(slots[slot]).tobytes() == values.tobytes(), f"{slot}: {name}"

    width = p.theta.size // 5
    starts = np.array([0, 3 * width, width], np.int64)
    expected = np.zeros(3 * width, p.theta.dtype)
    out = to_torch(expected)
    backend_reference.displace(p.theta, p.state, p.scheme, p.steps, p.probe, p.offset, starts, width, expected, 1)
    slots = {slot: to_torch(values) for slot, values in p.state.items()}
    backend_triton.displace(
        to_torch(p.theta), slots, p.scheme, p.steps, p.probe, p.offset, starts, width, out, 1
    )  # fmt: skip
    assert to_numpy(out).tobytes() == expected.tobytes(), f"point: {name}"


if __name__ == "__main__":
    kernels_cuda.TILE = 256
    methods, formats = ("decomfl", "hiso", "hiso-momentum"), list(NumberFormat)
    for case in range(6):
        check(case, methods[case % 3], formats[(case // 2) % 3], list(Distribution)[case % 2])
    sys.stdout.write("ok")
