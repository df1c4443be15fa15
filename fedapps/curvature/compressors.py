r"""Compressors of symmetric matrices, as FedNL's clients use them on what they have yet to learn of their Hessian.

Each is a contraction: for every symmetric ``M`` ``(d, d)``, with the ``delta`` of the table,

.. math:: |C(M) - M|_F^2 \le (1 - \delta)\, |M|_F^2

============  ================================================================  =====================  ===================
compressor    what travels                                                      bytes                  ``delta``
============  ================================================================  =====================  ===================
`Identity`    the upper triangle                                                ``8 d (d + 1) / 2``    1
`TopK`        the ``k`` entries of the upper triangle with the largest share    ``12 k``               ``2k / (d (d + 1))``
              of the norm, in which those off the diagonal count twice
`RankR`       the ``r`` eigenvalues largest in absolute value, with their       ``8 r (d + 1)``        ``r / d``
              eigenvectors
============  ================================================================  =====================  ===================

Matrices are packed upper triangles (`fedapps.curvature.packing`), so every ``C(M)`` is symmetric to the bit. Safaryan et al.,
ICML 2022, arXiv 2106.02969, section 3.2 and appendix A.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from fedapps.curvature.packing import diagonal_places, pack_upper, triangle_size, triangle_width, unpack_upper
from fedapps.errors import MessageError

Triangle = NDArray[np.float64]
"""A symmetric matrix ``(d, d)`` as its upper triangle, ``(d (d + 1) / 2,)``."""

Message = Mapping[str, NDArray[Any]]
"""What travels, by name."""

ORTHONORMAL = 1e-10
"""How far the products of received eigenvectors may be from those of an orthonormal basis."""


class Compressor(Protocol):
    """A contraction of symmetric matrices ``(d, d)``, given as triangles."""

    def delta(self, d: int) -> float:
        """Give the share of the squared norm that is never lost, in ``(0, 1]``."""

    def like(self, d: int) -> dict[str, NDArray[Any]]:
        """Give arrays of the names, shapes and dtypes of a message, without values."""

    def compress(self, M: Triangle) -> dict[str, NDArray[Any]]:
        """Compose the message."""

    def decompress(self, message: Message, d: int, where: str) -> Triangle:
        """Compute ``C(M)`` from a message of the right names, shapes and dtypes.

        Raises:
            MessageError: No `compress` composes such a message; ``where`` says whose it is.
        """


@dataclass(frozen=True)
class Identity:
    """The matrix as it is."""

    def delta(self, d: int) -> float:
        """Give 1: nothing is lost."""
        return 1.0

    def like(self, d: int) -> dict[str, NDArray[Any]]:
        """Describe ``triangle``."""
        return {"triangle": _like(triangle_size(d))}

    def compress(self, M: Triangle) -> dict[str, NDArray[Any]]:
        """Give the triangle."""
        return {"triangle": M}

    def decompress(self, message: Message, d: int, where: str) -> Triangle:
        """Take the triangle."""
        return message["triangle"]


@dataclass(frozen=True)
class TopK:
    """The ``k`` entries of the upper triangle whose share of the Frobenius norm is largest.

    Attributes:
        k: Number of entries, at least 1; all of them if there are fewer.
    """

    k: int

    def delta(self, d: int) -> float:
        """Give ``k`` over the size of the triangle: the largest hold at least their part of the norm."""
        return self._k(d) / triangle_size(d)

    def like(self, d: int) -> dict[str, NDArray[Any]]:
        """Describe ``indices`` in the triangle and their ``values``."""
        return {"indices": _like(self._k(d), dtype=np.int32), "values": _like(self._k(d))}

    def compress(self, M: Triangle) -> dict[str, NDArray[Any]]:
        """Pick the entries, in the order of the triangle."""
        d = triangle_width(len(M))
        share = 2 * M**2
        share[diagonal_places(d)] /= 2
        k = self._k(d)
        indices = np.sort(np.argpartition(share, len(M) - k)[len(M) - k :]).astype(np.int32)
        return {"indices": indices, "values": M[indices]}

    def decompress(self, message: Message, d: int, where: str) -> Triangle:
        """Put the entries in their places."""
        indices, size = message["indices"], triangle_size(d)
        if not (indices[0] >= 0 and indices[-1] < size and np.all(np.diff(indices) > 0)):
            raise MessageError(
                f"{where}, indices of the entries",
                expected=f"rising numbers from 0 to {size - 1}",
                got=f"numbers from {indices.min()} to {indices.max()}, {len(np.unique(indices))} of {len(indices)} different",
                do="compose the message with fedapps.curvature.compressors",
            )
        triangle = np.zeros(size)
        triangle[indices] = message["values"]
        return triangle

    def _k(self, d: int) -> int:
        return min(self.k, triangle_size(d))


@dataclass(frozen=True)
class RankR:
    """The eigendecomposition, cut after the ``r`` eigenvalues that are largest in absolute value.

    Attributes:
        r: Rank, at least 1; ``d`` if that is less.
    """

    r: int

    def delta(self, d: int) -> float:
        """Give ``r / d``: the largest eigenvalues hold at least their part of the norm."""
        return self._r(d) / d

    def like(self, d: int) -> dict[str, NDArray[Any]]:
        """Describe ``eigenvalues`` ``(r,)`` and ``eigenvectors`` ``(d, r)``."""
        return {"eigenvalues": _like(self._r(d)), "eigenvectors": _like(d, self._r(d))}

    def compress(self, M: Triangle) -> dict[str, NDArray[Any]]:
        """Decompose the matrix."""
        eigenvalues, Q = np.linalg.eigh(unpack_upper(M))
        largest = np.sort(np.argsort(-np.abs(eigenvalues), kind="stable")[: self._r(len(eigenvalues))])
        return {"eigenvalues": eigenvalues[largest], "eigenvectors": np.ascontiguousarray(Q[:, largest])}

    def decompress(self, message: Message, d: int, where: str) -> Triangle:
        r"""Multiply out :math:`Q \Lambda Q'`."""
        Q = message["eigenvectors"]
        # What overflows or is not a number compares false.
        with np.errstate(over="ignore", invalid="ignore"):
            error = float(np.abs(Q.T @ Q - np.eye(Q.shape[1])).max())
        if not error <= ORTHONORMAL:
            raise MessageError(
                f"{where}, eigenvectors",
                expected=f"orthonormal columns (to {ORTHONORMAL:g})",
                got=f"ones whose products are up to {error:.1e} off",
                do="compose the message with fedapps.curvature.compressors",
            )
        M = (Q * message["eigenvalues"]) @ Q.T
        return pack_upper((M + M.T) / 2)

    def _r(self, d: int) -> int:
        return min(self.r, d)


def num_bytes(compressor: Compressor, d: int) -> int:
    """Count the bytes of a message, without names and headers."""
    return sum(value.size * value.dtype.itemsize for value in compressor.like(d).values())


def _like(*shape: int, dtype: Any = np.float64) -> NDArray[Any]:
    """Describe an array without allocating it."""
    return np.broadcast_to(np.zeros((), dtype), shape)
