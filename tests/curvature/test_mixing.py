"""Preconditioned mixing, as pure functions of running sums."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest

from fedapps.curvature.mixing import BlockSums, add_block, mix_block, start_block
from fedapps.curvature.packing import pack_upper
from fedapps.errors import CurvatureError

ROWS, WIDTH = 3, 5
WEIGHTS = (10.0, 30.0, 7.0)

Client = tuple[float, np.ndarray, np.ndarray]
"""Weight ``p_i``, ``P_i``, ``W_i``."""


def _curvature(generator: np.random.Generator) -> np.ndarray:
    rows = generator.normal(size=(20, WIDTH)) * generator.uniform(0.5, 2, WIDTH)
    return rows.T @ rows / 20


@pytest.fixture(name="W")
def _sent() -> np.ndarray:
    return np.random.default_rng(1).normal(size=(ROWS, WIDTH))


@pytest.fixture
def clients() -> list[Client]:
    generator = np.random.default_rng(2)
    return [(weight, _curvature(generator), generator.normal(size=(ROWS, WIDTH))) for weight in WEIGHTS]


def _sum(W: np.ndarray, clients: list[Client], dtype: type = np.float64) -> BlockSums:
    sums = start_block(*W.shape)
    for weight, P, W_i in clients:
        add_block(sums, weight, pack_upper(P.astype(dtype)), ((W_i - W) @ P).astype(dtype), where="test")
    return sums


def _mix(W: np.ndarray, clients: list[Client]) -> np.ndarray:
    return mix_block(W, _sum(W, clients), where="test").W


def test_equals_the_papers_form_with_normalised_weights(W: np.ndarray, clients: list[Client]) -> None:
    """Equation 8 without the delta form: ``[sum p_i W_i P_i] [sum p_i P_i]^-1``, ``p_i = n_i / sum n``."""
    p = np.array(WEIGHTS) / sum(WEIGHTS)
    numerator = sum(p_i * W_i @ P for p_i, (_, P, W_i) in zip(p, clients, strict=True))
    denominator = sum(p_i * P for p_i, (_, P, _) in zip(p, clients, strict=True))
    mixed = mix_block(W, _sum(W, clients), where="test")
    np.testing.assert_allclose(mixed.W, numerator @ np.linalg.inv(denominator), rtol=1e-10)
    assert mixed.added_damping == 0


def test_equal_curvature_gives_the_weighted_mean(W: np.ndarray, clients: list[Client]) -> None:
    P = clients[0][1]
    same = [(weight, P, W_i) for weight, _, W_i in clients]
    expected = np.average([W_i for _, _, W_i in clients], axis=0, weights=WEIGHTS)
    np.testing.assert_allclose(_mix(W, same), expected, rtol=1e-10)


def test_damping_alone_gives_the_weighted_mean(W: np.ndarray, clients: list[Client]) -> None:
    """Dead inputs: ``A_i = 0`` everywhere, so ``P_i = damping I``, here 1e-3."""
    dead = [(weight, 1e-3 * np.eye(WIDTH), W_i) for weight, _, W_i in clients]
    expected = np.average([W_i for _, _, W_i in clients], axis=0, weights=WEIGHTS)
    np.testing.assert_allclose(_mix(W, dead), expected, rtol=1e-12)


def test_one_client_gives_its_own_block(W: np.ndarray, clients: list[Client]) -> None:
    np.testing.assert_allclose(_mix(W, clients[:1]), clients[0][2], rtol=1e-10)


def test_equal_blocks_stay_whatever_the_curvature(W: np.ndarray, clients: list[Client]) -> None:
    """Equal models stay where they are.

    At the model that was sent out bitwise, elsewhere up to rounding times the condition number.
    """
    assert np.array_equal(_mix(W, [(weight, P, W) for weight, P, _ in clients]), W)
    other = clients[0][2]
    np.testing.assert_allclose(_mix(W, [(weight, P, other) for weight, P, _ in clients]), other, rtol=1e-10)


def test_scale_of_the_weights_cancels(W: np.ndarray, clients: list[Client]) -> None:
    scaled = [(1e-3 * weight, P, W_i) for weight, P, W_i in clients]
    np.testing.assert_allclose(_mix(W, scaled), _mix(W, clients), rtol=1e-10)


def test_order_of_the_clients_changes_rounding_only(W: np.ndarray, clients: list[Client]) -> None:
    expected = _mix(W, clients)
    for order in permutations(clients):
        np.testing.assert_allclose(_mix(W, list(order)), expected, rtol=1e-12)


def test_client_split_in_two_equals_one(W: np.ndarray, clients: list[Client]) -> None:
    """A client of weight 30 as two of weights 12 and 18 that report the same."""
    weight, P, W_i = clients[1]
    assert weight == 12 + 18
    split = [clients[0], (12.0, P, W_i), (18.0, P, W_i), clients[2]]
    np.testing.assert_allclose(_mix(W, split), _mix(W, clients), rtol=1e-10)


def test_single_precision_on_the_wire_costs_a_rounding_of_the_change(W: np.ndarray, clients: list[Client]) -> None:
    """The error is relative to the change, which is small against the model: the point of the delta form.

    Bound: epsilon of float32 (1.2e-7) times the condition number of the mean curvature (below 100) times the change.
    """
    near = [(weight, P, W + 1e-4 * W_i) for weight, P, W_i in clients]
    mixed = mix_block(W, _sum(W, near, np.float32), where="test").W
    assert np.abs(mixed - _mix(W, near)).max() < 1.2e-5 * np.abs(mixed - W).max()


def test_damping_added_on_the_server_is_returned_in_units_of_one_client() -> None:
    """Rank one on every client: the ladder's rung does not grow with the weights, and the result is finite."""
    W, a = np.zeros((1, 3)), np.array([[1.0, 2.0, 0.0]])
    added = []
    for weight in (1.0, 1e6):
        mixed = mix_block(W, _sum(W, [(weight, a.T @ a, a)]), where="test")
        assert np.isfinite(mixed.W).all()
        np.testing.assert_allclose(mixed.W, a, atol=1e-6)
        added.append(mixed.added_damping)
    assert added[0] > 0
    assert added[1] == pytest.approx(added[0])


