"""Packing of symmetric matrices."""

from __future__ import annotations

import numpy as np
import pytest

from fedapps.curvature.packing import TILE, pack_upper, triangle_size, triangle_width, unpack_upper
from fedapps.errors import CurvatureError


def _symmetric(n: int, dtype: type, seed: int = 0) -> np.ndarray:
    matrix = np.random.default_rng(seed).normal(size=(n, n))
    return (matrix + matrix.T).astype(dtype)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("n", [1, 2, 5, TILE - 1, TILE, 2 * TILE + 3], ids="n={}".format)
def test_round_trip_is_bitwise_and_keeps_the_dtype(n: int, dtype: type) -> None:
    matrix = _symmetric(n, dtype)
    packed = pack_upper(matrix)
    assert packed.shape == (triangle_size(n),)
    assert packed.dtype == matrix.dtype
    unpacked = unpack_upper(packed)
    assert unpacked.dtype == matrix.dtype
    np.testing.assert_array_equal(unpacked, matrix)


def test_order_is_row_by_row_from_the_diagonal() -> None:
    matrix = np.array([[1.0, 2.0, 3.0], [2.0, 4.0, 5.0], [3.0, 5.0, 6.0]])
    np.testing.assert_array_equal(pack_upper(matrix), [1, 2, 3, 4, 5, 6])


def test_matches_the_index_arrays_of_numpy() -> None:
    matrix = _symmetric(7, np.float64)
    np.testing.assert_array_equal(pack_upper(matrix), matrix[np.triu_indices(7)])


def test_packing_is_linear() -> None:
    """The server sums packed triangles: the sum unpacked is the sum of the matrices."""
    first, second = _symmetric(6, np.float64, 1), _symmetric(6, np.float64, 2)
    summed = unpack_upper(0.25 * pack_upper(first) + 3 * pack_upper(second))
    np.testing.assert_allclose(summed, 0.25 * first + 3 * second, rtol=1e-15)


def test_input_is_left_alone_and_may_be_read_only() -> None:
    matrix = _symmetric(4, np.float32)
    matrix.setflags(write=False)
    packed = pack_upper(matrix)
    packed.setflags(write=False)
    assert unpack_upper(packed).flags.writeable


def test_asymmetry_of_rounding_passes() -> None:
    matrix = _symmetric(300, np.float32)
    matrix[290, 3] += 1e-6
    assert pack_upper(matrix).size == triangle_size(300)


@pytest.mark.parametrize(
    ("row", "column"), [(1, 0), (0, 1), (TILE + 5, 2), (TILE + 5, TILE + 1)], ids=["lower", "upper", "far", "last tile"]
)
def test_asymmetry_beyond_rounding_is_refused(row: int, column: int) -> None:
    matrix = _symmetric(TILE + 10, np.float32)
    matrix[row, column] += 0.1
    with pytest.raises(CurvatureError, match="symmetric"):
        pack_upper(matrix)


@pytest.mark.parametrize("shape", [(3,), (2, 3), (2, 2, 2)], ids=str)
def test_only_square_matrices_are_packed(shape: tuple[int, ...]) -> None:
    with pytest.raises(CurvatureError, match=r"expected shape \(n, n\), got"):
        pack_upper(np.zeros(shape))


def test_size_that_is_no_triangle_is_refused() -> None:
    with pytest.raises(CurvatureError, match="such as 6 or 10, got 8"):
        unpack_upper(np.zeros(8))


def test_matrix_is_not_unpacked() -> None:
    with pytest.raises(CurvatureError, match="expected a vector"):
        unpack_upper(np.zeros((2, 3)))


@pytest.mark.parametrize("n", [0, 1, 2, 4096, 10**6], ids=str)
def test_width_inverts_size(n: int) -> None:
    assert triangle_size(n) == sum(range(n + 1))
    assert triangle_width(triangle_size(n)) == n
