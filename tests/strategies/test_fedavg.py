"""Flower's own strategies in our rounds: the same bits as Flower's, buffers kept away, refused rounds without a trace."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp import strategy as flower

from fedapps.errors import TaskError
from fedapps.messages import pack_arrays
from fedapps.settings import RoundSettings
from fedapps.strategies import (
    FedAdagrad,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedCLUP,
    FedPM,
    FedProx,
    FedYogi,
    LocalNewton,
    PFedMe,
)
from fedapps.strategies.fedavg import FlowerStrategy, _as_message

RANDOM = np.random.default_rng(0)
SIZES = {0: 10, 1: 30, 2: 60}
BUFFERS = {
    "bn.running_mean": np.zeros(2, np.float32),
    "bn.running_var": np.ones(2, np.float32),
    "bn.count": np.array(0),
}

OURS: dict[str, tuple[type[FlowerStrategy], type[flower.FedAvg], dict[str, Any]]] = {
    "FedAvg": (FedAvg, flower.FedAvg, {}),
    "FedProx": (FedProx, flower.FedProx, {"proximal_mu": 0.1}),
    "FedAvgM": (FedAvgM, flower.FedAvgM, {"server_learning_rate": 0.7, "server_momentum": 0.9}),
    "FedAvgM without momentum": (FedAvgM, flower.FedAvgM, {"server_learning_rate": 0.7}),
    "FedAdam": (FedAdam, flower.FedAdam, {"eta": 0.05, "beta_1": 0.8, "beta_2": 0.95, "tau": 0.01}),
    "FedYogi": (FedYogi, flower.FedYogi, {"eta": 0.05, "beta_1": 0.8, "beta_2": 0.95, "tau": 0.01}),
    "FedAdagrad": (FedAdagrad, flower.FedAdagrad, {"eta": 0.05, "tau": 0.01}),
}
STATEFUL = [name for name in OURS if name not in ("FedAvg", "FedProx", "FedAvgM without momentum")]
every_strategy = pytest.mark.parametrize("name", OURS)


def start_model(dtype: Any = np.float32) -> dict[str, np.ndarray]:
    random = np.random.default_rng(1)
    # Not in alphabetical order, of several shapes, one of them 0-dimensional.
    shapes: dict[str, tuple[int, ...]] = {"w2": (3, 4), "a": (4,), "scale": ()}
    return {name: random.normal(size=shape).astype(dtype) for name, shape in shapes.items()}


def trained(model: dict[str, np.ndarray], server_round: int, partition: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng([server_round, partition])
    return {n: (v + 0.1 * random.normal(size=v.shape)).astype(v.dtype) for n, v in model.items()}


def content(
    arrays: dict[str, np.ndarray], num_examples: int, buffers: dict[str, np.ndarray] | None = None
) -> RecordDict:
    records = {"arrays": pack_arrays(arrays), "metrics": MetricRecord({"num-examples": num_examples})}
    return RecordDict({**records, **({"buffers": pack_arrays(buffers)} if buffers else {})})


class OnlineNodes:
    """All of the grid that Flower's ``configure_train`` asks for."""

    def get_node_ids(self) -> list[int]:
        return list(SIZES)


def flower_round(
    strategy: flower.FedAvg, server_round: int, model: dict[str, np.ndarray], replies: dict[int, RecordDict]
) -> dict[str, np.ndarray]:
    """A round of Flower's strategy as its own ``start`` runs it, the replies in order of partition ids."""
    strategy.configure_train(server_round, pack_arrays(model), ConfigRecord(), cast(Grid, OnlineNodes()))
    messages = [_as_message(replies[partition], partition) for partition in sorted(replies)]
    arrays, _ = strategy.aggregate_train(server_round, messages)
    assert isinstance(arrays, ArrayRecord)
    return {name: array.numpy() for name, array in arrays.items()}


def our_round(
    strategy: FlowerStrategy, server_round: int, model: dict[str, np.ndarray], replies: dict[int, RecordDict],
    order: list[int] | None = None,
) -> dict[str, np.ndarray] | None:  # fmt: skip
    strategy.rounds.begin(server_round, model, list(replies))
    for partition in order or list(replies):
        strategy.receive(partition, replies[partition], model)
    return strategy.rounds.end()


