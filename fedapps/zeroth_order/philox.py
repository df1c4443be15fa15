"""Philox4x32-10, the counter-based generator below every direction.

A block of four 32-bit words is a pure function of a 128-bit counter and a 64-bit key, so any block can be drawn without
those before it, on any machine and in any order.

References:
    Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

Words: TypeAlias = tuple[NDArray[np.uint32], NDArray[np.uint32], NDArray[np.uint32], NDArray[np.uint32]]
"""The four words of a block, each an array over blocks."""

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)

_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def split_word(value: int) -> tuple[int, int]:
    """Split an integer, 0 to 2^64 - 1, into its (low, high) 32-bit words."""
    return value & 0xFFFFFFFF, value >> 32


def round_keys(seed: int) -> NDArray[np.uint64]:
    """List the keys of the ten rounds, (10, 2): 32-bit values in 64-bit integers, that of the seed's low word first.

    Each word grows by its Weyl constant a round, modulo 2^32.
    """
    low, high = split_word(seed)
    keys = [((low + r * WEYL[0]) & 0xFFFFFFFF, (high + r * WEYL[1]) & 0xFFFFFFFF) for r in range(ROUNDS)]
    return np.array(keys, np.uint64)


def philox4x32(counter: tuple[ArrayLike, ArrayLike, ArrayLike, ArrayLike], seed: int) -> Words:
    """Draw blocks of Philox4x32-10.

    One round maps `(c0, c1, c2, c3)` to `(hi(M1 c2) ^ c1 ^ k0, lo(M1 c2), hi(M0 c0) ^ c3 ^ k1, lo(M0 c0))`.

    Args:
        counter: The four 32-bit counter words, broadcast against each other, shape (blocks,).
        seed: The key, 0 to 2^64 - 1.
    """
    c0, c1, c2, c3 = np.broadcast_arrays(*(np.asarray(word, np.uint64) for word in counter))
    for k0, k1 in round_keys(seed):
        p0 = np.uint64(MULTIPLIERS[0]) * c0
        p1 = np.uint64(MULTIPLIERS[1]) * c2
        c0, c1, c2, c3 = (p1 >> _HALF) ^ c1 ^ k0, p1 & _LOW, (p0 >> _HALF) ^ c3 ^ k1, p0 & _LOW
    return c0.astype(np.uint32), c1.astype(np.uint32), c2.astype(np.uint32), c3.astype(np.uint32)
