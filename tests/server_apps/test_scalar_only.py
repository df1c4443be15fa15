"""Scalar-only runs end to end in the in-process engine: journal, replicas, catching up, resume, bytes."""

from __future__ import annotations

import logging
import random
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Context, Message

from fedapps.client_apps import hiso, replicas
from fedapps.client_apps.work import ClientWork, Node
from fedapps.errors import CheckpointError, RosterError, RoundFailedError
from fedapps.results.replay import replay, verify, write_replayed
from fedapps.results.run_folder import RunFolder
from fedapps.strategies.hiso import HiSo
from fedapps.strategies.kept_journal import KeptJournal
from fedapps.tasks import TaskConfig, load_task
from fedapps.tasks.torch_task import TorchTask
from fedapps.zeroth_order.directions import direction
from fedapps.zeroth_order.journal import Journal
from fedapps.zeroth_order.wire import pack_scalars

from ..simulation import runs
from .test_run import empty, raised

METHODS = ["hiso", "decomfl", "hiso-momentum"]

TINY: dict[str, Any] = {
    "lr": 0.02, "local-steps": 2, "weighting": "uniform", "num-server-rounds": 6, "method": "hiso",
    "node-wait": 0.0,
    "task-options": 'sizes = "6,7,8,9,6,5"',
}  # fmt: skip
"""Six tiny clients, two local steps."""

pytestmark = pytest.mark.usefixtures("own_module")


@pytest.fixture(autouse=True)
def _no_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test finds the replica of another one."""
    monkeypatch.setattr(replicas, "_held", None)


@pytest.fixture
def log() -> Iterator[Any]:
    handler = runs.LogLines()
    logging.getLogger("flwr").addHandler(handler)
    yield handler
    logging.getLogger("flwr").removeHandler(handler)


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Path]:
    """Give every client a node of its own with a state folder, as SuperNodes have: replicas lie in memory-mapped stores."""

    def folder(partition: int) -> Path:
        return tmp_path / "nodes" / str(partition)

    def of(context: Context) -> Node:
        partition = int(context.node_config["partition-id"])
        return Node(partition, int(context.node_config["num-partitions"]), folder(partition))

    monkeypatch.setattr(Node, "of", of)
    return folder


def tiny(path: Path, config: dict[str, Any] | None = None, clients: int = 6, **how: Any) -> runs.Left:
    return runs.short_run(path, {**TINY, **(config or {})}, clients, **how)


def journal_of(run: runs.Left) -> bytes:
    return run.folder.journal_path.read_bytes()


def sampled_as(monkeypatch: pytest.MonkeyPatch, sample: Callable[[int], list[int]]) -> None:
    monkeypatch.setattr(HiSo, "sample", lambda self, server_round: sample(server_round))


# The same journal everywhere, and the model from it ------------------------------------------------------


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


def test_two_workers_and_two_of_six_sampled_clients_write_the_same_journal(tmp_path: Path) -> None:
    """Placement of clients on workers is not sticky: each worker's replica is advanced by whoever comes."""
    config = {"fraction-train": 0.34, "num-server-rounds": 12, "hiso.fingerprint-every": 3, "seed": 2**63 - 1}
    straight = tiny(tmp_path / "straight", config)
    for name, extra, how in [
        ("workers", {}, {"workers": 2}),
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
    task = load_task("fedapps_testing:Sites", TaskConfig(seed=5, options={"sizes": "6,9"}, partition=_by_site()))
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


def _by_site() -> Any:
    from fedapps.tasks import PartitionConfig, PartitionKind

    return PartitionConfig(PartitionKind.COLUMN, column="site")


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
        TaskConfig(options={"sizes": "6,7,8,9,6,5"}, partition=_by_site(), client_test_fraction=0.34),
    )
    expected = [task.evaluate(run.model, task.client_data(p, 6).test)["loss"] for p in range(6)]
    assert rows[-1]["client-test-loss"] == pytest.approx(np.mean(expected), rel=1e-6)


# Bytes ----------------------------------------------------------------------------------------------------


def payloads(run: runs.Left, direction: str, record: str) -> list[int]:
    rows = [r for r in run.folder.read_ledger() if r["kind"] == "train" and r["direction"] == direction]
    return [row["payload"][record] for row in rows]


