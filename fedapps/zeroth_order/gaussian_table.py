"""The table that turns 16 random bits into a number of a Gaussian shape.

`T[i] = q_i / sqrt(mean q^2)` with `q_i = Phi^-1(0.5 + (i + 0.5)/65536)`, `i = 0..32767`, computed in float64, rounded to
a multiple of 2^-16 and stored as float32. Its checksum is verified at import: a machine whose arithmetic gives another
table would draw other directions than everybody else.
"""

from __future__ import annotations

import hashlib
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from fedapps.zeroth_order.errors import DirectionError

TABLE_SHA256 = "eda81a6046f02c773f5875de98bda94f959b157dde1bea9edeef98a9fc52660b"
"""SHA-256 of the table's little-endian bytes."""


def gaussian_table() -> NDArray[np.float32]:
    """Compute the table of magnitudes, (32768,): strictly increasing positive numbers with mean square 1 up to rounding."""
    quantile = NormalDist().inv_cdf
    q = np.array([quantile(0.5 + (i + 0.5) / 65536) for i in range(32768)])
    table: NDArray[np.float64] = np.rint(q / np.sqrt(np.mean(q * q)) * 65536) / 65536
    return table.astype(np.float32)


def check_table(table: NDArray[np.float32]) -> NDArray[np.float32]:
    """Refuse a table, (32768,), that differs in any bit from the definition; give it back."""
    found = hashlib.sha256(table.astype("<f4").tobytes()).hexdigest()
    if found != TABLE_SHA256:
        raise DirectionError(
            "Gaussian table",
            expected=f"SHA-256 {TABLE_SHA256}",
            got=found,
            do="this machine cannot take part: its floating-point functions differ, so its directions would too",
        )
    return table


MAGNITUDES = check_table(gaussian_table())
"""`T`, (32768,)."""
MAGNITUDES.flags.writeable = False

SIGNED = np.concatenate([MAGNITUDES, -MAGNITUDES])
"""The value of all 65536 lanes: the sign is bit 15, so lane `q` has the value `SIGNED[q]`."""
SIGNED.flags.writeable = False
