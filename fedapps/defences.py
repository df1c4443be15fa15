r"""What bounds one client's say in a round: the size of an update, and defences of averages against clients that lie.

An update is what a reply changes: :math:`\Delta_i = x_i - x`, where ``x_i`` are the floating tensors of client ``i`` and ``x``
those that it was sent; where a method sends differences, or products and curvature, ``x = 0``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Arrays = Mapping[str, NDArray[Any]]
"""Name -> array."""


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
            if np.issubdtype(value.dtype, np.floating):
                change = np.subtract(value, origin.get(name, 0.0), dtype=np.float64).ravel()
                total += float(change @ change)
    return float(np.sqrt(total))
