from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest

from fedapps.zeroth_order import aggregate
from fedapps.zeroth_order.aggregate import Aggregation, aggregate_scalars, clip_norms
from fedapps.zeroth_order.errors import ScalarError


def replies_of(values: Any, partitions: list[int] | None = None) -> dict[int, Any]:
    rows = np.asarray(values, np.float32)
    ids = partitions or list(range(len(rows)))
    return {i: tuple(map(tuple, row.tolist())) for i, row in zip(ids, rows, strict=True)}


RANDOM = np.random.default_rng(0).standard_normal((7, 3, 2)).astype(np.float32)


def test_known_means(known: dict[str, Any]) -> None:
    for case in known["aggregation"]:
        assert [list(row) for row in aggregate_scalars(replies_of(case["clients"]))] == case["G"]


def test_the_order_of_arrival_does_not_matter() -> None:
    """In the order of partitions 2^60 and -2^60 cancel before 1 is added; in any other order the 1 is lost."""
    replies = replies_of(np.float32([1.0, 2.0**60, -(2.0**60)]).reshape(3, 1, 1), [9, 2, 4])
    shuffled = {i: replies[i] for i in (2, 9, 4)}
    assert aggregate_scalars(replies) == aggregate_scalars(shuffled) == ((float(np.float32(1 / 3)),),)


def test_weights_are_normalised() -> None:
    weights = {0: 2.0, 1: 6.0}
    found = aggregate_scalars(replies_of([[[1.0]], [[5.0]]]), weights=weights)
    assert found == ((4.0,),)


def test_the_median_and_the_trimmed_mean_withstand_an_outlier() -> None:
    hostile = RANDOM.copy()
    hostile[3] = 1e30
    for rule, expected in (
        (Aggregation.MEDIAN, np.median(hostile.astype(np.float64), axis=0)),
        (Aggregation.TRIMMED_MEAN, np.sort(hostile.astype(np.float64), axis=0)[1:-1].mean(axis=0)),
    ):
        found = np.array(aggregate_scalars(replies_of(hostile), rule=rule, trim=0.2))
        np.testing.assert_allclose(found, expected, rtol=1e-6)
        assert np.abs(found).max() < 10


def test_trimming_nothing_is_the_mean() -> None:
    replies = replies_of(RANDOM)
    assert aggregate_scalars(replies, rule=Aggregation.TRIMMED_MEAN, trim=0.0) == aggregate_scalars(replies)


@pytest.mark.parametrize(
    ("clients", "trim", "cut"),
    [(3, 0.1, 1), (4, 0.001, 1), (6, 0.1, 1), (9, 0.1, 1), (10, 0.1, 1), (20, 0.1, 2), (3, 0.49, 1), (7, 0.49, 3)],
)
def test_the_trimmed_mean_cuts_off_its_share_and_one_value_at_least(clients: int, trim: float, cut: int) -> None:
    values = np.random.default_rng(clients).standard_normal((clients, 2, 3)).astype(np.float32)
    values[clients // 2] = 1e30
    found = aggregate_scalars(replies_of(values), rule=Aggregation.TRIMMED_MEAN, trim=trim)
    expected = np.sort(values.astype(np.float64), axis=0)[cut : clients - cut].mean(axis=0)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert np.abs(found).max() < 10


@pytest.mark.parametrize("clients", [1, 2])
def test_the_trimmed_mean_of_fewer_than_three_is_their_mean_and_says_so_once(
    clients: int, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("flwr").propagate = True
    aggregate._say_untrimmed.cache_clear()
    replies = replies_of(RANDOM[:clients])
    for _ in range(3):
        assert aggregate_scalars(replies, rule=Aggregation.TRIMMED_MEAN) == aggregate_scalars(replies)
    assert [record.message for record in caplog.records] == [
        "trimmed mean: of fewer than 3 clients' scalars none can be cut off, so their mean is taken"
    ]


def test_clipping_bounds_each_clients_norm() -> None:
    """Norms 5 and 1 under a bound of 2: the first is scaled by 0.4, the second stays."""
    stacked = np.array([[[3.0, 4.0]], [[0.6, 0.8]]])
    np.testing.assert_allclose(clip_norms(stacked, 2.0), [[[1.2, 1.6]], [[0.6, 0.8]]], rtol=1e-15)
    np.testing.assert_array_equal(clip_norms(np.zeros((1, 1, 2)), 2.0), 0)
    found = aggregate_scalars(replies_of(stacked), clip=2.0)
    np.testing.assert_allclose(found, [[0.9, 1.2]], rtol=1e-6)


@pytest.mark.parametrize(
    ("replies", "options", "message"),
    [
        ({}, {}, "round: expected a reply, got none"),
        ({3: ((1.0,),), 5: ((1.0, 2.0),)}, {}, "partition 5: expected 1 rows of 1 numbers"),
        ({3: ((1.0,),), 5: ((1.0,), (2.0,))}, {}, "partition 5: expected 1 rows of 1 numbers, got 2 rows"),
        ({3: ((float("nan"),),)}, {}, "partition 3: expected finite scalars, got nan"),
        ({3: ((float("inf"),),)}, {}, "partition 3: expected finite scalars"),
        ({3: ()}, {}, "partition 3: expected 0 rows of 0|partition 3: expected tau rows"),
        ({3: ((1.0,),)}, {"weights": {3: 0.0}}, "weights: expected numbers with a sum above 0"),
        ({3: ((1.0,),)}, {"weights": {3: -1.0}}, "weights: expected numbers"),
        ({3: ((1.0,),)}, {"rule": Aggregation.TRIMMED_MEAN, "trim": 0.5}, r"trim: expected a share in \[0, 0.5\)"),
        ({3: ((1.0,),)}, {"clip": 0.0}, "clip: expected a finite number above 0"),
    ],
    ids=["no reply", "wide", "long", "nan", "inf", "empty", "no weight", "negative weight", "trim", "clip"],
)
def test_bad_replies_and_options_are_refused(replies: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ScalarError, match=message):
        aggregate_scalars(replies, **options)
