from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="the CUDA path needs torch")
pytest.importorskip("triton", reason="this build of torch has no triton; the CUDA build does")

import torch

from fedapps.zeroth_order import backend_reference
from fedapps.zeroth_order.directions import Distribution
from fedapps.zeroth_order.dispatch import apply_rounds, kernel_checksum, kernel_name, perturb
from fedapps.zeroth_order.number_formats import NumberFormat
from fedapps.zeroth_order.tensors import like, to_numpy


@pytest.mark.slow
def test_interpreted_kernels_have_the_bits_of_the_reference() -> None:
    """The interpreter is switched on before the kernels are imported, so in a process of its own."""
    script = Path(__file__).parent / "interpret_kernels.py"
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    ran = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    combinations = product(("decomfl", "hiso", "hiso-momentum"), NumberFormat, Distribution)
    assert ran.stdout.splitlines() == [", ".join(combination) for combination in combinations]


@pytest.mark.gpu
def test_the_gpu_draws_what_the_cpu_draws() -> None:
    assert kernel_name("cuda") == "triton"
    assert kernel_checksum("cuda") == kernel_checksum("cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["decomfl", "hiso", "hiso-momentum"])
@pytest.mark.parametrize("number_format", list(NumberFormat))
@pytest.mark.parametrize("distribution", list(Distribution))
def test_gpu_rounds_and_points_have_the_bits_of_the_reference(
    method: str, number_format: NumberFormat, distribution: Distribution, make_problem: Callable[..., Any]
) -> None:
    for case in range(4):
        p = make_problem(case, method=method, number_format=number_format, distribution=distribution)
        dtype = getattr(torch, number_format)
        theta = like(p.theta, torch.empty(0, dtype=dtype, device="cuda"), p.theta.shape)
        state = {slot: torch.from_numpy(values).cuda() for slot, values in p.state.items()}
        point = perturb(theta, state, p.scheme, offset=p.offset, steps=p.steps, probe=p.probe)
        expected = np.empty_like(p.theta)
        whole = (p.offset, np.zeros(1, np.int64), p.theta.size, expected, 1)
        backend_reference.displace(p.theta, p.state, p.scheme, p.steps, p.probe, *whole)
        assert to_numpy(point).tobytes() == expected.tobytes()
        apply_rounds(theta, state, p.records, p.scheme, offset=p.offset)
        backend_reference.apply(p.theta, p.state, p.scheme, p.records, p.offset, 1)
        assert to_numpy(theta).tobytes() == p.theta.tobytes()
        for slot, values in p.state.items():
            assert to_numpy(state[slot]).tobytes() == values.tobytes()
