"""A round without Flower: who counts, in which order, what fails, what follows; and sampling."""

from __future__ import annotations

import itertools
import logging
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fedapps.errors import CurvatureError, MessageError, RoundFailedError, SettingsError
from fedapps.messages.schema import STORE_LOST, Arrays, Reply
from fedapps.settings import RoundSettings
from fedapps.strategies.rounds import REASON_LENGTH, FollowUp, RoundMethod, Rounds, sample_partitions

MODEL = {"x": np.zeros(1)}


class Total(RoundMethod):
    """Adds up the clients' numbers; those below zero are refused. It may ask for further exchanges."""

    def __init__(self, *follow_ups: FollowUp) -> None:
        self.follow_ups = follow_ups
        self.folded: list[int] = []
        self.answered: list[tuple[str, int]] = []
        self.enough: list[bool] = []
        self.finished = 0

    def begin(self, model: Arrays) -> None:
        self.model, self.sum, self.left = model, 0.0, list(self.follow_ups)

    def fold(self, reply: Reply) -> None:
        value = float(reply.arrays["x"][0])
        if value < 0:
            raise MessageError(reply.where, expected="a number of at least 0", got=str(value))
        if value == np.inf:
            raise CurvatureError(reply.where, expected="a finite number", got="infinity")
        self.folded.append(reply.partition)
        self.sum += value

    def follow_up(self, *, enough: bool) -> FollowUp | None:
        self.enough.append(enough)
        self.asked = self.left.pop(0) if self.left else None
        return self.asked

    def answer(self, reply: Reply) -> None:
        if reply.entries != {"answer": {"yes": True}}:
            raise MessageError(reply.where, expected="an answer", got=str(dict(reply.entries)))
        self.answered.append((self.asked.name, reply.partition))  # type: ignore[union-attr]

    def finish(self) -> Arrays:
        self.finished += 1
        return {"x": self.model["x"] + self.sum}


def reply_of(partition: int, value: float = 1.0, **metrics: float) -> Reply:
    return Reply(partition, 10 + partition, dict(metrics), {"x": np.array([value])})


def answer_of(partition: int, *, good: bool = True) -> Reply:
    return Reply(partition, 0, {}, entries={"answer": {"yes": True}} if good else {})


def begun(sampled: Any, method: Total | None = None, **settings: Any) -> tuple[Rounds, Total]:
    method = method or Total()
    rounds = Rounds(method, RoundSettings(**settings))
    rounds.begin(1, MODEL, sampled)
    return rounds, method


@pytest.mark.parametrize("buffer_mb", [0.0, 256.0], ids=["on disk", "in memory"])
def test_replies_are_folded_by_partition_whatever_their_order(buffer_mb: float) -> None:
    """Numbers whose sum depends on the order of its terms: one order, one sum."""
    values = {1: 1e16, 4: 1.0, 6: -0.0, 9: 1.0}
    sums = set()
    for order in itertools.permutations(values):
        rounds, method = begun([9, 4, 1, 6], fold_buffer_mb=buffer_mb)
        assert rounds.report.sampled == rounds.awaited == [1, 4, 6, 9]
        for partition in order:
            rounds.receive(partition, reply_of(partition, values[partition]))
        new = rounds.end()
        assert new is not None
        assert method.folded == rounds.report.folded == [1, 4, 6, 9]
        sums.add(new["x"].tobytes())
    assert len(sums) == 1


def test_the_report_and_the_last_folded_rounds_tell_who_counted() -> None:
    rounds, _ = begun([0, 1, 2])
    rounds.receive(0, reply_of(0, loss=0.5))
    rounds.receive(1, reply_of(1, -1.0))
    rounds.receive(2, None, "sensor offline")
    new = rounds.end()
    assert new is not None
    assert new["x"] == 1.0
    report = rounds.report
    assert (report.server_round, report.folded, report.accepted) == (1, [0], True)
    assert report.refused == {1: "client 1: expected a number of at least 0, got -1.0", 2: "sensor offline"}
    assert (report.num_examples, report.metrics) == ({0: 10}, {0: {"loss": 0.5}})
    rounds.begin(2, MODEL, [1])
    rounds.receive(1, reply_of(1))
    rounds.end()
    assert rounds.last_folded == {0: 1, 1: 2}
    assert rounds.report.refused == {}


