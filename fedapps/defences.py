r"""What bounds one client's say in a round: the size of an update, and defences of averages against clients that lie.

A reply is named tensors in groups: ``update`` (trainable tensors and buffers) and each further record, such as FedPM's
``products`` (:math:`M_i`) and ``curvature`` (:math:`P_i`). Of ``n`` replies :math:`x_i` to a model :math:`x`, of which at most
``f`` are assumed to be lies:

===============  ====================================================================================================
clip             :math:`x_i \to x + \Delta_i \min(1, c\, m / \lVert\Delta_i\rVert)`, :math:`\Delta_i = x_i - x`, ``m`` the
                 median of all :math:`\lVert\Delta_i\rVert`: norm clipping, Sun et al. 2019, arXiv 1911.07963
median           each number the median of the clients': Yin et al., ICML 2018, arXiv 1803.01498, Definition 1
trimmed-mean     each number the mean of the clients' without the ``f`` largest and the ``f`` smallest: Definition 2 there
multi-krum       the ``n - f`` replies of the least :math:`s_i = \sum_{j \to i} d_{ij}`, over the ``n - f - 2`` others
                 nearest to ``i``: Blanchard et al., NeurIPS 2017, arXiv 1703.02757
===============  ====================================================================================================

Departures. Clip: each group by its own norm, and a multiple of the median in place of a fixed bound, which no one knows in
advance. Multi-Krum: :math:`d_{ij} = \sum_g \lVert x_{ig} - x_{jg} \rVert^2 / m_g` with ``m_g`` the median of the
group's squared distances, so that no group outweighs another; with one group the choice is the paper's. Flower's own FedMedian,
FedTrimmedAvg and MultiKrum know one record, the model; the results here are theirs for it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedapps.errors import SettingsError

Arrays = Mapping[str, NDArray[Any]]
"""Name -> array."""

Groups = Mapping[str, Arrays]
"""Group -> tensors of a reply."""

CHUNK = 1 << 20
"""Numbers of all clients that are sorted at once."""


class Defence(StrEnum):
    """How the replies of a round are made safe before they are averaged."""

    NONE = "none"
    """Not at all."""
    CLIP = "clip"
    """Updates are scaled down to a multiple of their median norm."""
    MEDIAN = "median"
    """The median of each number; weights have no part in it."""
    TRIMMED_MEAN = "trimmed-mean"
    """The mean of each number without the extremes; weights have no part in it."""
    MULTI_KRUM = "multi-krum"
    """The weighted mean of the replies that are nearest to each other."""


def refuse_changed_replies(defence: Defence, method: str, *, expected: str = "multi-krum or none") -> None:
    """Refuse a defence that changes replies, where the server's state must hold what the clients believe that it does.

    Raises:
        SettingsError: It is neither none nor multi-krum, which folds a reply as it is or not at all.
    """
    if defence not in (Defence.NONE, Defence.MULTI_KRUM):
        raise SettingsError(
            f"setting 'defence' of method '{method}'",
            expected=f"{expected}: the sum must hold what the clients believe it does",
            got=defence.value,
            do="choose one of the two",
        )


def update_norm(arrays: Arrays, origin: Arrays) -> float:
    r"""Give the Euclidean norm of an update, :math:`\lVert x_i - x \rVert`, in float64.

    Args:
        arrays: ``x_i``; integers and bools do not count.
        origin: ``x``; 0 for tensors that it lacks.

    Returns:
        The norm; infinity where float64 does not hold its square.
    """
    total = 0.0
    with np.errstate(over="ignore"):
        for name, value in arrays.items():
            if _is_float(value):
                change = np.subtract(value, origin.get(name, 0.0), dtype=np.float64).ravel()
                total += float(change @ change)
    return math.sqrt(total)


def num_liars(share: float, n: int) -> int:
    """Give ``f = ceil(share n)``, at most ``(n - 1) / 2``: no defence holds against half of the clients.

    Args:
        share: Share of the clients that are assumed to lie.
        n: Number of replies.
    """
    return min(math.ceil(share * n - 1e-9), (n - 1) // 2)


def most_common_form(replies: Sequence[Groups]) -> list[int]:
    """Find the replies whose tensors have the names and shapes that most have; of others no number could be compared.

    Args:
        replies: At least one.

    Returns:
        Their places, ascending.
    """
    forms = [
        tuple((group, name, value.shape) for group in sorted(reply) for name, value in sorted(reply[group].items()))
        for reply in replies
    ]
    common = Counter(forms).most_common(1)[0][0]
    return [place for place, form in enumerate(forms) if form == common]


def clip(reply: Groups, origin: Arrays, bounds: Mapping[str, float]) -> dict[str, dict[str, NDArray[Any]]]:
    r"""Scale an update down, :math:`x + \Delta_i \min(1, b / \lVert\Delta_i\rVert)`, each group to its own bound.

    Args:
        reply: The tensors ``x_i``.
        origin: ``x``; 0 for tensors that it lacks.
        bounds: Group -> ``b``.

    Returns:
        Tensors of the same shapes and dtypes; integers and bools as they are.

    References:
        Sun et al. 2019, arXiv 1911.07963.
    """
    clipped: dict[str, dict[str, NDArray[Any]]] = {}
    for group, arrays in reply.items():
        norm = update_norm(arrays, origin)
        factor = bounds[group] / norm if norm > bounds[group] else 1.0
        clipped[group] = {
            name: _scaled(value, origin.get(name, 0.0), factor) if factor < 1 and _is_float(value) else value
            for name, value in arrays.items()
        }
    return clipped


def _scaled(value: NDArray[Any], origin: Any, factor: float) -> NDArray[Any]:
    change = np.subtract(value, origin, dtype=np.float64)
    return np.asarray(origin + factor * change, value.dtype)


def clip_bounds(replies: Sequence[Groups], origins: Sequence[Arrays], multiple: float) -> dict[str, float]:
    """Give the bound of each group: a multiple of the median norm.

    Args:
        replies: Replies of one form.
        origins: What each is measured from.
        multiple: ``c``.
    """
    return {
        group: multiple
        * float(np.median([update_norm(reply[group], x) for reply, x in zip(replies, origins, strict=True)]))
        for group in replies[0]
    }


def coordinatewise(replies: Sequence[Groups], cut: int | None) -> dict[str, dict[str, NDArray[Any]]]:
    """Give the median or the trimmed mean of every number.

    Args:
        replies: Replies of one form.
        cut: How many of the largest and of the smallest are left out, less than half of the replies; None for the median.

    Returns:
        The floating tensors by group, computed in float64, in their own dtypes; integers and bools are left out.

    References:
        Yin et al., arXiv 1803.01498, Definitions 1 and 2.
    """
    return {
        group: {
            name: _middle([reply[group][name] for reply in replies], cut)
            for name, value in arrays.items()
            if _is_float(value)
        }
        for group, arrays in replies[0].items()
    }


def _middle(values: Sequence[NDArray[Any]], cut: int | None) -> NDArray[Any]:
    n, flat = len(values), [value.ravel() for value in values]
    middle = np.empty(flat[0].size, values[0].dtype)
    step = max(CHUNK // n, 1)
    for start in range(0, middle.size, step):
        part = np.stack([value[start : start + step] for value in flat]).astype(np.float64)
        middle[start : start + step] = (
            np.median(part, axis=0) if cut is None else np.sort(part, axis=0)[cut : n - cut].mean(axis=0)
        )
    return middle.reshape(values[0].shape)


def multi_krum(replies: Sequence[Groups], f: int) -> list[int]:
    """Choose the ``n - f`` replies that are nearest to each other.

    Args:
        replies: ``n`` replies of one form.
        f: Number of liars, less than ``n``. The theory asks for ``n >= 2 f + 3``.

    Returns:
        Their places, ascending.

    References:
        Blanchard et al., NeurIPS 2017, arXiv 1703.02757, Section 4.
    """
    n = len(replies)
    distances = _distances(replies)
    nearest = max(n - f - 2, 1)
    # The place breaks ties, so that one order of the replies gives one choice.
    scores = [float(np.sort(np.delete(row, i))[:nearest].sum()) for i, row in enumerate(distances)]
    return sorted(sorted(range(n), key=lambda i: (scores[i], i))[: n - f])


def _distances(replies: Sequence[Groups]) -> NDArray[np.float64]:
    """Give ``d_ij``, (n, n). Differences first: ``|x|^2 + |y|^2 - 2 xy`` would lose small updates of large weights."""
    n = len(replies)
    total = np.zeros((n, n))
    for group in replies[0]:
        squares = np.zeros((n, n))
        for i in range(n):
            for j in range(i):
                with np.errstate(over="ignore"):
                    squares[i, j] = squares[j, i] = update_norm(replies[i][group], replies[j][group]) ** 2
        scale = float(np.median(squares[np.tril_indices(n, -1)])) if n > 1 else 0.0
        total += squares / scale if 0 < scale < math.inf else squares
    return total


def _is_float(value: NDArray[Any]) -> bool:
    return np.issubdtype(value.dtype, np.floating)
