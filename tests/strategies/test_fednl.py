"""FedNL against the paper's algorithms, computed here in float64 with full matrices: sampled clients, lost replies, stores."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Message, MetricRecord, RecordDict

from fedapps.client_apps import store as client_store
from fedapps.curvature.packing import unpack_upper
from fedapps.defences import Defence
from fedapps.errors import FedAppsError, SettingsError
from fedapps.messages import pack_arrays, unpack_arrays
from fedapps.messages.schema import Reply
from fedapps.methods import resolve_settings
from fedapps.methods.second_order import FedNLSettings
from fedapps.settings import RoundSettings
from fedapps.strategies import FedNL
from fedapps.tasks.from_settings import load_task_of

from ..simulation.runs import assert_same_model, client_states, short_run
from .logistic_clients import LOGISTIC, REGULARISATION, D, parts

pytestmark = pytest.mark.usefixtures("own_module")

FEDNL: dict[str, Any] = {**LOGISTIC, "method": "fednl"}


def compress(M: np.ndarray, config: dict[str, Any]) -> np.ndarray:
    kind = config.get("fednl.compressor", "rank-r")
    if kind == "rank-r":
        U, s, Vt = np.linalg.svd(M)
        r = config.get("fednl.rank", 1)
        return (U[:, :r] * s[:r]) @ Vt[:r]
    if kind == "identity":
        return M
    upper = np.triu(M)
    share = upper**2 * (2 - np.eye(D))
    least = np.sort(share.ravel())[-config["fednl.k"]]
    upper = np.where(share >= least, upper, 0)
    return upper + np.triu(upper, 1).T


def solve(H: np.ndarray, rhs: np.ndarray, option: int) -> np.ndarray:
    if option == 1:
        eigenvalues, Q = np.linalg.eigh(H)
        H = (Q * np.maximum(eigenvalues, REGULARISATION)) @ Q.T
    return np.linalg.solve(H, rhs)


def refused(reply: Message) -> Message:
    """For the client it is as if the reply were lost; but nobody waits."""
    reply.content = RecordDict()
    return reply


def papers(config: dict[str, Any], rows: list[dict[str, Any]]) -> tuple[np.ndarray, dict[int, np.ndarray]]:
    """Algorithm 1, or 2 where clients are sampled; what is lost changes nothing at either end."""
    clients, p = parts()
    alpha, option = config.get("fednl.alpha", 1.0), config.get("fednl.option", 2)
    partial, exact = config.get("fraction-train", 1.0) < 1, config.get("fednl.initial", "exact") == "exact"
    theta = np.zeros(D)
    H: dict[int, np.ndarray] = {}
    error: dict[int, float] = {}
    q: dict[int, np.ndarray] = {}
    for row in rows:
        old = dict(H)
        for i in row["folded"]:
            h = clients[i].hessian(theta)
            old[i] = H.get(i, h if exact else np.zeros((D, D)))
            H[i] = old[i] + alpha * compress(h - old[i], config)
            latest = partial or config.get("fednl.hessian") == "latest"
            error[i] = np.linalg.norm((H[i] if latest else old[i]) - h)
            q[i] = (H[i] + error[i] * np.eye(D)) @ theta - clients[i].gradient(theta)
        if partial:
            mean = sum(p[i] * (H[i] + error[i] * np.eye(D)) for i in H)
            theta = np.linalg.solve(mean, sum(p[i] * q[i] for i in H))
            continue
        used = H if latest else old
        mean = sum(p[i] * used[i] for i in used) / sum(p[i] for i in used)
        folded, total = row["folded"], sum(p[i] for i in row["folded"])
        g = sum(p[i] * clients[i].gradient(theta) for i in folded) / total
        shift = sum(p[i] * error[i] for i in folded) / total if option == 2 else 0.0
        theta = theta - config.get("lr", 1.0) * solve(mean + shift * np.eye(D), g, option)
    return theta, H


ALGORITHMS = {
    "rank-r": {},
    "rank 3, zero at the start": {"fednl.rank": 3, "fednl.initial": "zero"},
    "eigenvalues cut": {"fednl.option": 1, "fednl.alpha": 0.5, "fednl.rank": 4},
    "top-k, latest": {"fednl.compressor": "top-k", "fednl.k": 20, "fednl.hessian": "latest"},
    "identity, a shorter step": {"fednl.compressor": "identity", "lr": 0.7},
    "sampled clients": {"fraction-train": 0.67},
    "sampled clients, zero at the start": {
        "fraction-train": 0.67, "fednl.initial": "zero", "fednl.compressor": "top-k", "fednl.k": 40, "fednl.alpha": 0.8,
    },
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("own", ALGORITHMS.values(), ids=ALGORITHMS.keys())
def test_it_is_the_papers_algorithm(tmp_path: Path, own: dict[str, Any]) -> None:
    config = {**FEDNL, **own}
    left = short_run(tmp_path / "run", config, faults={(1, 1): refused, (2, 0): refused, (4, 2): refused})
    rows = left.rows("train")
    assert sum(len(row["refused"]) for row in rows) >= 2
    theta, H = papers(config, rows)
    np.testing.assert_allclose(left.model["weights"], theta, rtol=1e-9, atol=1e-11)
    states = client_states(left.folder.path)
    assert states.keys() == H.keys()
    for i, state in states.items():
        np.testing.assert_allclose(unpack_upper(state["H"]), H[i], rtol=1e-9, atol=1e-11)


def newton(rounds: int, *, previous: bool) -> np.ndarray:
    """Newton's method on the clients' common objective, with the Hessian of the model before or of the present one."""
    clients, p = parts()
    theta, old = np.zeros(D), None
    for _ in range(rounds):
        new = sum(w * part.hessian(theta) for w, part in zip(p, clients, strict=True))
        g = sum(w * part.gradient(theta) for w, part in zip(p, clients, strict=True))
        used = old if previous and old is not None else new
        theta, old = theta - np.linalg.solve(used, g), new
    return theta


@pytest.mark.parametrize(("option", "which"), [(1, "previous"), (1, "latest"), (2, "latest")])
def test_without_compression_it_is_newtons_method(tmp_path: Path, which: str, option: int) -> None:
    """But for option 2 with ``previous``, which shifts by the Hessian's change since the round before."""
    own = {"fednl.compressor": "identity", "fednl.option": option, "fednl.hessian": which}
    left = short_run(tmp_path / "run", {**FEDNL, **own, "num-server-rounds": 4})
    np.testing.assert_allclose(left.model["weights"], newton(4, previous=which == "previous"), rtol=1e-10)


