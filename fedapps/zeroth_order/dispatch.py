"""One entry for perturbing and updating, on whatever a machine has: Triton on CUDA, numba on the CPU, else NumPy.

All paths give the same bits, so the choice is only a matter of time. Parameters may be NumPy arrays (float32, float16,
or `uint16` patterns of bfloat16) or torch tensors on the CPU or on CUDA, and are updated where they lie. Elements are
numbered in their logical order: those of another memory format (`channels_last`) are copied to it and back.
"""

from __future__ import annotations

import hashlib
import importlib
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from fedapps.zeroth_order import backend_reference, rules
from fedapps.zeroth_order.directions import Distribution, check_range
from fedapps.zeroth_order.errors import DirectionError
from fedapps.zeroth_order.layout import Ranges
from fedapps.zeroth_order.number_formats import NumberFormat, format_of, narrow
from fedapps.zeroth_order.program import Program, compile_records
from fedapps.zeroth_order.scheme import HessianUpdate, LocalStep, Probe, Record, Scheme
from fedapps.zeroth_order.tensors import Tensor, aligned_empty, contiguous, device_of, flat_view, like, to_numpy

if TYPE_CHECKING:
    import torch

LOG = logging.getLogger("flwr")
"""Flower's logger."""

FUSED = ("decomfl", "hiso", "hiso-momentum")
"""Rules that the compiled paths know; any other runs on the reference."""


def perturb(
    theta: Tensor,
    state: Mapping[str, Tensor],
    scheme: Scheme,
    *,
    offset: int = 0,
    steps: Sequence[LocalStep] = (),
    probe: Probe | None = None,
    rows: NDArray[np.int64] | None = None,
    fixed: Ranges = (),
    scratch: Callable[[int, np.dtype[Any]], NDArray[Any]] = aligned_empty,
    threads: int | None = None,
) -> Tensor:
    """Materialise a tensor where a client stands: after its local steps, and displaced by a probe.

    Args:
        theta: A tensor at the round's start, any shape; not changed.
        state: The rule's state of that tensor, slot -> float32 of as many elements; only what the scale reads is needed.
        scheme: The run's scheme.
        offset: Place of the tensor's first element.
        steps: Local steps taken so far.
        probe: The probe, or None.
        rows: Only these rows of the first dimension, in this order; None for all.
        fixed: Elements that stay where they are.
        scratch: Gives `(elements, dtype)` -> memory for a result on the CPU; new memory costs page faults.
        threads: Of the CPU path; None for as many as torch uses, else all processors.

    Returns:
        A new tensor of the same kind and format, (len(rows) or the first dimension, *rest).

    Raises:
        DirectionError: Format, memory layout, rows or state do not fit.
    """
    flat, slots, place = _prepare(theta, state, offset)
    if rows is None:
        starts, width, shape = np.zeros(1, np.int64), _numel(flat), tuple(theta.shape)
    else:
        _check_rows(rows, theta.shape[0])
        width = _numel(flat) // theta.shape[0] if theta.shape[0] else 0
        starts, shape = np.ascontiguousarray(rows, np.int64) * width, (len(rows), *theta.shape[1:])
    if not steps and probe is None:
        whole = flat if rows is None else flat.reshape(theta.shape[0], -1)[rows].reshape(-1)
        return like(whole.copy() if isinstance(whole, np.ndarray) else whole.clone(), theta, shape)
    count = len(starts) * width
    out = scratch(count, flat.dtype) if isinstance(flat, np.ndarray) else flat.new_empty(count)
    run = _backend_for(scheme, place)
    run.displace(flat, slots, scheme, steps, probe, offset, starts, width, out, _threads(threads))
    _put_back(out, flat, starts, width, fixed)
    return like(out, theta, shape)