def test_a_scalar_costs_four_bytes_each_way_beside_fixed_settings(tmp_path: Path) -> None:
    """A27: K = 2 steps, P = 3 probes are 24 bytes up; more of them cost 4 bytes each."""
    few, many = (
        tiny(tmp_path / str(p), {"hiso.num-probes": p, "num-server-rounds": 3, "hiso.fingerprint-every": 0})
        for p in (3, 103)
    )
    fixed_up = payloads(few, "up", "scalars")[0] - 24
    assert 0 < fixed_up < 40
    for direction_, record, fixed in [("up", "scalars", 40), ("down", "journal", 300)]:
        small, large = payloads(few, direction_, record), payloads(many, direction_, record)
        # Rounds 2 and 3 of each client bring one record each: 6 scalars, or 206.
        added = [b - a for a, b in zip(small[6:], large[6:], strict=True)]
        assert all(800 <= extra <= 810 for extra in added), added
        assert all(size <= fixed + 8 * 6 for size in small), small
    assert payloads(few, "up", "arrays") == payloads(few, "down", "arrays") == [0] * 18


def test_a_round_costs_at_most_eight_bytes_a_scalar_each_way_and_a_missed_one_its_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a fingerprint after every round, which moves each scalar down twice; client 2 takes part in rounds 1 and 5."""
    sampled_as(monkeypatch, lambda r: [0, 1, 2] if r in (1, 5) else [0, 1])
    moved = [
        _moved(tiny(tmp_path / str(p), {"hiso.num-probes": p, "num-server-rounds": 5, "hiso.fingerprint-every": 1}))
        for p in (1, 101)
    ]
    scalars = 2 * 100  # more in a round: K = 2, 100 more probes
    missed = {(5, 2, "down"): 4}  # rounds 1 to 4, the first of which it has measured but not seen
    for key, size in moved[0].items():
        rounds = missed.get(key, 1)
        extra = moved[1][key] - size
        assert extra <= (8 + 4 * (rounds - 1)) * scalars + 12, key
        # Beside its scalars a round is fixed settings, and a missed one a record of the journal.
        fixed = size - (8 + 4 * (rounds - 1)) * 2
        assert fixed <= (720 if key[2] == "down" else 240) + 45 * (rounds - 1), (key, size)


def _moved(run: runs.Left) -> dict[tuple[int, int, str], int]:
    """Payload of all train messages of a client in a round beside `config`, by (round, client, direction)."""
    total: dict[tuple[int, int, str], int] = {}
    for row in run.folder.read_ledger():
        if row["kind"] == "train":
            key = (row["round"], row["partition"], row["direction"])
            total[key] = total.get(key, 0) + sum(size for name, size in row["payload"].items() if name != "config")
    return total


def test_traffic_does_not_depend_on_the_size_of_the_model(tmp_path: Path) -> None:
    """Beside `config`, which names the run's folder and task."""
    config = {"partition": "iid", "partition-column": "", "num-server-rounds": 2, "task-options": ""}
    small, large = (tiny(tmp_path / task, {**config, "task": task}) for task in ("digits-mlp", "digits"))
    sent = [
        [{name: size for name, size in row["payload"].items() if name != "config"} for row in run.folder.read_ledger()
         if row["kind"] == "train"]
        for run in (small, large)
    ]  # fmt: skip
    assert sent[0] == sent[1]
    assert max(sum(payload.values()) for payload in sent[0]) < 400
    assert sum(v.nbytes for v in large.model.values()) > 8 * sum(v.nbytes for v in small.model.values())


# Catching up ----------------------------------------------------------------------------------------------


