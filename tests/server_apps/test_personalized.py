"""Personalised methods end to end in the in-process engine: what clients keep, what they are measured at, where it ends."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Message, RecordDict

from fedapps.client_apps.torch_problem import TorchProblem
from fedapps.errors import RoundFailedError, SettingsError
from fedapps.methods import resolve_settings
from fedapps.personalization.quadratic import global_minimiser, joint_minimiser, least_squares, local_minimisers
from fedapps.results.storage import load_arrays, save_arrays
from fedapps.tasks.from_settings import load_task_of

from ..simulation import runs

short_run, assert_same_model = runs.short_run, runs.assert_same_model

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("own_module")]

KEEPERS = ["fedclup", "pfedme", "ditto", "localtrain"]
LINEAR = {
    "task": "synthetic-linear", "partition": "auto", "partition-column": "auto", "weighting": "auto", "batch-size": 0,
    "lr": 0.4, "local-epochs": 40, "task-options": 'clients = 4\nexamples = 40\ndimension = 3\nheterogeneity = 2.0',
    "evaluate-every": 0, "client-evaluation": "last",
}  # fmt: skip
"""Four least-squares clients; forty steps solve a local problem."""


def empty(reply: Message) -> Message:
    reply.content = RecordDict()
    return reply


def stores(run: runs.Left) -> dict[int, dict[str, np.ndarray]]:
    return runs.client_states(run.folder.path)


def personal(run: runs.Left) -> dict[int, dict[str, np.ndarray]]:
    return {
        partition: {k.removeprefix("personal/"): v for k, v in state.items() if k.startswith("personal/")}
        for partition, state in stores(run).items()
    }


def quadratics(config: dict[str, Any], clients: int) -> list[Any]:
    """The clients' losses of a synthetic linear task."""
    task = load_task_of(resolve_settings({**runs.SITES, **config}))
    data = [task.client_data(i, clients).train for i in range(clients)]
    return [least_squares(d.inputs, d.targets) for d in data]


# Where it ends: closed forms --------------------------------------------------------------------------------


@pytest.mark.parametrize("lam", [0.1, 10.0])
@pytest.mark.parametrize("faults", [{}, {(3, 1): empty, (4, 0): empty, (7, 2): empty}], ids=["all arrive", "some lost"])
def test_fedclup_reaches_the_joint_minimiser_with_half_of_the_clients(tmp_path: Path, lam: float, faults: Any) -> None:
    """``stale = reuse`` has the exact fixed point, and a lost reply leaves both ends in agreement.

    Gradient steps of 1/(1/0.4 + lambda) contract by 1 - (mu + lambda)/(2.5 + lambda) < 0.85 each, so forty of them solve
    a local problem to 1e-3, and warm starts do the rest.
    """
    config = {**LINEAR, "method": "fedclup", "fedclup.lambda": lam, "fraction-train": 0.5, "num-server-rounds": 80}
    run = short_run(tmp_path / "run", config, 4, faults=faults)
    oracle = joint_minimiser(quadratics(config, 4), np.full(4, 0.25), lam)
    np.testing.assert_allclose(run.model["weights"], oracle.model, atol=1e-8)
    kept = personal(run)
    np.testing.assert_allclose([kept[i]["weights"] for i in range(4)], oracle.personal, atol=1e-8)


def test_without_the_differences_of_absent_clients_it_stays_away(tmp_path: Path) -> None:
    config = {**LINEAR, "method": "fedclup", "fedclup.stale": "replies", "fraction-train": 0.5, "num-server-rounds": 60}
    run = short_run(tmp_path / "run", config, 4)
    oracle = joint_minimiser(quadratics(config, 4), np.full(4, 0.25), 0.3)
    assert np.linalg.norm(run.model["weights"] - oracle.model) > 1e-2


def test_reuse_of_models_reaches_the_joint_minimiser_too(tmp_path: Path) -> None:
    config = {
        **LINEAR, "method": "fedclup", "fedclup.stale": "reuse-models", "fraction-train": 0.5, "num-server-rounds": 120,
    }  # fmt: skip
    run = short_run(tmp_path / "run", config, 4)
    oracle = joint_minimiser(quadratics(config, 4), np.full(4, 0.25), 0.3)
    np.testing.assert_allclose(run.model["weights"], oracle.model, atol=1e-6)
    assert run.rows("train")[-1]["gamma"] == pytest.approx(1 / 0.3)