@every_strategy
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_every_round_has_the_bits_of_flowers_own_strategy_on_ordered_replies(name: str, dtype: Any) -> None:
    """Five rounds, so that moments count; replies arrive in another order, and one client lists its tensors backwards.

    NumPy 2 makes Flower's FedAdam give float64 for float32; the model that goes out keeps its dtype on both sides.
    """
    ours, theirs, arguments = OURS[name]
    our, their = ours(**arguments), theirs(**arguments)
    model = start_model(dtype)
    for server_round in range(1, 6):
        replies = {p: content(trained(model, server_round, p), SIZES[p]) for p in SIZES}
        expected = flower_round(their, server_round, model, replies)
        backwards = dict(reversed(trained(model, server_round, 0).items()))
        new = our_round(our, server_round, model, {**replies, 0: content(backwards, SIZES[0])}, order=[2, 0, 1])
        assert new is not None
        assert list(new) == list(model)
        for tensor, value in new.items():
            assert value.dtype == dtype
            assert value.tobytes() == expected[tensor].astype(dtype).tobytes(), (server_round, tensor)
        model = new


@every_strategy
def test_uniform_weights_are_flowers_with_equal_numbers_of_examples(name: str) -> None:
    ours, theirs, arguments = OURS[name]
    model = start_model()
    models = {p: trained(model, 1, p) for p in SIZES}
    settings = RoundSettings(weighting="uniform")
    new = our_round(ours(settings, **arguments), 1, model, {p: content(models[p], SIZES[p]) for p in SIZES})
    expected = flower_round(theirs(**arguments), 1, model, {p: content(models[p], 1) for p in SIZES})
    assert new is not None
    assert all(value.tobytes() == expected[tensor].astype(np.float32).tobytes() for tensor, value in new.items())


@every_strategy
@pytest.mark.parametrize(
    "as_one_record", [False, True], ids=["buffers apart", "one state dict, as Flower's clients send"]
)
def test_buffers_are_averaged_and_never_reach_the_server_optimiser(name: str, as_one_record: bool) -> None:
    """Variances that go down fast: momentum or an adaptive step would carry them below zero."""
    ours, _, arguments = OURS[name]
    strategy = ours(**arguments)
    model = {**start_model(), **BUFFERS}
    for server_round in range(1, 7):
        replies = {}
        for p in SIZES:
            new = trained({k: v for k, v in model.items() if k not in BUFFERS}, server_round, p)
            buffers = {
                "bn.running_mean": np.full(2, p, np.float32),
                "bn.running_var": np.full(2, 0.1**server_round, np.float32),
                "bn.count": np.array(server_round + p),
            }
            replies[p] = content({**new, **buffers}, SIZES[p]) if as_one_record else content(new, SIZES[p], buffers)
        after = our_round(strategy, server_round, model, replies)
        assert after is not None
        model = after
        np.testing.assert_allclose(model["bn.running_mean"], 0.3 * 1 + 0.6 * 2, rtol=1e-6)
        np.testing.assert_allclose(model["bn.running_var"], 0.1**server_round, rtol=1e-6)
        count = model["bn.count"]
        assert (count.dtype, count.shape, int(count)) == (np.int64, (), server_round + 2)
    assert list(model) == [*start_model(), *BUFFERS]
    assert not any("bn." in tensor for tensor in strategy.state_arrays())


@pytest.mark.parametrize("name", STATEFUL)
def test_a_refused_round_leaves_the_state_as_it_was(name: str) -> None:
    ours, _, arguments = OURS[name]

    def run(*, with_refused_round: bool) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        strategy = ours(RoundSettings(min_replies=2), **arguments)
        model = start_model()
        for server_round in (1, 2, 3):
            if server_round == 2 and not with_refused_round:
                continue
            replies = {p: content(trained(model, server_round, p), SIZES[p]) for p in SIZES}
            before = {k: v.copy() for k, v in strategy.state_arrays().items()}
            if server_round == 2:
                replies = {0: replies[0], 1: RecordDict(), 2: RecordDict()}
            new = our_round(strategy, server_round, model, replies)
            assert (new is None) == (server_round == 2)
            if new is None:
                after = strategy.state_arrays()
                assert before
                assert all(after[k].tobytes() == v.tobytes() for k, v in before.items())
            else:
                model = new
        return model, strategy.state_arrays()

    model, state = run(with_refused_round=True)
    same_model, same_state = run(with_refused_round=False)
    assert all(model[k].tobytes() == v.tobytes() for k, v in same_model.items())
    assert all(state[k].tobytes() == v.tobytes() for k, v in same_state.items())


