r"""Preconditioned mixing: what FedPM's server does with the replies of a round.

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

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedapps.averaging import check_weight
from fedapps.curvature.packing import triangle_size, unpack_upper
from fedapps.curvature.solve import solve_spd
from fedapps.errors import CurvatureError

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
    """Start the sums of a block, over no client; ``rows`` are the outputs of the layer, or 1 for a parameter vector."""
    return BlockSums(0.0, np.zeros(triangle_size(width)), np.zeros((rows, width)))


def add_block(sums: BlockSums, weight: float, curvature: Array, product: Array, *, where: str) -> None:
    """Add a client to the sums of a block, in place; they are unchanged if an error is raised.

    ``where`` is layer and client, for the error if the weight is not positive and finite, or a shape differs from the block's.
    """
    check_weight(weight, where)
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
    r"""Mix a block: :math:`W' = W + [\sum_i p_i M_i] [\sum_i p_i P_i]^{-1}`; ``where`` is the layer, for messages.

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
