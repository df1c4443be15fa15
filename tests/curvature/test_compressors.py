"""Compressors against slow oracles on full matrices, their contraction, their bytes, and messages that nobody composes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fedapps.curvature.compressors import Compressor, Identity, RankR, TopK, num_bytes
from fedapps.curvature.packing import pack_upper, unpack_upper
from fedapps.errors import MessageError
from fedapps.messages import pack_arrays
from fedapps.messages.schema import record_bytes

D = 7
COMPRESSORS = [Identity(), *(TopK(k) for k in (1, 7, 20, 28, 50)), *(RankR(r) for r in (1, 3, 7, 9))]


def symmetric(seed: int, d: int = D) -> np.ndarray:
    A = np.random.default_rng(seed).normal(size=(d, d))
    return A + A.T


def through(compressor: Compressor, M: np.ndarray) -> np.ndarray:
    """``C(M)`` as full matrix, by a real message."""
    return unpack_upper(compressor.decompress(compressor.compress(pack_upper(M)), len(M), "client 0"))


def oracle(compressor: Compressor, M: np.ndarray) -> np.ndarray:
    d = len(M)
    if isinstance(compressor, RankR):
        U, s, Vt = np.linalg.svd(M)
        r = min(compressor.r, d)
        return (U[:, :r] * s[:r]) @ Vt[:r]
    if isinstance(compressor, TopK):
        places = [(i, j) for i in range(d) for j in range(i, d)]
        places.sort(key=lambda place: -(M[place] ** 2) * (1 if place[0] == place[1] else 2))
        C = np.zeros_like(M)
        for i, j in places[: compressor.k]:
            C[i, j] = C[j, i] = M[i, j]
        return C
    return M


@pytest.mark.parametrize("compressor", COMPRESSORS, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_what_arrives_is_what_the_definition_says(compressor: Compressor, seed: int) -> None:
    M = symmetric(seed)
    np.testing.assert_allclose(through(compressor, M), oracle(compressor, M), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("compressor", COMPRESSORS, ids=str)
def test_no_more_than_1_minus_delta_of_the_squared_norm_is_lost(compressor: Compressor) -> None:
    """Equality where every entry, or every eigenvalue, has the same share: the delta of the table is the best there is."""
    for seed in range(20):
        M = symmetric(seed)
        lost = np.sum((through(compressor, M) - M) ** 2)
        assert lost <= (1 - compressor.delta(D)) * np.sum(M**2) * (1 + 1e-12) + 1e-20
    even = np.eye(D) if isinstance(compressor, RankR) else np.full((D, D), 0.5**0.5) + (1 - 0.5**0.5) * np.eye(D)
    lost = np.sum((through(compressor, even) - even) ** 2)
    assert lost == pytest.approx((1 - compressor.delta(D)) * np.sum(even**2), rel=1e-12, abs=1e-20)


def test_an_entry_off_the_diagonal_counts_twice() -> None:
    """2 * 0.9^2 > 1^2: the norm that is left is 1; it would be 1.62 without the diagonal entry."""
    M = np.array([[1.0, 0.9], [0.9, 0.0]])
    np.testing.assert_array_equal(through(TopK(1), M), [[0.0, 0.9], [0.9, 0.0]])


@pytest.mark.parametrize(
    ("compressor", "expected"),
    [(Identity(), 8 * D * (D + 1) / 2), (TopK(5), 12 * 5), (RankR(2), 8 * 2 * (D + 1))],
    ids=str,
)
def test_a_message_has_the_bytes_of_the_table(compressor: Compressor, expected: int) -> None:
    message = compressor.compress(pack_upper(symmetric(0)))
    assert record_bytes(pack_arrays(message)) == num_bytes(compressor, D) == expected
    like = compressor.like(D)
    assert {k: (v.shape, v.dtype) for k, v in message.items()} == {k: (v.shape, v.dtype) for k, v in like.items()}


@pytest.mark.parametrize(
    "indices", [[0, 2, 2], [3, 2, 5], [-1, 2, 5], [2, 5, 28], [5, 2, 28], [-(2**31), 0, 2**31 - 1]], ids=str
)
def test_indices_that_do_not_rise_or_lie_outside_are_refused(indices: list[int]) -> None:
    message = {"indices": np.array(indices, np.int32), "values": np.ones(3)}
    with pytest.raises(MessageError, match=r"client 4, indices of the entries: expected rising numbers from 0 to 27"):
        TopK(3).decompress(message, D, "client 4")


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda Q: 2 * Q, id="long"),
        pytest.param(lambda Q: Q * (1 + 1e-9), id="a little long"),
        pytest.param(lambda Q: Q[:, [0, 0]], id="twice the same"),
        pytest.param(lambda Q: 1e200 * Q, id="too long for its square"),
    ],
)
def test_eigenvectors_that_are_not_orthonormal_are_refused(change: Any) -> None:
    message = RankR(2).compress(pack_upper(symmetric(0)))
    with pytest.raises(MessageError, match="client 4, eigenvectors: expected orthonormal columns"):
        RankR(2).decompress({**message, "eigenvectors": change(message["eigenvectors"])}, D, "client 4")
