"""Sampling is a pure function of seed, round, number of clients and fraction."""

from __future__ import annotations

import random

import numpy as np
import pytest

from fedapps.settings import RoundSettings
from fedapps.strategies.rounds import sample_partitions


@pytest.mark.parametrize(
    ("n", "fraction", "size"), [(10, 1.0, 10), (10, 0.5, 5), (10, 0.01, 1), (3, 0.5, 2), (1, 0.1, 1)]
)
def test_sample_size_and_range(n: int, fraction: float, size: int) -> None:
    sampled = sample_partitions(3, 7, n, fraction)
    assert len(sampled) == size
    assert sampled == sorted(set(sampled))
    assert set(sampled) <= set(range(n))


def test_sampling_ignores_global_generators_and_other_draws() -> None:
    first = sample_partitions(5, 2, 100, 0.1)
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002 - the global state is what must not matter
    sample_partitions(5, 1, 100, 0.1)
    assert sample_partitions(5, 2, 100, 0.1) == first
    assert sample_partitions(5, 3, 100, 0.1) != first
    assert sample_partitions(6, 2, 100, 0.1) != first


def test_every_client_is_sampled_equally_often() -> None:
    counts = np.zeros(10)
    for server_round in range(2000):
        counts[sample_partitions(0, server_round, 10, 0.3)] += 1
    # Binomial with 2000 draws of probability 0.3: standard deviation 20.5; five of them.
    assert np.abs(counts - 600).max() < 103


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"fraction_train": 0.0}, "'fraction_train': .*> 0 and <= 1, got 0.0"),
        ({"weighting": "equal"}, "'weighting': .*examples, uniform, got 'equal'"),
        ({"on_failure": "ignore"}, "'on_failure': .*tolerate, fail-fast, got 'ignore'"),
        ({"min_replies": 0}, "'min_replies': .*>= 1, got 0"),
    ],
)
def test_wrong_settings_are_refused(change: dict[str, object], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        RoundSettings(**change)  # type: ignore[arg-type]


def test_weights() -> None:
    assert RoundSettings().weight(90) == 90.0
    assert RoundSettings(weighting="uniform").weight(90) == 1.0
