"""FedCLUP's server without clients: the step, who counts, what starts anew, what a checkpoint holds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from flwr.app import MetricRecord, RecordDict

import fedapps
from fedapps.defences import Defence
from fedapps.errors import RosterError, SettingsError
from fedapps.messages import pack_arrays
from fedapps.messages.node_facts import NodeFacts
from fedapps.messages.plans import AskedCurvature, RoundPlan
from fedapps.methods.personalised import FedClupSettings
from fedapps.personalization.fedclup import Stale
from fedapps.settings import RoundSettings
from fedapps.strategies import FedCLUP
from fedapps.strategies.fedclup import MOST_FIT_ROUNDS

SIZES = [10, 30, 60]
MODEL = {"w": np.array([1.0, -2.0]), "shared": np.array([0.5]), "counter": np.array(0)}
OWN = FedClupSettings(lambda_=0.5, gamma=1.2, personal="w")


def own_with(own: FedClupSettings = OWN, **changes: Any) -> FedClupSettings:
    return FedClupSettings(**{**own.model_dump(), **changes})


def strategy_of(own: FedClupSettings = OWN, sizes: list[int] = SIZES, **settings: Any) -> FedCLUP:
    strategy = FedCLUP(RoundSettings(**settings), own=own)
    strategy.roster.num_partitions = len(sizes)
    strategy.roster.facts = {
        i: NodeFacts(i, len(sizes), n, fedapps.__version__, "fedclup", "cpu", "") for i, n in enumerate(sizes)
    }
    return strategy


def reply_of(change: Any, *, shared: float = 0.0, num_examples: int = 1, **metrics: float) -> RecordDict:
    named = {name.replace("_", "-"): value for name, value in metrics.items()}
    return RecordDict(
        {
            "arrays": pack_arrays({"w": np.asarray(change, np.float64), "shared": np.array([shared])}),
            "buffers": pack_arrays({"counter": np.array(num_examples)}),
            "metrics": MetricRecord({"num-examples": num_examples, **named}),
        }
    )


def take(strategy: FedCLUP, partition: int, reply: RecordDict, model: dict[str, np.ndarray]) -> None:
    """A reply with the number of examples that the client's node told."""
    if partition in strategy.roster.facts:
        reply["metrics"]["num-examples"] = strategy.roster.facts[partition].num_examples
    strategy.receive(partition, reply, model)


def one_round(
    strategy: FedCLUP, replies: dict[int, RecordDict], model: dict[str, np.ndarray] | None = None, number: int = 1
) -> dict[str, np.ndarray]:
    model = MODEL if model is None else model
    strategy.rounds.begin(number, model, list(replies))
    for partition, reply in replies.items():
        take(strategy, partition, reply, model)
    new = strategy.rounds.end()
    assert new is not None
    return new


def plan_of(strategy: FedCLUP, partition: int) -> RoundPlan:
    return RoundPlan.from_entries(strategy.records_for(partition, 0, MODEL)["config"])


@pytest.mark.parametrize("stale", Stale)
@pytest.mark.parametrize("defence", Defence)
def test_a_defence_that_changes_replies_needs_a_sum_of_this_rounds_alone(defence: Defence, stale: Stale) -> None:
    """A client takes its own last message for what the sum holds of it; multi-krum leaves replies as they are."""
    own, settings = own_with(stale=stale), RoundSettings(defence=defence)
    if defence in (Defence.NONE, Defence.MULTI_KRUM) or stale is Stale.REPLIES:
        assert FedCLUP(settings, own=own).settings.defence is defence
        return
    with pytest.raises(
        SettingsError, match=rf"'defence' of method 'fedclup': expected multi-krum, .*got {defence.value}"
    ):
        FedCLUP(settings, own=own)


def test_the_step_is_gamma_lambda_times_the_sum_over_all_clients() -> None:
    """Two of three clients: w - 1.2 * 0.5 * (0.1 d_0 + 0.6 d_2); the third counts as 0, and weights stay over all three.

    What is shared is the mean over the two, weights 1/7 and 6/7; the counter takes the maximum.
    """
    d = np.array([[1.0, 2.0], [-3.0, 0.5]])
    replies = {0: reply_of(d[0], shared=7.0, num_examples=10), 2: reply_of(d[1], shared=14.0, num_examples=60)}
    new = one_round(strategy_of(), replies)
    np.testing.assert_allclose(new["w"], MODEL["w"] - 0.6 * (0.1 * d[0] + 0.6 * d[1]), rtol=1e-14)
    assert new["shared"] == pytest.approx([13.0], rel=1e-14)
    assert int(new["counter"]) == 60
    assert list(new) == list(MODEL)


