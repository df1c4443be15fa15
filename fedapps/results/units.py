"""Bytes and seconds as people read them."""

from __future__ import annotations

import math

BYTE_UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
"""Decimal units, largest first."""


def byte_unit(largest: float) -> tuple[float, str]:
    """Choose the unit for an axis or a column of byte counts.

    Args:
        largest: The largest count to be shown.

    Returns:
        Bytes in one unit, and its name; ``(1.0, "B")`` below 1 kB.
    """
    for size, name in BYTE_UNITS:
        if largest >= size:
            return size, name
    return 1.0, "B"


def human_bytes(count: float) -> str:
    """Write a number of bytes with three significant digits.

    Returns:
        For example ``"60 B"``, ``"1.23 kB"``, ``"45.0 MB"``; ``"-"`` if it is not finite.
    """
    if not math.isfinite(count):
        return "-"
    # 999.6 kB would read "1000 kB": the unit follows from the rounded value.
    size, name = byte_unit(float(f"{abs(count):.3g}"))
    if name == "B":
        return f"{count:.0f} B"
    value = count / size
    digits = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:.{digits}f} {name}"


def human_seconds(seconds: float) -> str:
    """Write a duration.

    Args:
        seconds: Duration, s.

    Returns:
        For example ``"0.42 s"``, ``"12.3 s"``, ``"3 min 05 s"``, ``"1 h 02 min"``; ``"-"`` if it is not finite.
    """
    if not math.isfinite(seconds):
        return "-"
    if seconds < 9.995:
        return f"{seconds:.2f} s"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min"