def apply_rounds(
    theta: Tensor,
    state: Mapping[str, Tensor],
    records: Sequence[Record],
    scheme: Scheme,
    *,
    offset: int = 0,
    fixed: Ranges = (),
    program: Program | None = None,
    threads: int | None = None,
) -> None:
    """Apply rounds of a journal to a tensor and its state, in place, in one pass over memory.

    Args:
        theta: A tensor, or a window of one.
        state: The rule's state of the same elements, slot -> float32.
        records: Rounds, in order.
        scheme: The run's scheme.
        offset: Place of the first element.
        fixed: Elements that stay where they are, with their state.
        program: `compile_records(records, scheme)`, to share it between tensors.
        threads: Of the CPU path; None for as many as torch uses, else all processors.

    Raises:
        DirectionError: Format, memory layout or state do not fit.
    """
    missing = [slot for slot in rules.rule_of(scheme).slots if slot not in state]
    if missing:
        got = f"{sorted(state)}"
        raise DirectionError("state", expected=f"slot '{missing[0]}'", got=got, do="start from the rule's init")
    flat, slots, place = _prepare(theta, state, offset)
    if not records or not _numel(flat):
        return
    run = _backend_for(scheme, place)
    program = program if program or run is backend_reference else compile_records(records, scheme)
    for start, stop in _between(fixed, _numel(flat)):
        window = {slot: values[start:stop] for slot, values in slots.items()}
        if run is backend_reference:
            backend_reference.apply(flat[start:stop], window, scheme, records, offset + start, _threads(threads))
        else:
            run.apply(flat[start:stop], window, program, offset + start, _threads(threads))
    if place == "copied" or not _is_contiguous(theta):
        _copy_back(theta, flat)
        for slot, values in slots.items():
            _copy_back(state[slot], values)


def kernel_name(device: str = "cpu") -> str:
    """Say which path serves a device, `cpu` or `cuda[:i]`: `triton`, `numba` or `numpy`."""
    return str(_backend(device.partition(":")[0]).NAME)


def kernel_checksum(device: str = "cpu") -> str:
    """Hash what the path of a device makes of a small fixed problem: all formats, distributions, rules and policies.

    Both ends of a run compare it before round 1: a kernel or version that draws other directions is refused. The SHA-256, in
    hexadecimal, is the same on every path and machine.
    """
    digest = hashlib.sha256()
    for number_format in NumberFormat:
        for distribution in Distribution:
            for method, policy in zip(FUSED, HessianUpdate, strict=True):
                scheme = Scheme(2**63 + 11, method, distribution, policy)
                for array in _small_problem(scheme, number_format, device):
                    digest.update(array.astype(array.dtype.newbyteorder("<")).tobytes())
    return digest.hexdigest()


def _small_problem(scheme: Scheme, number_format: NumberFormat, device: str) -> list[NDArray[Any]]:
    size, offset = 301, 2**36 + 5
    theta = _to_device(narrow(np.linspace(-2, 2, size, dtype=np.float32), number_format), device)
    state = {slot: _to_device(values, device) for slot, values in rules.rule_of(scheme).init(size).items()}
    scalars = ((0.75, -1.5), (-0.3125, 2.0))
    records = [Record(r, 2 * r, 0.01 / r, 1e-3, 0.1, 1e-6, scalars, 2, momentum=0.9) for r in (1, 2)]
    apply_rounds(theta, state, records, scheme, offset=offset)
    taken = [LocalStep(7, (0.5,), 0.01)]
    moved = perturb(theta, state, scheme, offset=offset, steps=taken, probe=Probe(8, 1, 1e-3))
    return [to_numpy(values) for values in (theta, moved, *state.values())]


def _to_device(array: NDArray[Any], device: str) -> Tensor:
    if device == "cpu":
        return array
    import torch  # only for a device of torch

    dtype = torch.bfloat16 if array.dtype == np.uint16 else torch.from_numpy(array[:0]).dtype
    return like(array, torch.empty(0, dtype=dtype, device=device), array.shape)


# --- choice of a path ----------------------------------------------------------------------------------------------


def _backend_for(scheme: Scheme, place: str) -> ModuleType:
    # By the rule's name, not the method's: a method of one's own may share a rule.
    return _backend("cpu" if place == "copied" else place) if rules.rule_of(scheme).name in FUSED else backend_reference