def test_an_error_of_the_mathematics_refuses_a_reply_as_a_malformed_one_does() -> None:
    rounds, method = begun([0, 1])
    rounds.receive(0, reply_of(0, np.inf))
    rounds.receive(1, reply_of(1))
    assert rounds.end() is not None
    assert method.folded == [1]
    assert "client 0: expected a finite number" in rounds.report.refused[0]


def test_a_client_that_has_lost_what_it_kept_is_noted_with_the_round() -> None:
    rounds, _ = begun([3])
    rounds.load_state({"failed-in-a-row": 0}, {3: 7})
    rounds.receive(3, reply_of(3, **{STORE_LOST: 1.0}))
    rounds.end()
    assert rounds.report.notes == ["client 3 has lost what it kept since round 7"]


# Failures -------------------------------------------------------------------------------------------------


def test_a_round_below_the_quorum_changes_nothing_and_the_next_one_may_be_accepted() -> None:
    rounds, method = begun([0, 1, 2], min_replies=2)
    rounds.receive(1, reply_of(1))
    rounds.receive(2, None, "Traceback\n  File x\nValueError: sensor offline")
    assert rounds.end() is None
    assert (method.finished, rounds.report.accepted, rounds.failed_in_a_row) == (0, False, 1)
    assert rounds.report.refused[0] == "no reply within 3600 s"
    assert rounds.last_folded == {}
    rounds.begin(2, MODEL, [0, 1, 2])
    for partition in (0, 2):
        rounds.receive(partition, reply_of(partition))
    assert rounds.end() == {"x": np.array([2.0])}
    assert (method.finished, rounds.failed_in_a_row, rounds.last_folded) == (1, 0, {0: 2, 2: 2})


def test_failed_rounds_in_a_row_end_the_run_and_an_accepted_one_starts_the_count_anew() -> None:
    rounds, _ = begun([0, 1], max_consecutive_failed_rounds=2, min_replies=2)
    for number, succeeds in enumerate([False, True, False], start=1):
        rounds.begin(number, MODEL, [0, 1])
        for partition in (0, 1) if succeeds else ():
            rounds.receive(partition, reply_of(partition))
        assert (rounds.end() is not None) == succeeds
    resumed = Rounds(Total(), RoundSettings(max_consecutive_failed_rounds=2, min_replies=2))
    resumed.load_state(rounds.state(), rounds.last_folded)
    assert resumed.last_folded == {0: 2, 1: 2}
    for each in (rounds, resumed):
        each.begin(4, MODEL, [0, 1])
        each.receive(0, reply_of(0))
        each.receive(1, None, "Traceback\nValueError: sensor offline")
        with pytest.raises(
            RoundFailedError,
            match=r"round 4: expected at least 2 valid replies, got 1 of 2 \(client 1: ValueError: sensor offline\)"
            r".*failure 2 in a row",
        ):
            each.end()


@pytest.mark.parametrize("error", [MessageError, CurvatureError])
def test_a_round_that_the_method_cannot_end_changes_nothing_and_counts_as_failed(
    caplog: pytest.LogCaptureFixture, error: type[MessageError | CurvatureError]
) -> None:
    class Singular(Total):
        def finish(self) -> Arrays:
            if not self.finished:
                self.finished += 1
                raise error("layer 'fc'", expected="a positive definite block", got="one that is zero everywhere")
            return super().finish()

    rounds, _ = begun([0], Singular())
    rounds.receive(0, reply_of(0))
    assert rounds.end() is None
    assert (rounds.report.accepted, rounds.failed_in_a_row, rounds.last_folded) == (False, 1, {})
    assert "round 1: layer 'fc': expected a positive definite block" in caplog.text
    assert "the model is unchanged" in caplog.text
    rounds.begin(2, MODEL, [0])
    rounds.receive(0, reply_of(0))
    assert rounds.end() == {"x": np.array([1.0])}
    assert rounds.failed_in_a_row == 0


FAILURES: dict[str, tuple[Callable[[Rounds], object], str]] = {
    "error": (lambda rounds: rounds.receive(1, None, "sensor offline"), "sensor offline"),
    "malformed": (lambda rounds: rounds.receive(1, reply_of(1, -1.0)), "client 1: expected a number of at least 0"),
    "late": (lambda rounds: rounds.end(), "no reply within 0.5 s"),
}