def test_the_weights_are_over_all_clients_not_over_those_of_a_round(tmp_path: Path) -> None:
    """Sites of 6 and 18 examples: the fixed point is that of weights 1/4 and 3/4, one client a round."""
    config = {
        **LINEAR, "method": "fedclup", "fraction-train": 0.5, "num-server-rounds": 60, "weighting": "examples",
        "task": "fedapps_testing:Lines", "task-options": 'sizes = "6,18"', "partition": "column",
        "partition-column": "site", "client-test-fraction": 0.0, "client-evaluation": "none",
    }  # fmt: skip
    run = short_run(tmp_path / "run", config, 2)
    oracle = joint_minimiser(quadratics(config, 2), np.array([0.25, 0.75]), 0.3)
    np.testing.assert_allclose(run.model["weights"], oracle.model, atol=1e-8)


def test_localtrain_and_globaltrain_are_the_ends_of_the_dial(tmp_path: Path) -> None:
    clients = quadratics(LINEAR, 4)
    alone = short_run(tmp_path / "local", {**LINEAR, "method": "localtrain", "num-server-rounds": 8}, 4)
    kept = personal(alone)
    np.testing.assert_allclose([kept[i]["weights"] for i in range(4)], local_minimisers(clients), atol=1e-8)
    pooled = short_run(
        tmp_path / "global", {**LINEAR, "method": "globaltrain", "local-epochs": 1, "num-server-rounds": 60}, 4
    )
    np.testing.assert_allclose(pooled.model["weights"], global_minimiser(clients, np.full(4, 0.25)), atol=1e-8)


def test_pfedme_has_the_fixed_point_of_the_joint_problem_and_its_limits(tmp_path: Path) -> None:
    """Which of pFedMe's models is which: w = mean of the copies; with exact inner solutions the fixed point is FedCLUP's."""
    config = {**LINEAR, "method": "pfedme", "local-epochs": 1, "pfedme.inner-steps": 60, "pfedme.eta": 3.0}
    run = short_run(tmp_path / "run", {**config, "num-server-rounds": 30}, 4)
    clients = quadratics(config, 4)
    oracle = joint_minimiser(clients, np.full(4, 0.25), 0.3)
    np.testing.assert_allclose(run.model["weights"], oracle.model, atol=1e-6)
    kept = personal(run)
    np.testing.assert_allclose([kept[i]["weights"] for i in range(4)], oracle.personal, atol=1e-6)
    weak = short_run(tmp_path / "weak", {**config, "pfedme.lambda": 1e-9, "num-server-rounds": 2}, 4)
    own = personal(weak)
    np.testing.assert_allclose([own[i]["weights"] for i in range(4)], local_minimisers(clients), atol=1e-6)
    strong = {**config, "pfedme.lambda": 1e4, "pfedme.eta": 1e-4, "num-server-rounds": 3}
    run = short_run(tmp_path / "strong", strong, 4)
    for model in personal(run).values():
        np.testing.assert_allclose(model["weights"], run.model["weights"], atol=1e-3)


@pytest.mark.parametrize("steps", [2, 9], ids=["fewer", "more"])
def test_dittos_personal_model_takes_its_own_number_of_steps(tmp_path: Path, steps: int) -> None:
    config = {**LINEAR, "local-epochs": 4, "num-server-rounds": 2, "method": "ditto"}
    run = short_run(tmp_path / "run", {**config, "ditto.personal-steps": steps, "ditto.lambda": 0.5}, 4)
    plain = short_run(tmp_path / "plain", {**config, "method": "fedavg"}, 4)
    np.testing.assert_allclose(run.model["weights"], plain.model["weights"], rtol=1e-12)
    received = [np.zeros(3), short_run(tmp_path / "one", {**config, "num-server-rounds": 1}, 4).model["weights"]]
    data, lr = load_task_of(resolve_settings({**config, "num-server-rounds": 2})).load()[0], 1 / (1 / 0.4 + 0.5)
    for i, found in personal(run).items():
        mine = np.flatnonzero(data.columns["client"] == i)
        f = least_squares(np.asarray(data.inputs)[mine][:40], data.targets[mine][:40])
        v = np.zeros(3)
        for w in received:
            for _ in range(steps):
                v = v - lr * (f.gradient(v) + 0.5 * (v - w))
        np.testing.assert_allclose(found["weights"], v, rtol=1e-10)


