"""SCAFFOLD and PSGD against their formulas, computed here in float64, with sampled clients and replies that are lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Message, RecordDict

from fedapps.client_apps import store as client_store
from fedapps.errors import SettingsError
from fedapps.messages import pack_arrays, unpack_arrays
from fedapps.methods import resolve_settings
from fedapps.settings import RoundSettings, parse_toml_options
from fedapps.strategies import SCAFFOLD
from fedapps.tasks import TaskConfig, load_task

from ..simulation.runs import client_states, short_run

SIZES = (6, 18, 9)
OPTIONS = """
clients = 3
examples = 20
sizes = '6,18,9'
regularisation = 0.0
heterogeneity = 2.0
"""
LINES: dict[str, Any] = {
    "task": "fedapps_testing:Lines", "task-options": OPTIONS, "batch-size": 0, "local-epochs": 3, "lr": 0.2,
    "num-server-rounds": 7, "fraction-train": 0.67,
}  # fmt: skip


def gradients() -> list[Any]:
    """``A_i theta - b_i`` of every client."""
    data = load_task(LINES["task"], TaskConfig(options=parse_toml_options("task-options", OPTIONS))).load()[0]
    found = []
    for site in range(3):
        mine = data.columns["site"] == site
        X, y = np.asarray(data.inputs)[mine], np.asarray(data.targets)[mine]
        assert len(y) == SIZES[site]
        found.append((X.T @ X / len(y), X.T @ y / len(y)))
    return [lambda theta, A=A, b=b: A @ theta - b for A, b in found]


def weights(weighting: str) -> np.ndarray:
    n = np.array(SIZES, float) if weighting == "examples" else np.ones(3)
    return n / n.sum()


def refused(reply: Message) -> Message:
    """For the client it is as if the reply were lost; but nobody waits."""
    reply.content = RecordDict()
    return reply


@pytest.mark.parametrize("weighting", ["examples", "uniform"])
@pytest.mark.parametrize(("option", "momentum"), [("I", 0.0), ("II", 0.0), ("I", 0.5)])
@pytest.mark.usefixtures("own_module")
def test_scaffold_is_the_papers_algorithm(tmp_path: Path, option: str, weighting: str, momentum: float) -> None:
    K, lr, lr_g = 3, LINES["lr"], 0.8
    config = {
        **LINES, "method": "scaffold", "weighting": weighting, "scaffold.option": option, "scaffold.server-lr": lr_g,
        "local-momentum": momentum,
    }  # fmt: skip
    left = short_run(tmp_path / "run", config, faults={(2, 1): refused, (4, 0): refused, (5, 2): refused})
    g, p = gradients(), weights(weighting)
    x, c, own = np.zeros(3), np.zeros(3), np.zeros((3, 3))
    for row in left.rows("train"):
        dy, dc = {}, {}
        for i in row["sampled"]:
            y, m = x.copy(), np.zeros(3)
            for _ in range(K):
                m = momentum * m + g[i](y) - own[i] + c
                y = y - lr * m
            new = g[i](x) if option == "I" else own[i] - c + (x - y) / (K * lr)
            dy[i], dc[i] = y - x, new - own[i]
        folded = [i for i in row["sampled"] if str(i) not in row["refused"]]
        x = x + lr_g * sum(p[i] * dy[i] for i in folded) / sum(p[i] for i in folded)
        c = c + sum(p[i] * dc[i] for i in folded)
        for i in folded:
            own[i] = own[i] + dc[i]
    assert sum(len(row["refused"]) for row in left.rows("train")) >= 2
    np.testing.assert_allclose(left.model["weights"], x, rtol=1e-12)
    for i, state in client_states(left.folder.path).items():
        np.testing.assert_allclose(state["c/weights"], own[i], rtol=1e-10, atol=1e-14)
    np.testing.assert_allclose(left.folder.load_checkpoint().strategy_arrays["weights"], c, rtol=1e-10)


@pytest.mark.usefixtures("own_module")
def test_with_one_client_scaffold_is_fedavg(tmp_path: Path) -> None:
    one = {**LINES, "task-options": "clients = 1\nexamples = 20\nsizes = '9'", "fraction-train": 1.0}
    models = [short_run(tmp_path / m, {**one, "method": m}, 1).model["weights"] for m in ("scaffold", "fedavg")]
    np.testing.assert_allclose(*models, rtol=1e-12)


@pytest.mark.usefixtures("own_module")
def test_buffers_take_the_mean_and_the_messages_are_as_the_row_says(tmp_path: Path) -> None:
    config = {"task": "fedapps_testing:BatchNormSites", "method": "scaffold"}
    left = short_run(tmp_path / "run", config)
    plain = short_run(tmp_path / "plain", {**config, "method": "fedavg"})
    # In the first round c = c_i = 0, so that all is FedAvg.
    names = {name.removeprefix("c/") for name in client_states(left.folder.path)[0]}
    parameters = sum(value.nbytes for name, value in left.model.items() if name in names)
    more = {
        way: sum(sum(row[way] for row in run.rows("train")) * sign for run, sign in ((left, 1), (plain, -1)))
        for way in ("payload-up", "payload-down")
    }
    assert parameters
    for value in more.values():  # entries of the config are a few bytes a message
        assert 6 * parameters <= value < 6 * parameters + 6 * 100


@pytest.mark.usefixtures("own_module")
def test_a_lost_store_starts_all_control_variates_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load = client_store.ClientStore.load

    def forgetful(self: Any, last_folded: int) -> Any:
        if last_folded == 3 and self.folder.name == "client-1":
            return None
        return load(self, last_folded)

    monkeypatch.setattr(client_store.ClientStore, "load", forgetful)
    config = {**LINES, "method": "scaffold", "fraction-train": 1.0, "num-server-rounds": 60, "weighting": "uniform"}
    left = short_run(tmp_path / "run", config)
    notes = left.rows("train")[3]["notes"]
    assert any("start anew" in note for note in notes)
    assert any("client 1 has lost" in note for note in notes)
    # It ends at the optimum of the mean all the same.
    g, p = gradients(), weights("uniform")
    assert np.linalg.norm(sum(w * f(left.model["weights"]) for w, f in zip(p, g, strict=True))) < 1e-6
    states = client_states(left.folder.path)
    c = left.folder.load_checkpoint().strategy_arrays["weights"]
    np.testing.assert_allclose(sum(p[i] * states[i]["c/weights"] for i in range(3)), c, atol=1e-12)


def without(reply: Message) -> Message:
    del reply.content["control"]
    return reply


def short(reply: Message) -> Message:
    changes = unpack_arrays(reply.content, "control", "")
    reply.content["control"] = pack_arrays(dict(list(changes.items())[1:]))
    return reply


@pytest.mark.parametrize("fault", [without, short])
@pytest.mark.usefixtures("own_module")
def test_a_reply_without_all_of_its_control_variate_changes_nothing(tmp_path: Path, fault: Any) -> None:
    config = {"method": "scaffold", "num-server-rounds": 1}
    left = short_run(tmp_path / "run", config, faults={(1, 1): fault})
    assert "record 'control': expected the change of c_i" in left.rows("train")[0]["refused"]["1"]


def test_defences_that_change_replies_are_refused() -> None:
    with pytest.raises(SettingsError, match=r"'defence' of method 'scaffold': expected multi-krum or none.*got clip"):
        SCAFFOLD(RoundSettings(defence="clip"))


@pytest.mark.parametrize("weighting", ["examples", "uniform"])
@pytest.mark.usefixtures("own_module")
def test_psgd_is_gradient_descent_on_the_mean_loss(tmp_path: Path, weighting: str) -> None:
    config = {**LINES, "method": "psgd", "weighting": weighting, "local-epochs": 1}
    left = short_run(tmp_path / "run", config, faults={(2, 1): refused})
    g, p, x = gradients(), weights(weighting), np.zeros(3)
    for row in left.rows("train"):
        folded = [i for i in row["sampled"] if str(i) not in row["refused"]]
        x = x - LINES["lr"] * sum(p[i] * g[i](x) for i in folded) / sum(p[i] for i in folded)
    np.testing.assert_allclose(left.model["weights"], x, rtol=1e-12)


@pytest.mark.parametrize("task", ["fedapps_testing:Sites", "fedapps_testing:BatchNormSites"])
@pytest.mark.usefixtures("own_module")
def test_psgd_of_one_step_is_fedavg_of_one_step(tmp_path: Path, task: str) -> None:
    one = {"task": task, "local-steps": 1, "num-server-rounds": 3}
    psgd, fedavg = (short_run(tmp_path / m, {**one, "method": m}) for m in ("psgd", "fedavg"))
    assert psgd.model.keys() == fedavg.model.keys()
    for name, value in psgd.model.items():
        np.testing.assert_allclose(value, fedavg.model[name], rtol=1e-5, atol=1e-7)


@pytest.mark.usefixtures("own_module")
def test_psgds_epoch_of_batches_is_the_full_gradient(tmp_path: Path) -> None:
    whole, batches = (
        short_run(tmp_path / str(size), {"method": "psgd", "batch-size": size, "task": "fedapps_testing:Sites"})
        for size in (0, 4)
    )
    for name, value in whole.model.items():
        np.testing.assert_allclose(value, batches.model[name], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("key", "value", "option"), [("local-momentum", 0.5, "II"), ("weight-decay", 0.1, "I")], ids=["momentum", "decay"]
)
def test_what_an_option_cannot_account_for_is_refused(key: str, value: float, option: str) -> None:
    with pytest.raises(
        SettingsError, match=f"'{key}' of method 'scaffold': expected 0 with scaffold.option = {option},"
    ):
        resolve_settings({"method": "scaffold", key: value, "scaffold.option": option}, "torch")
