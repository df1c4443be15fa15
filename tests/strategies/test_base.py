"""Flower's side of a round: what is composed, asked again and refused, with a method of a few lines."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.superlink.grid import HttpGrid
from typing_extensions import override

import fedapps
from fedapps.errors import MessageError, RoundFailedError
from fedapps.messages import Arrays, Records, Reply, pack_arrays
from fedapps.messages.node_facts import NodeFacts
from fedapps.messages.schema import payload_bytes
from fedapps.settings import RoundSettings
from fedapps.strategies import RoundStrategy
from fedapps.strategies.base import mean_metrics
from fedapps.strategies.exchange import GridWrapper
from fedapps.strategies.rounds import FollowUp

from .scripted_grid import FIRST_NODE, Answer, ScriptedGrid, evaluate, seat, train

MODEL = {"w": np.array([1.0, 2.0], np.float32)}


class Sum(RoundStrategy):
    """Adds the clients' tensors to the model. Clients that lack the key ask again; some are asked a second question."""

    def __init__(self, settings: RoundSettings | None = None, follow_up: FollowUp | None = None, **rounds: Any) -> None:
        super().__init__(settings, **rounds)
        self.asked, self.has_asked = follow_up, False
        self.sends_key: set[int] = set()
        self.calls: list[tuple[int, int]] = []
        self.answers: dict[int, dict[str, Any]] = {}

    @override
    def begin(self, model: Arrays) -> None:
        self.total, self.has_asked = dict(model), False

    @override
    def fold(self, reply: Reply) -> None:
        self.total = {name: self.total[name] + value for name, value in reply.arrays.items()}

    @override
    def finish(self) -> Arrays:
        return self.total

    @override
    def records_for(self, partition: int, through: int, model: Arrays) -> Records:
        self.calls.append((partition, through))
        own = {"key": {"value": 7}} if partition in self.sends_key else {}
        return {**super().records_for(partition, through, model), **own, "config": {"client": partition}}

    @override
    def asks_again(self, partition: int, content: RecordDict) -> str:
        if "lacks" not in content:
            return ""
        self.sends_key.add(partition)
        return "the key"

    @override
    def follow_up(self, *, enough: bool) -> FollowUp | None:
        asked, self.has_asked = None if self.has_asked else self.asked, True
        return asked

    @override
    def answer(self, reply: Reply) -> None:
        if "answer" not in reply.entries:
            raise MessageError(reply.where, expected="an answer", got=", ".join(reply.entries))
        self.answers[reply.partition] = dict(reply.entries["answer"])


def reply(value: float = 1.0, num_examples: int = 1, **metrics: float) -> RecordDict:
    return RecordDict(
        {
            "arrays": pack_arrays({"w": np.full(2, value, np.float32)}),
            "metrics": MetricRecord({"num-examples": num_examples, **metrics}),
        }
    )


def lacks() -> RecordDict:
    return RecordDict(
        {"lacks": ConfigRecord({}), "arrays": ArrayRecord({}), "metrics": MetricRecord({"num-examples": 1})}
    )


def strategy_of(clients: int = 3, **settings: Any) -> Sum:
    made = Sum(RoundSettings(**settings))
    seat(made, clients)
    return made


def nodes(grid: ScriptedGrid) -> list[int]:
    return [message.metadata.dst_node_id - FIRST_NODE for message in grid.sent]


def config_of(message: Message) -> dict[str, Any]:
    return dict(message.content.config_records["config"])


# What is sent ---------------------------------------------------------------------------------------------


def test_a_message_holds_the_model_the_rounds_entries_and_the_clients_own() -> None:
    strategy, grid = strategy_of(round_timeout=30.0), ScriptedGrid(lambda partition, message: reply())
    strategy.roster.experiment = "e"
    new, _ = train(strategy, grid, 1, MODEL, lr=0.5)
    assert new is not None
    np.testing.assert_array_equal(new["w"], [4.0, 5.0])
    train(strategy, grid, 2, new, lr=0.25)
    assert nodes(grid) == [0, 1, 2] * 2
    for number, message in enumerate(grid.sent):
        server_round, partition = 1 + number // 3, number % 3
        assert config_of(message) == {
            "lr": 0.5 / server_round, "server-round": server_round, "experiment": "e",
            "last-folded": server_round - 1, "client": partition,
        }  # fmt: skip
        assert (message.metadata.message_type, message.metadata.group_id) == ("train", str(server_round))
        assert message.metadata.ttl == 90.0
    assert strategy.calls == [(p, through) for through in (0, 1) for p in range(3)]