def test_the_sum_is_kept_over_rounds_and_changes_by_what_clients_send() -> None:
    strategy = strategy_of()
    new = one_round(strategy, {0: reply_of([1.0, 0.0])})
    again = one_round(strategy, {1: reply_of([0.0, 1.0])}, new, 2)
    np.testing.assert_allclose(again["w"], new["w"] - 0.6 * np.array([0.1, 0.3]), rtol=1e-14)
    last = one_round(strategy, {0: reply_of([-1.0, 0.0])}, again, 3)  # Client 0 is now where the model is.
    np.testing.assert_allclose(last["w"], again["w"] - 0.6 * np.array([0.0, 0.3]), rtol=1e-14)


def test_replies_only_are_scaled_to_one_and_forgotten() -> None:
    strategy = strategy_of(own_with(stale=Stale.REPLIES))
    new = one_round(strategy, {0: reply_of([1.0, 0.0]), 1: reply_of([0.0, 1.0])})
    np.testing.assert_allclose(new["w"], MODEL["w"] - 0.6 * np.array([0.25, 0.75]), rtol=1e-14)
    again = one_round(strategy, {1: reply_of([0.0, 1.0])}, new, 2)
    np.testing.assert_allclose(again["w"], new["w"] - 0.6 * np.array([0.0, 1.0]), rtol=1e-14)


def test_uniform_weights_ask_for_no_numbers_of_examples() -> None:
    new = one_round(strategy_of(weighting="uniform"), {2: reply_of([3.0, 0.0], num_examples=5)})
    np.testing.assert_allclose(new["w"], MODEL["w"] - 0.6 * np.array([1.0, 0.0]), rtol=1e-14)


def test_a_node_that_answers_no_query_is_named() -> None:
    strategy = strategy_of()
    del strategy.roster.facts[2]
    with pytest.raises(RosterError, match="no answer from client 2"):
        one_round(strategy, {2: reply_of([0.0, 0.0])})


def test_a_lost_store_voids_the_sum_and_opens_a_new_generation() -> None:
    """The round's changes count for nothing, before and after the lost one in the order of partitions."""
    strategy = strategy_of()
    new = one_round(strategy, {i: reply_of([1.0, 1.0]) for i in range(3)})
    assert plan_of(strategy, 0).generation == 0
    lost = {0: reply_of([5.0, 5.0]), 1: reply_of([9.0, 9.0], store_lost=1.0), 2: reply_of([7.0, 7.0], shared=3.0)}
    same = one_round(strategy, lost, new, 2)
    assert same["w"].tobytes() == new["w"].tobytes()
    assert strategy.rounds.report.folded == [0, 1, 2]
    assert strategy.rounds.report.notes[0].startswith("client 1 has lost what it kept since round 1")
    assert plan_of(strategy, 0).generation == 1
    after = one_round(strategy, {2: reply_of([1.0, 0.0])}, same, 3)
    np.testing.assert_allclose(after["w"], same["w"] - 0.6 * 0.6 * np.array([1.0, 0.0]), rtol=1e-14)


def test_after_a_lost_store_the_models_of_all_are_heard_of_anew() -> None:
    """Of models, client 2's 0.6 alone counts: w - 0.6 (0.6 w - 0.6 w_2)."""
    strategy = strategy_of(own_with(stale=Stale.REUSE_MODELS))
    new = one_round(strategy, {i: reply_of([1.0, 1.0]) for i in range(3)})
    same = one_round(strategy, {1: reply_of([9.0, 9.0], store_lost=1.0)}, new, 2)
    after = one_round(strategy, {2: reply_of([4.0, 5.0])}, same, 3)
    np.testing.assert_allclose(after["w"], same["w"] - 0.36 * (same["w"] - np.array([4.0, 5.0])), rtol=1e-14)


def test_a_client_that_lost_its_store_before_it_counted_voids_nothing() -> None:
    strategy = strategy_of()
    new = one_round(strategy, {0: reply_of([1.0, 0.0]), 1: reply_of([0.0, 1.0], store_lost=1.0)})
    np.testing.assert_allclose(new["w"], MODEL["w"] - 0.6 * np.array([0.1, 0.3]), rtol=1e-14)
    assert plan_of(strategy, 0).generation == 0


@pytest.mark.parametrize("stale", list(Stale))
def test_a_round_below_the_quorum_changes_no_sum_and_makes_nobody_heard_of(stale: Stale) -> None:
    strategy, other = (strategy_of(own_with(stale=stale), min_replies=2) for _ in range(2))
    for s in (strategy, other):
        new = one_round(s, {i: reply_of([1.0, 2.0]) for i in (1, 2)})
    strategy.rounds.begin(2, new, [0, 1])
    take(strategy, 0, reply_of([4.0, 4.0]), new)
    assert strategy.rounds.end() is None
    replies = {0: reply_of([0.5, 0.0]), 2: reply_of([0.0, 0.5])}
    assert one_round(strategy, replies, new, 3)["w"].tobytes() == one_round(other, replies, new, 3)["w"].tobytes()