@pytest.mark.parametrize("name", STATEFUL)
def test_state_arrays_carry_a_run_over_a_restart(name: str) -> None:
    """Also if the first round after the restart is refused, and another checkpoint is written then."""
    ours, _, arguments = OURS[name]
    straight, model = ours(**arguments), start_model()
    for server_round in (1, 2):
        new = our_round(straight, server_round, model, _replies(model, server_round))
        assert new is not None
        model = new
    restarted = ours(**arguments)
    restarted.load_state_arrays(straight.state_arrays())
    assert our_round(restarted, 3, model, {0: RecordDict()}) is None
    again = ours(**arguments)
    again.load_state_arrays(restarted.state_arrays())
    expected, got = (our_round(s, 4, model, _replies(model, 4)) for s in (straight, again))
    assert expected is not None
    assert got is not None
    assert all(got[k].tobytes() == v.tobytes() for k, v in expected.items())
    fresh = our_round(ours(**arguments), 4, model, _replies(model, 4))
    assert fresh is not None
    assert fresh["w2"].tobytes() != expected["w2"].tobytes()


def _replies(model: dict[str, np.ndarray], server_round: int) -> dict[int, RecordDict]:
    return {p: content(trained(model, server_round, p), SIZES[p]) for p in SIZES}


def test_a_client_with_other_buffers_is_refused() -> None:
    strategy = FedAvg()
    model = {**start_model(), "mask": np.ones(2, np.float32)}
    plain = trained(model, 1, 0)
    split = {k: v for k, v in plain.items() if k != "mask"}
    new = our_round(strategy, 1, model, {0: content(plain, 10), 1: content(split, 10, {"mask": plain["mask"]})})
    assert new is not None
    assert strategy.rounds.report.folded == [0]
    assert "as from the other clients" in strategy.rounds.report.refused[1]


def test_the_summary_tells_the_arguments(caplog: pytest.LogCaptureFixture) -> None:
    logger = __import__("logging").getLogger("flwr")
    logger.addHandler(caplog.handler)
    try:
        FedAdam(RoundSettings(seed=7), eta=0.05).summary()
    finally:
        logger.removeHandler(caplog.handler)
    assert "seed=7" in caplog.text
    assert "FedAdam {'eta': 0.05}" in caplog.text


@pytest.mark.parametrize("kind", [FedAvg, FedAdam, FedPM, LocalNewton, PFedMe, FedCLUP], ids=lambda kind: kind.__name__)
def test_a_model_in_bfloat16_is_refused_also_under_flowers_own_loop(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It travels as patterns, of which every mean is nonsense."""
    made = kind(RoundSettings())
    monkeypatch.setattr(made.roster, "refresh", lambda grid: None)
    made.roster.node_of, made.roster.num_partitions = {0: 70, 1: 71}, 2
    model = pack_arrays({"w": np.ones(3, np.float32), "half": np.full(3, 0x3F80, np.uint16)})
    with pytest.raises(TaskError, match=f"{kind.__name__}, model tensor 'half': expected numbers that can be averaged"):
        made.configure_train(1, model, ConfigRecord({"lr": 0.1}), cast(Grid, None))


def test_the_config_that_was_given_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """FedProx tells clients that were written for it their mu, in a copy of the config, beside the round's own entries."""
    config, strategy = ConfigRecord({"lr": 0.1}), FedProx(proximal_mu=0.25, min_train_nodes=1)
    monkeypatch.setattr(strategy.roster, "refresh", lambda grid: None)
    strategy.roster.node_of, strategy.roster.num_partitions = {0: 5}, 1
    (message,) = strategy.configure_train(1, pack_arrays(start_model()), config, cast(Grid, OnlineNodes()))
    sent = message.content.config_records["config"]
    assert dict(sent) == {"lr": 0.1, "server-round": 1, "experiment": "", "last-folded": 0, "proximal-mu": 0.25}
    assert dict(config) == {"lr": 0.1}
