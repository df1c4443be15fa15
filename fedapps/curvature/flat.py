"""A model as one vector, for mathematics on all of its parameters at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def flatten(arrays: Mapping[str, Array], names: Iterable[str]) -> NDArray[np.float64]:
    """Lay named tensors end to end, each by rows, in float64.

    Args:
        arrays: Name -> tensor.
        names: Which of them, and in which order; not empty.

    Returns:
        ``(d,)``.
    """
    return np.concatenate([np.asarray(arrays[name], dtype=np.float64).ravel() for name in names])


def unflatten(flat: NDArray[Any], like: Mapping[str, Array], names: Iterable[str]) -> dict[str, Array]:
    """Cut a vector into named tensors: the inverse of `flatten`, but for the rounding to their dtypes.

    Args:
        flat: ``(d,)``.
        like: Tensors of the shapes and dtypes to come, by name.
        names: As for `flatten`.

    Returns:
        Name -> tensor, in the order of the names.
    """
    rows = unflatten_rows(flat[None], like, names)
    return {name: value[0] for name, value in rows.items()}


def flatten_rows(arrays: Mapping[str, Array], names: Iterable[str]) -> NDArray[np.float64]:
    """Lay named stacks of ``k`` tensors side by side: row ``j`` is `flatten` of the ``j``-th of each, ``(k, d)``."""
    return np.concatenate([np.asarray(arrays[n], dtype=np.float64).reshape(len(arrays[n]), -1) for n in names], axis=1)


def unflatten_rows(rows: NDArray[Any], like: Mapping[str, Array], names: Iterable[str]) -> dict[str, Array]:
    """Cut ``(k, d)`` into named stacks ``(k, ...)``: the inverse of `flatten_rows`, but for the rounding."""
    arrays, start = {}, 0
    for name in names:
        end = start + like[name].size
        arrays[name] = rows[:, start:end].reshape(-1, *like[name].shape).astype(like[name].dtype)
        start = end
    return arrays
