"""How the trainable tensors of a model are laid end to end, and the fingerprint of a state.

Element `e` of a run belongs to the tensor in whose range it lies; the order is that of `named_parameters()`, tied
tensors once, frozen ones left out. Elements that no gradient could move (the padding row of an embedding, or what a task
says) are *fixed*: they have their place and their directions, but no probe and no update moves them, on any end.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np

from fedapps.zeroth_order.errors import DirectionError
from fedapps.zeroth_order.number_formats import NumberFormat
from fedapps.zeroth_order.tensors import Tensor, contiguous, flat_view, to_numpy

Ranges: TypeAlias = tuple[tuple[int, int], ...]
"""First element and the one behind the last, of a flattened tensor; rising, none empty, with elements between."""

MOST_RANGES = 65_536
"""Ranges of fixed elements that a tensor may have: the header of the journal lists them."""

_CHUNK = 1 << 20  # elements hashed at a time


@dataclass(frozen=True)
class TensorSpec:
    """One trainable tensor."""

    name: str  # its name in `named_parameters()`
    shape: tuple[int, ...]
    number_format: NumberFormat = NumberFormat.FLOAT32  # how its numbers are stored
    fixed: Ranges = ()  # elements that nothing moves

    def __post_init__(self) -> None:
        edges = [-1, *(edge for one in self.fixed for edge in one)]
        rising = all(a < b for a, b in pairwise(edges)) and all(len(one) == 2 for one in self.fixed)
        if not rising or edges[-1] > self.size or len(self.fixed) > MOST_RANGES:
            raise DirectionError(
                f"tensor '{self.name}', fixed elements",
                expected=f"at most {MOST_RANGES} rising ranges within its {self.size} elements",
                got=f"{len(self.fixed)}, such as {self.fixed[:3]}",
                do="fix whole rows",
            )

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Layout:
    """The trainable tensors in the order in which they are laid end to end."""

    tensors: tuple[TensorSpec, ...]  # at least one, with different names

    def __post_init__(self) -> None:
        if not self.tensors or not self.size:
            raise DirectionError(
                "model", expected="a trainable parameter", got="none", do="leave some parameters unfrozen"
            )
        if len({tensor.name for tensor in self.tensors}) != len(self.tensors):
            raise DirectionError("model", expected="different names", got="a name twice", do="list tied tensors once")

    @property
    def size(self) -> int:
        """Number of elements of all tensors, `d`."""
        return sum(tensor.size for tensor in self.tensors)

    @cached_property
    def offsets(self) -> dict[str, int]:
        """Name -> place of the tensor's first element."""
        offsets, place = {}, 0
        for tensor in self.tensors:
            offsets[tensor.name] = place
            place += tensor.size
        return offsets

    @property
    def fixed(self) -> dict[str, Ranges]:
        """Name -> fixed elements, of the tensors that have some."""
        return {tensor.name: tensor.fixed for tensor in self.tensors if tensor.fixed}

    def difference(self, other: Layout) -> str | None:
        """Say in a phrase where another layout differs first; None if they are equal."""
        for mine, theirs in zip(self.tensors, other.tensors, strict=False):
            if mine != theirs:
                return f"{_describe(theirs)} in the place of {_describe(mine)}"
        if len(self.tensors) != len(other.tensors):
            return f"{len(other.tensors)} tensors instead of {len(self.tensors)}"
        return None


def layout_of(tensors: Mapping[str, Tensor], fixed: Mapping[str, Ranges] | None = None) -> Layout:
    """Describe tensors, name -> NumPy array (bfloat16 as `uint16`) or torch tensor, in their order; of some, what is fixed.

    Raises:
        DirectionError: There is none, or one is not float32, bfloat16 or float16.
    """
    return Layout(
        tuple(
            TensorSpec(name, tuple(t.shape), _format(name, t), (fixed or {}).get(name, ()))
            for name, t in tensors.items()
        )
    )


def fingerprint(
    layout: Layout, theta: Mapping[str, Tensor], state: Mapping[str, Mapping[str, Tensor]] | None = None
) -> str:
    """Name a state: SHA-256 over the little-endian bytes of all tensors of `theta`, then of `H`, then of other slots.

    `H` is part of every state: for a method without it, it is 1 everywhere and is hashed as such, so HiSo with `nu = 0`
    and DeComFL have the same fingerprint.

    Args:
        layout: The order of the tensors.
        theta: Name -> parameters.
        state: Slot -> name -> float32; None for the state at the start of a run.
    """
    slots = state or {}
    digest = hashlib.sha256()
    for tensor in layout.tensors:
        _update(digest, theta[tensor.name])
    for slot in ("H", *sorted(set(slots) - {"H"})):
        for tensor in layout.tensors:
            if slot in slots:
                _update(digest, slots[slot][tensor.name])
            else:
                for count in _chunks(tensor.size):
                    digest.update(np.ones(count, "<f4").data)
    return digest.hexdigest()


def _update(digest: Any, tensor: Tensor) -> None:
    flat = flat_view(contiguous(tensor))
    start = 0
    for count in _chunks(len(flat)):
        part = to_numpy(flat[start : start + count])
        digest.update(np.ascontiguousarray(part.astype(part.dtype.newbyteorder("<"), copy=False)).data)
        start += count


def _chunks(size: int) -> Iterator[int]:
    return (min(_CHUNK, size - start) for start in range(0, size, _CHUNK))


def _format(name: str, tensor: Tensor) -> NumberFormat:
    dtype = str(tensor.dtype).removeprefix("torch.")
    formats = {"uint16": NumberFormat.BFLOAT16} if isinstance(tensor, np.ndarray) else {}
    formats |= {f.value: f for f in NumberFormat}
    if dtype not in formats:
        expected = "float32, bfloat16 or float16"
        raise DirectionError(f"tensor '{name}'", expected=expected, got=dtype, do="convert the model")
    return formats[dtype]


def _describe(tensor: TensorSpec) -> str:
    count = sum(stop - start for start, stop in tensor.fixed)
    fixed = f" with {count} fixed elements from {tensor.fixed[0][0]} on" if tensor.fixed else ""
    return f"'{tensor.name}' {list(tensor.shape)} {tensor.number_format}{fixed}"