def test_a_client_that_missed_rounds_or_joins_late_catches_up(
    tmp_path: Path, nodes: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A12: client 2 takes part in rounds 1 and 6 only, client 3 in round 6 only."""
    sampled_as(monkeypatch, lambda r: {1: [0, 1, 2], 6: [0, 1, 2, 3]}.get(r, [0, 1]))
    config = {"hiso.fingerprint-every": 1, "num-server-rounds": 6, "client-evaluation": "last"}
    run = tiny(tmp_path / "run", config, clients=6)
    journal = Journal.read(run.folder.journal_path)
    rows = [r for r in run.folder.read_ledger() if (r["kind"], r["direction"], r["round"]) == ("train", "down", 6)]
    size = {row["partition"]: row["payload"]["journal"] for row in reversed(rows)}  # the first: the second confirms
    assert size[0] == size[1] < size[2] <= size[3]
    assert run.rows("train")[-1]["folded"] == [0, 1, 2, 3]
    # After the evaluation at the end every client, the ones that were never sampled included, holds the server's model.
    for partition in range(6):
        assert_caught_up(nodes(partition), journal, run)


def assert_caught_up(node: Path, journal: Journal, run: runs.Left) -> None:
    from fedapps.zeroth_order.store import Store

    [folder] = (node / "replicas").iterdir()

    def nothing() -> Any:
        raise AssertionError("the store is not whole")

    with Store(folder, journal.header, nothing) as store:
        assert store.replica.round == run.summary["rounds"]
        runs.assert_same_model({name: np.array(value) for name, value in store.replica.theta.items()}, run.model)
        assert store.replica.fingerprint() == replay(run.folder.journal_path, run.folder.initial_path).fingerprint


def test_stores_on_nodes_write_the_journal_of_one_process(tmp_path: Path, nodes: Callable[[int], Path]) -> None:
    config = {"fraction-train": 0.5, "hiso.fingerprint-every": 2}
    on_nodes = tiny(tmp_path / "nodes-run", config)
    assert (nodes(0) / "replicas" / "client-0" / "state.bin").exists()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Node, "of", lambda context: replace(_plain_node(context), state_dir=None))
        plain = tiny(tmp_path / "plain", config)
    assert journal_of(on_nodes) == journal_of(plain)


def _plain_node(context: Context) -> Node:
    return Node(int(context.node_config["partition-id"]), int(context.node_config["num-partitions"]), None)


def test_a_client_that_lost_its_journal_gets_it_within_the_round(
    tmp_path: Path, nodes: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch, log: Any
) -> None:
    straight = tiny(tmp_path / "straight")
    shutil.rmtree(tmp_path / "nodes")

    def sample(server_round: int) -> list[int]:
        if server_round == 4:
            shutil.rmtree(nodes(1))
        return list(range(6))

    sampled_as(monkeypatch, sample)
    run = tiny(tmp_path / "run")
    assert [row["resent"] for row in run.rows("train")] == [0, 0, 0, 1, 0, 0]
    assert run.rows("train")[3]["folded"] == [0, 1, 2, 3, 4, 5]
    assert "client 1 has lost its journal: sent again from round 0" in log.text
    assert journal_of(run) == journal_of(straight)


def test_a_client_that_lost_its_journal_gets_it_within_the_evaluation(
    tmp_path: Path, nodes: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch, log: Any
) -> None:
    config = {"client-evaluation": "every", "client-test-fraction": 0.25}
    straight = tiny(tmp_path / "straight", config)
    shutil.rmtree(tmp_path / "nodes")
    configure = HiSo.configure_evaluate

    def loses(self: HiSo, server_round: int, *args: Any) -> Any:
        if server_round == 3:
            shutil.rmtree(nodes(1))
        return configure(self, server_round, *args)

    monkeypatch.setattr(HiSo, "configure_evaluate", loses)
    run = tiny(tmp_path / "run", config)
    assert "client 1 has lost its journal: sent again from round 0" in log.text
    assert run.folder.read_clients() == straight.folder.read_clients()
    assert [row["partition"] for row in run.folder.read_clients() if row["round"] == 3] == [0, 1, 2, 3, 4, 5]
    assert journal_of(run) == journal_of(straight)


def test_a_lost_journal_of_a_simulated_client_is_replaced_by_its_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: Any
) -> None:
    straight = tiny(tmp_path / "straight")

    def sample(server_round: int) -> list[int]:
        if server_round == 4:
            for store in (tmp_path / "run" / "clients").glob("*/client-1"):
                shutil.rmtree(store)
        return list(range(6))

    sampled_as(monkeypatch, sample)
    run = tiny(tmp_path / "run")
    assert [row["resent"] for row in run.rows("train")] == [0] * 6
    assert "client 1 has lost what it kept since round 3" in log.text
    assert journal_of(run) == journal_of(straight)


def test_an_astray_replica_is_rebuilt_and_counted(
    tmp_path: Path, nodes: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch, log: Any
) -> None:
    config = {"hiso.fingerprint-every": 1}
    straight = tiny(tmp_path / "straight", config)
    shutil.rmtree(tmp_path / "nodes")

    def sample(server_round: int) -> list[int]:
        if server_round == 4:
            led_astray(nodes(2))
        return list(range(6))

    sampled_as(monkeypatch, sample)
    run = tiny(tmp_path / "run", config)
    assert [row["rebuilt"] for row in run.rows("train")] == [0, 0, 0, 1, 0, 0]
    assert "rebuild it from base and journal" in log.text
    assert journal_of(run) == journal_of(straight)


def led_astray(node: Path) -> None:
    path = next((node / "replicas").glob("*/state.bin"))
    data = bytearray(path.read_bytes())
    data[2] ^= 1
    path.write_bytes(data)


def test_a_replica_in_the_minority_is_rebuilt_at_its_next_message(
    tmp_path: Path, nodes: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch, log: Any
) -> None:
    """Client 2 goes astray after it measured round 2, and is sampled again in round 4.

    Nothing but its vote on the state after round 2 shows it: its replica has applied that round already.
    """
    config = {"hiso.fingerprint-every": 2, "evaluate-every": 0, "num-server-rounds": 4}
    sampled_as(monkeypatch, lambda r: [0, 1, 3] if r == 3 else [0, 1, 2, 3])
    straight = tiny(tmp_path / "straight", config)
    shutil.rmtree(tmp_path / "nodes")
    measure = hiso._measure

    def measure_and_go_astray(work: ClientWork, client: Any) -> Any:
        result = measure(work, client)
        if (work.server_round, work.node.partition) == (2, 2):
            with torch.no_grad():
                next(client.model.parameters()).add_(1e-3)
        return result

    monkeypatch.setattr(hiso, "_measure", measure_and_go_astray)
    run = tiny(tmp_path / "run", config)
    assert "round 2: client 2: its replica went astray and is built again at its next message" in log.text
    assert [row["rebuilt"] for row in run.rows("train")] == [0, 0, 0, 1]
    assert journal_of(run) == journal_of(straight)


def test_a_replica_built_again_while_it_confirms_is_counted(
    tmp_path: Path, nodes: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    straight = tiny(tmp_path / "straight", {"hiso.fingerprint-every": 1})
    shutil.rmtree(tmp_path / "nodes")
    ask = HiSo.confirmations

    def ask_after_a_crash(self: HiSo) -> Any:
        if self.report.server_round == 3:
            mark = next((nodes(2) / "replicas").glob("*/state.json"))
            mark.write_text(mark.read_text().replace('"applying": false', '"applying": true'))
        return ask(self)

    monkeypatch.setattr(HiSo, "confirmations", ask_after_a_crash)
    run = tiny(tmp_path / "run", {"hiso.fingerprint-every": 1})
    assert [row["rebuilt"] for row in run.rows("train")] == [0, 0, 1, 0, 0, 0]
    assert journal_of(run) == journal_of(straight)


def test_a_lone_client_is_not_asked_for_a_fingerprint(
    tmp_path: Path, nodes: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch, log: Any
) -> None:
    """Where the server holds no model either, nobody could agree: nothing is confirmed, and nothing built again."""
    sampled_as(monkeypatch, lambda r: [r % 2])
    run = tiny(tmp_path / "run", {"hiso.fingerprint-every": 1, "evaluate-every": 0})
    assert [row["rebuilt"] for row in run.rows("train")] == [0] * 6
    assert "astray" not in log.text
    assert "built again" not in log.text
    assert [record.fingerprint for record in Journal.read(run.folder.journal_path).records] == [None] * 6


def test_a_second_run_on_a_node_counts_no_rebuilt_replica(
    tmp_path: Path, nodes: Callable[[int], Path], log: Any
) -> None:
    tiny(tmp_path / "one", {"seed": 1})
    second = tiny(tmp_path / "two", {"seed": 2})
    assert [row["rebuilt"] for row in second.rows("train")] == [0] * 6


def test_an_astray_replica_of_a_process_is_rebuilt_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"hiso.fingerprint-every": 1}
    straight = tiny(tmp_path / "straight", config)

    def sample(server_round: int) -> list[int]:
        held = replicas._held
        if server_round == 4 and held is not None:
            with torch.no_grad():
                next(held.model.parameters()).add_(1e-3)
        return list(range(6))

    sampled_as(monkeypatch, sample)
    run = tiny(tmp_path / "run", config)
    assert [row["rebuilt"] for row in run.rows("train")] == [0, 0, 0, 1, 0, 0]
    assert journal_of(run) == journal_of(straight)


def test_a_replica_that_goes_astray_between_two_clients_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second client has nothing to apply, so only the comparison with the journal's last fingerprint shows it."""
    config = {"hiso.fingerprint-every": 1}
    straight = tiny(tmp_path / "straight", config)
    save = hiso.save_journal

    def save_and_lead_astray(work: ClientWork, journal: Journal) -> None:
        save(work, journal)
        if (work.server_round, work.node.partition) == (4, 0) and replicas._held is not None:
            with torch.no_grad():
                next(replicas._held.model.parameters()).add_(1e-3)

    monkeypatch.setattr(hiso, "save_journal", save_and_lead_astray)
    run = tiny(tmp_path / "run", config)
    assert [row["rebuilt"] for row in run.rows("train")] == [0, 0, 0, 1, 0, 0]
    assert journal_of(run) == journal_of(straight)


def test_two_hundred_rounds_of_trouble_leave_every_client_with_the_servers_model(
    tmp_path: Path, nodes: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random drop-outs, lost stores, torn stores and one astray replica; every message is a new start on a node."""
    draw = random.Random(3)

    def sample(server_round: int) -> list[int]:
        if server_round == 97:
            led_astray(nodes(0))
        for partition in range(6):
            if server_round < 195 and nodes(partition).exists():
                trouble(nodes(partition), draw.random())
        return sorted(draw.sample(range(6), 3)) if server_round < 200 else list(range(6))

    faults = {(r, p): draw.choice([raised, empty]) for r in range(1, 195) for p in range(6) if draw.random() < 0.2}
    sampled_as(monkeypatch, sample)
    config = {
        "num-server-rounds": 200, "hiso.fingerprint-every": 10, "hiso.num-probes": 1, "local-steps": 1,
        "client-evaluation": "last", "evaluate-every": 0,
    }  # fmt: skip
    run = tiny(tmp_path / "run", config, faults=faults)
    rows = run.rows("train")
    assert sum(row["resent"] for row in rows) >= 10
    assert sum(row["rebuilt"] for row in rows) >= 10
    assert sum(len(row["refused"]) for row in rows) >= 50
    assert rows[-1]["folded"] == [0, 1, 2, 3, 4, 5]
    journal = Journal.read(run.folder.journal_path)
    # A lone voter confirms nothing.
    confirmable = [row["round"] for row in rows if row["round"] % 10 == 0 and len(row["folded"]) > 1]
    assert verify(run.folder.journal_path, run.folder.initial_path) == confirmable
    assert len(confirmable) >= 15
    for partition in range(6):
        assert_caught_up(nodes(partition), journal, run)


def trouble(node: Path, chance: float) -> None:
    """Do something to a node, or nothing."""
    if chance < 0.02:
        shutil.rmtree(node)  # a new disk
    elif chance < 0.04 and (node / "replicas").exists():
        shutil.rmtree(node / "replicas")  # the cache only
    elif chance < 0.06 and (mark := next((node / "replicas").glob("*/state.json"), None)) is not None:
        text = mark.read_text()
        mark.write_text(text.replace('"applying": false', '"applying": true'))  # died in the middle of an update


# Bad replies, kernels and settings ------------------------------------------------------------------------


def scalars_of(values: Any, **change: Any) -> Callable[[Message], Message]:
    def fault(reply: Message) -> Message:
        record = dict(reply.content.config_records["scalars"])
        reply.content["scalars"] = ConfigRecord({**record, "values": pack_scalars(values), **change})
        return reply

    return fault


FAULTS = {
    "NaN": (scalars_of([np.nan] * 10), "expected finite scalars"),
    "wrong shape": (scalars_of([1.0] * 5), "expected 2 rows of 5 numbers"),
    "too many": (scalars_of([1.0] * 20), "expected 2 rows of 5 numbers"),
    "a past round": (scalars_of([1.0] * 10, **{"server-round": 1}), "expected scalars of round 2, got round 1"),
    "an error": (raised, "sensor offline"),
}


@pytest.mark.parametrize(("fault", "reason"), FAULTS.values(), ids=FAULTS.keys())
def test_a_bad_reply_is_named_and_its_client_goes_on(tmp_path: Path, log: Any, fault: Any, reason: str) -> None:
    run = tiny(tmp_path / "run", {"num-server-rounds": 4}, faults={(2, 1): fault})
    row = run.rows("train")[1]
    assert reason in row["refused"]["1"]
    assert "round 2, client 1" in log.text
    assert [r["folded"] for r in run.rows("train")][2:] == [[0, 1, 2, 3, 4, 5]] * 2
    same = tiny(tmp_path / "same", {"num-server-rounds": 4}, faults={(2, 1): empty})
    assert journal_of(run) == journal_of(same)


def test_a_round_below_the_quorum_leaves_no_record(tmp_path: Path) -> None:
    faults = {(2, p): raised for p in range(6)}
    run = tiny(tmp_path / "run", {"num-server-rounds": 4}, faults=faults)
    records = Journal.read(run.folder.journal_path).records
    assert [(r.round, r.first_step) for r in records] == [(1, 0), (3, 4), (4, 6)]
    assert [row["accepted"] for row in run.rows("train")] == [True, False, True, True]
    runs.assert_same_model(run.model, replay(run.folder.journal_path, run.folder.initial_path).arrays)


def test_a_node_that_draws_other_directions_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A11."""
    monkeypatch.setattr(sys.modules["fedapps.client_apps.app"], "_kernel", lambda device: "0" * 64)
    with pytest.raises(RosterError, match=r"partition 5\), kernel: expected directions with checksum .*got 0000"):
        tiny(tmp_path / "run", {"node-wait": 0.0})


def test_directions_depend_on_no_global_state(tmp_path: Path) -> None:
    """A11: whatever the process has drawn before, journals are equal, and the global generators are left alone."""
    first = tiny(tmp_path / "first")
    torch.manual_seed(1234)
    np.random.seed(99)  # noqa: NPY002
    before = torch.get_rng_state(), np.random.get_state()[1].copy()  # type: ignore[union-attr, index] # noqa: NPY002
    second = tiny(tmp_path / "second")
    assert journal_of(first) == journal_of(second)
    assert torch.equal(before[0], torch.get_rng_state())
    assert (before[1] == np.random.get_state()[1]).all()  # type: ignore[index] # noqa: NPY002


def test_buffers_stay_and_tied_weights_are_one(tmp_path: Path) -> None:
    """A09, A30."""
    run = tiny(tmp_path / "run", {"task": "fedapps_testing:BatchNormSites"})
    assert (run.model["1.running_mean"] == 0).all()
    assert int(run.model["1.num_batches_tracked"]) == 0
    assert Journal.read(run.folder.journal_path).header.layout.size == 4 * 8 + 8 + 8 + 8 + 8 * 2 + 2
    tied = tiny(tmp_path / "tied", {"task": "fedapps_testing:TiedSites"})
    assert list(tied.model) == ["embedding.weight", "head.bias"]
    written = write_replayed(replay(tied.folder.journal_path, tied.folder.initial_path), tmp_path / "out")
    assert written.read_bytes() == tied.folder.model_path.read_bytes()


# Resume ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_three_rounds_and_a_resume_are_six_rounds(tmp_path: Path, method: str) -> None:
    """A26: journal bytes too."""
    config = {"method": method, "fraction-train": 0.67, f"{method}.fingerprint-every": 2}
    straight = tiny(tmp_path / "straight", config)
    tiny(tmp_path / "halves", {**config, "num-server-rounds": 3})
    halves = tiny(tmp_path / "halves", {**config, "resume": True})
    runs.assert_same_model(straight.model, halves.model)
    assert journal_of(straight) == journal_of(halves)
    assert straight.folder.initial_path.read_bytes() == halves.folder.initial_path.read_bytes()


def test_a_resume_cuts_off_rounds_beyond_the_checkpoint_and_a_torn_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clients' replica in this process has applied the rounds that are cut off, and another round 3 comes."""
    straight = tiny(tmp_path / "straight", {"num-server-rounds": 5})
    tiny(tmp_path / "run", {"num-server-rounds": 2})
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    longer = tiny(tmp_path / "run", {"num-server-rounds": 4, "resume": True}, faults={(3, 0): empty})
    with (tmp_path / "copy" / "journal.jsonl").open("ab") as stream:
        stream.write(b"".join(journal_of(longer).splitlines(keepends=True)[3:]) + b'{"round": 5, "fir')
    resumed = tiny(tmp_path / "copy", {"num-server-rounds": 5, "resume": True})
    assert journal_of(resumed) == journal_of(straight)
    assert journal_of(resumed).splitlines()[3] != journal_of(longer).splitlines()[3]
    runs.assert_same_model(resumed.model, straight.model)


def test_a_resume_without_its_journal_is_refused(tmp_path: Path) -> None:
    run = tiny(tmp_path / "run", {"num-server-rounds": 3})
    lines = journal_of(run).splitlines(keepends=True)
    run.folder.journal_path.write_bytes(b"".join(lines[:3]))
    with pytest.raises(CheckpointError, match=r"expected 3 rounds of .*got 2"):
        tiny(tmp_path / "run", {"num-server-rounds": 4, "resume": True})


# FedZO ----------------------------------------------------------------------------------------------------


def test_fedzo_averages_models_after_steps_along_own_directions(tmp_path: Path) -> None:
    config = {"method": "fedzo", "num-server-rounds": 15, "lr": 0.1, "evaluate-every": 15, "fedzo.num-probes": 5}
    run = tiny(tmp_path / "run", config)
    losses = [row["test-loss"] for row in run.rows("evaluate")]
    assert losses[-1] < 0.8 * losses[0]
    size = sum(value.nbytes for value in run.model.values())
    assert set(payloads(run, "up", "arrays")) == set(payloads(run, "down", "arrays")) == {size}
    assert not run.folder.journal_path.exists()
    one = {"method": "fedzo", "num-server-rounds": 1, "fedzo.num-probes": 1, "local-steps": 1, "lr": 0.1,
           "task-options": 'sizes = "6,9"'}  # fmt: skip
    alone = [tiny(tmp_path / f"only-{p}", one, 2, faults={(1, 1 - p): empty}).model for p in (0, 1)]
    first = tiny(tmp_path / "none", {**one, "lr": 1e-30}, 2).model
    moves = [np.concatenate([(m[name] - first[name]).ravel() for name in first]) for m in alone]
    cosine = abs(moves[0] @ moves[1]) / np.linalg.norm(moves[0]) / np.linalg.norm(moves[1])
    assert cosine < 0.6  # Each client draws its own direction.


def test_fedzo_refuses_a_convex_task_before_anything_is_written(tmp_path: Path) -> None:
    from fedapps.errors import SettingsError

    with pytest.raises(SettingsError, match="method 'fedzo': expected a torch task"):
        tiny(tmp_path / "run", {"method": "fedzo", "task": "a9a"})
    assert not (tmp_path / "run").exists()


def test_a_diverging_run_fails_with_a_reason(tmp_path: Path) -> None:
    with pytest.raises(RoundFailedError):
        tiny(tmp_path / "run", {"method": "decomfl", "lr": 1e38, "num-server-rounds": 9})
    run = runs.Left(RunFolder.open(tmp_path / "run"))
    assert run.summary["status"] == "failed"
    replayed = replay(run.folder.journal_path, run.folder.initial_path)
    assert write_replayed(replayed, tmp_path / "out").read_bytes() == run.folder.model_path.read_bytes()


def test_a_client_with_another_first_model_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def other(task: TorchTask, device: str = "cpu") -> torch.nn.Module:
        return task.module(task.initial_arrays(1234), device)

    monkeypatch.setattr(TorchTask, "initial_module", other)
    with pytest.raises(RoundFailedError, match="the shapes fit but the weights differ"):
        tiny(tmp_path / "run", {"max-consecutive-failed-rounds": 1})
