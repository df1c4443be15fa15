"""Which of the two forms of momentum FedAvgM has, by hand."""

from __future__ import annotations

import numpy as np
import pytest
from flwr.app import MetricRecord, RecordDict

from fedapps.messages import pack_arrays
from fedapps.methods import resolve_settings
from fedapps.strategies import FedAvg, FedAvgM
from fedapps.strategies.fedavg import FlowerStrategy


def step(
    strategy: FlowerStrategy, server_round: int, model: dict[str, np.ndarray], delta: float
) -> dict[str, np.ndarray]:
    """One round with one client, whose model is ``delta`` larger."""
    strategy.rounds.begin(server_round, model, [0])
    trained = {name: value + value.dtype.type(delta) for name, value in model.items()}
    strategy.receive(
        0, RecordDict({"arrays": pack_arrays(trained), "metrics": MetricRecord({"num-examples": 3})}), model
    )
    new = strategy.rounds.end()
    assert new is not None
    return new


def test_momentum_has_the_sum_form() -> None:
    """Momentum as a sum, not an average.

    Deltas +1 and +1 with beta 0.9 and server lr 1 give 1, then 1 + (0.9 + 1) = 2.9 (the other form: 0.1, 0.29).
    """
    strategy = FedAvgM(server_momentum=0.9)
    first = step(strategy, 1, {"x": np.zeros(1)}, 1.0)
    assert first["x"] == pytest.approx(1.0)
    assert step(strategy, 2, first, 1.0)["x"] == pytest.approx(2.9)


def test_the_server_learning_rate_scales_the_step_and_not_the_momentum() -> None:
    """Momentum 1, then 0.5 + 1 = 1.5; x = 0.2, then 0.2 + 0.2 * 1.5."""
    strategy = FedAvgM(server_momentum=0.5, server_learning_rate=0.2)
    first = step(strategy, 1, {"x": np.zeros(1)}, 1.0)
    assert first["x"] == pytest.approx(0.2)
    assert step(strategy, 2, first, 1.0)["x"] == pytest.approx(0.5)


def test_without_momentum_and_with_server_lr_one_it_is_fedavg_bitwise() -> None:
    momentum, plain = FedAvgM(server_learning_rate=1.0, server_momentum=0.0), FedAvg()
    model = {"x": np.random.default_rng(0).normal(size=100).astype(np.float32)}
    for server_round in (1, 2, 3):
        new, expected = (step(s, server_round, model, 0.1 * server_round) for s in (momentum, plain))
        assert new["x"].tobytes() == expected["x"].tobytes()
        model = new
    assert momentum.state_arrays() == {}


def test_settings_have_flowers_names() -> None:
    config = {"method": "fedavgm", "fedavgm.server-lr": 0.3, "fedavgm.momentum": 0.8}
    flower = FedAvgM.from_settings(resolve_settings(config, "torch"), "e").flower
    assert (flower.server_learning_rate, flower.server_momentum) == (0.3, 0.8)
