"""Flower's constructor words, held against Flower's own FedAvg."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg

import fedapps.strategies
from fedapps.errors import RosterError, SettingsError
from fedapps.messages import pack_arrays
from fedapps.settings import RoundSettings
from fedapps.strategies import FedAvg, FedAvgM, FedCLUP, FedPM, HiSo, RoundStrategy
from fedapps.strategies.exchange import exchange
from fedapps.strategies.roster import Roster
from fedapps.strategies.words import FlowerWords

from .scripted_grid import ScriptedGrid, train

MODEL = {"w": np.zeros(2, np.float32)}
WORDS = set(inspect.signature(FlowerFedAvg.__init__).parameters) - {"self"}
STRATEGIES = [
    cls for name in fedapps.strategies.__all__ if name[0] != "R" and (cls := getattr(fedapps.strategies, name))
]


class Nodes(ScriptedGrid):
    """Nodes that come and go, whose ClientApp has no query handler."""

    def __init__(self, *ids: int, reply: Callable[[Message], RecordDict] | None = None) -> None:
        super().__init__(lambda partition, message: reply(message) if reply else None)
        self.ids = list(ids)

    def get_node_ids(self) -> list[int]:
        return self.ids

    def get_nodes(self) -> Any:
        return [NodeInfo(node_id=i) for i in self.ids]


def asked(strategy: Any, grid: Any, server_round: int = 1, phase: str = "train") -> list[int]:
    configure = getattr(strategy, f"configure_{phase}")
    return sorted(m.metadata.dst_node_id for m in configure(server_round, pack_arrays(MODEL), ConfigRecord({}), grid))


@pytest.mark.parametrize("cls", STRATEGIES)
def test_every_strategy_takes_every_word_of_flowers_fedavg(cls: type[RoundStrategy]) -> None:
    def summarise(contents: list[RecordDict], key: str) -> MetricRecord:
        raise AssertionError

    words = {
        "fraction_train": 0.5, "fraction_evaluate": 0.25, "min_train_nodes": 3, "min_evaluate_nodes": 4,
        "min_available_nodes": 5, "weighted_by_key": "w", "arrayrecord_key": "a", "configrecord_key": "c",
        "train_metrics_aggr_fn": summarise, "evaluate_metrics_aggr_fn": summarise,
    }  # fmt: skip
    assert words.keys() == WORDS
    strategy = cls(**words, seed=7, min_replies=0.4)
    held = {**vars(strategy.words), **vars(strategy.settings)}
    assert {word: held[word] for word in words} == words
    assert (strategy.settings.seed, strategy.settings.min_replies) == (7, 0.4)


@pytest.mark.parametrize("phase", ["train", "evaluate"])
@pytest.mark.parametrize("words", [
    {}, {"fraction": 0.5}, {"fraction": 0.1}, {"fraction": 0.39}, {"fraction": 0.1, "min": 4}, {"fraction": 0.0},
    {"fraction": 0.0, "min": 3},
])  # fmt: skip
def test_as_many_nodes_are_sampled_as_by_flowers_fedavg(words: dict[str, float], phase: str) -> None:
    words = {{"fraction": f"fraction_{phase}", "min": f"min_{phase}_nodes"}[k]: v for k, v in words.items()}
    for count in (4, 7, 10):
        grid = Nodes(*range(100, 100 + count))
        ours: Any = FedAvg(**words)
        ours.roster.refresh(grid)
        assert len(asked(ours, grid, phase=phase)) == len(asked(FlowerFedAvg(**words), grid, phase=phase))


def test_samples_are_a_function_of_the_seed_and_evaluation_has_its_own() -> None:
    grid = Nodes(*range(100, 130))

    def draw(seed: int, phase: str) -> list[list[int]]:
        strategy = FedAvg(fraction_train=0.5, fraction_evaluate=0.5, seed=seed)
        strategy.roster.refresh(grid)
        return [asked(strategy, grid, r, phase) for r in (1, 2)]

    assert draw(1, "train") == draw(1, "train") != draw(2, "train")
    assert draw(1, "train") != draw(1, "evaluate") == draw(1, "evaluate")


def test_training_is_left_out_by_a_fraction_of_zero() -> None:
    strategy, grid = FedAvg(fraction_train=0.0), Nodes(5, 6)
    assert asked(strategy, grid) == []
    assert strategy.aggregate_train(1, []) == (None, None)
    assert asked(strategy, grid, phase="evaluate") == [5, 6]


def test_fewer_nodes_than_a_round_samples_end_the_wait() -> None:
    for words in ({"min_train_nodes": 3}, {"min_evaluate_nodes": 3}, {"min_available_nodes": 3}):
        with pytest.raises(RosterError, match="expected at least 3 nodes, got 2"):
            asked(FedPM(**words, node_wait=0.0), Nodes(5, 6))
    with pytest.raises(RosterError, match=r"round 1: expected at least 3 nodes \(min_train_nodes"):
        FedPM(min_train_nodes=3).places("train", 1, 2)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"fraction_trian": 0.5}, "'fraction_trian'; did you mean 'fraction_train'"),
        ({"min_reply": 2}, "'min_reply'; did you mean 'min_replies'"),
        ({"owm": 2}, "'owm'; did you mean 'own'"),
        ({"settings": RoundSettings(), "seed": 1}, r"both \(seed\)"),
        ({"fraction_evaluate": 1.5}, "'fraction_evaluate': expected a share from 0 to 1"),
        ({"min_train_nodes": -1}, "'min_train_nodes': expected a number of nodes"),
    ],
)
def test_wrong_words_are_refused_with_the_nearest(given: dict[str, Any], match: str) -> None:
    with pytest.raises(SettingsError, match=match):
        FedCLUP(**given)


def test_an_evaluation_goes_on_with_the_nodes_that_are_left() -> None:
    assert FedPM(min_evaluate_nodes=3).places("evaluate", 1, 2) == [0, 1]
    assert FedPM(RoundSettings()).places("evaluate", 1, 0) == []


def test_flowers_further_words_reach_flowers_strategy_and_hiso_keeps_its_weights() -> None:
    strategy = FedAvgM(server_momentum=0.5, fraction_train=0.5)
    assert (strategy.flower.server_momentum, strategy.settings.fraction_train) == (0.5, 0.5)
    assert HiSo(fraction_train=0.5).settings.weighting == "uniform"


def test_records_and_weights_have_the_names_of_the_project() -> None:
    """Two clients of weights 0.5 and 1.5, who answer under names of their own: Flower takes the only record of a kind."""
    seen: list[tuple[str, int, list[float]]] = []

    def summarise(contents: list[RecordDict], key: str) -> MetricRecord:
        seen.append((key, len(contents), [float(c["numbers"][key]) for c in contents]))  # type: ignore[arg-type, index]
        return MetricRecord({"seen": len(contents)})

    def reply(message: Message) -> RecordDict:
        assert sorted(message.content) == ["settings", "weights"]
        node = message.metadata.dst_node_id
        numbers = MetricRecord({"share": {8: 0.5, 9: 1.5}[node], "num-examples": 1})
        tensors = pack_arrays({"w": np.full(2, float(node), np.float32)})
        return RecordDict(
            {"out": tensors, "numbers": numbers} if message.metadata.message_type == "train" else {"numbers": numbers}
        )

    words: dict[str, Any] = {
        "arrayrecord_key": "weights", "configrecord_key": "settings", "weighted_by_key": "share",
        "train_metrics_aggr_fn": summarise, "evaluate_metrics_aggr_fn": summarise,
    }  # fmt: skip
    strategy, grid = FedAvg(**words), Nodes(8, 9, reply=reply)
    arrays, metrics = train(strategy, grid, 1, MODEL)
    assert arrays is not None
    assert metrics is not None
    assert arrays["w"].tolist() == [8.75, 8.75]  # (0.5 * 8 + 1.5 * 9) / 2
    messages = strategy.configure_evaluate(1, pack_arrays(arrays), ConfigRecord({}), grid)
    strategy.aggregate_evaluate(1, list(exchange(grid, messages, 1.0)))
    assert seen == [("share", 2, [0.5, 1.5])] * 2
    assert dict(metrics) == {"seen": 2}


def test_the_lone_record_of_a_methods_own_is_not_taken_for_the_model() -> None:
    content = RecordDict({"scalars": pack_arrays(MODEL), "m": MetricRecord({"num-examples": 1})})
    assert sorted(FlowerWords().inward(content, {"scalars": None})) == ["metrics", "scalars"]


def roster(*, newcomers: bool = True) -> Roster:
    made = Roster(node_wait=0.0, num_clients=2, timeout=1.0, asks=False)
    made.newcomers = newcomers
    return made


def test_nodes_that_are_not_asked_keep_their_numbers_and_newcomers_get_the_next() -> None:
    grid, made = Nodes(30, 10), roster()
    made.refresh(grid)
    assert made.node_of == {0: 10, 1: 30}
    grid.ids = [30, 5, 20]
    made.refresh(grid)  # 10 was started anew, under an id that says nothing of it
    assert made.node_of == {1: 30, 2: 5, 3: 20}
    grid.ids = [10, 30]
    made.refresh(grid)
    assert (made.node_of, made.num_partitions) == ({0: 10, 1: 30}, 4)
    grid.ids = [10]
    with pytest.raises(RosterError, match="expected at least 2 nodes, got 1"):
        made.refresh(grid)


def test_a_method_that_sums_over_all_clients_refuses_newcomers(caplog: pytest.LogCaptureFixture) -> None:
    grid, made = Nodes(10, 30, 40), roster(newcomers=False)
    made.refresh(grid)
    grid.ids = [10, 30, 5]
    made.refresh(grid)
    made.refresh(grid)
    assert (made.node_of, made.num_partitions) == ({0: 10, 1: 30}, 3)
    assert sum("node 5 came after the first round" in line for line in caplog.messages) == 1


def test_only_who_needs_the_clients_examples_asks_for_them() -> None:
    assert not FedPM().roster.asks
    assert FedPM(handshake=True).roster.asks
    assert FedCLUP().roster.asks
    assert not FedCLUP(weighting="uniform").roster.asks
    strategy = FedCLUP(weighting="uniform")
    strategy.roster.refresh(Nodes(1, 2, 3, 4))
    assert strategy.share_of_all(2) == 0.25