FROM_CURVATURE = [FedClupSettings(lambda_=0.5), FedClupSettings(lambda_=0.5, stale=Stale.REPLIES)]
"""Settings whose server step follows from ``L``."""


@pytest.mark.parametrize(
    ("own", "sampled", "expected"),
    [
        (FedClupSettings(lambda_=0.5), [0, 1, 2], 1 / 0.5 + 1 / 4.0),
        (FedClupSettings(lambda_=0.5), [1], (1 / 0.5 + 1 / 4.0) / 3),
        (FedClupSettings(lambda_=0.5, stale=Stale.REPLIES), [1], 1 / 0.5 + 1 / 4.0),
        (FedClupSettings(lambda_=0.5, stale=Stale.REUSE_MODELS), [1], 1 / 0.5),
        (FedClupSettings(lambda_=0.5, gamma_rule="average"), [0, 1], 1 / 0.5),
        (FedClupSettings(lambda_=0.5, gamma=0.7), [0, 1], 0.7),
    ],
    ids=["theory", "a third of the clients", "replies", "reuse-models", "average", "given"],
)
def test_gamma_follows_its_rule_with_the_greatest_curvature(
    own: FedClupSettings, sampled: list[int], expected: float
) -> None:
    """Curvatures 1 and 4 of clients 0 and 1; a client reports its own once."""
    strategy = strategy_of(own_with(own, personal="w"))
    asked = AskedCurvature.FOR_GAMMA if own in FROM_CURVATURE else AskedCurvature.ROUGHLY
    assert plan_of(strategy, 1).curvature is asked
    curvature = {0: 1.0, 1: 4.0, 2: 2.0}
    one_round(strategy, {i: reply_of([0.1, 0.1], largest_curvature=curvature[i]) for i in sampled})
    assert strategy.rounds.report.values["gamma"] == pytest.approx(expected, rel=1e-14)
    assert plan_of(strategy, 1).curvature is AskedCurvature.NOTHING
    assert plan_of(strategy, 2).curvature is (AskedCurvature.NOTHING if 2 in sampled else asked)


def test_a_step_of_plain_averaging_is_warned_of_too() -> None:
    """Curvature 4 and lambda 0.5: steps of 100 are far from 2/4.5, and once it is said."""
    own = FedClupSettings(lambda_=0.5, gamma_rule="average", personal="w", personal_lr=100.0)
    strategy = strategy_of(own)
    new = one_round(strategy, {i: reply_of([0.1, 0.1], largest_curvature=4.0) for i in range(3)})
    (note,) = strategy.rounds.report.notes
    assert "local step eta = 100 is unstable: it is not below 2/(L + lambda) = 0.444444" in note
    one_round(strategy, {i: reply_of([0.1, 0.1]) for i in range(3)}, new, 2)
    assert not strategy.rounds.report.notes


def test_a_gamma_that_reuse_of_models_cannot_bear_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"gamma with stale = reuse-models: expected at most 1/lambda = 2"):
        FedCLUP(own=FedClupSettings(lambda_=0.5, gamma=2.1, stale=Stale.REUSE_MODELS))
    with pytest.raises(SettingsError, match=r"'lambda_': expected .*> 0, got 0\.0"):
        FedClupSettings(lambda_=0.0)


def fit_of(difference: Any, noise: float = 0.01) -> RecordDict:
    d = np.asarray(difference, np.float64)
    return reply_of(d, num_examples=20, fit_distance2=float(d @ d), fit_noise=noise, fit_variance=0.2)


def test_lambda_is_chosen_from_the_fits_and_the_model_moves_to_their_mean() -> None:
    """Fits at w - d with d = (1, 0), (-1, 0), (0, 1), equal weights: spread 3/2 (1 - |mean|^2) with mean (0, 1/3).

    R^2 = 3/2 * 8/9 - 0.01, lambda = s2 d / (n R^2) = 0.2 * 2 / (20 R^2).
    """
    own = own_with(adaptive=True, lambda_min=1e-3, lambda_max=10.0)
    strategy = strategy_of(own, [20, 20, 20], fraction_train=0.34)
    assert strategy.sample(1) == [0, 1, 2]
    assert plan_of(strategy, 0) == RoundPlan(1e-3, 0, fitting=True, curvature=AskedCurvature.ROUGHLY)
    new = one_round(strategy, {i: fit_of(d) for i, d in enumerate([(1, 0), (-1, 0), (0, 1)])})
    np.testing.assert_allclose(new["w"], MODEL["w"] - np.array([0.0, 1 / 3]), rtol=1e-14)
    R2 = 1.5 * 8 / 9 - 0.01
    assert strategy.lam == pytest.approx(0.2 * 2 / (20 * R2), rel=1e-12)
    assert not strategy.choosing
    assert "by the rule" in strategy.rounds.report.notes[0]
    assert len(strategy.sample(2)) == 1
    # The fits are not in the sum that follows.
    again = one_round(strategy, {0: reply_of([3.0, 0.0])}, new, 2)
    np.testing.assert_allclose(again["w"], new["w"] - 1.2 * strategy.lam * np.array([1.0, 0.0]), rtol=1e-14)


