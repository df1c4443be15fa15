"""FedCLUP's two ends: reductions, the exact fixed point under partial participation, lost replies, and bad input."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fedapps.errors import MessageError, SettingsError
from fedapps.personalization import fedclup
from fedapps.personalization.fedclup import FedClupConfig, Stale, default_gamma, gamma_warnings, personal_names
from fedapps.personalization.proximal import Proximal, descend, safe_step
from fedapps.personalization.quadratic import Quadratic, global_minimiser, joint_minimiser, local_minimisers

LAMBDAS = (0.01, 0.1, 1.0, 10.0)
HEAVY = np.array([0.02] * 7 + [0.86])
MODEL = {"a": np.array([1.0, 2.0]), "b": np.array([[3.0]])}


def curvature(clients: list[Quadratic]) -> tuple[float, float]:
    spectra = [np.linalg.eigvalsh(client.A) for client in clients]
    return min(s[0] for s in spectra), max(s[-1] for s in spectra)


def one_round(models: list[dict[str, np.ndarray]], p: list[float], config: FedClupConfig) -> dict[str, np.ndarray]:
    """A first round in which every client replies with the given model."""
    state = fedclup.initial_state(MODEL)
    for w_i, weight in zip(models, p, strict=True):
        state = fedclup.fold(state, fedclup.send(MODEL, w_i, None, config.stale).message, weight, first=True)
    return fedclup.server_step(state, config).model


@pytest.mark.parametrize("stale", list(Stale))
@pytest.mark.parametrize("lam", [0.5, 4.0])
def test_gamma_one_over_lambda_is_plain_averaging(stale: Stale, lam: float) -> None:
    random = np.random.default_rng(0)
    models = [{name: random.standard_normal(w.shape) for name, w in MODEL.items()} for _ in range(3)]
    p = [0.2, 0.3, 0.5]
    found = one_round(models, p, FedClupConfig(lam, 1 / lam, stale))
    for name, w in found.items():
        np.testing.assert_allclose(w, sum(q * m[name] for q, m in zip(p, models, strict=True)), rtol=1e-14)


def test_server_step_by_hand() -> None:
    """W = 1, w_i = 3 and 0 with p = (1/4, 3/4), lambda = 2, gamma = 0.4: 1 - 0.8 * (0.25 * -2 + 0.75 * 1) = 0.8."""
    state = fedclup.initial_state({"w": np.array([1.0])})
    for w_i, p in ((3.0, 0.25), (0.0, 0.75)):
        sent = fedclup.send({"w": np.array([1.0])}, {"w": np.array([w_i])}, None, Stale.REUSE)
        state = fedclup.fold(state, sent.message, p, first=True)
    np.testing.assert_allclose(fedclup.server_step(state, FedClupConfig(2.0, 0.4)).model["w"], [0.8], rtol=1e-14)


def test_old_differences_count_again_and_old_models_move_less() -> None:
    """Client 0 (p = 0.25) replies once with w_i = 3 to w = 1; client 1 never does; lambda = gamma = 1.

    reuse: w = 1 - 0.25 * (1 - 3) = 1.5, and next round the same difference again: 2.0.
    reuse-models: w = 1 - (0.25 * 1 - 0.25 * 3) = 1.5, then 1.5 - 0.25 * (1.5 - 3) = 1.875.
    replies: w = 3 (weights scaled to the replies), and nothing the round after.
    """
    expected = {Stale.REUSE: [1.5, 2.0], Stale.REUSE_MODELS: [1.5, 1.875], Stale.REPLIES: [3.0, 3.0]}
    for stale, values in expected.items():
        state = fedclup.initial_state({"w": np.array([1.0])})
        sent = fedclup.send({"w": np.array([1.0])}, {"w": np.array([3.0])}, None, stale)
        state = fedclup.server_step(fedclup.fold(state, sent.message, 0.25, first=True), FedClupConfig(1, 1, stale))
        again = fedclup.server_step(state, FedClupConfig(1, 1, stale))
        np.testing.assert_allclose([state.model["w"][0], again.model["w"][0]], values, err_msg=stale)


@pytest.mark.parametrize("lam", LAMBDAS)
@pytest.mark.parametrize("loss_rate", [0.0, 0.2])
def test_reuse_reaches_the_joint_minimiser_with_half_of_the_clients(
    clients: list[Quadratic], weights: np.ndarray, run_fedclup: Callable[..., Any], lam: float, loss_rate: float
) -> None:
    """Defaults throughout; a fifth of the replies lost changes the speed and nothing else."""
    mu, L = curvature(clients)
    K = int(np.ceil((L + lam) / (mu + lam)))
    solution = joint_minimiser(clients, weights, lam)
    run = run_fedclup(
        clients, weights, FedClupConfig(lam, default_gamma(lam, L, 4, 8)), num_rounds=200, num_steps=K, L=L,
        num_sampled=4, loss_rate=loss_rate,
    )  # fmt: skip
    np.testing.assert_allclose(run.state.model["w"], solution.model, atol=1e-8)
    np.testing.assert_allclose(np.stack(run.personal), solution.personal, atol=1e-8)
    held = sum(p * known["w"] for p, known in zip(weights, run.known, strict=True))
    np.testing.assert_allclose(run.state.total["w"], held, atol=1e-14)
    np.testing.assert_allclose(held, 0, atol=1e-8)


def test_rarely_sampled_clients_with_very_unequal_weights_still_converge(
    clients: list[Quadratic], run_fedclup: Callable[..., Any]
) -> None:
    """One of eight clients a round, one of them with 0.86 of the weight."""
    _, L = curvature(clients)
    run = run_fedclup(
        clients,
        HEAVY,
        FedClupConfig(0.5, default_gamma(0.5, L, 1, 8)),
        num_rounds=700,
        num_steps=6,
        L=L,
        num_sampled=1,
    )
    np.testing.assert_allclose(run.state.model["w"], joint_minimiser(clients, HEAVY, 0.5).model, atol=1e-8)


def test_reuse_models_reaches_the_joint_minimiser_by_plain_averaging(
    clients: list[Quadratic], weights: np.ndarray, run_fedclup: Callable[..., Any]
) -> None:
    _, L = curvature(clients)
    config = FedClupConfig(1.0, 1.0, Stale.REUSE_MODELS)
    run = run_fedclup(clients, weights, config, num_rounds=200, num_steps=4, L=L, num_sampled=4, loss_rate=0.2)
    np.testing.assert_allclose(run.state.model["w"], joint_minimiser(clients, weights, 1.0).model, atol=1e-8)


def test_replies_alone_hover_around_the_joint_minimiser(
    clients: list[Quadratic], weights: np.ndarray, run_fedclup: Callable[..., Any]
) -> None:
    _, L = curvature(clients)
    target = joint_minimiser(clients, weights, 1.0).model
    config = FedClupConfig(1.0, default_gamma(1.0, L, 4, 8), Stale.REPLIES)
    run = run_fedclup(clients, weights, config, num_rounds=200, num_steps=4, L=L, num_sampled=4, target=target)
    assert min(run.distances[50:]) > 0.01
    everyone = FedClupConfig(1.0, default_gamma(1.0, L, 8, 8), Stale.REPLIES)
    full = run_fedclup(clients, weights, everyone, num_rounds=60, num_steps=4, L=L, target=target)
    assert full.distances[-1] < 1e-8


def test_the_full_theory_step_diverges_for_a_heavy_client_under_partial_participation(
    clients: list[Quadratic], run_fedclup: Callable[..., Any]
) -> None:
    """What the share |S|/N in the default, and the warning about a larger step, are for."""
    _, L = curvature(clients)
    config = FedClupConfig(1.0, default_gamma(1.0, L, 8, 8))
    target = joint_minimiser(clients, HEAVY, 1.0).model
    run = run_fedclup(clients, HEAVY, config, num_rounds=200, num_steps=4, L=L, num_sampled=1, target=target)
    assert max(run.distances) > 1e3
    assert gamma_warnings(config, L, 1, 8)


@pytest.mark.parametrize(("lam", "limit"), [(1e-6, "local"), (1e6, "global")])
def test_ends_of_the_dial(
    clients: list[Quadratic], weights: np.ndarray, run_fedclup: Callable[..., Any], lam: float, limit: str
) -> None:
    """Lambda -> 0 is LocalTrain; lambda -> infinity is GlobalTrain (from few exact rounds of the theory's step)."""
    _, L = curvature(clients)
    run = run_fedclup(
        clients, weights, FedClupConfig(lam, default_gamma(lam, L, 8, 8)), num_rounds=80, num_steps=0, L=L
    )
    expected = local_minimisers(clients) if limit == "local" else [global_minimiser(clients, weights)] * 8
    np.testing.assert_allclose(np.stack(run.personal), expected, atol=1e-4)


def test_steps_without_warm_start_stop_elsewhere(clients: list[Quadratic], weights: np.ndarray) -> None:
    """Why clients keep w_i: two steps from w every time have another fixed point."""
    _, L = curvature(clients)
    lam, state = 1.0, fedclup.initial_state({"w": np.zeros(8)})
    known: list[Any] = [None] * 8
    for _ in range(150):
        w = state.model["w"]
        for i, client in enumerate(clients):
            w_i = descend([Proximal(client, w, lam)] * 2, w, safe_step(L, lam))
            sent = fedclup.send({"w": w}, {"w": w_i}, known[i], Stale.REUSE)
            state = fedclup.fold(state, sent.message, weights[i], first=known[i] is None)
            known[i] = sent.known
        state = fedclup.server_step(state, FedClupConfig(lam, default_gamma(lam, L, 8, 8)))
    assert np.linalg.norm(state.model["w"] - joint_minimiser(clients, weights, lam).model) > 0.01


def test_rounding_of_messages_does_not_pile_up_in_the_sum(
    clients: list[Quadratic], weights: np.ndarray, run_fedclup: Callable[..., Any]
) -> None:
    """float32 models and messages, 400 rounds: the sum still equals the clients' own values to float64 rounding."""
    _, L = curvature(clients)
    config = FedClupConfig(1.0, default_gamma(1.0, L, 4, 8))
    run = run_fedclup(
        clients, weights, config, num_rounds=400, num_steps=4, L=L, num_sampled=4, loss_rate=0.05, dtype=np.float32
    )
    assert run.state.model["w"].dtype == np.float32
    held = sum(p * known["w"] for p, known in zip(weights, run.known, strict=True))
    np.testing.assert_allclose(run.state.total["w"], held, atol=1e-14)
    np.testing.assert_allclose(run.state.model["w"], joint_minimiser(clients, weights, 1.0).model, atol=2e-6)


def test_message_and_known_value_add_up_to_what_the_client_knows() -> None:
    received = {"w": np.array([1.0, 2.0], np.float32)}
    first = fedclup.send(received, {"w": np.array([0.9, 2.3], np.float32)}, None, Stale.REUSE)
    second = fedclup.send(received, {"w": np.array([0.1, 7.7], np.float32)}, first.known, Stale.REUSE)
    assert second.message["w"].dtype == np.float32
    assert second.known["w"].dtype == np.float64
    total = first.message["w"].astype(np.float64) + second.message["w"].astype(np.float64)
    np.testing.assert_array_equal(second.known["w"], total)
    np.testing.assert_allclose(total, [0.9, -5.7], atol=1e-6)


def test_a_lost_reply_leaves_both_ends_where_they_were() -> None:
    """The client computes on, but goes on from what it knew: the next message replaces the lost one whole."""
    w = {"w": np.array([1.0])}
    state = fedclup.initial_state(w)
    folded = fedclup.send(w, {"w": np.array([0.5])}, None, Stale.REUSE)
    state = fedclup.fold(state, folded.message, 0.5, first=True)
    fedclup.send(w, {"w": np.array([-9.0])}, folded.known, Stale.REUSE)  # lost
    later = fedclup.send(w, {"w": np.array([0.2])}, folded.known, Stale.REUSE)
    state = fedclup.fold(state, later.message, 0.5, first=False)
    np.testing.assert_allclose(state.total["w"], [0.5 * (1.0 - 0.2)], rtol=1e-14)


def test_sums_do_not_depend_on_the_order_of_replies_beyond_rounding() -> None:
    random = np.random.default_rng(2)
    models = [{name: random.standard_normal(w.shape) for name, w in MODEL.items()} for _ in range(5)]
    p = [0.1, 0.15, 0.2, 0.25, 0.3]
    config = FedClupConfig(2.0, 0.3)
    one, other = one_round(models, p, config), one_round(models[::-1], p[::-1], config)
    for name in MODEL:
        np.testing.assert_allclose(one[name], other[name], atol=1e-14)


def test_a_client_split_in_two_equal_ones_changes_nothing() -> None:
    random = np.random.default_rng(3)
    models = [{name: random.standard_normal(w.shape) for name, w in MODEL.items()} for _ in range(2)]
    config = FedClupConfig(2.0, 0.3)
    whole = one_round(models, [0.4, 0.6], config)
    split = one_round([*models, models[1]], [0.4, 0.2, 0.4], config)
    for name in MODEL:
        np.testing.assert_allclose(whole[name], split[name], atol=1e-14)


def test_states_are_not_modified() -> None:
    state = fedclup.initial_state(MODEL)
    sent = fedclup.send(MODEL, {name: w + 1 for name, w in MODEL.items()}, None, Stale.REUSE)
    folded = fedclup.fold(state, sent.message, 0.5, first=True)
    moved = fedclup.server_step(folded, FedClupConfig(1.0, 1.0))
    np.testing.assert_array_equal(state.total["a"], [0, 0])
    np.testing.assert_array_equal(folded.model["a"], [1, 2])
    assert moved.model["a"] is not folded.model["a"]
    assert not np.shares_memory(state.model["a"], MODEL["a"])


def test_restart_voids_the_sum_and_clients_begin_again(clients: list[Quadratic], weights: np.ndarray) -> None:
    """A client that lost its store cannot take back what it added; after a restart the solution is exact again."""
    _, L = curvature(clients)
    lam, config = 1.0, FedClupConfig(1.0, default_gamma(1.0, L, 8, 8))
    state = fedclup.initial_state({"w": np.zeros(8)})
    known: list[Any] = [None] * 8
    personal: list[Any] = [np.zeros(8)] * 8
    for server_round in range(120):
        if server_round == 20:
            generation = state.generation
            state, known, personal[3] = fedclup.restart(state), [None] * 8, state.model["w"]
            assert state.generation == generation + 1
            assert state.heard == 0
        w = state.model["w"]
        for i, client in enumerate(clients):
            personal[i] = descend([Proximal(client, w, lam)] * 4, personal[i], safe_step(L, lam))
            sent = fedclup.send({"w": w}, {"w": personal[i]}, known[i], Stale.REUSE)
            state = fedclup.fold(state, sent.message, weights[i], first=known[i] is None)
            known[i] = sent.known
        state = fedclup.server_step(state, config)
    np.testing.assert_allclose(state.model["w"], joint_minimiser(clients, weights, lam).model, atol=1e-8)


def test_default_gamma() -> None:
    assert default_gamma(0.5, 4.0, 8, 8) == pytest.approx(2.25)
    assert default_gamma(0.5, 4.0, 2, 8) == pytest.approx(2.25 / 4)


@pytest.mark.parametrize(
    ("config", "num_sampled", "message"),
    [
        pytest.param(FedClupConfig(1.0, 1.25), 8, None, id="theory step, everyone"),
        pytest.param(FedClupConfig(1.0, 0.625), 4, None, id="default, half"),
        pytest.param(FedClupConfig(1.0, 0.63), 4, r"\(\|S\|/N\)\(1/lambda \+ 1/L\) = 0.625", id="reuse beyond default"),
        pytest.param(FedClupConfig(1.0, 1.25, Stale.REPLIES), 4, None, id="replies have no share"),
        pytest.param(
            FedClupConfig(1.0, 1.3, Stale.REPLIES), 4, r"theory's step 1/lambda \+ 1/L = 1.25", id="beyond theory"
        ),
        pytest.param(FedClupConfig(1.0, 2.6), 8, r"unstable even .* 2.5", id="beyond the limit"),
        pytest.param(FedClupConfig(1.0, 1.0, Stale.REUSE_MODELS), 1, None, id="plain averaging of old models"),
    ],
)
def test_server_steps_are_judged_by_their_bounds(config: FedClupConfig, num_sampled: int, message: str | None) -> None:
    warnings = gamma_warnings(config, 4.0, num_sampled, 8)
    if message is None:
        assert warnings == []
    else:
        (warning,) = warnings
        assert re.search(message, warning)


@pytest.mark.parametrize(
    ("lam", "gamma", "stale", "message"),
    [
        pytest.param(0.0, 1.0, Stale.REUSE, "lambda: expected a finite number above 0", id="lambda zero"),
        pytest.param(-1.0, 1.0, Stale.REUSE, "lambda", id="lambda negative"),
        pytest.param(1.0, 0.0, Stale.REUSE, "gamma", id="gamma zero"),
        pytest.param(1.0, float("inf"), Stale.REUSE, "gamma", id="gamma infinite"),
        pytest.param(2.0, 0.51, Stale.REUSE_MODELS, "at most 1/lambda = 0.5", id="old models with a larger step"),
    ],
)
def test_impossible_settings_are_refused(lam: float, gamma: float, stale: Stale, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        FedClupConfig(lam, gamma, stale)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        pytest.param({"a": MODEL["a"]}, r"tensors b: expected shapes \(1, 1\)", id="a tensor is missing"),
        pytest.param({**MODEL, "c": np.zeros(2)}, r"tensors c: expected shapes none", id="one too many"),
        pytest.param({**MODEL, "a": np.zeros(3)}, r"tensors a: .* got \(3,\)", id="another shape"),
    ],
)
def test_models_of_another_architecture_are_refused(other: dict[str, np.ndarray], message: str) -> None:
    with pytest.raises(MessageError, match=f"personal model in the client's store, {message}"):
        fedclup.send(MODEL, other, None, Stale.REUSE)
    with pytest.raises(MessageError, match=f"last folded reply in the client's store, {message}"):
        fedclup.send(MODEL, MODEL, other, Stale.REUSE)
    with pytest.raises(MessageError, match=f"reply, {message}"):
        fedclup.fold(fedclup.initial_state(MODEL), other, 0.5, first=True)