def test_dittos_global_model_is_fedavgs_and_its_personal_models_are_pulled_to_it(tmp_path: Path) -> None:
    sites = {"client-test-fraction": 0.0, "client-validation-fraction": 0.0}
    ditto, fedavg = (short_run(tmp_path / m, {**sites, "method": m}) for m in ("ditto", "fedavg"))
    assert_same_model(ditto.model, fedavg.model)
    config = {**LINEAR, "local-epochs": 5, "num-server-rounds": 30, "method": "ditto"}
    run = short_run(tmp_path / "linear", config, 4)
    w = run.model["weights"]
    for kept, client in zip(personal(run).values(), quadratics(config, 4), strict=True):
        expected = np.linalg.solve(client.A + 0.3 * np.eye(3), client.b + 0.3 * w)
        np.testing.assert_allclose(kept["weights"], expected, atol=1e-4)


# What clients keep ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "workers"), [*((method, 0) for method in KEEPERS), ("fedclup", 2)]
)  # Workers are slow to start, and know nothing of the method: one is enough.
def test_a_client_goes_on_where_its_last_folded_reply_left_it(tmp_path: Path, method: str, workers: int) -> None:
    """What a client keeps lasts, also for clients skipped between.

    The same in two workers, and without the model of a lost reply.
    """
    config = {"method": method, "num-server-rounds": 4, "fraction-train": 0.67, "client-evaluation": "none"}
    faults = {(2, p): empty for p in range(3)}
    straight = short_run(tmp_path / "straight", config, workers=workers, faults=faults)
    reference = short_run(tmp_path / "reference", config, faults=faults)
    assert_same_model(straight.model, reference.model)
    for partition, state in stores(straight).items():
        assert_same_model(state, stores(reference)[partition])
    sampled = [row["sampled"] for row in straight.rows("train")]
    assert any(partition not in round_ for round_ in sampled for partition in range(3))


@pytest.mark.parametrize("method", [*KEEPERS, "globaltrain"])
def test_killing_and_resuming_loses_no_personal_model(tmp_path: Path, method: str) -> None:
    """A run that failed in round 3, after clients had already saved it, goes on as if nothing had happened."""
    config = {
        "method": method, "fraction-train": 0.67, "on-failure": "fail-fast", "num-server-rounds": 4,
        "client-test-fraction": 0.34, "client-evaluation": "every",
    }  # fmt: skip
    straight = short_run(tmp_path / "straight", config)
    last = straight.rows("train")[2]["sampled"][-1]
    with pytest.raises(RoundFailedError):
        short_run(tmp_path / "failed", config, faults={(3, last): empty})
    resumed = short_run(tmp_path / "failed", {**config, "resume": True})
    assert_same_model(straight.model, resumed.model)
    if method != "globaltrain":
        for partition, state in stores(straight).items():
            assert_same_model(state, stores(resumed)[partition])
    assert straight.folder.read_clients() == resumed.folder.read_clients()


def test_a_lost_store_is_named_and_the_sum_starts_anew(tmp_path: Path, log: Any) -> None:
    config = {**LINEAR, "method": "fedclup", "num-server-rounds": 3}
    first = short_run(tmp_path / "run", config, 4)
    for folder in (tmp_path / "run").glob("clients/*/client-2"):
        shutil.rmtree(folder)
    run = short_run(tmp_path / "run", {**config, "num-server-rounds": 60, "resume": True}, 4)
    assert "client 2 has lost what it kept since round 3" in log.text
    assert "the sum of differences starts anew" in log.text
    notes = " ".join(run.rows("train")[3]["notes"])
    assert "client 2" in notes
    assert first.summary["status"] == run.summary["status"] == "completed"
    oracle = joint_minimiser(quadratics(config, 4), np.full(4, 0.25), 0.3)
    np.testing.assert_allclose(run.model["weights"], oracle.model, atol=1e-8)


@pytest.mark.parametrize("method", KEEPERS)
def test_a_stored_model_of_another_architecture_is_refused_by_name(tmp_path: Path, method: str) -> None:
    config = {"method": method, "num-server-rounds": 1}
    short_run(tmp_path / "run", config)
    path = next((tmp_path / "run").glob("clients/*/client-1/round-1.safetensors"))
    save_arrays(path, {**load_arrays(path), "personal/0.weight": np.zeros((7, 4), np.float32)})
    run = short_run(tmp_path / "run", {**config, "num-server-rounds": 2, "resume": True})
    assert run.rows("train")[1]["folded"] == [0, 2]
    reason = run.rows("train")[1]["refused"]["1"]
    assert "client 1, stored personal model, tensor '0.weight': expected shape (5, 4)" in reason
    assert "got shape (7, 4)" in reason


