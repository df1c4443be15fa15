"""From the clients' scalars to the round's `G`: mean, median, trimmed mean, with an optional clip.

All arithmetic is float64 in the order of partitions, rounded once to float32, so the result does not depend on arrival.

| symbol | identifier | shape |
|---|---|---|
| `g_i[k,p]` | `replies[i]` | (tau, P) |
| `G[k,p]` | result | (tau, P) |

References:
    DeComFL, arXiv 2405.15861 (mean). Yin et al., "Byzantine-robust distributed learning", ICML 2018,
    arXiv 1803.01498 (median, trimmed mean).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from enum import StrEnum
from functools import cache

import numpy as np
from numpy.typing import NDArray

from fedapps.zeroth_order.errors import ScalarError
from fedapps.zeroth_order.scheme import Scalars, check_scalars

LOG = logging.getLogger("flwr")
"""Flower's logger."""


class Aggregation(StrEnum):
    """How the scalars of several clients become one."""

    MEAN = "mean"
    """The mean, uniform or by weights."""

    MEDIAN = "median"
    """The median of each entry; weights have no part in it."""

    TRIMMED_MEAN = "trimmed-mean"
    """The mean of each entry without the largest and smallest share, one value at least; weights have no part in it."""


def aggregate_scalars(
    replies: Mapping[int, Scalars],
    *,
    rule: Aggregation = Aggregation.MEAN,
    weights: Mapping[int, float] | None = None,
    trim: float = 0.1,
    clip: float | None = None,
) -> Scalars:
    """Aggregate the scalars of a round.

    Args:
        replies: Partition -> scalars, all of one shape (tau, P).
        rule: Mean, median or trimmed mean.
        weights: Partition -> weight for the mean; None is uniform.
        trim: Share cut off at each end by the trimmed mean, in [0, 0.5): from three replies on at least one value, unless
            it is 0. Of fewer replies the trimmed mean is their mean.
        clip: Upper bound of each client's Euclidean norm over all its scalars, or None.

    Returns:
        `G`, float32 values, (tau, P).

    Raises:
        ScalarError: There is no reply, a reply is not finite or of another shape, or an option is out of range.
    """
    if not replies:
        raise ScalarError("round", expected="a reply", got="none", do="refuse the round")
    order = sorted(replies)
    shape = (len(replies[order[0]]), len(replies[order[0]][0]) if replies[order[0]] else 0)
    for partition in order:
        check_scalars(replies[partition], where=f"partition {partition}", shape=shape)
    stacked = np.array([replies[partition] for partition in order], np.float64)  # (clients, tau, P)
    if clip is not None:
        stacked = clip_norms(stacked, clip)
    if rule is Aggregation.MEDIAN:
        result = np.median(stacked, axis=0)
    elif rule is Aggregation.TRIMMED_MEAN:
        result = _trimmed_mean(stacked, trim)
    else:
        result = _weighted_mean(stacked, [1.0 if weights is None else weights[partition] for partition in order])
    return tuple(tuple(float(np.float32(value)) for value in row) for row in result)


def clip_norms(stacked: NDArray[np.float64], bound: float) -> NDArray[np.float64]:
    """Scale down each client's scalars, of (clients, tau, P), whose norm exceeds a bound: `g_i min(1, bound / |g_i|)`.

    Raises:
        ScalarError: The bound is not a finite number above 0.
    """
    if not (math.isfinite(bound) and bound > 0):
        raise ScalarError("clip", expected="a finite number above 0", got=repr(bound))
    norms = np.sqrt((stacked**2).sum(axis=(1, 2), keepdims=True))
    factors: NDArray[np.float64] = np.minimum(1.0, bound / np.maximum(norms, np.finfo(np.float64).tiny))
    return stacked * factors


def _weighted_mean(stacked: NDArray[np.float64], weights: list[float]) -> NDArray[np.float64]:
    total = math.fsum(weights)
    if not total > 0 or any(not math.isfinite(weight) or weight < 0 for weight in weights):
        raise ScalarError("weights", expected="numbers with a sum above 0", got=f"{weights}", do="refuse the round")
    # One client after another: a library's sum may add in another order on another machine.
    result = np.zeros(stacked.shape[1:])
    for weight, scalars in zip(weights, stacked, strict=True):
        result = result + weight * scalars
    return result / total


def _trimmed_mean(stacked: NDArray[np.float64], trim: float) -> NDArray[np.float64]:
    if not 0 <= trim < 0.5:
        raise ScalarError("trim", expected="a share in [0, 0.5)", got=repr(trim))
    cut = int(trim * len(stacked))
    if trim > 0 and len(stacked) < 3:
        _say_untrimmed()
    elif trim > 0:
        cut = max(cut, 1)  # With nothing cut off it would be the mean, which one client alone can move at will.
    kept = np.sort(stacked, axis=0)[cut : len(stacked) - cut]
    return _weighted_mean(kept, [1.0] * len(kept))


@cache  # one line in the log of a process
def _say_untrimmed() -> None:
    LOG.warning("trimmed mean: of fewer than 3 clients' scalars none can be cut off, so their mean is taken")
