from __future__ import annotations

import math

import pytest

from fedapps.results.units import byte_unit, human_bytes, human_seconds


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (60, "60 B"),
        (999, "999 B"),
        (999.6, "1.00 kB"),
        (1000, "1.00 kB"),
        (1234, "1.23 kB"),
        (9996, "10.0 kB"),
        (12_345, "12.3 kB"),
        (999_400, "999 kB"),
        (999_600, "1.00 MB"),
        (45_000_000, "45.0 MB"),
        (7.1e9, "7.10 GB"),
        (3e15, "3000 TB"),
        (-1500, "-1.50 kB"),
        (math.nan, "-"),
        (math.inf, "-"),
    ],
)
def test_bytes_have_three_digits_and_a_decimal_unit(count: float, text: str) -> None:
    assert human_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0.00 s"),
        (0.416, "0.42 s"),
        (9.999, "10.0 s"),
        (12.34, "12.3 s"),
        (59.97, "1 min 00 s"),
        (185, "3 min 05 s"),
        (3599.6, "1 h 00 min"),
        (3750, "1 h 02 min"),
        (math.nan, "-"),
    ],
)
def test_seconds_read_like_a_clock(seconds: float, text: str) -> None:
    assert human_seconds(seconds) == text


@pytest.mark.parametrize(
    ("largest", "unit"), [(0, (1.0, "B")), (999, (1.0, "B")), (1e3, (1e3, "kB")), (2e9, (1e9, "GB"))]
)
def test_the_unit_follows_the_largest_value(largest: float, unit: tuple[float, str]) -> None:
    assert byte_unit(largest) == unit
