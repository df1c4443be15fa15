"""Statistics over clients."""

from __future__ import annotations

import numpy as np
import pytest

from fedapps.results.spread import client_statistics


def test_mean_weighted_mean_deviation_and_worst_decile() -> None:
    values = {p: {"test-accuracy": p / 20, "test-loss": float(p)} for p in range(20)}
    counts = {p: p + 1 for p in range(20)}
    found = client_statistics(values, counts)
    accuracies = np.arange(20) / 20
    assert found["client-test-accuracy"] == pytest.approx(accuracies.mean())
    assert found["client-test-accuracy-weighted"] == pytest.approx((accuracies * np.arange(1, 21)).sum() / 210)
    assert found["client-test-accuracy-std"] == pytest.approx(accuracies.std())
    # A tenth of 20 clients are two: the least accurate, and those of the greatest loss.
    assert found["client-test-accuracy-worst-decile"] == pytest.approx((0 + 1 / 20) / 2)
    assert found["client-test-loss-worst-decile"] == pytest.approx(18.5)


def test_a_metric_counts_only_the_clients_that_have_it() -> None:
    found = client_statistics({0: {"a": 1.0}, 3: {"a": 3.0, "b": 5.0}}, {0: 1, 3: 3})
    assert found["client-a"] == 2.0
    assert found["client-a-weighted"] == 2.5
    assert found["client-b"] == 5.0
    assert client_statistics({}, {}) == {}
