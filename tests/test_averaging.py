"""The weighted mean of named tensors, from running sums."""

from __future__ import annotations

import numpy as np
import pytest

from fedapps.averaging import add_mean, finish_mean, start_mean
from fedapps.errors import CurvatureError


@pytest.mark.parametrize("weight", [0.0, -1.0, np.nan, np.inf], ids=str)
def test_weight_must_be_positive_and_finite(weight: float) -> None:
    with pytest.raises(ValueError, match="client 3: expected a weight that is positive and finite"):
        add_mean(start_mean({}), weight, {}, where="client 3")


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
