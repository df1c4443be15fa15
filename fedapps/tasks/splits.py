"""Seeded draws shared by the tasks: one random stream a purpose, and holding examples out."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.intp]
"""Positions of examples, ascending."""


class Purpose(IntEnum):
    """What a random stream is for; equal seeds give unrelated draws for different purposes."""

    SERVER_VALIDATION = 1
    """Cutting the server's validation examples from the training pool."""
    PARTITION = 2
    """Splitting the training pool among the clients."""
    CLIENT_HOLD_OUT = 3
    """Cutting a client's own test and validation examples from its share."""
    TEST_SET = 4
    """Cutting the test set from data that comes without one."""
    SUBSET = 5
    """Drawing the training pool from more data than is asked for."""


def stream(purpose: Purpose, seed: int, *identity: int) -> np.random.Generator:
    """Open the random stream of a purpose, without touching any global generator: the same for the same arguments.

    ``identity`` are further non-negative integers that set streams apart, such as a partition id.
    """
    return np.random.default_rng([int(purpose), seed, *identity])


def hold_out(strata: NDArray[Any], fraction: float, generator: np.random.Generator) -> tuple[Indices, Indices]:
    """Hold a share of the examples out, stratified where that makes sense.

    Of ``n`` examples ``round(fraction * n)`` are held out, but never all. If the strata have two examples or more on
    average, each gives its share (largest remainders, ties by lot) and keeps at least one, so that a few examples less
    may be held out. Otherwise, as for real-valued targets, the draw ignores them.

    Args:
        strata: Labels or other values ``(n,)`` by which to stratify; an array of more dimensions only tells ``n``.
        fraction: Share to hold out, in [0, 1).
        generator: Source of the draw.

    Returns:
        Indices kept and indices held out, each ascending; together every index once.
    """
    n = len(strata)
    num_held = min(round(fraction * n), max(n - 1, 0))
    order = generator.permutation(n)
    held = order[:num_held]
    if num_held and strata.ndim == 1:
        _, labels, sizes = np.unique(strata, return_inverse=True, return_counts=True)
        if 2 * len(sizes) <= n:
            quotas = _quotas(sizes, num_held, generator)
            held = np.concatenate([order[labels[order] == c][:quota] for c, quota in enumerate(quotas)])
    mask = np.zeros(n, dtype=bool)
    mask[held] = True
    return np.flatnonzero(~mask), np.flatnonzero(mask)


def _quotas(sizes: NDArray[np.intp], total: int, generator: np.random.Generator) -> NDArray[np.intp]:
    """Share ``total`` out in proportion to ``sizes``, but leave at least one of each."""
    exact = total * sizes / sizes.sum()
    quotas = np.floor(exact).astype(np.intp)
    by_remainder = np.lexsort((generator.random(len(sizes)), quotas - exact))
    quotas[by_remainder[: total - quotas.sum()]] += 1
    capped: NDArray[np.intp] = np.minimum(quotas, sizes - 1)
    return capped
