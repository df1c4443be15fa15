"""Tests of ``fedapps/strategies/hiso.py`` and ``scalar_options.py``: the journal's keeper without any client."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fedapps.strategies.scalar_options import ScalarOptions
from flwr.app import ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import Strategy

from fedapps.errors import CheckpointError, MessageError, RoundFailedError, SettingsError
from fedapps.messages import pack_arrays
from fedapps.methods import resolve_settings
from fedapps.settings import RoundSettings
from fedapps.strategies.hiso import HiSo
from fedapps.strategies.kept_journal import KeptJournal
from fedapps.zeroth_order.aggregate import Aggregation
from fedapps.zeroth_order.errors import JournalError
from fedapps.zeroth_order.journal import Journal
from fedapps.zeroth_order.rules import apply_round, rule_of
from fedapps.zeroth_order.scheme import HessianUpdate, Scheme
from fedapps.zeroth_order.wire import pack_scalars, unpack_slice

MODEL = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(2, np.float32), "count": np.array(3)}
TAU, P = 2, 3


def scalars(*values: float) -> list[float]:
    return [float(np.float32(v)) for v in values]


def reply(server_round: int, values: Any, *, examples: int = 5, **other: Any) -> RecordDict:
    data = values if isinstance(values, bytes | str) else pack_scalars(values)
    record = ConfigRecord({"server-round": server_round, "values": data, **other})
    metrics = MetricRecord({"num-examples": examples, "train-loss": 1.0})
    return RecordDict({"arrays": ArrayRecord({}), "scalars": record, "metrics": metrics})


def strategy(method: str = "hiso", path: Path | None = None, **other: Any) -> HiSo:
    options = ScalarOptions(
        scheme=Scheme(11, method), tau=TAU, num_probes=P, nu=0.0 if method == "decomfl" else 0.1,
        momentum=0.5 if method == "hiso-momentum" else None, fingerprint_every=2,
    )  # fmt: skip
    made = HiSo(RoundSettings(weighting="uniform", max_consecutive_failed_rounds=9), scalars=replace(options, **other))
    made.open_journal(MODEL, ["w", "b"], base="test", path=path)
    made._lr = 0.1
    return made


def kept(made: HiSo) -> KeptJournal:
    assert made.kept is not None
    return made.kept


def play(made: HiSo, server_round: int, values: dict[int, Any]) -> Any:
    made.rounds.begin(server_round, {}, range(3))
    for partition, content in values.items():
        made.receive(partition, content if isinstance(content, RecordDict) else reply(server_round, content))
    new = made.rounds.end()
    made.settle()
    return new


GOOD = scalars(1, -2, 3, 0.5, 0.25, -1)


@pytest.mark.parametrize("method", ["hiso", "decomfl", "hiso-momentum"])
def test_a_round_is_the_reference_of_the_mean(method: str) -> None:
    made = strategy(method)
    other = [2 * v for v in GOOD]
    assert play(made, 1, {0: GOOD, 2: other, 1: GOOD}) == {}
    assert kept(made).replica is None
    new = made.model()
    record = kept(made).journal.records[0]
    mean = [float(np.float32(4 * v / 3)) for v in GOOD]
    assert record.scalars == (tuple(mean[:3]), tuple(mean[3:]))
    assert (record.round, record.first_step, record.participants, record.fingerprint) == (1, 0, 3, None)
    flat = np.concatenate([MODEL["w"].ravel(), MODEL["b"]])
    expected, _ = apply_round(flat, rule_of(made.scalars.scheme).init(8), record, made.scalars.scheme, offset=0)
    assert np.concatenate([new["w"].ravel(), new["b"]]).tobytes() == expected.tobytes()
    assert list(new) == list(MODEL)
    assert new["count"] == 3
    assert not new["w"].flags.writeable


def test_weights_follow_the_options_and_the_order_of_arrival_changes_nothing() -> None:
    journals = []
    for order in ((0, 1, 2), (2, 0, 1)):
        made = strategy()
        made.options = replace(made.options, weighting="examples")
        values = {0: (GOOD, 1), 1: ([0.1] * 6, 2), 2: ([v / 3 for v in GOOD], 7)}
        play(made, 1, {p: reply(1, values[p][0], examples=values[p][1]) for p in order})
        journals.append(kept(made).journal.to_text())
    assert journals[0] == journals[1]
    assert kept(made).journal.records[0].scalars[0][0] == pytest.approx((1 + 0.2 + 7 / 3) / 10)


def test_aggregation_and_clip_are_those_of_the_options() -> None:
    made = strategy(aggregation=Aggregation.MEDIAN)
    play(made, 1, {0: GOOD, 1: [1e6] * 6, 2: [-1e6] * 6})
    assert kept(made).journal.records[0].scalars == (tuple(GOOD[:3]), tuple(GOOD[3:]))
    made = strategy(clip=1.0)
    play(made, 1, {0: [1e6] * 6, 1: [1e6] * 6, 2: [1e6] * 6})
    assert np.linalg.norm(kept(made).journal.records[0].scalars) == pytest.approx(1, rel=1e-6)


MALFORMED = {
    "NaN": (reply(1, [np.nan] * 6), "expected finite scalars, got nan among 6"),
    "infinite": (reply(1, [*GOOD[:5], np.inf]), "expected finite scalars, got inf"),
    "too few": (reply(1, GOOD[:3]), "expected 2 rows of 3 numbers, got 1 rows of"),
    "too many": (reply(1, GOOD * 2), "expected 2 rows of 3 numbers, got 4 rows of"),
    "torn": (reply(1, b"\0" * 23), "expected 2 rows of 3 scalars, got 23 bytes"),
    "none": (reply(1, b""), "expected 2 rows of 3 numbers"),
    "a past round": (reply(7, GOOD), "expected scalars of round 1, got round 7"),
    "no record": (RecordDict({k: v for k, v in reply(1, GOOD).items() if k != "scalars"}), "expected 'values' in record"),
    "a text": (reply(1, "1"), "expected 'values' in record 'scalars'"),
    "zero examples": (reply(1, GOOD, examples=0), "expected a positive integer, got 0"),
    "a model": (
        RecordDict({**reply(1, GOOD), "arrays": pack_arrays({"w": np.full((2, 3), np.nan, np.float32)})}),
        "expected a tensor of the model that was sent out",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("content", "match"), MALFORMED.values(), ids=MALFORMED.keys())
def test_a_malformed_reply_is_named_and_the_others_count(content: RecordDict, match: str) -> None:
    made, without = strategy(), strategy()
    play(made, 1, {0: GOOD, 1: content, 2: GOOD})
    assert match in made.rounds.report.refused[1]
    assert "client 1" in made.rounds.report.refused[1]
    play(without, 1, {0: GOOD, 2: GOOD})
    assert kept(made).journal.to_text() == kept(without).journal.to_text()
    assert kept(made).journal.records[0].participants == 2


def test_scalars_of_a_client_that_was_not_asked_or_answers_twice_are_ignored() -> None:
    made = strategy()
    made.rounds.begin(1, {}, [0])
    for partition, values in [(2, [9.0] * 6), (0, GOOD), (0, [9.0] * 6)]:
        made.receive(partition, reply(1, values))
    made.rounds.end()
    made.settle()
    assert kept(made).journal.records[0].scalars == (tuple(GOOD[:3]), tuple(GOOD[3:]))


def test_a_refused_round_has_no_record_but_its_steps_are_used_up() -> None:
    made = strategy()
    play(made, 1, {0: GOOD})
    assert play(made, 2, {0: b""}) is None
    play(made, 3, {0: GOOD})
    records = kept(made).journal.records
    assert [(r.round, r.first_step) for r in records] == [(1, 0), (3, 4)]
    made.model()
    assert kept(made).replica.round == 3  # type: ignore[union-attr]


# Slices ---------------------------------------------------------------------------------------------------


def slice_for(made: HiSo, partition: int, through: int) -> Any:
    return unpack_slice(made.records_for(partition, through)["journal"], "server")


def test_a_client_gets_what_it_has_not_acknowledged() -> None:
    """A client whose reply of round f was folded holds the journal up to f - 1."""
    made = strategy(mu_decay=0.5)
    for r in (1, 2, 3):
        play(made, r, {0: GOOD} if r < 3 else {0: GOOD, 1: GOOD})
    for partition, after in [(0, 2), (1, 2), (2, 0)]:
        part = slice_for(made, partition, 3)
        assert (part.after, part.through) == (after, 3)
        assert part.records == tuple(kept(made).journal.records[after:])
    record = made.records_for(2, 3)["journal"]
    assert (record["next-first-step"], record["next-mu"]) == (6, 1e-3 / 8)
    assert bytes(record["base"]).hex() == kept(made).journal.header.base.fingerprint  # type: ignore[arg-type]


def test_a_replica_of_another_state_is_refused_where_the_journal_has_a_fingerprint() -> None:
    made = strategy()
    made.model()
    for r in (1, 2):
        play(made, r, {0: GOOD, 1: GOOD})
    right = bytes.fromhex(str(kept(made).journal.records[-1].fingerprint))
    values = {0: reply(3, GOOD, fingerprint=right), 1: reply(3, GOOD, fingerprint=b"\1" * 32)}
    play(made, 3, values)
    assert made.rounds.report.folded == [0]
    assert "client 1, fingerprint: expected" in made.rounds.report.refused[1]


# Fingerprints ---------------------------------------------------------------------------------------------


def ended(votes: dict[int, bytes], *, holds_model: bool, spoil: bool = False) -> HiSo:
    """Play two rounds of four clients; in the second, where a fingerprint is due, some of them name its state."""
    made = strategy()
    made.roster.node_of = {p: 70 + p for p in range(4)}
    if holds_model:
        made.model()
    play(made, 1, {0: GOOD})
    made.rounds.begin(2, {}, range(4))
    for partition in range(4):
        made.receive(partition, reply(2, GOOD))
    made.rounds.end()
    messages = made.confirmations()
    assert [message.metadata.dst_node_id for message in messages] == [70, 71, 72, 73]
    for partition, message in enumerate(messages):
        message.metadata.__dict__["_message_id"] = str(partition)
        if partition in votes:
            made.receive_confirmation(Message(reply(2, b"", fingerprint=votes[partition]), reply_to=message))
        elif partition == 3:
            made.receive_confirmation(Message(Error(2, "out of memory"), reply_to=message))
    if spoil:
        np.asarray(kept(made).replica.theta["w"])[...] += 1  # type: ignore[union-attr]  # the server holds a model
    made.settle()
    return made


def right() -> bytes:
    made = strategy()
    made.model()
    for r in (1, 2):
        play(made, r, {0: GOOD} if r == 1 else dict.fromkeys(range(4), GOOD))
    return bytes.fromhex(str(kept(made).journal.records[-1].fingerprint))


R, X, Y = right(), b"\1" * 32, b"\2" * 32


@pytest.mark.parametrize(
    ("votes", "holds_model", "recorded", "astray"),
    [
        ({0: R, 1: R, 2: R}, False, R, []),
        ({0: R, 1: X, 2: R}, False, R, ["client 1"]),
        ({0: R, 1: X}, True, R, ["client 1"]),
        ({}, True, R, []),
        ({}, False, None, []),
        ({0: R, 1: X}, False, None, ["client 0", "client 1"]),
        ({0: X, 1: X, 2: X}, True, R, ["client 0", "client 1", "client 2"]),
        ({0: X, 1: Y}, True, R, ["client 0", "client 1"]),
        ({0: R}, False, None, []),
        ({0: b"\1", 1: b"", 2: b"\1"}, False, None, []),
    ],
    ids=[
        "all",
        "one astray",
        "one astray, the server votes",
        "the server alone",
        "nobody",
        "a tie",
        "one replica votes for three clients",
        "none is right but the server",
        "one witness",
        "no fingerprints at all",
    ],
)
def test_the_journal_holds_the_fingerprint_of_the_majority(
    votes: dict[int, bytes], holds_model: bool, recorded: bytes | None, astray: list[str]
) -> None:
    made = ended(votes, holds_model=holds_model)
    record = kept(made).journal.records[-1]
    assert (record.round, record.fingerprint) == (2, recorded.hex() if recorded else None)
    assert [note.partition(":")[0] for note in made.rounds.report.notes if "went astray" in note] == astray
    silent = {p for p in range(4) if len(votes.get(p, b"")) != 32} - ({0, 1, 2} - set(votes))
    assert [note.partition(" did")[0] for note in made.rounds.report.notes if "not confirm" in note] == [
        f"client {p}" for p in sorted(silent)
    ]
    assert made.rounds.report.values["rebuilt"] == 0
    assert (kept(made).replica is None) == (not holds_model)


def test_a_server_that_went_astray_builds_its_replica_again_and_votes_anew() -> None:
    made = ended({0: R, 1: X}, holds_model=True, spoil=True)
    assert kept(made).journal.records[-1].fingerprint == R.hex()
    assert made.rounds.report.values["rebuilt"] == 1
    assert "the server's replica had gone astray and was built again" in made.rounds.report.notes


def test_a_dead_worker_ends_the_run_also_while_it_confirms() -> None:
    made = strategy()
    made.roster.node_of = {0: 70, 1: 71}
    for r in (1, 2):
        made.rounds.begin(r, {}, [0, 1])
        for partition in (0, 1):
            made.receive(partition, reply(r, GOOD))
        made.rounds.end()
        messages = made.confirmations()
        if r == 1:
            made.settle()
    messages[0].metadata.__dict__["_message_id"] = "asked"
    with pytest.raises(RoundFailedError, match="round 2, client 0: its worker process died"):
        made.receive_confirmation(Message(Error(0, "actor died"), reply_to=messages[0]))


@pytest.mark.parametrize("count", [float("nan"), float("inf"), [3], 0, -1, 2.5], ids=str)
def test_an_evaluation_without_a_count_of_examples_is_left_out(count: Any) -> None:
    made = strategy()
    made.roster.node_of = {0: 70, 1: 71}
    replies = []
    for node, examples in ((70, count), (71, 4)):
        asked = Message(RecordDict({}), dst_node_id=node, message_type="evaluate")
        asked.metadata.__dict__["_message_id"] = str(node)
        metrics = MetricRecord({"num-examples": examples, "loss": 0.5})
        replies.append(Message(RecordDict({"metrics": metrics}), reply_to=asked))
    assert made.evaluation_results(replies) == ({1: {"loss": 0.5}}, {1: 4})


def test_a_metric_that_is_no_count_ends_no_run() -> None:
    made = strategy()
    made.rounds.begin(1, {}, [0])
    content = reply(1, GOOD)
    content["metrics"]["rebuilt"] = float("nan")  # type: ignore[index]  # a metric record
    made.receive(0, content)
    made.rounds.end()
    assert made.rounds.report.values["rebuilt"] == 0


def test_a_client_that_lacks_the_journal_twice_is_not_measured_and_spoils_no_mean(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = strategy()
    play(made, 1, {0: GOOD, 1: GOOD})
    made.roster.node_of, made.roster.num_partitions = {0: 70, 1: 71}, 2
    made.options = replace(made.options, evaluate_clients=True)
    asked = made.configure_evaluate(1, ArrayRecord({}), ConfigRecord({}), None)  # type: ignore[arg-type]

    def answered(message: Message, content: RecordDict, number: int) -> Message:
        message.metadata.__dict__["_message_id"] = str(number)
        return Message(content, reply_to=message)

    lacks = {"scalars": ConfigRecord({"need-from": 0}), "metrics": MetricRecord({"num-examples": 9})}
    good = RecordDict({"metrics": MetricRecord({"num-examples": 4, "test-loss": 0.5})})
    first = [answered(asked[0], RecordDict(lacks), 0), answered(asked[1], good, 1)]
    assert made.evaluation_results(first) == ({1: {"test-loss": 0.5}}, {1: 4})
    [again] = made.take_resends()
    assert (again.metadata.message_type, again.metadata.dst_node_id) == ("evaluate", 70)
    assert unpack_slice(again.content["journal"], "server").after == 0  # type: ignore[arg-type]
    assert made.evaluation_results([answered(again, RecordDict(lacks), 2)]) == ({}, {})
    assert made.take_resends() == []
    assert "client 0 was not measured: it lacks the journal from round 0" in made.rounds.report.notes


def test_clients_are_asked_only_where_a_fingerprint_is_due_and_get_that_round_only() -> None:
    made = strategy()
    made.roster.node_of = {0: 70, 1: 71}
    for r in (1, 2):
        made.rounds.begin(r, {}, [0, 1])
        for partition in (0, 1):
            made.receive(partition, reply(r, GOOD))
        made.rounds.end()
        messages = made.confirmations()
        assert len(messages) == 2 * (r == 2)
        made.settle()
    record = messages[0].content["journal"]
    part = unpack_slice(record, "server")  # type: ignore[arg-type]
    assert (part.after, part.through, part.records) == (1, 2, tuple(kept(made).journal.records[1:]))
    assert record["confirm"] is True
    assert messages[0].content["config"]["last-folded"] == 2  # type: ignore[index, call-overload]


# The file, and resume -------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["hiso", "hiso-momentum"])
def test_a_resumed_strategy_goes_on_to_the_bit(tmp_path: Path, method: str) -> None:
    straight = strategy(method, tmp_path / "straight.jsonl")
    first = strategy(method, tmp_path / "halves.jsonl")
    for made in (straight, first):
        made.model()  # A server that holds a model writes fingerprints: here of round 2.
        play(made, 1, {0: GOOD, 1: [2.0] * 6})
        play(made, 2, {1: GOOD})
    assert first.state_arrays() == {}
    second = HiSo(options=first.options, scalars=first.scalars)
    second.load_state(first.state(), first.last_folded)
    second.open_journal(MODEL, ["w", "b"], path=tmp_path / "halves.jsonl")
    second._lr = 0.1
    for made in (straight, second):
        play(made, 3, {0: [0.5] * 6, 2: GOOD})
    assert straight.model()["w"].tobytes() == second.model()["w"].tobytes()
    assert (tmp_path / "straight.jsonl").read_bytes() == (tmp_path / "halves.jsonl").read_bytes()
    assert slice_for(second, 1, 3).after == 1


def test_a_journal_that_is_not_the_checkpoints_is_refused(tmp_path: Path) -> None:
    first = strategy(path=tmp_path / "journal.jsonl")
    play(first, 1, {0: GOOD})
    second = HiSo(options=first.options, scalars=first.scalars)
    second.load_state({**first.state(), "records": 2}, {})
    other = {**MODEL, "b": np.zeros(2, np.float32)}
    for arrays, names, error, match in [
        (MODEL, ["w", "b"], CheckpointError, r"journal\.jsonl: expected 2 rounds"),
        (MODEL, ["w"], JournalError, "expected the model it was written for, got 1 tensors instead of 2"),
        (other, ["w", "b"], JournalError, "expected the base model 'test' with fingerprint"),
    ]:
        with pytest.raises(error, match=match):
            second.open_journal(arrays, names, path=tmp_path / "journal.jsonl")
    with pytest.raises(JournalError, match="expected no file, got a journal"):
        strategy(path=tmp_path / "journal.jsonl")


def test_the_file_is_the_journal(tmp_path: Path) -> None:
    made = strategy(path=tmp_path / "journal.jsonl")
    play(made, 1, {0: GOOD})
    assert (tmp_path / "journal.jsonl").read_text() == kept(made).journal.to_text()
    assert Journal.read(tmp_path / "journal.jsonl").records == kept(made).journal.records


# Settings and Flower's own loop ---------------------------------------------------------------------------


def test_options_come_from_the_settings() -> None:
    config = {
        "method": "hiso-momentum", "local-steps": 3, "seed": 2**63 - 1, "hiso-momentum.num-probes": 4,
        "hiso-momentum.clip": 2.0, "hiso-momentum.hessian-update": "round-mean", "hiso-momentum.momentum": 0.25,
        "hiso-momentum.distribution": "rademacher", "hiso-momentum.aggregation": "trimmed-mean",
    }  # fmt: skip
    made = HiSo.from_settings(resolve_settings(config, "torch"), "e")
    options = made.scalars
    assert (options.tau, options.num_probes, options.clip, options.momentum) == (3, 4, 2.0, 0.25)
    assert options.scheme.seed == 2**63 - 1
    assert options.scheme.hessian_update is HessianUpdate.ROUND_MEAN
    assert (options.scheme.distribution, options.aggregation) == ("rademacher", Aggregation.TRIMMED_MEAN)
    assert made.options.weighting == "uniform"
    plain = HiSo.from_settings(resolve_settings({"method": "decomfl"}, "torch"), "e").scalars
    assert (plain.nu, plain.momentum, plain.clip) == (0.0, None, None)


@pytest.mark.parametrize("method", ["hiso", "decomfl", "hiso-momentum"])
def test_steps_must_be_counted_and_the_task_be_torch(method: str) -> None:
    with pytest.raises(SettingsError, match="setting 'local-steps': expected at least 1"):
        HiSo.from_settings(resolve_settings({"method": method, "local-steps": 0}, "torch"), "e")
    with pytest.raises(SettingsError, match=f"method '{method}': expected a torch task, got 'a9a', a convex task"):
        resolve_settings({"method": method, "task": "a9a"})
    with pytest.raises(ValueError, match="expected at least 1, got 0 and 1"):
        ScalarOptions(tau=0)


def test_flowers_own_calls_work_without_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    made = HiSo(scalars=ScalarOptions(scheme=Scheme(3), tau=TAU, num_probes=P))
    assert isinstance(made, Strategy)
    monkeypatch.setattr(made.roster, "refresh", lambda grid: None)
    made.roster.node_of, made.roster.num_partitions = {0: 70, 1: 71}, 2
    arrays = pack_arrays({name: MODEL[name] for name in ("w", "b")})
    with pytest.raises(MessageError, match="train config, entry 'lr': expected a number, got None"):
        made.configure_train(1, arrays, ConfigRecord({}), None)  # type: ignore[arg-type]
    messages = made.configure_train(1, arrays, ConfigRecord({"lr": 0.1}), None)  # type: ignore[arg-type]
    for number, message in enumerate(messages):
        message.metadata.__dict__["_message_id"] = str(number)
    assert [len(message.content.array_records["arrays"]) for message in messages] == [0, 0]
    need = RecordDict(
        {
            "arrays": ArrayRecord({}),
            "scalars": ConfigRecord({"need-from": 0}),
            "metrics": MetricRecord({"num-examples": 1}),
        }
    )
    replies = [Message(reply(1, GOOD), reply_to=messages[0]), Message(need, reply_to=messages[1])]
    new, metrics = made.aggregate_train(1, replies)
    assert new is not None
    assert {name: array.numpy().tobytes() for name, array in new.items()} == {
        name: value.tobytes() for name, value in made.model().items()
    }
    assert new["w"].numpy().tobytes() != MODEL["w"].tobytes()
    assert metrics is not None
    assert "its journal was lost; it is sent again with the next round" in made.rounds.report.refused[1]
    assert made.rounds.report.values == {"rebuilt": 0, "resent": 1}
    assert [record.participants for record in kept(made).journal.records] == [1]
