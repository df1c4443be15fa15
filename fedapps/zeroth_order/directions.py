"""The direction `u(seed, step, probe, element)`: a pure function that nobody ever sends.

This is the readable reference, in NumPy. The compiled paths give the same bits.

| symbol | identifier | meaning |
|---|---|---|
| `e` | `start..stop` | place of an element when all trainable tensors are laid end to end |
| `b` | `block` | block of eight (Gaussian) or 128 (Rademacher) elements |
| `s` | `step` | global step, below 2^32 |
| `p` | `probe` | probe within the step, below 2^32 |

References:
    DeComFL, arXiv 2405.15861 (a direction is named by its seed); HiSo, arXiv 2506.02370, Algorithm 1.
"""

from __future__ import annotations

from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from fedapps.zeroth_order.errors import DirectionError
from fedapps.zeroth_order.gaussian_table import SIGNED
from fedapps.zeroth_order.philox import philox4x32

STEP_LIMIT = 2**32
"""Global steps and probes lie below this."""

SEED_LIMIT = 2**64
"""Seeds lie below this."""


class Distribution(StrEnum):
    """How a direction's elements are distributed; both have mean 0 and variance 1."""

    GAUSSIAN = "gaussian"
    """A Gaussian of 65536 values (DeComFL, HiSo)."""

    RADEMACHER = "rademacher"
    """+1 or -1 with equal chance (Spall's simultaneous perturbation)."""

    @property
    def block(self) -> int:
        """Number of elements that one block of the generator serves."""
        return 8 if self is Distribution.GAUSSIAN else 128


def direction(
    seed: int, step: int, probe: int, start: int, stop: int, distribution: Distribution = Distribution.GAUSSIAN
) -> NDArray[np.float32]:
    """Draw elements `start..stop-1` of a direction, without generating what lies before.

    Args:
        seed: The run's seed, 0 to 2^64 - 1.
        step: Global step, 0 to 2^32 - 1.
        probe: Probe within the step, 0 to 2^32 - 1.
        start: First element.
        stop: One past the last element.
        distribution: Gaussian or Rademacher.

    Returns:
        The elements, (stop - start,).

    Raises:
        DirectionError: Seed, step, probe or range lie outside the definition.
    """
    check_seed(seed)
    check_below("step", step, STEP_LIMIT, "start a new run: a run has 2^32 steps")
    check_below("probe", probe, STEP_LIMIT, "use fewer probes a step")
    check_range(start, stop)
    first = start // distribution.block
    last = -(-stop // distribution.block)
    block = np.arange(first, last, dtype=np.uint64)
    words = philox4x32((block & np.uint64(0xFFFFFFFF), block >> np.uint64(32), step, probe), seed)
    lay_out = gaussian_lanes if distribution is Distribution.GAUSSIAN else rademacher_lanes
    skipped = start - first * distribution.block
    return lay_out(np.stack(words, axis=1))[skipped : skipped + stop - start]


def gaussian_lanes(words: NDArray[np.uint32]) -> NDArray[np.float32]:
    """Turn words (blocks, 4) into Gaussian numbers (8 blocks,): lanes are (low, high) 16 bits of a word, bit 15 is the sign."""
    lanes = np.stack([words & np.uint32(0xFFFF), words >> np.uint32(16)], axis=-1)  # (blocks, 4, 2)
    return SIGNED[lanes.reshape(-1)]


def rademacher_lanes(words: NDArray[np.uint32]) -> NDArray[np.float32]:
    """Turn words (blocks, 4) into signs (128 blocks,): element `e` takes bit `e % 32` of word `(e % 128) // 32`; 1 means +1."""
    bits = (words[:, :, None] >> np.arange(32, dtype=np.uint32)) & np.uint32(1)  # (blocks, 4, 32)
    return (bits.astype(np.float32) * np.float32(2) - np.float32(1)).reshape(-1)


def check_seed(seed: int) -> None:
    """Refuse a seed that is no integer from 0 to 2^64 - 1."""
    check_below("seed", seed, SEED_LIMIT, "choose a seed of 64 bits")


def check_below(name: str, value: int, limit: int, do: str) -> None:
    """Refuse what is no integer in `[0, limit)`, for a `limit` that is a power of 2."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not 0 <= value < limit:
        power = limit.bit_length() - 1
        raise DirectionError(name, expected=f"an integer from 0 to 2^{power} - 1", got=repr(value), do=do)


def check_range(start: int, stop: int) -> None:
    """Refuse elements `start..stop-1` where `start` is negative, or `stop` lies before it or beyond 2^63."""
    if not 0 <= start <= stop < 2**63:
        raise DirectionError("elements", expected="0 <= start <= stop < 2^63", got=f"{start} to {stop}")