def test_a_round_below_the_quorum_leaves_sum_and_clients_as_they_were(tmp_path: Path) -> None:
    config = {"method": "fedclup", "min-replies": 3}
    faulty = short_run(tmp_path / "two", {**config, "num-server-rounds": 2}, faults={(2, 0): empty})
    one = short_run(tmp_path / "one", {**config, "num-server-rounds": 1})
    assert_same_model(one.model, faulty.model)
    assert_same_model(one.folder.load_checkpoint().strategy_arrays, faulty.folder.load_checkpoint().strategy_arrays)
    for partition, state in stores(one).items():
        assert_same_model(state, stores(faulty)[partition])


# What clients are measured at -------------------------------------------------------------------------------


@pytest.mark.parametrize("method", KEEPERS)
def test_personal_models_of_all_clients_are_measured_on_their_own_data(tmp_path: Path, method: str) -> None:
    """Every client is scored, by its own model.

    Three clients with the same inputs, client k calls everything class k; one client a round, nine rounds.
    """
    config = {
        "method": method, "task": "fedapps_testing:Conflict", "fraction-train": 0.34, "num-server-rounds": 9, "lr": 0.5,
        "local-epochs": 5, "client-test-fraction": 0.25, "client-evaluation": "last",
    }  # fmt: skip
    run = short_run(tmp_path / "run", config)
    rows = run.folder.read_clients()
    assert [(row["round"], row["partition"], row["num-examples"]) for row in rows] == [(9, 0, 4), (9, 1, 4), (9, 2, 4)]
    assert [row["personal-test-accuracy"] for row in rows] == [1.0, 1.0, 1.0]
    means = run.rows("client-evaluate")[-1]
    for suffix, expected in {"": 1.0, "-weighted": 1.0, "-std": 0.0, "-worst-decile": 1.0}.items():
        assert means[f"client-personal-test-accuracy{suffix}"] == expected
    if method == "localtrain":
        assert "client-global-test-accuracy" not in means
    else:
        assert means["client-global-test-accuracy"] == pytest.approx(1 / 3, abs=0.34)
        assert means["client-global-test-accuracy"] < 0.7
        assert means["client-global-test-accuracy-std"] > 0.3
    assert run.summary["final"]["client-personal-test-accuracy"] == 1.0


def test_evaluation_leaves_training_as_it_is(tmp_path: Path) -> None:
    config = {"method": "fedclup", "fraction-train": 0.34, "num-server-rounds": 5, "client-test-fraction": 0.34}
    plain = short_run(tmp_path / "plain", {**config, "client-evaluation": "none"})
    more = short_run(tmp_path / "more", {**config, "client-evaluation": "every"})
    assert_same_model(plain.model, more.model)
    for partition, state in stores(plain).items():
        assert_same_model(state, stores(more)[partition])
    assert len(more.folder.read_clients()) == 15


def test_exported_models_are_the_kept_ones_with_a_manifest(tmp_path: Path) -> None:
    config = {
        "method": "fedclup", "fedclup.export": True, "client-evaluation": "none", "client-test-fraction": 0.0,
        "client-validation-fraction": 0.0, "task": "fedapps_testing:BatchNormSites",
    }  # fmt: skip
    run = short_run(tmp_path / "run", config)
    assert not (tmp_path / "run" / "clients.jsonl").exists()  # The clients hold no test data, so nothing is measured.
    folder = next((tmp_path / "run").glob("clients/*/personal"))
    assert sorted(path.name for path in folder.iterdir()) == [
        f"{i}.{e}" for i in range(3) for e in ("json", "safetensors")
    ]
    for partition, kept in personal(run).items():
        exported = load_arrays(folder / f"{partition}.safetensors")
        assert kept.keys() == exported.keys()  # The buffers too: the whole model is the client's own.
        assert_same_model({name: exported[name] for name in kept}, kept)
        assert exported.keys() == run.model.keys()
        manifest = json.loads((folder / f"{partition}.json").read_text())
        digest = hashlib.sha256((folder / f"{partition}.safetensors").read_bytes()).hexdigest()
        assert (manifest["partition"], manifest["round"], manifest["sha256"]) == (partition, 2, digest)
        assert manifest["tensors"]["0.weight"] == {"shape": [8, 4], "dtype": "float32"}