@cache
def _backend(device: str) -> ModuleType:
    chosen = _load_backend(device)
    LOG.info("zeroth-order kernels on %s: %s", device, chosen.NAME)
    return chosen


def _load_backend(device: str) -> ModuleType:
    try:
        if device == "cuda":
            return _imported("backend_triton")
        if sys.byteorder != "little":
            raise ImportError("for little-endian processors only")
        return _imported("backend_numba")
    except (ImportError, OSError) as error:  # Absent, or broken: of another NumPy, or without its shared library.
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    if device == "cuda":
        LOG.warning(
            "zeroth order: no triton (%s), so CUDA tensors are updated on the CPU; install the CUDA build of torch",
            reason,
        )
        return _backend("cpu")
    LOG.warning(
        "zeroth order: no numba (%s), so directions take NumPy and many times longer; install fedapps[fast]", reason
    )
    return backend_reference


def _imported(name: str) -> ModuleType:
    """Import a path when it is chosen."""
    return importlib.import_module(f"fedapps.zeroth_order.{name}")


def _threads(threads: int | None) -> int:
    if threads is not None:
        return threads
    torch = sys.modules.get("torch")
    return int(torch.get_num_threads()) if torch is not None else len(os.sched_getaffinity(0))


# --- checks and views ----------------------------------------------------------------------------------------------


def _prepare(theta: Tensor, state: Mapping[str, Tensor], offset: int) -> tuple[Any, dict[str, Any], str]:
    """Give flat views, and where they lie: on the device, or copied to the CPU because its path is missing."""
    device = device_of(theta)
    if device not in ("cpu", "cuda"):
        raise DirectionError("parameters", expected="device cpu or cuda", got=device, do="move the model")
    flat, slots = flat_view(contiguous(theta)), {slot: flat_view(values, slot) for slot, values in state.items()}
    check_range(offset, offset + _numel(flat))
    for slot, values in slots.items():
        if _numel(values) != _numel(flat) or str(values.dtype).removeprefix("torch.") != "float32":
            got = f"{_numel(values)} of {values.dtype}"
            expected = f"{_numel(flat)} elements of float32"
            raise DirectionError(f"state '{slot}'", expected=expected, got=got, do="start from the rule's init")
    if device == "cuda" and _backend(device).NAME != "triton":
        return to_numpy(flat), {slot: to_numpy(values) for slot, values in slots.items()}, "copied"
    if device == "cpu":
        format_of(flat)  # type: ignore[arg-type]
    return flat, slots, device


def _numel(flat: Any) -> int:
    return int(flat.size if isinstance(flat, np.ndarray) else flat.numel())


def _is_contiguous(tensor: Tensor) -> bool:
    return bool(tensor.flags.c_contiguous) if isinstance(tensor, np.ndarray) else tensor.is_contiguous()


def _between(fixed: Ranges, size: int) -> Iterator[tuple[int, int]]:
    """List the ranges of elements that are not fixed."""
    edges = [0, *(edge for one in fixed for edge in one), size]
    return ((start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True) if start < stop)


def _put_back(out: Any, flat: Any, starts: NDArray[np.int64], width: int, fixed: Ranges) -> None:
    """Give the fixed elements among displaced windows of `width` elements, end to end, their own values."""
    for start, stop in fixed:
        for place in np.nonzero((starts < stop) & (starts + width > start))[0].tolist():
            first, last = max(start, int(starts[place])), min(stop, int(starts[place]) + width)
            there = place * width + first - int(starts[place])
            out[there : there + last - first] = flat[first:last]


def _copy_back(target: Tensor, values: Any) -> None:
    if isinstance(target, np.ndarray):
        target[...] = values.reshape(target.shape)
        return
    target.detach().copy_(cast("torch.Tensor", like(values, target, tuple(target.shape))))


def _check_rows(rows: NDArray[np.int64], count: int) -> None:
    if len(rows) and not 0 <= int(np.min(rows)) <= int(np.max(rows)) < count:
        raise DirectionError("rows", expected=f"0 to {count - 1}", got=f"{np.min(rows)} to {np.max(rows)}")
