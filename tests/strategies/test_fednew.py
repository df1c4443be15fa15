"""FedNew against the paper's algorithm, computed here in float64: sampled clients, lost replies, Hessians kept for rounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Message, RecordDict

from fedapps.client_apps import store as client_store
from fedapps.curvature.fednew import next_dual, primal
from fedapps.defences import Defence
from fedapps.errors import FedAppsError, SettingsError
from fedapps.methods import resolve_settings
from fedapps.settings import RoundSettings
from fedapps.strategies import FedNew
from fedapps.tasks.from_settings import load_task_of

from ..simulation.runs import assert_same_model, client_states, short_run
from .logistic_clients import LOGISTIC, D, parts

pytestmark = pytest.mark.usefixtures("own_module")

ALPHA, RHO = 0.02, 0.15
FEDNEW: dict[str, Any] = {
    **LOGISTIC, "method": "fednew", "fednew.alpha": ALPHA, "fednew.rho": RHO, "num-server-rounds": 8,
}  # fmt: skip


def refused(reply: Message) -> Message:
    """For the client it is as if the reply were lost; but nobody waits."""
    reply.content = RecordDict()
    return reply


def papers(config: dict[str, Any], rows: list[dict[str, Any]]) -> tuple[np.ndarray, np.ndarray]:
    """The passes of ADMM, every client's dual by the ``y`` of its own last folded round; theta, and the duals at the end."""
    clients, p = parts()
    refresh = config.get("fednew.refresh", 1)
    theta, y, dual = np.zeros(D), np.zeros(D), np.zeros((3, D))
    hessians: dict[int, list[np.ndarray]] = {i: [] for i in range(3)}
    for row in rows:
        y_i = {}
        for i in row["folded"]:
            due = not hessians[i] or (refresh and len(hessians[i]) % refresh == 0)
            hessians[i].append(clients[i].hessian(theta) if due else hessians[i][-1])
            rhs = clients[i].gradient(theta) - dual[i] + RHO * y
            y_i[i] = np.linalg.solve(hessians[i][-1] + (ALPHA + RHO) * np.eye(D), rhs)
        y = sum(p[i] * y_i[i] for i in y_i) / sum(p[i] for i in y_i)
        for i in y_i:
            dual[i] += RHO * (y_i[i] - y)
        theta = theta - config["lr"] * y
    return theta, dual


@pytest.mark.parametrize(
    "own",
    [{}, {"fednew.refresh": 3, "lr": 0.8}, {"fednew.refresh": 0}, {"fraction-train": 0.67, "fednew.refresh": 2}],
    ids=["all", "a Hessian for three rounds", "for good", "sampled"],
)
@pytest.mark.slow
def test_it_is_the_papers_algorithm(tmp_path: Path, own: dict[str, Any]) -> None:
    config = {**FEDNEW, **own}
    left = short_run(
        tmp_path / "run", config, faults={(1, 1): refused, (3, 0): refused, (4, 0): refused, (6, 2): refused}
    )
    rows = left.rows("train")
    assert sum(len(row["refused"]) for row in rows) >= 2
    theta, dual = papers(config, rows)
    np.testing.assert_allclose(left.model["weights"], theta, rtol=1e-10, atol=1e-13)
    # What the client does in its next round: the y of its last one is among those that the server keeps.
    kept = left.folder.load_checkpoint()
    for i, state in client_states(left.folder.path).items():
        y = kept.strategy_arrays[f"{kept.last_folded[i]}/weights"]
        np.testing.assert_allclose(next_dual(state["dual"], state["y"], y, RHO), dual[i], rtol=1e-9, atol=1e-13)
    _, p = parts()
    np.testing.assert_allclose(p @ dual, 0, atol=1e-14)
    assert {int(key.partition("/")[0]) for key in kept.strategy_arrays} == set(kept.last_folded.values())


def test_passes_at_a_frozen_point_end_at_the_damped_newton_direction() -> None:
    """``(sum p_i H_i + alpha I)^-1 sum p_i g_i``."""
    clients, p = parts()
    theta = np.linspace(-1, 1, D)
    H, g = ([getattr(part, what)(theta) for part in clients] for what in ("hessian", "gradient"))
    y, dual = np.zeros(D), np.zeros((3, D))
    for _ in range(2000):
        y_i = [primal(H[i], g[i], dual[i], y, alpha=ALPHA, rho=RHO, where="test").x for i in range(3)]
        y = sum(w * own for w, own in zip(p, y_i, strict=True))
        dual = np.array([next_dual(dual[i], y_i[i], y, RHO) for i in range(3)])
    mean_H, mean_g = (sum(w * own for w, own in zip(p, all_, strict=True)) for all_ in (H, g))
    np.testing.assert_allclose(y, np.linalg.solve(mean_H + ALPHA * np.eye(D), mean_g), rtol=1e-9)


