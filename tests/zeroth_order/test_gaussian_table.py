from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest
from scipy.special import ndtri

from fedapps.zeroth_order.errors import DirectionError
from fedapps.zeroth_order.gaussian_table import MAGNITUDES, SIGNED, TABLE_SHA256, check_table


def test_the_table_is_the_known_one(known: dict[str, Any]) -> None:
    assert hashlib.sha256(MAGNITUDES.astype("<f4").tobytes()).hexdigest() == known["table_sha256"] == TABLE_SHA256
    assert MAGNITUDES[:4].tolist() == known["table_first"]
    assert float(MAGNITUDES[-1]) == known["table_last"]


def test_the_table_holds_quantiles_scaled_to_unit_variance() -> None:
    """Against scipy's quantile function in float64; an entry is a multiple of 2^-16, so it is off by at most half of it."""
    q = ndtri(0.5 + (np.arange(32768) + 0.5) / 65536)
    expected = q / np.sqrt(np.mean(q * q))
    assert np.abs(MAGNITUDES - expected).max() <= 2**-17 * (1 + 1e-6)
    np.testing.assert_array_equal(MAGNITUDES * 65536 % 1, 0)


def test_the_upper_half_of_the_lanes_is_negative() -> None:
    np.testing.assert_array_equal(SIGNED[:32768], MAGNITUDES)
    np.testing.assert_array_equal(SIGNED[32768:], -MAGNITUDES)


def test_a_table_off_by_one_bit_is_refused() -> None:
    wrong = MAGNITUDES.copy()
    wrong.view(np.uint32)[17] ^= 1
    with pytest.raises(DirectionError, match="Gaussian table: expected SHA-256 eda81a60"):
        check_table(wrong)
