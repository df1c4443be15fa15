"""FedAdam, FedYogi and FedAdagrad: two steps by hand, in float64."""

from __future__ import annotations

from math import sqrt

import numpy as np
import pytest
from flwr.app import MetricRecord, RecordDict

from fedapps.messages import pack_arrays
from fedapps.methods import resolve_settings
from fedapps.strategies import FedAdagrad, FedAdam, FedYogi
from fedapps.strategies.fedavg import FlowerStrategy

ETA, B1, B2, TAU = 0.1, 0.9, 0.99, 0.01
FIRST, SECOND = 1.0, 2.0
"""What the clients moved by in the two rounds."""


def two_steps(strategy: FlowerStrategy) -> list[float]:
    model, values = {"x": np.zeros(1)}, []
    for server_round, delta in enumerate((FIRST, SECOND), start=1):
        strategy.rounds.begin(server_round, model, [0])
        trained = {"x": model["x"] + delta}
        strategy.receive(
            0, RecordDict({"arrays": pack_arrays(trained), "metrics": MetricRecord({"num-examples": 3})}), model
        )
        new = strategy.rounds.end()
        assert new is not None
        model = new
        values.append(float(model["x"][0]))
    return values


def test_two_steps_of_fedadam_with_flowers_bias_correction() -> None:
    """Which Adam it is.

    ``m`` is an average (weight ``1 - beta_1``), and the correction in round ``t`` has the exponent ``t + 1``.

    Without correction, and with the usual exponent ``t``, the first step would be another.
    """
    m1, v1 = (1 - B1) * FIRST, (1 - B2) * FIRST**2
    m2, v2 = B1 * m1 + (1 - B1) * SECOND, B2 * v1 + (1 - B2) * SECOND**2

    def rate(exponent: int) -> float:
        return ETA * sqrt(1 - B2**exponent) / (1 - B1**exponent)

    x1 = rate(2) * m1 / (sqrt(v1) + TAU)
    x2 = x1 + rate(3) * m2 / (sqrt(v2) + TAU)
    assert two_steps(FedAdam(eta=ETA, beta_1=B1, beta_2=B2, tau=TAU)) == pytest.approx([x1, x2], rel=1e-12)
    without, usual = ETA * m1 / (sqrt(v1) + TAU), rate(1) * m1 / (sqrt(v1) + TAU)
    assert x1 != pytest.approx(without, rel=1e-3)
    assert x1 != pytest.approx(usual, rel=1e-3)


def test_two_steps_of_fedyogi() -> None:
    """``v`` grows by ``(1 - beta_2) delta^2`` where it is smaller than ``delta^2``, here in both rounds; no correction."""
    m1, v1 = (1 - B1) * FIRST, (1 - B2) * FIRST**2
    m2, v2 = B1 * m1 + (1 - B1) * SECOND, v1 + (1 - B2) * SECOND**2
    x1 = ETA * m1 / (sqrt(v1) + TAU)
    x2 = x1 + ETA * m2 / (sqrt(v2) + TAU)
    assert two_steps(FedYogi(eta=ETA, beta_1=B1, beta_2=B2, tau=TAU)) == pytest.approx([x1, x2], rel=1e-12)


def test_two_steps_of_fedadagrad() -> None:
    """No momentum, the squares are summed."""
    x1 = ETA * FIRST / (FIRST + TAU)
    x2 = x1 + ETA * SECOND / (sqrt(FIRST**2 + SECOND**2) + TAU)
    assert two_steps(FedAdagrad(eta=ETA, tau=TAU)) == pytest.approx([x1, x2], rel=1e-12)


def test_a_zero_difference_moves_nothing() -> None:
    for strategy in (FedAdam(), FedYogi(), FedAdagrad()):
        model = {"x": np.ones(2, np.float32)}
        strategy.rounds.begin(1, model, [0])
        reply = {"arrays": pack_arrays({"x": np.ones(2, np.float32)}), "metrics": MetricRecord({"num-examples": 1})}
        strategy.receive(0, RecordDict(reply), model)
        new = strategy.rounds.end()
        assert new is not None
        assert new["x"].tolist() == [1, 1]


def test_settings_have_flowers_names() -> None:
    given = {"server-lr": 0.3, "tau": 0.2, "beta-1": 0.7, "beta-2": 0.8}
    for cls, keys in ((FedAdam, list(given)), (FedYogi, list(given)), (FedAdagrad, ["server-lr", "tau"])):
        method = cls.__name__.lower()
        config = {"method": method, **{f"{method}.{key}": given[key] for key in keys}}
        flower = cls.from_settings(resolve_settings(config, "torch"), "e").flower
        assert type(flower) is cls.FLOWER
        assert (flower.eta, flower.tau) == (0.3, 0.2)
        assert (flower.beta_1, flower.beta_2) == ((0.7, 0.8) if "beta-1" in keys else (0.0, flower.beta_2))