@pytest.mark.slow
def test_it_reaches_the_optimum(tmp_path: Path) -> None:
    left = short_run(tmp_path / "run", {**FEDNEW, "num-server-rounds": 80})
    clients, p = parts()
    g = sum(w * part.gradient(left.model["weights"]) for w, part in zip(p, clients, strict=True))
    assert np.linalg.norm(g) < 1e-8


def test_no_hessian_travels_and_only_those_left_out_get_a_second_direction(tmp_path: Path) -> None:
    left = short_run(tmp_path / "run", {**FEDNEW, "num-server-rounds": 4}, faults={(2, 1): refused})
    ledger = [row for row in left.folder.read_ledger() if row["kind"] == "train"]
    vector = 8 * D
    for row in ledger:
        payload = {k: v for k, v in row["payload"].items() if k not in ("config", "metrics")}
        if row["direction"] == "up":
            assert payload == ({} if (row["round"], row["partition"]) == (2, 1) else {"arrays": vector})
        else:
            more = {"own-direction": vector} if (row["round"], row["partition"]) == (3, 1) else {}
            assert payload == {"arrays": vector, "direction": vector, **more}


@pytest.mark.parametrize("own", [{}, {"fraction-train": 0.67, "fednew.refresh": 2}], ids=["all", "sampled"])
@pytest.mark.slow
def test_a_resume_goes_on_to_the_bit(tmp_path: Path, own: dict[str, Any]) -> None:
    config = {**FEDNEW, **own}
    straight = short_run(tmp_path / "straight", config, late=[0, 1])
    short_run(tmp_path / "halves", {**config, "num-server-rounds": 3})
    halves = short_run(tmp_path / "halves", {**config, "resume": True})
    assert_same_model(straight.model, halves.model)


@pytest.mark.slow
def test_a_lost_store_starts_all_duals_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Round 3 takes no step; from round 4 on it is a run that starts at the model of round 2."""
    load = client_store.ClientStore.load

    def forgetful(self: Any, last_folded: int) -> Any:
        return None if last_folded == 2 and self.folder.name == "client-1" else load(self, last_folded)

    monkeypatch.setattr(client_store.ClientStore, "load", forgetful)
    two = short_run(tmp_path / "two", {**FEDNEW, "num-server-rounds": 2}).model
    three = short_run(tmp_path / "run", {**FEDNEW, "num-server-rounds": 3})
    assert_same_model(two, three.model)
    assert "the dual variables start anew at zero: no step is taken" in three.rows("train")[-1]["notes"]
    four = short_run(tmp_path / "run", {**FEDNEW, "num-server-rounds": 4, "resume": True})
    clients, p = parts()
    theta = two["weights"]
    y_i = [np.linalg.solve(c.hessian(theta) + (ALPHA + RHO) * np.eye(D), c.gradient(theta)) for c in clients]
    np.testing.assert_allclose(four.model["weights"], theta - p @ np.array(y_i), rtol=1e-10)


@pytest.mark.slow
def test_a_small_network_learns_and_its_buffers_take_the_mean_as_they_came(tmp_path: Path) -> None:
    config = {"method": "fednew", "task": "fedapps_testing:BatchNormSites", "num-server-rounds": 12, "lr": 1.0}
    left = short_run(tmp_path / "run", config)
    first = load_task_of(resolve_settings(config)).initial_arrays(0)
    for name in ("1.running_mean", "1.running_var", "1.num_batches_tracked"):
        np.testing.assert_array_equal(left.model[name], first[name])
    losses = [row["train-loss"] for row in left.rows("train")]
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("defence", [Defence.CLIP, Defence.MEDIAN, Defence.TRIMMED_MEAN])
def test_a_defence_that_changes_replies_is_refused(defence: Defence) -> None:
    with pytest.raises(SettingsError, match=rf"'defence' of method 'fednew': .*got {defence.value}"):
        FedNew(RoundSettings(defence=defence))
    assert FedNew(RoundSettings(defence=Defence.MULTI_KRUM))


def test_a_model_with_too_many_weights_is_refused_before_round_1(tmp_path: Path) -> None:
    with pytest.raises(FedAppsError, match=r"FedNew, the model: expected at most 16384 .*47236 weights.*first-order"):
        short_run(tmp_path / "run", {"method": "fednew", "task": "fedapps_testing:Wide", "node-wait": 0.0})