def test_zero_curvature_everywhere_is_an_error(W: np.ndarray) -> None:
    sums = start_block(ROWS, WIDTH)
    add_block(sums, 1.0, pack_upper(np.zeros((WIDTH, WIDTH))), np.zeros((ROWS, WIDTH)), where="test")
    with pytest.raises(CurvatureError, match=r"layer 'fc1': .* zero everywhere.*damping"):
        mix_block(W, sums, where="layer 'fc1'")


def test_no_client_is_an_error(W: np.ndarray) -> None:
    with pytest.raises(ValueError, match=r"layer 'fc1': .*one client, got none"):
        mix_block(W, start_block(ROWS, WIDTH), where="layer 'fc1'")


@pytest.mark.parametrize("weight", [0.0, -1.0, np.nan, np.inf], ids=str)
def test_weight_must_be_positive_and_finite(weight: float) -> None:
    with pytest.raises(ValueError, match=r"client 3: .*weight.*positive and finite"):
        add_block(start_block(1, 1), weight, np.ones(1), np.ones((1, 1)), where="client 3")


@pytest.mark.parametrize(
    ("P", "M"),
    [(np.ones(3), np.ones((2, 3))), (np.ones(6), np.ones((2, 2)))],
    ids=["P of another width", "M of another"],
)
def test_refused_block_leaves_the_sums_as_they_were(P: np.ndarray, M: np.ndarray) -> None:
    sums = start_block(2, 3)
    with pytest.raises(
        CurvatureError, match=r"layer 'fc1', client 3: expected a packed P of shape \(6,\) and M of shape"
    ):
        add_block(sums, 1.0, P, M, where="layer 'fc1', client 3")
    assert sums.weight == 0
    assert not sums.curvature.any()
    assert not sums.product.any()


def test_sums_survive_mixing_and_inputs_may_be_read_only(W: np.ndarray, clients: list[Client]) -> None:
    sums = _sum(W, clients)
    before = sums.curvature.copy(), sums.product.copy()
    W.setflags(write=False)
    mix_block(W, sums, where="test")
    np.testing.assert_array_equal(sums.curvature, before[0])
    np.testing.assert_array_equal(sums.product, before[1])
