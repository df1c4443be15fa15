"""The journal's keeper without any client."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import Strategy

from fedapps.errors import CheckpointError, MessageError, RoundFailedError, SettingsError
from fedapps.messages import pack_arrays
from fedapps.methods import resolve_settings
from fedapps.methods.zeroth_order import DeComFLSettings, HiSoMomentumSettings, HiSoSettings
from fedapps.settings import RoundSettings
from fedapps.strategies.hiso import HiSo
from fedapps.strategies.kept_journal import KeptJournal
from fedapps.zeroth_order.aggregate import Aggregation
from fedapps.zeroth_order.errors import JournalError
from fedapps.zeroth_order.journal import Journal
from fedapps.zeroth_order.rules import apply_round, rule_of
from fedapps.zeroth_order.scheme import HessianUpdate
from fedapps.zeroth_order.wire import pack_scalars, unpack_slice

from .scripted_grid import FIRST_NODE, ScriptedGrid, evaluate, seat, train

MODEL = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(2, np.float32), "count": np.array(3)}
TAU, P = 2, 3


def scalars(*values: float) -> list[float]:
    return [float(np.float32(v)) for v in values]


def reply(server_round: int, values: Any, *, examples: int = 5, **other: Any) -> RecordDict:
    data = values if isinstance(values, bytes | str) else pack_scalars(values)
    record = ConfigRecord({"server-round": server_round, "values": data, **other})
    metrics = MetricRecord({"num-examples": examples, "train-loss": 1.0})
    return RecordDict({"arrays": ArrayRecord({}), "scalars": record, "metrics": metrics})


OWN = {
    "hiso": HiSoSettings(num_probes=P, fingerprint_every=2, nu=0.1),
    "decomfl": DeComFLSettings(num_probes=P, fingerprint_every=2),
    "hiso-momentum": HiSoMomentumSettings(num_probes=P, fingerprint_every=2, nu=0.1, momentum=0.5),
}


def strategy(
    method: str = "hiso", path: Path | None = None, weighting: Literal["uniform", "examples"] = "uniform", **other: Any
) -> HiSo:
    settings = RoundSettings(seed=11, weighting=weighting, max_consecutive_failed_rounds=9)
    made = HiSo(settings, own=OWN[method].model_copy(update=other), rule=method, tau=TAU)
    made.open_journal(MODEL, ["w", "b"], base="test", path=path)
    made._lr = 0.1
    return made


def kept(made: HiSo) -> KeptJournal:
    assert made.kept is not None
    return made.kept


def play(made: HiSo, server_round: int, values: dict[int, Any]) -> Any:
    made.rounds.begin(server_round, {}, range(3))
    for partition, content in values.items():
        made.receive(partition, content if isinstance(content, RecordDict) else reply(server_round, content), {})
    return made.rounds.end()


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
    expected, _ = apply_round(flat, rule_of(made.scheme).init(8), record, made.scheme, offset=0)
    assert np.concatenate([new["w"].ravel(), new["b"]]).tobytes() == expected.tobytes()
    assert list(new) == list(MODEL)
    assert new["count"] == 3
    assert not new["w"].flags.writeable


def test_weights_follow_the_settings_and_the_order_of_arrival_changes_nothing() -> None:
    journals = []
    for order in ((0, 1, 2), (2, 0, 1)):
        made = strategy(weighting="examples")
        values = {0: (GOOD, 1), 1: ([0.1] * 6, 2), 2: ([v / 3 for v in GOOD], 7)}
        play(made, 1, {p: reply(1, values[p][0], examples=values[p][1]) for p in order})
        journals.append(kept(made).journal.to_text())
    assert journals[0] == journals[1]
    assert kept(made).journal.records[0].scalars[0][0] == pytest.approx((1 + 0.2 + 7 / 3) / 10)


def test_aggregation_and_clip_are_those_of_the_settings() -> None:
    made = strategy(aggregation=Aggregation.MEDIAN)
    play(made, 1, {0: GOOD, 1: [1e6] * 6, 2: [-1e6] * 6})
    assert kept(made).journal.records[0].scalars == (tuple(GOOD[:3]), tuple(GOOD[3:]))
    made = strategy(clip=1.0)
    play(made, 1, {0: [1e6] * 6, 1: [1e6] * 6, 2: [1e6] * 6})
    assert np.linalg.norm(kept(made).journal.records[0].scalars) == pytest.approx(1, rel=1e-6)


@pytest.mark.parametrize(("value", "accepted"), [(9e14, True), (-2e15, False)])
def test_scalars_whose_square_would_overflow_h_leave_the_journal_as_it_was(
    caplog: pytest.LogCaptureFixture, value: float, accepted: bool
) -> None:
    """All clients agree on it, so that no median refuses it: the sum itself is looked at."""
    made = strategy()
    play(made, 1, dict.fromkeys(range(3), GOOD))
    before = kept(made).journal.to_text()
    outcome = play(made, 2, dict.fromkeys(range(3), scalars(*GOOD[:5], value)))
    assert (outcome is not None, made.rounds.report.accepted) == (accepted, accepted)
    assert (kept(made).journal.to_text() != before) == accepted
    assert ("the clients' scalars: expected at most 1e+15" in caplog.text) != accepted
    assert made.rounds.report.refused == {}
    assert np.isfinite(made.model()["w"]).all()


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
        made.receive(partition, reply(1, values), {})
    made.rounds.end()
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
    return unpack_slice(made.records_for(partition, through, MODEL)["journal"], "server")


def test_a_client_gets_what_it_has_not_acknowledged() -> None:
    """A client whose reply of round f was folded holds the journal up to f - 1."""
    made = strategy(mu_decay=0.5)
    for r in (1, 2, 3):
        play(made, r, {0: GOOD} if r < 3 else {0: GOOD, 1: GOOD})
    for partition, after in [(0, 2), (1, 2), (2, 0)]:
        part = slice_for(made, partition, 3)
        assert (part.after, part.through) == (after, 3)
        assert part.records == tuple(kept(made).journal.records[after:])
    record = made.records_for(2, 3, MODEL)["journal"]
    assert (record["next-first-step"], record["next-mu"]) == (6, 1e-3 / 8)
    assert record["base"].hex() == kept(made).journal.header.base.fingerprint


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
    if holds_model:
        made.model()
    play(made, 1, {0: GOOD})
    made.rounds.begin(2, {}, range(4))
    for partition in range(4):
        made.receive(partition, reply(2, GOOD), {})
    assert list(made.rounds.follow_up()) == [0, 1, 2, 3]
    for partition, vote in votes.items():
        made.receive(partition, reply(2, b"", fingerprint=vote), {})
    made.rounds.receive(3, None, "out of memory")
    assert made.rounds.follow_up() == {}
    if spoil:
        np.asarray(kept(made).replica.theta["w"])[...] += 1  # type: ignore[union-attr]  # the server holds a model
    made.rounds.end()
    return made


def right() -> bytes:
    made = strategy()
    made.model()
    for r in (1, 2):
        play(made, r, {0: GOOD} if r == 1 else dict.fromkeys(range(4), GOOD))
    return bytes.fromhex(str(kept(made).journal.records[-1].fingerprint))


def right_of_the_first_round() -> bytes:
    made = strategy(fingerprint_every=1)
    made.model()
    play(made, 1, {0: GOOD})
    return bytes.fromhex(str(kept(made).journal.records[-1].fingerprint))


R, R1, X, Y = right(), right_of_the_first_round(), b"\1" * 32, b"\2" * 32


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
    silent = [p for p in range(4) if len(votes.get(p, b"")) != 32]
    noted = [note.partition(",")[0] for note in made.rounds.report.notes if "confirmation: " in note]
    assert sorted(noted) == [f"client {p}" for p in silent]
    assert made.rounds.report.refused == {}
    assert made.rounds.report.accepted
    assert made.rounds.report.values["rebuilt"] == 0
    assert (kept(made).replica is None) == (not holds_model)


def test_a_server_that_went_astray_builds_its_replica_again_and_votes_anew() -> None:
    made = ended({0: R, 1: X}, holds_model=True, spoil=True)
    assert kept(made).journal.records[-1].fingerprint == R.hex()
    assert made.rounds.report.values["rebuilt"] == 1
    assert "the server's replica had gone astray and was built again" in made.rounds.report.notes


def test_a_dead_worker_ends_the_run_also_while_it_confirms() -> None:
    made = strategy()
    seat(made, 2)

    def answer(partition: int, message: Message) -> RecordDict | Error:
        if message.content.config_records["journal"].get("confirm"):
            return Error(0, "actor died")
        return reply(int(message.content["config"]["server-round"]), GOOD)  # type: ignore[index, call-overload]

    grid = ScriptedGrid(answer)
    train(made, grid, 1, {}, lr=0.1)
    assert len(grid.sent) == 2
    with pytest.raises(RoundFailedError, match="round 2, client 0: its worker process died"):
        train(made, grid, 2, {}, lr=0.1)


@pytest.mark.parametrize("count", [float("nan"), float("inf"), [3], 0, -1, 2.5], ids=str)
def test_an_evaluation_without_a_count_of_examples_is_left_out(count: Any) -> None:
    made = strategy()
    seat(made, 2)
    counts = {0: count, 1: 4}
    grid = ScriptedGrid(
        lambda partition, message: RecordDict(
            {"metrics": MetricRecord({"num-examples": counts[partition], "loss": 0.5})}
        )
    )
    assert evaluate(made, grid, 1, {}) == ({1: {"loss": 0.5}}, {1: 4})


def test_a_metric_that_is_no_count_ends_no_run() -> None:
    made = strategy()
    made.rounds.begin(1, {}, [0])
    content = reply(1, GOOD)
    content["metrics"]["rebuilt"] = float("nan")  # type: ignore[index]  # a metric record
    made.receive(0, content, {})
    made.rounds.end()
    assert made.rounds.report.folded == [0]
    assert made.rounds.report.values["rebuilt"] == 0


def test_a_client_that_lacks_the_journal_twice_is_not_measured_and_spoils_no_mean() -> None:
    made = strategy()
    play(made, 1, {0: GOOD, 1: GOOD})
    seat(made, 2)
    lacks = {"scalars": ConfigRecord({"need-from": 0}), "metrics": MetricRecord({"num-examples": 9})}
    good = {"metrics": MetricRecord({"num-examples": 4, "test-loss": 0.5})}
    grid = ScriptedGrid(lambda partition, message: RecordDict(good if partition else lacks))
    assert evaluate(made, grid, 1, {}) == ({1: {"test-loss": 0.5}}, {1: 4})
    assert [message.metadata.dst_node_id for message in grid.sent] == [FIRST_NODE, FIRST_NODE + 1, FIRST_NODE]
    again = grid.sent[-1]
    assert again.metadata.message_type == "evaluate"
    assert unpack_slice(again.content.config_records["journal"], "server").after == 0
    assert made.rounds.report.notes == [
        "client 0 lacks the journal from round 0: it is sent again",
        "client 0 was not measured: it lacks the journal from round 0",
    ]


def test_clients_are_asked_only_where_a_fingerprint_is_due_and_get_that_round_only() -> None:
    made = strategy()
    seat(made, 2)

    def answer(partition: int, message: Message) -> RecordDict:
        if message.content.config_records["journal"].get("confirm"):
            return reply(2, b"", fingerprint=R)
        return reply(int(message.content["config"]["server-round"]), GOOD)  # type: ignore[index, call-overload]

    grid = ScriptedGrid(answer)
    train(made, grid, 1, {}, lr=0.1)
    assert len(grid.sent) == 2
    train(made, grid, 2, {}, lr=0.1)
    assert [message.metadata.dst_node_id - FIRST_NODE for message in grid.sent[4:]] == [0, 1]
    content = grid.sent[4].content
    part = unpack_slice(content.config_records["journal"], "server")
    (record,) = part.records
    assert (part.after, part.through, record.round, record.fingerprint) == (1, 2, 2, None)
    assert content.config_records["journal"]["confirm"] is True
    assert content.config_records["config"]["last-folded"] == 2
    assert kept(made).journal.records[-1].fingerprint == R.hex()


def test_a_client_that_lost_its_journal_before_it_confirms_has_no_vote() -> None:
    """It does not measure the round again, and its replica before the round is not what it votes for."""
    made = strategy(fingerprint_every=1)
    seat(made, 3)
    made.model()

    def answer(partition: int, message: Message) -> RecordDict:
        if not message.content.config_records["journal"].get("confirm"):
            return reply(1, GOOD, fingerprint=X)
        if partition == 1:
            return RecordDict({"arrays": ArrayRecord({}), "scalars": ConfigRecord({"need-from": 0})})
        return reply(1, b"", fingerprint=R1)

    grid = ScriptedGrid(answer)
    train(made, grid, 1, {}, lr=0.1)
    assert [message.metadata.dst_node_id - FIRST_NODE for message in grid.sent] == [0, 1, 2] * 2
    assert kept(made).journal.records[-1].fingerprint == R1.hex()
    (note,) = made.rounds.report.notes
    assert note.startswith("client 1, confirmation: expected the fingerprint")
    assert made.rounds.report.values["resent"] == 0


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
    second = HiSo(first.settings, own=first.own, rule=first.scheme.method, tau=TAU)
    second.load_state(first.state(), first.rounds.last_folded)
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
    second = HiSo(first.settings, own=first.own, rule=first.scheme.method, tau=TAU)
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


def test_numbers_come_from_the_settings() -> None:
    config = {
        "method": "hiso-momentum", "local-steps": 3, "seed": 2**63 - 1, "hiso-momentum.num-probes": 4,
        "hiso-momentum.clip": 2.0, "hiso-momentum.hessian-update": "round-mean", "hiso-momentum.momentum": 0.25,
        "hiso-momentum.distribution": "rademacher", "hiso-momentum.aggregation": "trimmed-mean",
    }  # fmt: skip
    made = HiSo.from_settings(resolve_settings(config, "torch"), "e")
    own: Any = made.own
    assert (made.tau, own.num_probes, own.clip, own.momentum) == (3, 4, 2.0, 0.25)
    assert (made.scheme.method, made.scheme.seed) == ("hiso-momentum", 2**63 - 1)
    assert made.scheme.hessian_update is HessianUpdate.ROUND_MEAN
    assert (made.scheme.distribution, own.aggregation) == ("rademacher", Aggregation.TRIMMED_MEAN)
    assert made.settings.weighting == "uniform"
    plain = HiSo.from_settings(resolve_settings({"method": "decomfl"}, "torch"), "e")
    plain.open_journal(MODEL, ["w", "b"])
    plain._lr = 0.1
    play(plain, 1, {0: [3e3] * 5})  # one step of five probes, and no bound on them
    (record,) = kept(plain).journal.records
    assert (record.nu, record.eps, record.momentum, record.scalars) == (0.0, 0.0, None, ((3e3,) * 5,))


@pytest.mark.parametrize("method", ["hiso", "decomfl", "hiso-momentum"])
def test_steps_must_be_counted_and_the_task_be_torch(method: str) -> None:
    with pytest.raises(SettingsError, match="setting 'local-steps': expected at least 1"):
        HiSo.from_settings(resolve_settings({"method": method, "local-steps": 0}, "torch"), "e")
    with pytest.raises(SettingsError, match=f"method '{method}': expected a torch task, got 'a9a', a convex task"):
        resolve_settings({"method": method, "task": "a9a"})
    with pytest.raises(SettingsError, match=r"expected at least 1: .* got 0"):
        HiSo(rule=method, tau=0)


def test_flowers_own_calls_work_without_a_file() -> None:
    """A client that lacks the journal is sent it again within the round; one that still lacks it then is refused."""
    made = HiSo(RoundSettings(seed=3, weighting="uniform"), own=OWN["hiso"], tau=TAU)
    assert isinstance(made, Strategy)
    seat(made, 2)
    lacks = {
        "arrays": ArrayRecord({}),
        "scalars": ConfigRecord({"need-from": 0}),
        "metrics": MetricRecord({"num-examples": 1}),
    }
    grid = ScriptedGrid(lambda partition, message: RecordDict(lacks) if partition else reply(1, GOOD))
    arrays = {name: MODEL[name] for name in ("w", "b")}
    with pytest.raises(MessageError, match="train config, entry 'lr': expected a number, got None"):
        train(made, grid, 1, arrays)
    new, metrics = train(made, grid, 1, arrays, lr=0.1)
    assert [message.metadata.dst_node_id - FIRST_NODE for message in grid.sent] == [0, 1, 1]
    assert [len(message.content.array_records["arrays"]) for message in grid.sent] == [0, 0, 0]
    assert new is not None
    assert {n: v.tobytes() for n, v in new.items()} == {n: v.tobytes() for n, v in made.model().items()}
    assert new["w"].tobytes() != MODEL["w"].tobytes()
    assert metrics is not None
    assert "got that it lacks the journal from round 0" in made.rounds.report.refused[1]
    assert made.rounds.report.values == {"rebuilt": 0, "resent": 1}
    assert [record.participants for record in kept(made).journal.records] == [1]
