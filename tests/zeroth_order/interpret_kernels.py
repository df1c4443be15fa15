"""Run by `test_backend_triton.py` in a process of its own, with TRITON_INTERPRET=1: kernels against the reference."""

from __future__ import annotations

import sys
from itertools import product
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))

from conftest import problem

from fedapps.zeroth_order import backend_reference, backend_triton, kernels_cuda
from fedapps.zeroth_order.directions import Distribution
from fedapps.zeroth_order.dispatch import FUSED
from fedapps.zeroth_order.number_formats import NumberFormat
from fedapps.zeroth_order.program import compile_records
from fedapps.zeroth_order.tensors import like, to_numpy


def to_torch(array: np.ndarray) -> torch.Tensor:
    dtype = torch.bfloat16 if array.dtype == np.uint16 else torch.from_numpy(array[:0]).dtype
    return like(array.copy(), torch.empty(0, dtype=dtype), array.shape)


def check(case: int, method: str, number_format: NumberFormat, distribution: Distribution) -> None:
    size = 150 + 101 * (case % 6)
    p = problem(case, method=method, number_format=number_format, distribution=distribution, size=size)
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
    slots = {slot: to_torch(values) for slot, values in p.state.items()}
    for probe in (p.probe, None) if p.steps else (p.probe,):
        expected = np.zeros(3 * width, p.theta.dtype)
        out, where = to_torch(expected), (p.offset, starts, width)
        backend_reference.displace(p.theta, p.state, p.scheme, p.steps, probe, *where, expected, 1)
        backend_triton.displace(to_torch(p.theta), slots, p.scheme, p.steps, probe, *where, out, 1)
        assert to_numpy(out).tobytes() == expected.tobytes(), f"point, probe {probe}: {name}"
    sys.stdout.write(f"{name}\n")


if __name__ == "__main__":
    kernels_cuda.TILE = 256
    # In this order every rule meets each policy for H, with each number of local steps.
    for case, combination in enumerate(product(FUSED, NumberFormat, Distribution)):
        check(case, *combination)
