"""The NumPy path: the reference arithmetic in tiles, for any rule. Slow; the measure of the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from fedapps.zeroth_order import rules
from fedapps.zeroth_order.number_formats import F32, Stored
from fedapps.zeroth_order.scheme import LocalStep, Probe, Record, Scheme

NAME = "numpy"

_TILE = 1 << 18  # elements; bounds the temporaries


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
    _threads: int,
) -> None:
    """Write where a client stands, for windows of a tensor, end to end.

    Args:
        theta: The tensor's elements, (n,).
        state: The rule's state of the same elements.
        scheme: The run's scheme.
        steps: Local steps taken so far.
        probe: The probe, or None.
        offset: Place of element 0.
        starts: First elements of the windows.
        width: Elements a window.
        out: Receives the windows, (len(starts) * width,).
        _threads: Unused here.
    """
    for row, start in enumerate(starts.tolist()):
        for begin in range(start, start + width, _TILE):
            window = slice(begin, min(begin + _TILE, start + width))
            there = rules.displace(
                theta[window], _cut(state, window), scheme, offset=offset + begin, steps=steps, probe=probe
            )
            target = row * width + begin - start
            out[target : target + there.size] = there


def apply(
    theta: Stored, state: Mapping[str, F32], scheme: Scheme, records: Sequence[Record], offset: int, _threads: int
) -> None:
    """Apply rounds in place, all of them to a tile before the next.

    Args:
        theta: The tensor's elements, (n,).
        state: The rule's state of the same elements.
        scheme: The run's scheme.
        records: Rounds, in order.
        offset: Place of element 0.
        _threads: Unused here.
    """
    for begin in range(0, theta.size, _TILE):
        window = slice(begin, min(begin + _TILE, theta.size))
        values = theta[window]
        slots: Mapping[str, F32] = _cut(state, window)
        for record in records:
            values, slots = rules.apply_round(values, slots, record, scheme, offset=offset + begin)
        theta[window] = values
        for slot, changed in slots.items():
            state[slot][window] = changed


def _cut(state: Mapping[str, F32], window: slice) -> dict[str, F32]:
    return {slot: values[window] for slot, values in state.items()}
