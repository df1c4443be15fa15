r"""What a server does with the replies of a round: preconditioned mixing, and the weighted mean.

FedPM (arXiv 2511.09100, equation 8) mixes the clients' parameters through their curvature. In delta form, for one block:

.. math:: W' = W + \Big[\sum_i p_i M_i\Big] \Big[\sum_i p_i P_i\Big]^{-1}, \qquad M_i = (W_i - W) P_i

==========  ==============  =======================  =======================================================
symbol      identifier      shape, dtype             meaning
==========  ==============  =======================  =======================================================
``W``       ``W``           (rows, width)            the block of the model that was sent out
``P_i``     ``curvature``   (width (width + 1)/2,)   preconditioner that client ``i``'s last step divided by,
                                                     packed, damping included
``M_i``     ``product``     (rows, width)            client ``i``'s product
``p_i``     ``weight``      float                    ``n_i`` or 1; its scale cancels, so it is not normalised
==========  ==============  =======================  =======================================================

A parameter vector ``theta`` is the block with one row, ``W = theta'``. Only the two sums are kept, in float64, so memory
does not grow with the number of clients, and one order of the replies gives one result, bit for bit.

Departures from the paper: none; the delta form is the same map, and loses nothing in single precision because what
travels is small. A block whose curvature is zero on every client cannot be mixed (an error says so): with a damping > 0,
which travels inside ``P_i``, it comes out as the plain mean.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedapps.curvature.packing import triangle_size, unpack_upper
from fedapps.curvature.solve import solve_spd
from fedapps.errors import CurvatureError, explain

Array = NDArray[Any]


@dataclass
class BlockSums:
    """Running sums of one block over the replies of a round. `add_block` changes them in place.

    Attributes:
        weight: Sum of ``p_i``.
        curvature: Sum of ``p_i P_i``, packed, ``(width (width + 1) / 2,)`` float64.
        product: Sum of ``p_i M_i``, ``(rows, width)`` float64.
    """

    weight: float
    curvature: NDArray[np.float64]
    product: NDArray[np.float64]


class Mixed(NamedTuple):
    """What `mix_block` gives.

    Attributes:
        W: The new block, ``(rows, width)`` float64.
        added_damping: What had to be added to the diagonal of the mean of ``P_i``; 0 almost always. It shrinks the
            result towards the model that was sent out, so it should be logged.
    """

    W: NDArray[np.float64]
    added_damping: float


def start_block(rows: int, width: int) -> BlockSums:
    """Start the sums of a block.

    Args:
        rows: Outputs of the layer; 1 for a parameter vector.
        width: Width of ``P``.

    Returns:
        Sums over no client.
    """
    return BlockSums(0.0, np.zeros(triangle_size(width)), np.zeros((rows, width)))


def add_block(sums: BlockSums, weight: float, curvature: Array, product: Array, *, where: str) -> None:
    """Add a client to the sums of a block, in place.

    Args:
        sums: The sums; unchanged if an error is raised.
        weight: ``p_i`` up to a factor common to all clients, > 0.
        curvature: ``P_i`` packed, ``(width (width + 1) / 2,)``.
        product: ``M_i``, ``(rows, width)``.
        where: Layer and client, for messages.

    Raises:
        ValueError: The weight is not positive and finite.
        CurvatureError: A shape differs from the block's.
    """
    _check_weight(weight, where)
    if curvature.shape != sums.curvature.shape or product.shape != sums.product.shape:
        raise CurvatureError(
            where,
            expected=f"a packed P of shape {sums.curvature.shape} and M of shape {sums.product.shape}",
            got=f"{curvature.shape} and {product.shape}",
            do="build the same model on every client, with the same layers preconditioned",
        )
    sums.weight += weight
    sums.curvature += np.multiply(curvature, weight, dtype=np.float64)
    sums.product += np.multiply(product, weight, dtype=np.float64)


def mix_block(W: Array, sums: BlockSums, *, where: str) -> Mixed:
    r"""Mix a block: :math:`W' = W + [\sum_i p_i M_i] [\sum_i p_i P_i]^{-1}`.

    Args:
        W: The block of the model that was sent out, ``(rows, width)``.
        sums: Sums over the clients; left unchanged.
        where: The layer, for messages.

    Returns:
        The new block and the damping that had to be added to make the mean of ``P_i`` positive definite.

    Raises:
        ValueError: No client was added.
        CurvatureError: ``P_i`` is zero everywhere on every client, or the sums cannot be solved.

    References:
        arXiv 2511.09100, equation 8.
    """
    if sums.weight == 0:
        raise ValueError(f"{where}: expected at least one client, got none; call add_block first")
    # Means, not sums, so that the added damping is in the units of one client's P.
    P = unpack_upper(sums.curvature / sums.weight)
    M = sums.product / sums.weight
    solution = solve_spd(P, M.T, where=where)  # (width, rows)
    return Mixed(W.astype(np.float64) + solution.x.T, solution.added_damping)


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
    _check_weight(weight, where)
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


def _check_weight(weight: float, where: str) -> None:
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
