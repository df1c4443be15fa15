r"""Sketches of a square root: few rows whose Gram matrix is, on average, that of many.

.. math:: Y = S R, \qquad \mathrm{E}[S'S] = I, \qquad \text{hence} \quad \mathrm{E}[Y'Y] = R'R

The sketches of FedNS (arXiv 2401.02734), with ``S`` ``(k, n)`` and ``R`` ``(n, d)``:

* Gaussian: entries from :math:`N(0, 1/k)`;
* SRHT, the subsampled randomised Hadamard transform: :math:`S = \sqrt{N/k}\, P H D`, with ``D`` random signs of the rows,
  padded by zero rows to a power of two ``N``, at least ``k``; ``H`` the orthogonal Hadamard matrix, and ``P`` a sample of ``k``
  of its rows without replacement. With ``k = N`` it is orthogonal: :math:`S'S = I` exactly;
* count-sketch: every column of ``S`` has one entry, +1 or -1, in a random row.
"""

from __future__ import annotations

from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]


class Sketch(StrEnum):
    """Which sketch."""

    GAUSSIAN = "gaussian"
    SRHT = "srht"
    COUNT = "count-sketch"


def sketch(R: Matrix, k: int, kind: Sketch, random: np.random.Generator) -> Matrix:
    """Sketch the rows of a matrix.

    Args:
        R: ``(n, d)``.
        k: Rows of the sketch, >= 1; it may be more than ``n``.
        kind: Which sketch.
        random: Where ``S`` is drawn from. Gaussian and count-sketch give each row of ``R`` its own column of ``S`` in turn, so
            that one stream sketches the first rows of a longer matrix alike.

    Returns:
        ``Y``, ``(k, d)``.

    Example:
        >>> R = np.arange(6.0).reshape(3, 2)
        >>> Y = sketch(R, 4, Sketch.SRHT, np.random.default_rng(0))  # k = N = 4
        >>> np.allclose(Y.T @ Y, R.T @ R)
        True
    """
    n, d = R.shape
    if kind is Sketch.GAUSSIAN:
        return np.asarray(random.standard_normal((n, k)).T @ R / np.sqrt(k))
    if kind is Sketch.COUNT:
        Y = np.zeros((k, d))
        draws = np.asarray(random.integers(2 * k, size=n))  # the row, and by its last bit the sign
        np.add.at(Y, draws // 2, R * (1.0 - 2.0 * (draws % 2))[:, None])
        return Y
    N = 1 << (max(n, k) - 1).bit_length()
    signed = np.zeros((N, d))
    signed[:n] = R * random.choice([-1.0, 1.0], n)[:, None]
    rows = random.choice(N, k, replace=False)
    return np.asarray(walsh_hadamard(signed)[rows] / np.sqrt(k))


def walsh_hadamard(X: Matrix) -> Matrix:
    r"""Multiply with Sylvester's Hadamard matrix, entries +-1, :math:`H_N'H_N = N I`, without forming it.

    Args:
        X: ``(N, d)``, ``N`` a power of two; `scipy.linalg.hadamard` would hold ``N^2`` entries.

    Returns:
        ``H X``, in ``N log N`` additions a column.
    """
    N, d = X.shape
    width = 1
    while width < N:
        # H_2w = [[H_w, H_w], [H_w, -H_w]] on every pair of neighbouring blocks.
        pairs = X.reshape(N // (2 * width), 2, width, d)
        upper, lower = pairs[:, 0], pairs[:, 1]
        X = np.stack([upper + lower, upper - lower], axis=1).reshape(N, d)
        width *= 2
    return X