@pytest.mark.parametrize(
    ("heard", "weight"), [pytest.param(0.6, 0.6, id="sum above 1"), pytest.param(0.5, 0.0, id="zero")]
)
def test_weights_that_are_not_over_all_clients_are_refused(heard: float, weight: float) -> None:
    state = fedclup.fold(fedclup.initial_state(MODEL), MODEL, heard, first=True)
    with pytest.raises(SettingsError, match=r"client weights p_i.*over all N clients"):
        fedclup.fold(state, MODEL, weight, first=True)


NAMES = ("body.0.weight", "body.0.bias", "head.weight", "head.bias", "header")


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        pytest.param((), NAMES, id="nothing named: everything is personal"),
        pytest.param(("head",), ("head.weight", "head.bias"), id="a module, not what merely starts like it"),
        pytest.param(("header",), ("header",), id="a tensor"),
        pytest.param(("*.bias",), ("body.0.bias", "head.bias"), id="a pattern"),
        pytest.param(("head", "body"), NAMES[:4], id="several, in the model's order"),
    ],
)
def test_names_are_picked(patterns: tuple[str, ...], expected: tuple[str, ...]) -> None:
    assert personal_names(NAMES, patterns) == expected


def test_pattern_that_names_nothing_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"personal parts, 'classifier'.*body\.0\.weight"):
        personal_names(NAMES, ("head", "classifier"))
