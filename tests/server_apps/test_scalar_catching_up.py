"""Scalar-only clients that missed rounds, or lost their journal or replica."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Context

from fedapps.client_apps import hiso, replicas
from fedapps.client_apps.rules import NodeRules
from fedapps.client_apps.work import ClientWork, Node
from fedapps.results.replay import verify
from fedapps.strategies.hiso import HiSo
from fedapps.zeroth_order.journal import Journal

from .scalar_runs import assert_caught_up, journal_of, sampled_as, tiny
from .test_run import empty, raised

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("own_module")]


def test_a_client_that_missed_rounds_or_joins_late_catches_up(
    tmp_path: Path, nodes: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Missed rounds are applied in order: client 2 takes part in rounds 1 and 6 only, client 3 in round 6 only."""
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


def test_stores_on_nodes_write_the_journal_of_one_process(tmp_path: Path, nodes: Callable[[int], Path]) -> None:
    config = {"fraction-train": 0.5, "hiso.fingerprint-every": 2}
    on_nodes = tiny(tmp_path / "nodes-run", config)
    assert (nodes(0) / "replicas" / "client-0" / "state.bin").exists()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Node, "of", lambda context, *_: replace(_plain_node(context), state_dir=None))
        plain = tiny(tmp_path / "plain", config)
    assert journal_of(on_nodes) == journal_of(plain)


def test_a_process_that_stays_keeps_model_and_store_from_one_message_to_the_next(
    tmp_path: Path, nodes: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One client is sampled, and its messages find what those before left mapped; a store that moved is opened anew."""
    config = {"hiso.fingerprint-every": 2, "num-server-rounds": 5}
    with monkeypatch.context() as patch:
        sampled_as(patch, lambda server_round: [0])
        patch.setattr(replicas, "_still_whole", lambda held, folder: False)
        anew = tiny(tmp_path / "anew", config)
    shutil.rmtree(tmp_path / "nodes")
    built, build = [], replicas._build

    def sample(server_round: int) -> list[int]:
        if server_round == 4:
            shutil.rmtree(nodes(0) / "replicas")
        return [0]

    def count(work: ClientWork) -> torch.nn.Module:
        built.append(work.server_round)
        return build(work)

    sampled_as(monkeypatch, sample)
    monkeypatch.setattr(replicas, "_build", count)
    monkeypatch.setattr(replicas, "_held", None)
    stayed = tiny(tmp_path / "stayed", config)
    assert built == [1, 4]
    assert journal_of(stayed) == journal_of(anew)
    assert stayed.folder.model_path.read_bytes() == anew.folder.model_path.read_bytes()


def _plain_node(context: Context) -> Node:
    return Node(
        int(context.node_config["partition-id"]),
        int(context.node_config["num-partitions"]),
        None,
        NodeRules(trust_server=True, common_data=True),
    )


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
    assert "client 1 lacks the journal from round 0: it is sent again" in log.text
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
    assert "client 1 lacks the journal from round 0: it is sent again" in log.text
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


def test_what_a_node_keeps_of_the_run_is_for_its_owner_only(tmp_path: Path, nodes: Callable[[int], Path]) -> None:
    before = os.umask(0)
    try:
        tiny(tmp_path / "run", {"num-server-rounds": 2})
    finally:
        os.umask(before)
    files = [path for path in (nodes(2) / "replicas").rglob("*") if path.is_file()]
    assert "applied.jsonl" in {path.name for path in files}
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
    assert {path.stat().st_mode & 0o777 for path in (nodes(2) / "replicas").glob("*")} == {0o700}


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

    def measure_and_go_astray(work: ClientWork, client: Any, measured: Any) -> Any:
        result = measure(work, client, measured)
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
    ask = HiSo.follow_up

    def ask_after_a_crash(self: HiSo, *, enough: bool) -> Any:
        if self.rounds.report.server_round == 3 and not self.rounds.is_follow_up:
            mark = next((nodes(2) / "replicas").glob("*/state.json"))
            mark.write_text(mark.read_text().replace('"applying": false', '"applying": true'))
        return ask(self, enough=enough)

    monkeypatch.setattr(HiSo, "follow_up", ask_after_a_crash)
    run = tiny(tmp_path / "run", {"hiso.fingerprint-every": 1})
    assert [row["rebuilt"] for row in run.rows("train")] == [0, 0, 1, 0, 0, 0]
    assert journal_of(run) == journal_of(straight)


def test_a_client_that_lost_its_journal_has_no_vote_in_the_confirmation(
    tmp_path: Path, nodes: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not trained a second time: what it would answer then names the state before the round."""
    straight = tiny(tmp_path / "straight", {"hiso.fingerprint-every": 1})
    shutil.rmtree(tmp_path / "nodes")
    ask = HiSo.follow_up

    def ask_after_a_loss(self: HiSo, *, enough: bool) -> Any:
        if self.rounds.report.server_round == 3 and not self.rounds.is_follow_up:
            shutil.rmtree(nodes(2))
        return ask(self, enough=enough)

    monkeypatch.setattr(HiSo, "follow_up", ask_after_a_loss)
    run = tiny(tmp_path / "run", {"hiso.fingerprint-every": 1})
    rows = run.rows("train")
    assert [len(row.get("notes", [])) for row in rows] == [0, 0, 1, 1, 0, 0]
    assert "client 2, confirmation" in rows[2]["notes"][0]
    assert [row["resent"] for row in rows] == [0, 0, 0, 1, 0, 0]
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
