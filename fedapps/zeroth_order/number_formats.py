"""The number formats of parameters: float32, bfloat16, float16, and the one rounding between them.

NumPy has no bfloat16: such tensors are held as arrays of their 16-bit patterns (`uint16`). Rounding is to nearest, ties
to even; subnormals are kept. Which NaN comes out of a NaN is not defined.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fedapps.zeroth_order.errors import DirectionError

F32: TypeAlias = NDArray[np.float32]
"""An array in float32."""

Stored: TypeAlias = NDArray[Any]
"""An array of parameters: float32, float16, or uint16 for the patterns of bfloat16."""


class NumberFormat(StrEnum):
    """How a tensor's numbers are stored; the value is the name in a journal's header."""

    FLOAT32 = "float32"
    """IEEE binary32."""

    BFLOAT16 = "bfloat16"
    """The upper half of binary32, as its bit pattern."""

    FLOAT16 = "float16"
    """IEEE binary16."""

    @property
    def storage(self) -> np.dtype[Any]:
        """The NumPy dtype that holds such numbers."""
        return np.dtype(np.uint16 if self is NumberFormat.BFLOAT16 else self.value)


_FORMATS = {number_format.storage: number_format for number_format in NumberFormat}


def format_of(array: Stored) -> NumberFormat:
    """Tell an array's number format from its dtype; `uint16` means bfloat16.

    Raises:
        DirectionError: The dtype is none of the three.
    """
    if array.dtype not in _FORMATS:
        raise DirectionError(
            "parameters",
            expected="float32, float16, or bfloat16 as uint16 patterns",
            got=str(array.dtype),
            do="build the model in one of these",
        )
    return _FORMATS[array.dtype]


def widen(array: Stored) -> F32:
    """Widen parameters of any shape to float32, exactly; a new array."""
    if format_of(array) is NumberFormat.BFLOAT16:
        return (array.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return array.astype(np.float32)


def narrow(values: F32, number_format: NumberFormat) -> Stored:
    """Round float32 numbers of any shape to a format, to nearest, ties to even; a new array."""
    if number_format is NumberFormat.FLOAT32:
        return values.copy()
    if number_format is NumberFormat.FLOAT16:
        with np.errstate(over="ignore", under="ignore"):
            return values.astype(np.float16)
    bits = values.view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = (bits + (np.uint32(0x7FFF) + odd)) >> np.uint32(16)
    return np.where(np.isnan(values), np.uint32(0x7FC0), rounded).astype(np.uint16)