@pytest.mark.parametrize(("fail", "reason"), FAILURES.values(), ids=FAILURES.keys())
def test_fail_fast_ends_the_run_at_the_first_failure(fail: Callable[[Rounds], object], reason: str) -> None:
    rounds, method = begun([0, 1], on_failure="fail-fast", round_timeout=0.5)
    rounds.receive(0, reply_of(0))
    with pytest.raises(RoundFailedError, match=rf"round 1, client 1: {reason}.*on-failure = fail-fast"):
        fail(rounds)
    assert method.finished == 0
    assert rounds.awaited == []
    with pytest.raises(RoundFailedError, match="not begun"):
        rounds.end()


def test_long_errors_are_cut_in_the_log_and_kept_in_the_report(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "flwr")
    rounds, _ = begun([0, 1])
    long = "the beginning" + "x" * 5 * REASON_LENGTH + "the end"
    rounds.receive(0, None, long)
    assert rounds.report.refused == {0: long}
    assert caplog.messages == ["round 1, client 0: ... " + long[-REASON_LENGTH:]]


def test_late_repeated_and_uninvited_replies_are_ignored(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "flwr")
    rounds, method = begun([0, 1])
    rounds.receive(0, reply_of(0))
    rounds.receive(0, reply_of(0, 100.0))
    rounds.receive(5, reply_of(5, 100.0))
    rounds.receive(0, None, "too late to fail")
    rounds.receive(1, reply_of(1))
    assert rounds.end() == {"x": np.array([2.0])}
    rounds.receive(1, reply_of(1, 100.0))
    assert rounds.report.refused == {}
    assert method.folded == [0, 1]
    assert caplog.messages == [f"client {p}: a reply that nobody waits for is ignored" for p in (0, 5, 0, 1)]


# Follow-ups -----------------------------------------------------------------------------------------------

ASK = {"question": {"how": "are you"}}


def test_follow_ups_are_held_one_after_the_other_with_answers_by_partition() -> None:
    first = FollowUp("first", dict.fromkeys([0, 2], ASK))
    second = FollowUp("second", {1: ASK})
    rounds, method = begun([0, 1, 2], Total(first, second))
    for partition in (2, 1, 0):
        rounds.receive(partition, reply_of(partition))
    assert not rounds.is_follow_up
    assert rounds.follow_up() == {0: ASK, 2: ASK}
    assert rounds.is_follow_up
    assert rounds.awaited == [0, 2]
    rounds.receive(2, answer_of(2))
    rounds.receive(1, answer_of(1))  # was not asked
    rounds.receive(0, answer_of(0))
    assert rounds.follow_up() == {1: ASK}
    rounds.receive(1, answer_of(1))
    assert rounds.follow_up() == {}
    assert method.answered == [("first", 0), ("first", 2), ("second", 1)]
    assert rounds.end() == {"x": np.array([3.0])}
    assert rounds.report.folded == [0, 1, 2]
    assert not rounds.is_follow_up


@pytest.mark.parametrize("required", [True, False])
def test_who_gives_no_answer_counts_only_where_none_is_required(required: bool) -> None:
    """A late, a failed and a malformed answer; the models of all four were folded and stay in the sum."""
    follow_up = FollowUp("vote", dict.fromkeys(range(4), ASK), required=required)
    rounds, method = begun(range(4), Total(follow_up), min_replies=2)
    for partition in range(4):
        rounds.receive(partition, reply_of(partition))
    rounds.follow_up()
    rounds.receive(0, answer_of(0))
    rounds.receive(1, None, "sensor offline")
    rounds.receive(2, answer_of(2, good=False))
    assert rounds.follow_up() == {}
    assert method.answered == [("vote", 0)]
    reasons = {
        1: "vote: sensor offline",
        2: "vote: expected an answer, got {}",
        3: "vote: no reply within 3600 s",
    }
    assert method.enough == [True, not required]
    new = rounds.end()
    if required:
        assert new is None
        assert rounds.report.refused == reasons
        assert rounds.report.notes == []
    else:
        assert new == {"x": np.array([4.0])}
        assert rounds.report.refused == {}
        assert sorted(rounds.report.notes) == [f"client {p}, {reason}" for p, reason in reasons.items()]
    assert rounds.report.folded == [0, 1, 2, 3]


def test_required_answers_above_the_quorum_accept_the_round() -> None:
    rounds, _ = begun(range(3), Total(FollowUp("vote", dict.fromkeys(range(3), ASK))), min_replies=2)
    for partition in range(3):
        rounds.receive(partition, reply_of(partition))
    rounds.follow_up()
    rounds.receive(0, answer_of(0))
    rounds.receive(1, answer_of(1))
    assert rounds.end() == {"x": np.array([3.0])}  # a client without an answer stays in the sum
    assert list(rounds.report.refused) == [2]
    assert rounds.last_folded == {0: 1, 1: 1, 2: 1}


