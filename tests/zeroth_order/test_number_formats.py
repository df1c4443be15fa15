from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch's conversions are the oracle")

import torch

from fedapps.zeroth_order.errors import DirectionError
from fedapps.zeroth_order.number_formats import NumberFormat, format_of, narrow, widen

HALVES = pytest.mark.parametrize("number_format", [NumberFormat.BFLOAT16, NumberFormat.FLOAT16])


def torch_widened(patterns: np.ndarray, number_format: NumberFormat) -> np.ndarray:
    return torch.from_numpy(patterns.view(np.int16)).view(getattr(torch, number_format)).float().numpy()


@HALVES
def test_all_patterns_are_widened_exactly(number_format: NumberFormat) -> None:
    patterns = np.arange(65536, dtype=np.uint16)
    expected = torch_widened(patterns, number_format)
    np.testing.assert_array_equal(widen(patterns.view(number_format.storage)), expected)


@HALVES
def test_rounding_is_to_nearest_even_over_all_magnitudes(number_format: NumberFormat) -> None:
    """Random bit patterns, and the exact middles between neighbours, which go to the even one."""
    random = np.random.default_rng(0)
    bits = random.integers(0, 2**32, 200_000, dtype=np.uint32).view(np.float32)
    finite = torch_widened(np.arange(0x7BFF, dtype=np.uint16), number_format)
    middles = ((finite[1:].astype(np.float64) + finite[:-1]) / 2).astype(np.float32)
    values = np.concatenate([bits[~np.isnan(bits)], middles, -middles, np.float32([0.0, -0.0, np.inf, -np.inf])])
    expected = torch.from_numpy(values).to(getattr(torch, number_format)).view(torch.int16).numpy()
    np.testing.assert_array_equal(narrow(values, number_format).view(np.int16), expected)


def test_nan_stays_nan() -> None:
    values = np.array([0x7F800001, 0xFFFFFFFF, 0x7FC00000], np.uint32).view(np.float32)
    for number_format in NumberFormat:
        assert np.isnan(widen(narrow(values, number_format))).all()


def test_float32_is_copied() -> None:
    values = np.ones(3, np.float32)
    assert not np.shares_memory(narrow(values, NumberFormat.FLOAT32), values)
    assert not np.shares_memory(widen(values), values)


def test_another_dtype_is_refused() -> None:
    with pytest.raises(
        DirectionError, match=r"parameters: expected float32, float16, or bfloat16 as uint16 .* float64"
    ):
        format_of(np.ones(2))
