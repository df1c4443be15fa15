"""Preconditioned mixing and weighted means, as pure functions of running sums."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest

from fedapps.curvature.mixing import (
    BlockSums,
    add_block,
    add_mean,
    finish_mean,
    mix_block,
    start_block,
    start_mean,
)
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
    with pytest.raises(CurvatureError, match=r"layer 'fc1': expected .* zero everywhere; set a damping > 0"):
        mix_block(W, sums, where="layer 'fc1'")


def test_no_client_is_an_error(W: np.ndarray) -> None:
    with pytest.raises(ValueError, match="layer 'fc1': expected at least one client, got none"):
        mix_block(W, start_block(ROWS, WIDTH), where="layer 'fc1'")


@pytest.mark.parametrize("weight", [0.0, -1.0, np.nan, np.inf], ids=str)
def test_weight_must_be_positive_and_finite(weight: float) -> None:
    with pytest.raises(ValueError, match="client 3: expected a weight that is positive and finite"):
        add_block(start_block(1, 1), weight, np.ones(1), np.ones((1, 1)), where="client 3")
    with pytest.raises(ValueError, match="client 3: expected a weight that is positive and finite"):
        add_mean(start_mean({}), weight, {}, where="client 3")


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


# Means of tensors -----------------------------------------------------------------------------


def test_floating_tensors_are_averaged_in_double_and_rounded_once() -> None:
    """Weights 10 and 30; float32 sums of 1e8 and 1 would lose the 1."""
    first = {"a": np.array([1e8, 1.0], np.float32), "scalar": np.array(2.0, np.float16)}
    second = {"a": np.array([1.0, 5.0], np.float32), "scalar": np.array(6.0, np.float16)}
    sums = start_mean(first)
    add_mean(sums, 10.0, first)
    add_mean(sums, 30.0, second)
    mean = finish_mean(sums)
    np.testing.assert_array_equal(mean["a"], np.array([0.25e8 + 0.75, 4.0], np.float64).astype(np.float32))
    assert mean["a"].dtype == np.float32
    assert (mean["scalar"].dtype, mean["scalar"].shape, float(mean["scalar"])) == (np.float16, (), 5.0)


def test_weights_are_applied_in_double() -> None:
    """Values with full mantissas: a product or sum rounded to float32 on the way would show in some of 1000 entries."""
    first, second = np.random.default_rng(0).normal(size=(2, 1000)).astype(np.float32)
    sums = start_mean({"w": first})
    add_mean(sums, 7.0, {"w": first})
    add_mean(sums, 23.0, {"w": second})
    expected = (7 * first.astype(np.float64) + 23 * second.astype(np.float64)) / 30
    np.testing.assert_array_equal(finish_mean(sums)["w"], expected.astype(np.float32))


def test_buffers_of_batch_normalisation() -> None:
    """Statistics are averaged, counters stay integers.

    Running mean by weight, counters 3 and 8 to an int64 of shape (), bool by or.
    """
    first = {"running_mean": np.zeros(2, np.float32), "count": np.array(3), "seen": np.array([True, False, False])}
    second = {"running_mean": np.full(2, 10, np.float32), "count": np.array(8), "seen": np.array([False, False, True])}
    sums = start_mean(first)
    add_mean(sums, 10.0, first)
    add_mean(sums, 30.0, second)
    mean = finish_mean(sums)
    np.testing.assert_array_equal(mean["running_mean"], [7.5, 7.5])
    assert (mean["count"].dtype, mean["count"].shape, int(mean["count"])) == (np.int64, (), 8)
    np.testing.assert_array_equal(mean["seen"], [True, False, True])
    assert list(mean) == ["running_mean", "count", "seen"]


def test_maximum_of_negative_integers_is_negative() -> None:
    sums = start_mean({"n": np.array([-5], np.int8)})
    add_mean(sums, 1.0, {"n": np.array([-5], np.int8)})
    np.testing.assert_array_equal(finish_mean(sums)["n"], [-5])


def test_mean_of_one_client_is_bitwise_its_tensor() -> None:
    value = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    sums = start_mean({"w": value})
    add_mean(sums, 37.0, {"w": value})
    assert finish_mean(sums)["w"].tobytes() == value.tobytes()


def test_result_does_not_share_memory_with_the_sums() -> None:
    sums = start_mean({"n": np.array([1])})
    add_mean(sums, 1.0, {"n": np.array([1])})
    finish_mean(sums)["n"][0] = 100
    assert finish_mean(sums)["n"][0] == 1


def test_names_are_those_of_the_tensors() -> None:
    assert start_mean({"b": np.ones(2), "a": np.array(1)}).names == {"a", "b"}


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"w": np.ones(2)}, "client 3: expected exactly the 2 tensors of the mean, got missing: 'n'; unknown: none"),
        ({"w": np.ones(2), "n": np.array(1), "x": np.ones(1)}, "got missing: none; unknown: 'x'"),
        (
            {"w": np.ones(3), "n": np.array(1)},
            r"client 3, tensor 'w': expected shape \(2,\) and dtype float64, got shape",
        ),
        ({"w": np.ones(2), "n": np.array(1.0)}, "client 3, tensor 'n': .*int64, got shape .* and dtype float64"),
    ],
    ids=["missing", "unknown", "other shape", "counter turned into a float"],
)
def test_refused_tensors_leave_the_sums_as_they_were(arrays: dict[str, np.ndarray], message: str) -> None:
    sums = start_mean({"w": np.ones(2), "n": np.array(1)})
    with pytest.raises(CurvatureError, match=message):
        add_mean(sums, 1.0, arrays, where="client 3")
    assert sums.weight == 0
    assert not sums.sums["w"].any()


def test_mean_of_no_client_is_an_error() -> None:
    with pytest.raises(ValueError, match="expected at least one client, got none"):
        finish_mean(start_mean({"w": np.ones(2)}))


def test_dtype_without_a_mean_is_refused() -> None:
    with pytest.raises(CurvatureError, match="tensor 'name': expected a floating, integer or bool dtype"):
        start_mean({"name": np.array(["text"])})
