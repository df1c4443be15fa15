"""Scalar-only runs in the in-process engine: the same journal everywhere, and the model from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedapps.results.replay import replay, verify, write_replayed
from fedapps.strategies.kept_journal import KeptJournal
from fedapps.tasks import TaskConfig, load_task
from fedapps.tasks.torch_task import TorchTask
from fedapps.zeroth_order.directions import direction
from fedapps.zeroth_order.journal import Journal

from ..simulation import runs
from .scalar_runs import METHODS, by_site, journal_of, tiny

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("own_module")]


@pytest.mark.parametrize("method", METHODS)
def test_the_journal_and_the_first_model_give_the_model_bit_for_bit(tmp_path: Path, method: str) -> None:
    run = tiny(tmp_path / "run", {"method": method, f"{method}.fingerprint-every": 2})
    replayed = replay(run.folder.journal_path, run.folder.initial_path)
    written = write_replayed(replayed, tmp_path / "out")
    assert written.read_bytes() == run.folder.model_path.read_bytes()
    assert verify(run.folder.journal_path, run.folder.initial_path) == [2, 4, 6]
    records = Journal.read(run.folder.journal_path).records
    assert records[-1].fingerprint == replayed.fingerprint
    assert [r.first_step for r in records] == [0, 2, 4, 6, 8, 10]
    half = tiny(tmp_path / "half", {"method": method, "num-server-rounds": 3, f"{method}.fingerprint-every": 2})
    runs.assert_same_model(half.model, replay(run.folder.journal_path, run.folder.initial_path, 3).arrays)


@pytest.mark.parametrize("method", [*METHODS, "fedzo"])
def test_a_padding_row_stays_on_clients_on_the_server_and_in_the_replay(
    tmp_path: Path, method: str, request: pytest.FixtureRequest
) -> None:
    """As under FedAvg, whose gradient there is 0; in a model of which a part is in ``channels_last``, and on nodes too."""
    scalar_only = {} if method == "fedzo" else {f"{method}.fingerprint-every": 1}
    config = {**scalar_only, "method": method, "task": "fedapps_testing:PaddedSites"}
    run = tiny(tmp_path / "run", config)
    assert all(row["folded"] == list(range(6)) for row in run.rows("train"))
    assert not run.model["embedding.weight"][0].any()
    options = {"sizes": "6,7,8,9,6,5"}
    first = load_task("fedapps_testing:PaddedSites", TaskConfig(options=options, seed=0)).initial_arrays(0)
    assert all((value != first[name]).any() for name, value in run.model.items())
    if method == "fedzo":
        return
    assert b'"fixed": [[0, 4]]' in journal_of(run)
    runs.assert_same_model(replay(run.folder.journal_path, run.folder.initial_path).arrays, run.model)
    assert verify(run.folder.journal_path, run.folder.initial_path) == [1, 2, 3, 4, 5, 6]
    request.getfixturevalue("nodes")  # with a store each
    assert journal_of(tiny(tmp_path / "on nodes", config)) == journal_of(run)


def test_two_workers_and_two_of_six_sampled_clients_write_the_same_journal(tmp_path: Path) -> None:
    """Placement of clients on workers is not sticky: each worker's replica is advanced by whoever comes."""
    config = {"fraction-train": 0.34, "num-server-rounds": 12, "hiso.fingerprint-every": 3, "seed": 2**63 - 1}
    straight = tiny(tmp_path / "straight", config)
    for name, extra, how in [
        ("workers", {"node-wait": 60.0}, {"workers": 2}),  # Workers are slow to start.
        ("late", {"fold-buffer-mb": 0.0}, {"late": [0, 1, 2]}),
    ]:
        other = tiny(tmp_path / name, {**config, **extra}, **how)
        assert journal_of(straight) == journal_of(other)
        runs.assert_same_model(straight.model, other.model)
        assert all(row["rebuilt"] == row["resent"] == 0 for row in other.rows("train"))
    assert b'"seed": "9223372036854775807"' in journal_of(straight)


def test_a_server_that_does_not_evaluate_holds_no_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: Any
) -> None:
    """The same journal, fingerprints included, which come from the clients then; the model is built once, at the end."""
    config = {"num-server-rounds": 4, "hiso.fingerprint-every": 2}
    holds = tiny(tmp_path / "holds", config)
    built = []
    model = KeptJournal.model

    def counted(kept: KeptJournal) -> Any:
        built.append((kept.replica, len(kept.journal.records)))
        return model(kept)

    monkeypatch.setattr(KeptJournal, "model", counted)
    none = tiny(tmp_path / "none", {**config, "evaluate-every": 0})
    assert built == [(None, 4)]
    assert "built again" not in log.text  # All clients share a replica, and each names its state.
    assert journal_of(none) == journal_of(holds)
    assert [r.fingerprint is not None for r in Journal.read(none.folder.journal_path).records] == [False, True] * 2
    assert none.folder.model_path.read_bytes() == holds.folder.model_path.read_bytes()
    for run in (none, holds):
        checkpoint = run.folder.load_checkpoint()
        assert checkpoint.arrays == checkpoint.strategy_arrays == {}