def test_an_undecided_choice_is_repeated_and_ends_with_the_fixed_lambda() -> None:
    """All fits equally far from the model, in nearly the same place: their distances say nothing about each other."""
    own = own_with(adaptive=True)
    strategy = strategy_of(own, [20, 20, 20])
    model = MODEL
    for number in range(1, MOST_FIT_ROUNDS + 1):
        assert strategy.choosing
        far = {i: fit_of(np.array([100.0, 0.1 * i])) for i in range(3)}
        model = one_round(strategy, far, model, number)
    assert not strategy.choosing
    assert strategy.lam == 0.5
    assert "not decided after 3 rounds" in strategy.rounds.report.notes[-1]


def test_one_surviving_reply_of_three_decides_no_lambda() -> None:
    """The round of fits is repeated by all; with all of them it is decided as if the first had not been."""
    strategy = strategy_of(own_with(adaptive=True, lambda_min=1e-3, lambda_max=10.0), [20, 20, 20])
    one_round(strategy, {1: fit_of((1, 0))})
    assert strategy.choosing
    assert "not decided" in strategy.rounds.report.notes[0]
    assert "nobody to share with" not in strategy.rounds.report.notes[0]
    assert strategy.sample(2) == [0, 1, 2]
    assert plan_of(strategy, 0).fitting
    one_round(strategy, {i: fit_of(d) for i, d in enumerate([(1, 0), (-1, 0), (0, 1)])}, number=2)
    assert not strategy.choosing
    assert strategy.lam == pytest.approx(0.2 * 2 / (20 * (1.5 * 8 / 9 - 0.01)), rel=1e-12)


def test_a_client_that_is_alone_trains_alone() -> None:
    strategy = strategy_of(own_with(adaptive=True, lambda_min=1e-3), [20])
    one_round(strategy, {0: fit_of((1, 0))})
    assert (strategy.choosing, strategy.lam) == (False, 1e-3)
    assert "a single client has nobody to share with" in strategy.rounds.report.notes[0]


def test_a_fit_without_its_scalars_is_refused() -> None:
    strategy = strategy_of(own_with(adaptive=True), [20, 20, 20])
    one_round(strategy, {0: fit_of((1, 0)), 1: reply_of([1.0, 0.0]), 2: fit_of((0, 1))})
    assert "expected the scalars of a local fit, got none called fit-distance2" in strategy.rounds.report.refused[1]


@pytest.mark.parametrize("own", [OWN, own_with(adaptive=True, lambda_min=1e-3)], ids=["fixed", "chosen"])
def test_a_restored_strategy_goes_on_with_the_same_bits(own: FedClupSettings) -> None:
    straight = strategy_of(own)
    first = {i: fit_of(d) for i, d in enumerate([(1, 0), (-1, 0), (0, 1)])}
    new = one_round(straight, first)
    new = one_round(straight, {1: reply_of([0.3, 0.1])}, new, 2)
    new = one_round(straight, {1: reply_of([0.3, 0.1], store_lost=1.0)}, new, 3)
    new = one_round(straight, {2: reply_of([0.3, 0.1])}, new, 4)
    restored = strategy_of(own)
    restored.load_state(straight.state(), straight.rounds.last_folded)
    restored.load_state_arrays(straight.state_arrays())
    assert plan_of(restored, 0) == plan_of(straight, 0)
    more = {0: reply_of([0.1, 0.2]), 2: reply_of([0.7, 0.0])}
    assert one_round(straight, more, new, 5)["w"].tobytes() == one_round(restored, more, new, 5)["w"].tobytes()
    assert plan_of(restored, 0).generation == 1
    assert restored.state() == straight.state()


def test_replies_of_other_personal_parts_are_refused() -> None:
    strategy = strategy_of(own_with(personal=""))
    other = reply_of([1.0, 0.0])
    other["arrays"] = pack_arrays({"w": np.array([1.0, 0.0])})
    other["buffers"] = pack_arrays({"shared": np.array([0.0]), "counter": np.array(0)})
    one_round(strategy, {0: reply_of([1.0, 0.0]), 1: other})
    assert "personal tensors: expected ['w', 'shared'] as from the other clients" in strategy.rounds.report.refused[1]