# Parts, traffic, choice of lambda ---------------------------------------------------------------------------


def test_only_the_named_parts_are_personal(tmp_path: Path) -> None:
    """The head is each client's own; the rest is FedAvg's, bitwise equal on all of them after a round."""
    config = {"method": "fedclup", "fedclup.personal": "2", "num-server-rounds": 3, "fedclup.export": True}
    run = short_run(tmp_path / "run", config)
    assert {name for kept in personal(run).values() for name in kept} == {"2.weight", "2.bias"}
    folder = next((tmp_path / "run").glob("clients/*/personal"))
    models = [load_arrays(folder / f"{partition}.safetensors") for partition in range(3)]
    assert all(model["0.weight"].tobytes() == run.model["0.weight"].tobytes() for model in models)
    assert len({model["2.weight"].tobytes() for model in models}) == 3


def test_a_part_that_does_not_exist_is_told_before_anyone_trains(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"personal parts, 'head'.*the tensors are 0\.weight, 0\.bias"):
        short_run(tmp_path / "run", {"method": "fedclup", "fedclup.personal": "head"})
    assert not (tmp_path / "run" / "clients").exists()


def test_of_localtrain_nothing_travels_but_metrics(tmp_path: Path) -> None:
    run = short_run(tmp_path / "run", {"method": "localtrain"})
    ledger = [row for row in run.folder.read_ledger() if row["kind"] != "query"]
    assert {row["kind"] for row in ledger} == {"train", "evaluate"}
    assert {row["payload"].get("arrays", 0) for row in ledger} == {0}


def test_fedclup_sends_as_much_as_it_receives_one_model(tmp_path: Path) -> None:
    ledger = short_run(tmp_path / "run", {"method": "fedclup"}).folder.read_ledger()
    sizes = [row["payload"]["arrays"] for row in ledger if row["kind"] == "train"]
    assert set(sizes) == {4 * (4 * 5 + 5 + 5 * 2 + 2)}


def test_lambda_is_chosen_from_a_round_of_local_fits_by_all_clients(tmp_path: Path) -> None:
    """R = 2 of 40 examples in 3 dimensions: lambda is near s2 d/(n R^2) = 3/160, and logged with its grounds."""
    config = {**LINEAR, "method": "fedclup", "fedclup.adaptive": True, "fraction-train": 0.5, "num-server-rounds": 60}
    run = short_run(tmp_path / "run", config, 4)
    first, *others = run.rows("train")
    assert first["folded"] == [0, 1, 2, 3]
    assert "by the rule" in first["notes"][0]
    lam = first["lambda"]
    assert 0.5 * 3 / 160 < lam < 2 * 3 / 160
    assert {row["lambda"] for row in others} == {lam}
    assert {len(row["folded"]) for row in others} == {2}
    oracle = joint_minimiser(quadratics(config, 4), np.full(4, 0.25), lam)
    np.testing.assert_allclose(run.model["weights"], oracle.model, atol=1e-4)
    halves = short_run(tmp_path / "halves", {**config, "num-server-rounds": 1}, 4)
    halves = short_run(tmp_path / "halves", {**config, "resume": True}, 4)
    assert_same_model(run.model, halves.model)


def test_lambda_is_chosen_for_a_network_too(tmp_path: Path) -> None:
    config = {"method": "fedclup", "fedclup.adaptive": True, "task-options": 'sizes = "20,20,1"', "local-epochs": 3}
    run = short_run(tmp_path / "run", config)
    assert "3 clients" in run.rows("train")[0]["notes"][0]
    assert 1e-3 <= run.rows("train")[1]["lambda"] <= 1e3
    assert run.summary["status"] == "completed"


# Bad input --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({"fedclup.lambda": 0.0}, r"'fedclup\.lambda': expected a finite number > 0"),
        ({"fedclup.lambda": -1.0}, r"'fedclup\.lambda': expected a finite number > 0"),
        (
            {"fedclup.stale": "reuse-models", "fedclup.lambda": 0.5, "fedclup.gamma": 2.5},
            r"at most 1/lambda = 2.*got 2\.5",
        ),
        ({"fedclup.adaptive": True, "fedclup.lambda-min": 5.0, "fedclup.lambda-max": 1.0}, "lower <= upper"),
        ({"fedclup.lamda": 0.5}, r"did you mean 'fedclup\.lambda'"),
        ({"pfedme.lambda": 0.5}, r"does not belong to method 'fedclup'"),
    ],
)
def test_wrong_numbers_fail_before_training(tmp_path: Path, config: dict[str, Any], match: str) -> None:
    with pytest.raises(SettingsError, match=match):
        short_run(tmp_path / "run", {"method": "fedclup", **config})
    assert not (tmp_path / "run" / "clients").exists()