@pytest.mark.parametrize("policy", ["every-step", "last-step", "round-mean"])
def test_hiso_that_learns_nothing_is_decomfl(tmp_path: Path, policy: str) -> None:
    hiso = tiny(tmp_path / "hiso", {"hiso.nu": 0.0, "hiso.hessian-update": policy, "hiso.fingerprint-every": 1})
    plain = tiny(tmp_path / "plain", {"method": "decomfl", "decomfl.fingerprint-every": 1})
    runs.assert_same_model(hiso.model, plain.model)
    left, right = (Journal.read(run.folder.journal_path).records for run in (hiso, plain))
    assert [(r.scalars, r.fingerprint) for r in left] == [(r.scalars, r.fingerprint) for r in right]
    learnt = tiny(tmp_path / "learnt", {"hiso.hessian-update": policy})
    assert learnt.model["0.weight"].tobytes() != hiso.model["0.weight"].tobytes()


def test_schedules_of_rate_and_radius_are_in_the_records(tmp_path: Path) -> None:
    config = {"lr-schedule": "exponential", "lr-decay": 0.5, "hiso.mu": 0.01, "hiso.mu-decay": 0.1}
    run = tiny(tmp_path / "run", {**config, "num-server-rounds": 3, "hiso.difference": "central"})
    records = Journal.read(run.folder.journal_path).records
    assert [r.lr for r in records] == [0.02, 0.01, 0.005]
    assert [r.mu for r in records] == [0.01, 0.01 * 0.1, 0.01 * 0.1**2]
    runs.assert_same_model(run.model, replay(run.folder.journal_path, run.folder.initial_path).arrays)


def test_the_server_averages_what_the_clients_measure(tmp_path: Path) -> None:
    """One step of two clients: G is the mean of finite differences in float64 along the defined direction."""
    config = {
        "task-options": 'sizes = "6,9"', "batch-size": 0, "local-steps": 1, "num-server-rounds": 1, "seed": 5,
        "hiso.num-probes": 2, "hiso.mu": 1e-2,
    }  # fmt: skip
    run = tiny(tmp_path / "run", config, 2)
    record = Journal.read(run.folder.journal_path).records[0]
    task = load_task("fedapps_testing:Sites", TaskConfig(seed=5, options={"sizes": "6,9"}, partition=by_site()))
    assert isinstance(task, TorchTask)
    theta = task.initial_arrays(5)
    flat = np.concatenate([value.ravel() for value in theta.values()]).astype(np.float64)

    def loss(point: np.ndarray, client: int) -> float:
        places = np.cumsum([0, *(value.size for value in theta.values())])
        arrays = {
            name: point[start : start + value.size].reshape(value.shape)
            for (name, value), start in zip(theta.items(), places[:-1], strict=True)
        }
        model = task.module(theta).double()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(torch.from_numpy(arrays[name]))
        inputs, targets = task.tensors(task.client_data(client, 2).train)
        return float(task.loss(model, inputs.double(), targets))

    for probe in range(2):
        z = direction(5, 0, probe, 0, flat.size).astype(np.float64)
        g = [(loss(flat + 1e-2 * z, client) - loss(flat, client)) / 1e-2 for client in (0, 1)]
        assert record.scalars[0][probe] == pytest.approx(np.mean(g), rel=2e-3, abs=2e-4)


def test_it_learns(tmp_path: Path) -> None:
    config = {"num-server-rounds": 30, "evaluate-every": 30, "lr": 0.1, "local-steps": 1, "batch-size": 0}
    losses = [row["test-loss"] for row in tiny(tmp_path / "run", {**config, "method": "decomfl"}).rows("evaluate")]
    assert losses[-1] < 0.8 * losses[0]


def test_clients_evaluate_their_replica(tmp_path: Path) -> None:
    run = tiny(tmp_path / "run", {"client-evaluation": "every", "client-test-fraction": 0.34, "fraction-train": 0.34})
    rows = run.rows("client-evaluate")
    assert len(rows) == 6
    same = tiny(tmp_path / "same", {"client-test-fraction": 0.34, "fraction-train": 0.34})
    assert journal_of(run) == journal_of(same)
    sent = [row for row in run.folder.read_ledger() if row["kind"] == "evaluate" and row["direction"] == "down"]
    assert {row["payload"]["arrays"] for row in sent} == {0}
    task = load_task(
        "fedapps_testing:Sites",
        TaskConfig(options={"sizes": "6,7,8,9,6,5"}, partition=by_site(), client_test_fraction=0.34),
    )
    expected = [task.evaluate(run.model, task.client_data(p, 6).test)["loss"] for p in range(6)]
    assert rows[-1]["client-test-loss"] == pytest.approx(np.mean(expected), rel=1e-6)