@pytest.mark.parametrize("required", [True, False])
def test_fail_fast_holds_in_a_follow_up_whose_answers_are_required(required: bool) -> None:
    rounds, _ = begun([0], Total(FollowUp("vote", {0: ASK}, required=required)), on_failure="fail-fast")
    rounds.receive(0, reply_of(0))
    rounds.follow_up()
    if required:
        with pytest.raises(RoundFailedError, match=r"round 1, client 0: vote: sensor offline .*fail-fast"):
            rounds.receive(0, None, "sensor offline")
    else:
        rounds.receive(0, None, "sensor offline")
        assert rounds.end() == {"x": np.array([1.0])}


def test_the_method_hears_whether_the_replies_make_the_quorum() -> None:
    rounds, method = begun([0, 1], min_replies=2)
    rounds.receive(0, reply_of(0))
    assert rounds.follow_up() == {}
    assert method.enough == [False]
    assert rounds.report.refused == {1: "no reply within 3600 s"}


def test_a_follow_up_to_nobody_is_none() -> None:
    rounds, _ = begun([0], Total(FollowUp("vote", {})))
    rounds.receive(0, reply_of(0))
    assert rounds.follow_up() == {}
    assert rounds.end() == {"x": np.array([1.0])}


def test_rounds_end_after_they_begin() -> None:
    with pytest.raises(RoundFailedError, match="a round that was not begun"):
        Rounds(Total(), RoundSettings()).end()


# Sampling, weights and settings ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "fraction", "size"), [(10, 1.0, 10), (10, 0.5, 5), (10, 0.01, 1), (3, 0.5, 2), (1, 0.1, 1)]
)
def test_sample_size_and_range(n: int, fraction: float, size: int) -> None:
    sampled = sample_partitions(3, 7, n, fraction)
    assert len(sampled) == size
    assert sampled == sorted(set(sampled))
    assert set(sampled) <= set(range(n))


def test_sampling_ignores_global_generators_and_other_draws() -> None:
    first = sample_partitions(5, 2, 100, 0.1)
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002 - the global state is what must not matter
    sample_partitions(5, 1, 100, 0.1)
    assert sample_partitions(5, 2, 100, 0.1) == first
    assert sample_partitions(5, 3, 100, 0.1) != first
    assert sample_partitions(6, 2, 100, 0.1) != first


def test_every_client_is_sampled_equally_often() -> None:
    counts = np.zeros(10)
    for server_round in range(2000):
        counts[sample_partitions(0, server_round, 10, 0.3)] += 1
    # Binomial with 2000 draws of probability 0.3: standard deviation 20.5; five of them.
    assert np.abs(counts - 600).max() < 103


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"fraction_train": 0.0}, "'fraction_train': .*> 0 and <= 1, got 0.0"),
        ({"weighting": "equal"}, "'weighting': .*examples, uniform, got 'equal'"),
        ({"on_failure": "ignore"}, "'on_failure': .*tolerate, fail-fast, got 'ignore'"),
        ({"min_replies": 0}, "'min_replies': .*> 0, got 0"),
        ({"min_replies": 2.5}, "'min_replies': .*whole number of clients, got 2.5"),
    ],
)
def test_wrong_settings_are_refused(change: dict[str, object], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        RoundSettings(**change)  # type: ignore[arg-type]


def test_weights() -> None:
    assert RoundSettings().weight(90) == 90.0
    assert RoundSettings(weighting="uniform").weight(90) == 1.0


@pytest.mark.parametrize(
    ("min_replies", "sampled", "quorum"), [(0.2, 10, 2), (0.2, 3, 1), (0.5, 3, 2), (1, 10, 1), (1.0, 10, 1), (7, 10, 7)]
)
def test_a_quorum_is_a_number_or_a_share_of_those_asked(min_replies: float, sampled: int, quorum: int) -> None:
    assert RoundSettings(min_replies=min_replies).quorum(sampled) == quorum


def test_a_quorum_that_no_round_can_reach_is_refused_before_anyone_trains() -> None:
    with pytest.raises(SettingsError, match=r"'min-replies': .*at most the 3 clients .*got 4"):
        begun(range(3), min_replies=4)
