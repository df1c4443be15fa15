r"""The weighted mean of named tensors over the replies of a round, from running sums.

.. math:: x = \sum_i p_i x_i \Big/ \sum_i p_i

Sums are kept in float64, so memory does not grow with the number of clients, and one order of the replies gives one result,
bit for bit. Integers and bools, which have no mean, take the maximum.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedapps.errors import CurvatureError, TaskError, explain

Array = NDArray[Any]


@dataclass
class TensorSums:
    """Running sums of named tensors over the replies of a round. `add_mean` changes them in place.

    Attributes:
        weight: Sum of ``p_i``.
        sums: Floating tensors: sum of ``p_i x_i`` in float64.
        maxima: Integer and bool tensors: maximum over the clients, in their own dtype.
        dtypes: Dtype of every tensor, in the order of the names.
    """

    weight: float
    sums: dict[str, NDArray[np.float64]]
    maxima: dict[str, Array]
    dtypes: dict[str, np.dtype[Any]]

    @property
    def names(self) -> frozenset[str]:
        """Names of the tensors."""
        return frozenset(self.dtypes)


def start_mean(like: Mapping[str, Array]) -> TensorSums:
    """Start the sums of named tensors.

    Args:
        like: Tensors with the names, shapes and dtypes to come; their values do not matter.

    Returns:
        Sums over no client.

    Raises:
        CurvatureError: A dtype is neither floating, integer nor bool.
    """
    sums, maxima = {}, {}
    for name, value in like.items():
        if np.issubdtype(value.dtype, np.floating):
            sums[name] = np.zeros(value.shape)
        else:
            maxima[name] = np.full(value.shape, _smallest(name, value.dtype), value.dtype)
    return TensorSums(0.0, sums, maxima, {name: value.dtype for name, value in like.items()})


def add_mean(sums: TensorSums, weight: float, arrays: Mapping[str, Array], *, where: str = "mean") -> None:
    """Add a client's tensors to the sums, in place.

    Args:
        sums: The sums; unchanged if an error is raised.
        weight: ``p_i`` up to a factor common to all clients, > 0.
        arrays: Tensors with the names, shapes and dtypes of ``sums``.
        where: The client, for messages.

    Raises:
        ValueError: The weight is not positive and finite.
        CurvatureError: A name, shape or dtype differs.
    """
    check_weight(weight, where)
    _check_tensors(sums, arrays, where)
    sums.weight += weight
    for name, total in sums.sums.items():
        np.add(total, np.multiply(arrays[name], weight, dtype=np.float64), out=total)
    for name, largest in sums.maxima.items():
        np.maximum(largest, arrays[name], out=largest)


def finish_mean(sums: TensorSums) -> dict[str, Array]:
    r"""Give the weighted mean :math:`\sum_i p_i x_i / \sum_i p_i` of every tensor; of integers and bools the maximum.

    Args:
        sums: Sums over the clients; left unchanged.

    Returns:
        Name -> tensor, shape and dtype as they came in, shape ``()`` included.

    Raises:
        ValueError: No client was added.
    """
    if sums.weight == 0:
        raise ValueError("mean: expected at least one client, got none; call add_mean first")
    return {
        name: np.asarray(sums.sums[name] / sums.weight, dtype) if name in sums.sums else sums.maxima[name].copy()
        for name, dtype in sums.dtypes.items()
    }


def _smallest(name: str, dtype: np.dtype[Any]) -> int | bool:
    if np.issubdtype(dtype, np.integer):
        return int(np.iinfo(dtype).min)
    if np.issubdtype(dtype, np.bool_):
        return False
    raise CurvatureError(
        f"tensor '{name}'",
        expected="a floating, integer or bool dtype",
        got=str(dtype),
        do="convert it before it is averaged",
    )


def check_averageable(arrays: Mapping[str, Array], who: str) -> None:
    """Refuse a model in bfloat16: it travels as 16-bit patterns, which NumPy takes for whole numbers.

    Args:
        arrays: The model.
        who: Whose it is, for the message.

    Raises:
        TaskError: A tensor is in bfloat16.
    """
    name = next((name for name, value in arrays.items() if value.dtype == np.uint16), None)
    if name is not None:
        raise TaskError(
            f"{who}, model tensor '{name}'",
            expected="numbers that can be averaged, such as float32",
            got="bfloat16",
            do="use float32 (dtype in task-options of a language task), train adapters (lora-rank), or take a "
            "scalar-only method",
        )


def check_weight(weight: float, where: str) -> None:
    """Refuse a weight that is not positive and finite, with a `ValueError` that names `where`."""
    if not (np.isfinite(weight) and weight > 0):
        raise ValueError(
            explain(where, expected="a weight that is positive and finite", got=f"{weight}", do="leave the client out")
        )


def _check_tensors(sums: TensorSums, arrays: Mapping[str, Array], where: str) -> None:
    if arrays.keys() != sums.names:
        raise CurvatureError(
            where,
            expected=f"exactly the {len(sums.names)} tensors of the mean",
            got=f"missing: {_list(sums.names - arrays.keys())}; unknown: {_list(arrays.keys() - sums.names)}",
            do="build the same model on every client",
        )
    for name, value in arrays.items():
        kept = sums.sums[name] if name in sums.sums else sums.maxima[name]
        if value.shape != kept.shape or value.dtype != sums.dtypes[name]:
            raise CurvatureError(
                f"{where}, tensor '{name}'",
                expected=f"shape {kept.shape} and dtype {sums.dtypes[name]}",
                got=f"shape {value.shape} and dtype {value.dtype}",
                do="build the same model on every client",
            )


def _list(names: Iterable[str]) -> str:
    return ", ".join(f"'{name}'" for name in sorted(names)) or "none"