def test_pfedmes_copy_may_not_jump_past_its_personal_model(tmp_path: Path) -> None:
    run_config = {"method": "pfedme", "pfedme.lambda": 2.0, "pfedme.eta": 0.6, "num-server-rounds": 1}
    with pytest.raises(
        SettingsError, match=r"pFedMe, eta: expected above 0 and at most 1/lambda, for lambda = 2, got 0\.6"
    ):
        short_run(tmp_path / "run", run_config)


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({"fedclup.gamma": 1e4}, r"gamma = 10000 is unstable even with every client.*its limit"),
        ({"fedclup.personal-lr": 100.0}, r"local step eta = 100 is unstable: it is not below 2/\(L \+ lambda\)"),
        (
            {"fedclup.gamma": 0.0, "fedclup.gamma-rule": "average", "fedclup.personal-lr": 100.0},
            r"local step eta = 100 is unstable: it is not below 2/\(L \+ lambda\)",
        ),
    ],
    ids=["server step", "local step", "local step with plain averaging"],
)
def test_unstable_steps_are_warned_of_with_their_bound(
    tmp_path: Path, log: Any, config: dict[str, Any], match: str
) -> None:
    base = {**LINEAR, "method": "fedclup", "local-epochs": 1, "num-server-rounds": 2, "fedclup.gamma": 0.1}
    run = short_run(tmp_path / "run", {**base, **config}, 4)
    assert len(re.findall(match, log.text)) == 1  # Once, not every round.
    assert re.search(match, " ".join(run.rows("train")[0]["notes"]))


@pytest.mark.parametrize("method", ["pfedme", "ditto"])
def test_an_unstable_step_of_a_personal_model_is_warned_of_with_its_bound(
    tmp_path: Path, log: Any, method: str
) -> None:
    """The bound is within a fifth of the client's own 2/(L + lambda); a step that is below it is not spoken of."""
    base = {**LINEAR, "method": method, "local-epochs": 1, "num-server-rounds": 3}
    short_run(tmp_path / "stable", base, 4)
    assert "is unstable" not in log.text
    run = short_run(tmp_path / "unstable", {**base, f"{method}.personal-lr": 10.0}, 4)
    match = r"client 0: the step of the personal model is unstable: it is not below 2/\(L \+ lambda\) = ([0-9.]+)"
    (bound,) = re.findall(match, log.text)  # Once, not every round or client.
    L = np.linalg.eigvalsh(quadratics(base, 4)[0].A)[-1]
    assert 2 / (L + 0.3) * 0.999 < float(bound) < 2 / (L + 0.3) * 1.2
    assert re.search(match, " ".join(run.rows("train")[0]["notes"]))
    assert not any("step-limit" in row for row in run.rows("train"))


@pytest.mark.parametrize("method", ["pfedme", "ditto"])
@pytest.mark.parametrize("config", [LINEAR, {"local-epochs": 60}], ids=["convex", "torch"])
def test_a_personal_model_that_diverged_is_named_with_its_bound(
    tmp_path: Path, method: str, config: dict[str, Any]
) -> None:
    config = {
        **config,
        "method": method,
        f"{method}.personal-lr": 1e6,
        "num-server-rounds": 1,
        "on-failure": "fail-fast",
    }
    with (
        np.errstate(all="ignore"),
        pytest.raises(RoundFailedError, match=r"a finite loss.* it is not below 2/\(L \+ lambda\) = "),
    ):
        short_run(tmp_path / "run", config, 4 if "task" in config else 3)


@pytest.mark.parametrize("method", ["fedclup", "pfedme", "ditto"])
def test_the_estimate_for_warnings_leaves_training_as_it_is(
    tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {"method": method, "task": "fedapps_testing:BatchNormSites"}
    config |= {"fedclup.gamma-rule": "average"} if method == "fedclup" else {}
    run = short_run(tmp_path / "with", config)
    monkeypatch.setattr(TorchProblem, "rough_curvature", lambda *_: 0.0)
    without = short_run(tmp_path / "without", config)
    assert_same_model(run.model, without.model)
    for partition, state in stores(run).items():
        assert_same_model(state, stores(without)[partition])