@pytest.mark.slow
def test_fedpm_is_fednl_without_compression_to_rounding(tmp_path: Path) -> None:
    own = {"fednl.compressor": "identity", "fednl.option": 1, "fednl.hessian": "latest"}
    mine = short_run(tmp_path / "fednl", {**FEDNL, **own}).model["weights"]
    config = {**LOGISTIC, "method": "fedpm", "local-epochs": 1, "fedpm.damping": 0.0}
    np.testing.assert_allclose(mine, short_run(tmp_path / "fedpm", config).model["weights"], rtol=1e-9)


# What travels ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("own", "size"),
    [
        ({}, 8 * (D + 1)),
        ({"fednl.rank": 3}, 8 * 3 * (D + 1)),
        ({"fednl.compressor": "top-k"}, 12 * D),
        ({"fednl.compressor": "identity"}, 8 * D * (D + 1) // 2),
    ],
    ids=["rank 1", "rank 3", "top-d", "identity"],
)
@pytest.mark.parametrize("initial", ["exact", "zero"])
def test_messages_have_the_bytes_that_the_row_promises(
    tmp_path: Path, own: dict[str, Any], size: int, initial: str
) -> None:
    left = short_run(tmp_path / "run", {**FEDNL, **own, "fednl.initial": initial, "num-server-rounds": 2})
    sent = {
        number: [row["payload"] for row in left.folder.read_ledger() if (row["round"], row["direction"]) == (number, "up")
                 and row["kind"] == "train"]
        for number in (1, 2)
    }  # fmt: skip
    first = {"hessian": 8 * D * (D + 1) // 2} if initial == "exact" else {"hessian-change": size}
    for number, expected in ((1, first), (2, {"hessian-change": size})):
        assert len(sent[number]) == 3
        for payload in sent[number]:
            assert {k: v for k, v in payload.items() if k.startswith("hessian")} == expected
            assert payload["arrays"] == 8 * D


def changed(record: str, tensor: str, change: Any) -> Any:
    def fault(reply: Message) -> Message:
        arrays = unpack_arrays(reply.content, record, "")
        arrays[tensor] = change(arrays[tensor].copy())
        reply.content[record] = pack_arrays(arrays)
        return reply

    return fault


def moved(reply: Message) -> Message:
    reply.content["hessian"] = reply.content["hessian-change"]
    del reply.content["hessian-change"]
    return reply


def both(reply: Message) -> Message:
    reply.content["hessian"] = pack_arrays({"triangle": np.zeros(D * (D + 1) // 2)})
    return reply


def told(error: Any) -> Any:
    def fault(reply: Message) -> Message:
        record = {**reply.content["metrics"], "hessian-error": error}
        reply.content["metrics"] = MetricRecord({k: v for k, v in record.items() if v is not None})
        return reply

    return fault


@pytest.mark.parametrize(
    ("fault", "own", "match"),
    [
        (changed("hessian-change", "eigenvectors", lambda Q: 3 * Q), {}, "client 1, eigenvectors: expected orthonormal"),
        (changed("hessian-change", "eigenvalues", lambda v: v[:0]), {}, r"'eigenvalues': expected shape \(1,\)"),
        (changed("hessian-change", "indices", lambda v: v[::-1].copy()), {"fednl.compressor": "top-k"},
         "client 1, indices of the entries: expected rising numbers from 0 to 77"),
        (changed("hessian-change", "indices", lambda v: v.astype(np.int64)), {"fednl.compressor": "top-k"}, "int32"),
        (moved, {}, "tensor 'eigenvalues': expected a tensor of the model that was sent out"),
        (moved, {"fednl.compressor": "identity"}, "client 1, Hessian: expected a record 'hessian-change' with triangle"),
        (both, {}, "client 1, Hessian: expected a record 'hessian-change' with eigenvalues, .*got 'hessian'"),
        (told(-1.0), {}, "client 1, metric 'hessian-error': expected a finite number >= 0, got -1.0"),
        (told(float("nan")), {}, "metric 'hessian-error'"),
        (told(None), {}, "metric 'hessian-error'"),
    ],
    ids=["eigenvectors", "shape", "indices", "dtype", "record", "record of the same form", "both", "error", "NaN", "no error"],
)  # fmt: skip
@pytest.mark.slow
def test_a_wrong_reply_is_refused_by_name_as_if_it_were_lost(
    tmp_path: Path, fault: Any, own: dict[str, Any], match: str
) -> None:
    config = {**FEDNL, **own, "num-server-rounds": 3}
    left = short_run(tmp_path / "wrong", config, faults={(2, 1): fault})
    row = left.rows("train")[1]
    assert row["folded"] == [0, 2]
    assert re.search(match, row["refused"]["1"]), row["refused"]
    assert_same_model(left.model, short_run(tmp_path / "lost", config, faults={(2, 1): refused}).model)


# What lasts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "own",
    [{}, {"fraction-train": 0.67}, {"fednl.line-search": True, "fednl.initial": "zero", "fednl.option": 1}],
    ids=["all", "sampled", "line search"],
)
@pytest.mark.slow
def test_a_resume_goes_on_to_the_bit(tmp_path: Path, own: dict[str, Any]) -> None:
    config = {**FEDNL, **own}
    straight = short_run(tmp_path / "straight", {**config, "num-server-rounds": 6}, late=[0, 1])
    short_run(tmp_path / "halves", {**config, "num-server-rounds": 3})
    halves = short_run(tmp_path / "halves", {**config, "num-server-rounds": 6, "resume": True})
    assert_same_model(straight.model, halves.model)


@pytest.mark.slow
@pytest.mark.parametrize("own", [{}, {"fraction-train": 0.99, "fednl.initial": "zero"}], ids=["exact", "sampled, zero"])
def test_a_lost_store_starts_the_sum_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: dict[str, Any]) -> None:
    """Round 3 takes no step; from round 4 on it is a run that starts at the model of round 2."""
    load = client_store.ClientStore.load

    def forgetful(self: Any, last_folded: int) -> Any:
        return None if last_folded == 2 and self.folder.name == "client-1" else load(self, last_folded)

    monkeypatch.setattr(client_store.ClientStore, "load", forgetful)
    config = {**FEDNL, **own}
    two = short_run(tmp_path / "two", {**config, "num-server-rounds": 2}).model
    three = short_run(tmp_path / "run", {**config, "num-server-rounds": 3})
    assert_same_model(two, three.model)
    [note] = [note for note in three.rows("train")[-1]["notes"] if "anew" in note]
    assert note == "the sum of Hessians starts anew: no step is taken"
    four = short_run(tmp_path / "run", {**config, "num-server-rounds": 4, "resume": True})
    theta = two["weights"]
    clients, p = parts()
    H = sum(w * part.hessian(theta) for w, part in zip(p, clients, strict=True))
    if own:
        errors = [part.hessian(theta) - compress(part.hessian(theta), {}) for part in clients]
        shift = sum(w * np.linalg.norm(E) for w, E in zip(p, errors, strict=True))
        H = H - sum(w * E for w, E in zip(p, errors, strict=True)) + shift * np.eye(D)
    g = sum(w * part.gradient(theta) for w, part in zip(p, clients, strict=True))
    np.testing.assert_allclose(four.model["weights"], theta - np.linalg.solve(H, g), rtol=1e-10)


# Line search, networks, limits -------------------------------------------------------------------------------


def test_the_line_search_backtracks_to_the_first_sufficient_decrease(tmp_path: Path) -> None:
    """From a Hessian of zero option 1 divides the gradient by mu: too far, until halving makes the loss fall."""
    config = {**FEDNL, "fednl.line-search": True, "fednl.initial": "zero", "fednl.option": 1, "num-server-rounds": 1}
    left = short_run(tmp_path / "run", config)
    [row] = left.rows("train")
    clients, p = parts()

    def loss(theta: np.ndarray) -> float:
        return float(p @ [part.loss(theta) for part in clients])

    g = sum(w * part.gradient(np.zeros(D)) for w, part in zip(p, clients, strict=True))
    direction, step = -g / REGULARISATION, 1.0
    while loss(step * direction) > loss(np.zeros(D)) + 1e-4 * step * (g @ direction):
        step /= 2
    assert step < 1
    assert row["line-search-step"] == step
    assert row["line-search-loss"] == pytest.approx(loss(step * direction), rel=1e-12)
    np.testing.assert_allclose(left.model["weights"], step * direction, rtol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("fraction", [1.0, 0.67])
def test_a_small_network_learns_and_its_buffers_take_the_mean_as_they_came(tmp_path: Path, fraction: float) -> None:
    """Sent back as received, the running statistics never change, nor does the counter."""
    config = {
        "method": "fednl", "task": "fedapps_testing:BatchNormSites", "num-server-rounds": 12, "lr": 1.0,
        "fraction-train": fraction,
    }  # fmt: skip
    left = short_run(tmp_path / "run", config)
    first = load_task_of(resolve_settings(config)).initial_arrays(0)
    for name in ("1.running_mean", "1.running_var", "1.num_batches_tracked"):
        np.testing.assert_array_equal(left.model[name], first[name])
    losses = [row["train-loss"] for row in left.rows("train")]
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("defence", list(Defence))
def test_a_defence_that_changes_replies_is_refused(defence: Defence) -> None:
    if defence in (Defence.NONE, Defence.MULTI_KRUM):
        assert FedNL(RoundSettings(defence=defence)).settings.defence is defence
        return
    with pytest.raises(SettingsError, match=rf"'defence' of method 'fednl': .*got {defence.value}"):
        FedNL(RoundSettings(defence=defence))


@pytest.mark.slow
def test_multi_krum_leaves_out_who_learned_something_else(tmp_path: Path) -> None:
    config = {**FEDNL, "partition": "iid", "defence": "multi-krum", "num-server-rounds": 4}
    lie = changed("hessian-change", "eigenvalues", lambda v: -40 * v)
    left = short_run(tmp_path / "run", config, 6, faults={(3, 2): lie})
    assert 2 not in left.rows("train")[2]["folded"]
    assert [row["accepted"] for row in left.rows("train")] == [True] * 4


def test_replies_are_compared_as_matrices() -> None:
    """An eigenvector has no sign: two that differ in it alone are the same change."""
    strategy = FedNL(own=FedNLSettings(initial="zero"))
    strategy.begin({"weights": np.zeros(2)})
    plain = [
        strategy.plain(Reply(i, 1, {}, records={"hessian-change": {
            "eigenvalues": np.array([2.0]), "eigenvectors": sign * np.array([[0.6], [0.8]]),
        }})).records
        for i, sign in enumerate((1, -1))
    ]  # fmt: skip
    for records in plain:
        np.testing.assert_allclose(records["hessian-change"]["triangle"], [0.72, 0.96, 1.28], rtol=1e-14)


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"fednl.option": 1, "fraction-train": 0.5}, "option"),
        ({"fednl.line-search": True, "fraction-train": 0.5}, "line-search"),
        ({"fednl.option": 1, "fednl.initial": "zero"}, "initial"),
        ({"fednl.option": 3}, "option"),
    ],
)
def test_what_the_paper_does_not_put_together_is_refused(values: dict[str, Any], key: str) -> None:
    with pytest.raises(SettingsError, match=rf"setting 'fednl\.{key}'"):
        resolve_settings({"method": "fednl", **values}, "convex")
    assert FedNLSettings(initial="zero", option=1, line_search=True).steps[:2] == (1.0, 0.5)


def test_a_model_with_too_many_weights_is_refused_before_round_1(tmp_path: Path) -> None:
    with pytest.raises(FedAppsError, match=r"FedNL, the model: expected at most 16384 .*47236 weights.*first-order"):
        short_run(tmp_path / "run", {"method": "fednl", "task": "fedapps_testing:Wide", "node-wait": 0.0})
