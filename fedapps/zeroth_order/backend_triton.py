"""The CUDA path: launches of the Triton kernels on flat torch tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from fedapps.zeroth_order import kernels_cuda
from fedapps.zeroth_order.directions import Distribution
from fedapps.zeroth_order.gaussian_table import SIGNED
from fedapps.zeroth_order.program import Program, compile_steps, probe_ints, signed_mu
from fedapps.zeroth_order.rules import rule_of
from fedapps.zeroth_order.scheme import LocalStep, Probe, Scheme

NAME = "triton"

Flat: TypeAlias = torch.Tensor

_FORMAT_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_RULE_CODES = {"decomfl": 0, "hiso": 1, "hiso-momentum": 2}


def displace(
    theta: Flat,
    state: Mapping[str, Flat],
    scheme: Scheme,
    steps: Sequence[LocalStep],
    probe: Probe | None,
    offset: int,
    starts: NDArray[np.int64],
    width: int,
    out: Flat,
    _threads: int,
) -> None:
    """Write where a client stands: `backend_reference.displace` in a kernel."""
    if out.numel() == 0:
        return
    scaled = _RULE_CODES[rule_of(scheme).name] != 0 and "H" in state
    program, send = compile_steps(steps, scheme), _sender(theta)
    with _on(theta):
        kernels_cuda.displace[(_tiles(width), len(starts))](
            _bits(theta),
            _bits(out),
            state["H"] if scaled else send(np.zeros(1, np.float32)),
            send(starts),
            send(np.array([offset, width, len(steps)], np.int64)),
            *_numbers(program, theta),
            send(np.array(probe_ints(probe), np.int64)),
            send(np.array([signed_mu(probe)], np.float32)),
            FORMAT=_FORMAT_CODES[theta.dtype],
            SCALED=scaled,
            GAUSSIAN=scheme.distribution is Distribution.GAUSSIAN,
            PROBED=probe is not None,
            TILE=kernels_cuda.TILE,
            **kernels_cuda.OPTIONS,
        )


def apply(theta: Flat, state: Mapping[str, Flat], program: Program, offset: int, _threads: int) -> None:
    """Apply the steps of many rounds in place, as `backend_reference.apply` does, in one pass over memory."""
    if theta.numel() == 0:
        return
    send = _sender(theta)
    unused = send(np.zeros(1, np.float32))
    with _on(theta):
        kernels_cuda.apply[(_tiles(theta.numel()),)](
            _bits(theta),
            state.get("H", unused),
            state.get("m", unused),
            send(np.array([offset, theta.numel(), len(program.ints)], np.int64)),
            *_numbers(program, theta),
            FORMAT=_FORMAT_CODES[theta.dtype],
            RULE=_RULE_CODES[rule_of(program.scheme).name],
            GAUSSIAN=program.scheme.distribution is Distribution.GAUSSIAN,
            TILE=kernels_cuda.TILE,
            **kernels_cuda.OPTIONS,
        )


def _tiles(width: int) -> int:
    # A window may start within a block of 128 elements, so it can reach into one more tile.
    return -(-(width + 127) // kernels_cuda.TILE)


def _numbers(program: Program, theta: Flat) -> tuple[Flat, ...]:
    send = _sender(theta)
    return (
        send(program.keys.astype(np.uint32).view(np.int32).reshape(-1)),
        _table(str(theta.device)),
        send(program.ints.reshape(-1)),
        send(program.floats.reshape(-1)),
        send(program.coefficients),
    )


@lru_cache(maxsize=8)
def _table(device: str) -> Flat:
    return torch.from_numpy(SIGNED.copy()).to(device)


def _bits(theta: Flat) -> Flat:
    return theta if theta.dtype is torch.float32 else theta.view(torch.int16)


def _sender(theta: Flat) -> Any:
    def send(array: NDArray[Any]) -> Flat:
        # Triton takes no pointer to nothing: an empty array travels as one element that is never read.
        filled = array if array.size else np.zeros(1, array.dtype)
        return torch.from_numpy(np.ascontiguousarray(filled)).to(theta.device)

    return send


def _on(theta: Flat) -> Any:
    return torch.cuda.device(theta.device) if theta.is_cuda else nullcontext()
