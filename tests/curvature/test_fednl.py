"""FedNL's mathematics on packed triangles, against the same on full matrices."""

from __future__ import annotations

import numpy as np
import pytest

from fedapps.curvature.compressors import Identity, RankR
from fedapps.curvature.fednl import cut_solve, empty_state, end_round, learn, norm, product, start_round
from fedapps.curvature.packing import pack_upper, unpack_upper
from fedapps.errors import CurvatureError

D = 5


def symmetric(seed: int) -> np.ndarray:
    A = np.random.default_rng(seed).normal(size=(D, D))
    return A + A.T


def test_norm_and_product_are_those_of_the_full_matrix() -> None:
    H, theta = symmetric(0), np.arange(D) - 1.5
    assert norm(pack_upper(H)) == pytest.approx(np.linalg.norm(H), rel=1e-14)
    np.testing.assert_allclose(product(pack_upper(H), 0.3, theta), (H + 0.3 * np.eye(D)) @ theta, rtol=1e-13)


def test_an_estimate_approaches_its_hessian_by_what_the_compressor_lets_through() -> None:
    """Rank 1 with alpha = 1 takes the eigenvalues of the difference away one by one: after ``d`` rounds nothing is left."""
    H, hessian = pack_upper(symmetric(0)), pack_upper(symmetric(1))
    left = np.sort(np.abs(np.linalg.eigvalsh(symmetric(1) - symmetric(0))))
    for k in range(D):
        assert norm(hessian - H) == pytest.approx(np.sqrt(np.sum(left[: D - k] ** 2)), rel=1e-10)
        H = learn(H, hessian, RankR(1), 1.0).H
    assert norm(hessian - H) < 1e-12
    half = learn(pack_upper(symmetric(0)), hessian, Identity(), 0.5).H
    np.testing.assert_allclose(unpack_upper(half), (symmetric(0) + symmetric(1)) / 2, rtol=1e-14)


@pytest.mark.parametrize(("shift", "mu", "num_cut"), [(0.0, 1e-3, 2), (3.0, 1e-3, 0), (1.0, 2.5, 2)])
def test_eigenvalues_are_shifted_and_then_cut(shift: float, mu: float, num_cut: int) -> None:
    eigenvalues, g = np.array([-2.0, 0.0, 1.5, 4.0, 9.0]), np.arange(1.0, D + 1)
    Q = np.linalg.qr(symmetric(3))[0]
    H = (Q * eigenvalues) @ Q.T
    expected = np.linalg.solve((Q * np.maximum(eigenvalues + shift, mu)) @ Q.T, g)
    found = cut_solve(pack_upper((H + H.T) / 2), shift, g, mu, where="server")
    np.testing.assert_allclose(found.x, expected, rtol=1e-10)
    assert found.num_cut == num_cut


def test_a_hessian_without_a_bound_from_below_is_refused() -> None:
    with pytest.raises(CurvatureError, match=r"server: expected eigenvalues above 0.*fednl\.mu"):
        cut_solve(pack_upper(np.diag([1.0, 0.0])), 0.0, np.ones(2), 0.0, where="server")


def test_a_round_changes_the_sums_by_what_came_and_modifies_nothing() -> None:
    state, sums = empty_state(2), start_round(2)
    sums.initial += [1.0, 2.0, 3.0]
    sums.learned += [0.5, 0.0, 1.0]
    sums.q += [1.0, -1.0]
    sums.weight = 0.25
    before, after = end_round(state, sums, 0.5)
    assert (before.H.tolist(), after.H.tolist()) == ([1, 2, 3], [1.25, 2, 3.5])
    assert (after.q.tolist(), after.weight) == ([1, -1], 0.25)
    assert not state.H.any()