@pytest.mark.parametrize("phase", ["train", "evaluate", "follow-up"])
def test_arrays_that_go_to_every_client_are_packed_once(phase: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a record for all there is one object, not one a client; the model is the record that came in, never packed anew."""
    shared: Arrays = {"direction": np.ones(2, np.float32)}
    own = {p: {"shift": np.full(1, p, np.float32)} for p in range(3)}
    strategy = strategy_of()
    strategy.asked = FollowUp("more", {p: {"direction": shared, "own": own[p]} for p in range(3)})
    packed: list[Any] = []
    monkeypatch.setattr(
        "fedapps.messages.schema.pack_arrays", lambda arrays: (packed.append(arrays), pack_arrays(arrays))[1]
    )
    answer = RecordDict({"answer": ConfigRecord({"x": 1})})
    grid = ScriptedGrid(lambda partition, message: answer if "direction" in message.content else reply())
    (evaluate if phase == "evaluate" else train)(strategy, grid, 1, MODEL)
    first = [message.content["arrays"] for message in grid.sent[:3]]
    assert first[0] is first[1] is first[2]
    if phase == "follow-up":
        sent = [message.content for message in grid.sent[3:]]
        assert sent[0]["direction"] is sent[1]["direction"] is sent[2]["direction"]
        assert [float(content["own"]["shift"].numpy()[0]) for content in sent] == [0, 1, 2]
        assert [id(arrays) for arrays in packed] == [id(shared) if n == 0 else id(own[n - 1]) for n in (0, 1, 2, 3)]
    elif phase == "evaluate":
        assert packed == []


def test_the_limit_counts_the_whole_message_with_its_entries() -> None:
    """Eight bytes of model; what goes over the limit is the record of entries, and the error says so."""
    strategy, grid = strategy_of(1), ScriptedGrid(lambda partition, message: reply())
    train(strategy, grid, 1, MODEL)
    sizes = payload_bytes(grid.sent[0].content)
    assert sizes["arrays"] == 8
    total = sum(sizes.values())
    train(strategy_of(1, max_message_mb=total / 1e6), grid, 1, MODEL)
    with pytest.raises(MessageError, match=r"largest parts being config \("):
        train(strategy_of(1, max_message_mb=(total - 1) / 1e6), grid, 1, MODEL)
    large = strategy_of(1, max_message_mb=total / 1e6)
    large.sends_key.add(0)
    with pytest.raises(MessageError, match=r"config \(.*key \("):
        train(large, grid, 1, MODEL)
    with pytest.raises(MessageError, match="at most 5e-06 MB"):
        evaluate(strategy_of(1, max_message_mb=5e-6), grid, 1, MODEL)


def test_a_client_whose_node_is_gone_is_refused_and_the_others_go_on() -> None:
    strategy, grid = strategy_of(), ScriptedGrid(lambda partition, message: reply())
    del strategy.roster.node_of[1]
    new, _ = train(strategy, grid, 1, MODEL)
    assert new is not None
    assert nodes(grid) == [0, 2]
    assert strategy.rounds.report.folded == [0, 2]
    assert strategy.rounds.report.refused == {1: "its node is gone"}


def test_a_round_below_the_quorum_gives_nothing() -> None:
    strategy = strategy_of(min_replies=2, round_timeout=0.1)
    grid = ScriptedGrid(lambda partition, message: None if partition else reply())
    assert train(strategy, grid, 1, MODEL) == (None, None)
    assert strategy.rounds.report.refused == {1: "no reply within 0.1 s", 2: "no reply within 0.1 s"}


def test_metrics_are_averaged_by_examples_over_what_every_client_reports() -> None:
    strategy = strategy_of(2)
    replies = {0: reply(num_examples=10, loss=1.0, extra=5.0), 1: reply(num_examples=30, loss=2.0)}
    _, metrics = train(strategy, ScriptedGrid(lambda partition, message: replies[partition]), 1, MODEL)
    assert dict(metrics or {}) == {"loss": 1.75}


# What is refused ------------------------------------------------------------------------------------------


def test_an_array_record_that_was_not_announced_is_refused() -> None:
    def answer(partition: int, message: Message) -> RecordDict:
        content = reply()
        if partition == 1:
            content["curvature"] = pack_arrays({"w": np.ones(2, np.float32)})
        return content

    strategy = strategy_of()
    train(strategy, ScriptedGrid(answer), 1, MODEL)
    assert strategy.rounds.report.folded == [0, 2]
    assert strategy.rounds.report.refused == {
        1: "client 1: expected records of arrays among arrays, buffers, got one called 'curvature'"
    }


def test_a_reply_that_nobody_waits_for_is_ignored(caplog: pytest.LogCaptureFixture) -> None:
    """One to another round's message, and one that comes twice."""
    caplog.set_level(logging.WARNING, "flwr")
    strategy, grid = strategy_of(1), ScriptedGrid(lambda partition, message: reply())
    train(strategy, grid, 1, MODEL)
    (asked,) = strategy.configure_train(2, pack_arrays(MODEL), ConfigRecord({}), grid)
    grid.push_messages([asked])
    old, new = (Message(reply(value), reply_to=message) for value, message in ((100.0, grid.sent[0]), (1.0, asked)))
    arrays, _ = strategy.aggregate_train(2, [old, new, Message(reply(100.0), reply_to=asked)])
    assert arrays is not None
    np.testing.assert_array_equal(arrays["w"].numpy(), [2.0, 3.0])
    assert caplog.messages == [
        f"a reply from node {FIRST_NODE} that nobody waits for is ignored",
        "client 0: a reply that nobody waits for is ignored",
    ]


def test_an_error_reply_is_a_failed_client_and_a_dead_worker_ends_the_run() -> None:
    def failing(code: int) -> Callable[[int, Message], Answer]:
        return lambda partition, message: Error(code, "Traceback\nMemoryError: x") if partition == 1 else reply()

    strategy = strategy_of()
    train(strategy, ScriptedGrid(failing(2)), 1, MODEL)
    assert strategy.rounds.report.refused == {1: "Traceback\nMemoryError: x"}
    with pytest.raises(RoundFailedError, match=r"round 1, client 1: its worker process died \(MemoryError: x\)"):
        train(strategy_of(), ScriptedGrid(failing(0)), 1, MODEL)
    # A machine of somebody else's says what it likes.
    strategy, grid = strategy_of(), ScriptedGrid(failing(0))
    grid.inner = object.__new__(HttpGrid)
    train(strategy, GridWrapper(grid), 1, MODEL)
    assert strategy.rounds.report.refused == {1: "Traceback\nMemoryError: x"}


# Asking again ---------------------------------------------------------------------------------------------


def test_a_client_that_lacks_something_gets_its_message_again_in_training() -> None:
    strategy = strategy_of()
    grid = ScriptedGrid(lambda p, message: lacks() if p == 1 and "key" not in message.content else reply(p))
    new, _ = train(strategy, grid, 1, MODEL)
    assert new is not None
    assert nodes(grid) == [0, 1, 2, 1]
    assert grid.sent[3].content.config_records["key"]["value"] == 7
    assert config_of(grid.sent[3]) == config_of(grid.sent[1])
    assert strategy.rounds.report.folded == [0, 1, 2]
    assert strategy.rounds.report.notes == ["client 1 lacks the key: it is sent again"]
    np.testing.assert_array_equal(new["w"], [4.0, 5.0])


def test_a_client_is_sent_its_message_again_once_a_phase() -> None:
    """Training and evaluation are two phases: in each it is sent again once, and then refused or left out."""
    strategy, grid = strategy_of(2), ScriptedGrid(lambda p, message: reply(loss=0.5) if p == 0 else lacks())
    train(strategy, grid, 1, MODEL)
    assert nodes(grid) == [0, 1, 1]
    assert strategy.rounds.report.folded == [0, 1]  # `Sum` folds what it is given: of a second such reply, nothing.
    grid.sent.clear()
    assert evaluate(strategy, grid, 1, MODEL) == ({0: {"loss": 0.5}}, {0: 1})
    assert nodes(grid) == [0, 1, 1]
    assert {message.metadata.message_type for message in grid.sent} == {"evaluate"}
    assert strategy.rounds.report.notes == [
        "client 1 lacks the key: it is sent again",
        "client 1 lacks the key: it is sent again",
        "client 1 was not measured: it lacks the key",
    ]
    grid.sent.clear()
    train(strategy, grid, 2, MODEL)
    assert nodes(grid) == [0, 1, 1]


def test_a_client_that_has_what_it_lacked_is_measured() -> None:
    strategy = strategy_of(2)
    grid = ScriptedGrid(lambda p, message: lacks() if p and "key" not in message.content else reply(loss=0.5 + p))
    assert evaluate(strategy, grid, 3, MODEL) == ({0: {"loss": 0.5}, 1: {"loss": 1.5}}, {0: 1, 1: 1})
    assert strategy.calls == [(0, 3), (1, 3), (1, 3)]


# Follow-ups -----------------------------------------------------------------------------------------------


def test_a_follow_up_tells_clients_that_this_rounds_reply_counted() -> None:
    """They go on from what they kept with it: ``last-folded`` is the present round, not the last accepted one."""
    strategy = strategy_of()
    strategy.asked = FollowUp("question", {0: {"question": {"x": 1}}, 2: {"question": {"x": 3}}})

    def answer(partition: int, message: Message) -> Answer:
        if "question" not in message.content:
            return reply()
        x = message.content.config_records["question"]["x"]
        return RecordDict({"answer": ConfigRecord({"x": 2 * x})})  # type: ignore[operator, dict-item]

    grid = ScriptedGrid(answer)
    train(strategy, grid, 1, MODEL)
    train(strategy, grid, 2, MODEL, lr=0.5)
    assert nodes(grid) == [0, 1, 2, 0, 2] * 2
    assert strategy.answers == {0: {"x": 2}, 2: {"x": 6}}
    first, second = grid.sent[5:8], grid.sent[8:]
    assert [config_of(message)["last-folded"] for message in first] == [1, 1, 1]
    assert [config_of(message)["last-folded"] for message in second] == [2, 2]
    assert list(second[0].content) == ["question", "config"]
    assert config_of(second[0]) == {"lr": 0.5, "server-round": 2, "experiment": "", "last-folded": 2}
    assert strategy.rounds.last_folded == {0: 2, 1: 2, 2: 2}


def test_an_answer_that_fails_is_one_of_the_follow_up() -> None:
    strategy = strategy_of(min_replies=2)
    strategy.asked = FollowUp("question", {p: {"question": {}} for p in range(3)})
    answer = RecordDict({"answer": ConfigRecord({"x": 1})})
    grid = ScriptedGrid(
        lambda p, message: reply() if "question" not in message.content else Error(2, "boom") if p == 1 else answer
    )
    new, _ = train(strategy, grid, 1, MODEL)
    assert new is not None
    assert strategy.rounds.report.refused == {1: "question: boom"}
    assert strategy.answers == {0: {"x": 1}, 2: {"x": 1}}


def test_after_a_round_that_a_follow_up_spoiled_clients_hear_that_it_did_not_count() -> None:
    """They go back to what they kept in round 1, in evaluation too."""
    strategy = strategy_of(2, min_replies=2)
    grid = ScriptedGrid(lambda p, message: reply() if "question" not in message.content else Error(2, "boom"))
    train(strategy, grid, 1, MODEL)
    strategy.asked = FollowUp("question", {0: {"question": {}}})
    assert train(strategy, grid, 2, MODEL) == (None, None)
    assert strategy.rounds.report.folded == [0, 1]
    grid.sent.clear()
    evaluate(strategy, grid, 2, MODEL)
    assert [config_of(message)["last-folded"] for message in grid.sent] == [1, 1]


def test_in_a_follow_up_nobody_gets_a_message_again() -> None:
    """The first message of the round would make the client train once more, and its reply no answer."""
    strategy = strategy_of(2)
    strategy.asked = FollowUp("question", {0: {"question": {}}})
    grid = ScriptedGrid(lambda p, message: reply(loss=0.5) if "question" not in message.content else lacks())
    train(strategy, grid, 1, MODEL)
    assert nodes(grid) == [0, 1, 0]
    assert strategy.rounds.report.notes == []
    strategy.sends_key.clear()
    again = ScriptedGrid(lambda p, message: reply(loss=0.5) if "key" in message.content else lacks())
    assert evaluate(strategy, again, 1, MODEL)[1] == {0: 1, 1: 1}


# Evaluation -----------------------------------------------------------------------------------------------


def test_evaluation_leaves_out_who_failed_or_has_no_data_and_averages_the_others() -> None:
    strategy = strategy_of(4)
    answers: dict[int, Answer] = {
        0: RecordDict({"metrics": MetricRecord({"num-examples": 10, "loss": 1.0})}),
        1: Error(2, "boom"),
        2: RecordDict({"metrics": MetricRecord({"num-examples": 0, "loss": 9.0})}),
        3: RecordDict({"metrics": MetricRecord({"num-examples": 30, "loss": 2.0})}),
    }
    grid = ScriptedGrid(lambda partition, message: answers[partition])
    assert evaluate(strategy, grid, 1, MODEL) == ({0: {"loss": 1.0}, 3: {"loss": 2.0}}, {0: 10, 3: 30})
    assert config_of(grid.sent[0])["server-round"] == 1
    messages = strategy.configure_evaluate(1, pack_arrays(MODEL), ConfigRecord({}), grid)
    grid.push_messages(messages)
    replies = grid.pull_messages([message.metadata.message_id for message in messages])
    assert dict(strategy.aggregate_evaluate(1, replies) or {}) == {"loss": 1.75}
    assert strategy.aggregate_evaluate(1, []) is None


def test_without_client_evaluation_nobody_is_asked() -> None:
    strategy = Sum(fraction_evaluate=0.0)
    seat(strategy, 2)
    assert (
        list(strategy.configure_evaluate(1, pack_arrays(MODEL), ConfigRecord({}), ScriptedGrid(lambda p, m: None)))
        == []
    )


def test_replies_before_any_message_are_an_error_of_the_caller() -> None:
    with pytest.raises(RuntimeError, match="call configure_train or configure_evaluate first"):
        strategy_of().aggregate_train(1, [])


def test_a_remark_of_a_kind_is_made_once_a_run(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "flwr")
    strategy = strategy_of()
    for text in ("first", "second"):
        strategy.note_once("kind", text)
    strategy.note_once("other", "third")
    assert strategy.rounds.report.notes == ["first", "third"]


def facts(partition: int, num_examples: int) -> NodeFacts:
    return NodeFacts(partition, 3, num_examples, fedapps.__version__, "sum", "cpu", "")


def test_a_weight_that_the_node_did_not_tell_is_refused() -> None:
    strategy = strategy_of()
    strategy.roster.facts = {p: facts(p, 5) for p in range(3)}
    grid = ScriptedGrid(lambda p, m: reply(num_examples=10**9 if p == 1 else 5))
    train(strategy, grid, 1, MODEL)
    assert strategy.rounds.report.folded == [0, 2]
    assert "expected the 5 examples that its node told, got 1000000000" in strategy.rounds.report.refused[1]


def test_where_the_task_is_known_no_client_says_what_a_buffer_is() -> None:
    strategy = strategy_of()
    strategy.trainable = frozenset({"w"})

    def answer(partition: int, message: Message) -> RecordDict:
        content = reply()
        if partition == 0:
            content["buffers"], content["arrays"] = content["arrays"], pack_arrays({})
        return content

    train(strategy, ScriptedGrid(answer), 1, MODEL)
    assert strategy.rounds.report.folded == [1, 2]
    assert "tensor 'w'" in strategy.rounds.report.refused[0]


@pytest.mark.parametrize("metrics", [{f"m{i}": 1.0 for i in range(201)}, {"m" * 201: 1.0}], ids=["many", "long"])
def test_too_many_metrics_are_refused_in_training_and_left_out_in_evaluation(metrics: dict[str, float]) -> None:
    strategy = strategy_of()
    grid = ScriptedGrid(lambda p, m: reply(**metrics) if p == 0 else reply())
    train(strategy, grid, 1, MODEL)
    assert strategy.rounds.report.folded == [1, 2]
    assert "expected at most 200 metrics" in strategy.rounds.report.refused[0]
    assert list(evaluate(strategy, grid, 1, MODEL)[0]) == [1, 2]


def test_a_value_that_is_not_finite_spoils_no_mean_and_the_number_of_clients_is_said() -> None:
    means = mean_metrics(
        {0: {"a": 1.0, "b": np.nan}, 1: {"a": np.inf, "b": np.nan}, 2: {"a": 4.0, "b": np.nan}}, {0: 1, 1: 5, 2: 2}
    )
    assert means["a"] == pytest.approx((1 * 1 + 2 * 4) / 3)
    assert means["a-clients"] == 2
    assert np.isnan(means["b"])
    assert means["b-clients"] == 0
    assert "a-clients" not in mean_metrics({0: {"a": 1.0}}, {0: 1})
