"""A symmetric matrix as its upper triangle, which is how a curvature block travels and how the server sums it.

The triangle of an ``(n, n)`` matrix holds ``n (n + 1) / 2`` numbers: row by row, each from the diagonal to the right.
"""

from __future__ import annotations

from math import isqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedapps.errors import CurvatureError

TILE = 256
"""Rows that are compared or mirrored at once: a tile of this size and its transpose fit a processor's cache."""


def triangle_size(n: int) -> int:
    """Count the numbers in the upper triangle of an ``(n, n)`` matrix, ``n (n + 1) / 2``."""
    return n * (n + 1) // 2


def triangle_width(size: int) -> int:
    """Find the ``n`` of the matrix whose upper triangle has so many numbers, or raise a CurvatureError if there is none."""
    n = (isqrt(8 * size + 1) - 1) // 2
    if triangle_size(n) != size:
        raise CurvatureError(
            "packed triangle",
            expected=f"n (n + 1) / 2 numbers, such as {triangle_size(n)} or {triangle_size(n + 1)}",
            got=str(size),
            do="pack the upper triangle with its diagonal, row by row",
        )
    return n


def pack_upper(matrix: NDArray[Any]) -> NDArray[Any]:
    """Copy the upper triangle of a symmetric matrix ``(n, n)`` of any floating dtype, ``(n (n + 1) / 2,)``.

    It may differ from its transpose by as much as rounding explains: the square root of the dtype's epsilon, relative to the
    largest entry.

    Raises:
        CurvatureError: The matrix is not square or not symmetric.
    """
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
        raise CurvatureError(
            "matrix to pack", expected="shape (n, n)", got=f"{matrix.shape}", do="pack one square block"
        )
    _check_symmetric(matrix)
    n = matrix.shape[0]
    packed = np.empty(triangle_size(n), matrix.dtype)
    start = 0
    # A copy a row: index arrays for the whole triangle would take four times the memory of a float32 block.
    for row in range(n):
        packed[start : start + n - row] = matrix[row, row:]
        start += n - row
    return packed


def unpack_upper(packed: NDArray[Any]) -> NDArray[Any]:
    """Rebuild a matrix ``(n, n)``, exactly symmetric, from its upper triangle; the inverse of `pack_upper`.

    Raises:
        CurvatureError: The input is not a vector, or has a size that no triangle has.
    """
    if packed.ndim != 1:
        raise CurvatureError(
            "packed triangle", expected="a vector", got=f"shape {packed.shape}", do="unpack one block at a time"
        )
    n = triangle_width(packed.size)
    matrix = np.empty((n, n), packed.dtype)
    start = 0
    for row in range(n):
        matrix[row, row:] = packed[start : start + n - row]
        start += n - row
    _mirror(matrix)
    return matrix


def scaled_identity(n: int, scale: float) -> NDArray[np.float64]:
    """Give the packed triangle, ``(n (n + 1) / 2,)``, of ``scale * I``."""
    packed = np.zeros(triangle_size(n))
    packed[diagonal_places(n)] = scale
    return packed


def diagonal_places(n: int) -> NDArray[np.intp]:
    """Say where the diagonal stands in the packed triangle of an ``(n, n)`` matrix."""
    # Row i starts, with its diagonal entry, after the n + (n - 1) + ... numbers of the rows above.
    rows = np.arange(n)
    return rows * n - rows * (rows - 1) // 2


def _mirror(matrix: NDArray[Any]) -> None:
    """Copy the upper triangle onto the lower one, in place."""
    n = matrix.shape[0]
    for start in range(0, n, TILE):
        stop = min(start + TILE, n)
        corner = matrix[start:stop, start:stop]
        lower = np.tril_indices(stop - start, -1)
        corner[lower] = corner.T[lower]
        for below in range(stop, n, TILE):
            matrix[below : below + TILE, start:stop] = matrix[start:stop, below : below + TILE].T


def _check_symmetric(matrix: NDArray[Any]) -> None:
    n = matrix.shape[0]
    largest = difference = 0.0
    for row in range(0, n, TILE):
        for column in range(row, n, TILE):
            upper = matrix[row : row + TILE, column : column + TILE]
            lower = matrix[column : column + TILE, row : row + TILE].T
            largest = max(largest, float(np.abs(upper).max()))
            difference = max(difference, float(np.abs(upper - lower).max()))
    allowed = float(np.sqrt(np.finfo(matrix.dtype).eps)) * largest
    # NaN compares false and passes: whether numbers are finite is another check.
    if difference > allowed:
        raise CurvatureError(
            "matrix to pack",
            expected=f"a symmetric matrix (to {allowed:.1e})",
            got=f"entries that differ from their mirror image by up to {difference:.1e}",
            do="symmetrise it, (P + P') / 2, if the difference is noise",
        )
