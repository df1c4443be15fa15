"""The rounds of a run: who is asked, in which order replies count, and what happens when some fail. Knows no Flower.

A method is three calls, `RoundMethod`: ``begin(model)``, ``fold(reply)`` for each valid reply by increasing partition id, and
``finish()``. A method of more than one exchange asks some clients again, by ``follow_up``, before it finishes. `Rounds`
makes a round of these calls; `fedapps.strategies.base` connects it to Flower.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from logging import getLogger
from typing import Any, Protocol

import numpy as np

from fedapps.defences import Defence, Groups, clip, clip_bounds, coordinatewise, most_common_form, multi_krum, num_liars
from fedapps.errors import CurvatureError, MessageError, RosterError, RoundFailedError, SettingsError
from fedapps.messages.schema import STORE_LOST, Arrays, Records, Reply, check_finite
from fedapps.settings import RoundSettings
from fedapps.strategies.folding import OrderedFold

logger = getLogger("flwr")

REASON_LENGTH = 600
"""Characters of a client's error that a log line shows: Flower sends the whole traceback of its worker."""

REFERENCE_ROUNDS = 20
"""Rounds over whose medians the reference of a norm is the greatest: rounds of small updates bound nothing. Near convergence a
round may have asked mostly clients that have nothing left to learn; over 5 rounds, honest updates came to 181 times the
reference, over 20 to 77."""


@dataclass
class RoundReport:
    """What happened in a round.

    Attributes:
        server_round: The round.
        sampled: Partitions that were asked.
        folded: Partitions whose reply was folded.
        refused: Partition -> why its reply was not folded, or, in a follow-up, does not count.
        left_out: Partitions whose reply the defence did not let through.
        num_examples: Partition -> examples of each folded reply.
        metrics: Partition -> metrics of each folded reply.
        accepted: False if the round was below the quorum and changed nothing.
        notes: Remarks of the method, such as damping that the server had to add.
        values: Numbers of the method for the round's row, such as a step size that the server chose.
    """

    server_round: int
    sampled: list[int]
    folded: list[int] = field(default_factory=list)
    refused: dict[int, str] = field(default_factory=dict)
    left_out: list[int] = field(default_factory=list)
    num_examples: dict[int, float] = field(default_factory=dict)
    metrics: dict[int, dict[str, float]] = field(default_factory=dict)
    accepted: bool = False
    notes: list[str] = field(default_factory=list)
    values: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class FollowUp:
    """A further exchange within a round.

    Attributes:
        name: What it is, for messages.
        records: Partition -> what the client receives beside the round's config; only clients whose reply was folded.
        required: Whether a client without a valid answer no longer counts for the quorum; else it is noted.
    """

    name: str
    records: Mapping[int, Records]
    required: bool = True


class RoundMethod(Protocol):
    """What a method does in a round."""

    def begin(self, model: Arrays) -> None:
        """Start a round.

        Args:
            model: The model that is sent out, by name.
        """

    holds: bool = False
    """Whether the replies of a round are small enough to be held until all are in; their own median then bounds them too."""

    def plain(self, reply: Reply) -> Reply:
        """Give a reply that is held in the form in which its numbers can be compared with those of other clients.

        Args:
            reply: A checked reply.

        Returns:
            What is measured, defended and folded in its place: itself unless overridden.

        Raises:
            MessageError: The reply does not fulfil what the method asks of it.
        """
        return reply

    def origin(self, reply: Reply) -> Arrays:
        """Say what the floating tensors of a reply are measured from, by name.

        Args:
            reply: A checked reply.

        Returns:
            Name -> tensor; one that it lacks is an update itself, as all are unless overridden.
        """
        return {}

    def norms(self, reply: Reply) -> Mapping[str, float]:
        """Measure a reply, just before it is folded.

        Args:
            reply: A checked reply.

        Returns:
            Name -> norm, each compared with those of the other clients (``max-update-ratio``); none unless overridden.

        Raises:
            MessageError: The reply does not fulfil what the method asks of it.
        """
        return {}

    def fold(self, reply: Reply) -> None:
        """Fold one reply into the running sums; called in order of partition ids.

        Args:
            reply: A checked reply.

        Raises:
            MessageError: The reply does not fulfil what the method asks of it; the sums are unchanged.
            CurvatureError: Likewise.
        """

    def follow_up(self, *, enough: bool) -> FollowUp | None:
        """Ask clients again, once all replies of the last exchange are in; called until it gives None.

        Args:
            enough: Whether the replies make the quorum.

        Returns:
            The next exchange of the round; None ends it.
        """

    def answer(self, reply: Reply) -> None:
        """Take the answer to a follow-up; called in order of partition ids.

        Args:
            reply: The answer, its tensors checked.

        Raises:
            MessageError: The answer does not fulfil what was asked.
        """

    def finish(self) -> Arrays:
        """End a round that has its quorum.

        Returns:
            The new model, by name, in the order of the old one; empty where the method builds it on demand.

        Raises:
            MessageError: The round would lead to numbers that are not finite; nothing has changed.
        """

    def state_arrays(self) -> Arrays:
        """Give the arrays that the method keeps over rounds; `finish` replaces them, and changes none in place."""
        return {}

    def load_state_arrays(self, arrays: Arrays) -> None:
        """Take back what `state_arrays` gave; called after `load_state`."""

    def state(self) -> dict[str, Any]:
        """Give the plain state that the method keeps over rounds."""
        return {}

    def load_state(self, state: Mapping[str, Any], last_folded: Mapping[int, int]) -> None:
        """Take back what `state` gave."""


class Rounds:
    """Makes a round of a method's calls.

    Args:
        method: The method.
        settings: Quorum, failure policy and buffers.

    Attributes:
        model: The model that was sent out in the last round.
        report: What happened in the last round.
        last_folded: Partition -> round of its last folded reply.
        failed_in_a_row: Rounds below the quorum since the last accepted one.
    """

    def __init__(self, method: RoundMethod, settings: RoundSettings) -> None:
        self._method = method
        self._settings = settings
        self.model: Arrays = {}
        self.report = RoundReport(0, [])
        self.last_folded: dict[int, int] = {}
        self.failed_in_a_row = 0
        self._order: OrderedFold | None = None
        self._follow_up: FollowUp | None = None
        # Name -> medians of the last rounds, and partition -> norm in the present one.
        self._medians: dict[str, list[float]] = {}
        self._norms: dict[str, dict[int, float]] = {}
        self._spoiled = False

    def begin(self, server_round: int, model: Arrays, sampled: Iterable[int]) -> None:
        """Start a round.

        Args:
            server_round: The round.
            model: The model that is sent out.
            sampled: Partitions that are asked.

        Raises:
            SettingsError: The quorum is larger than their number.
        """
        self.report = RoundReport(server_round, sorted(sampled))
        if self._quorum > len(self.report.sampled):
            raise SettingsError(
                "setting 'min-replies'",
                expected=f"at most the {len(self.report.sampled)} clients that a round asks",
                got=str(self._quorum),
                do="lower it, or sample more clients (fraction-train)",
            )
        self.model, self._norms, self._spoiled = model, {}, False
        self._open(self.report.sampled, self._fold, None)
        self._method.begin(model)

    def _open(self, partitions: Iterable[int], fold: Callable[[Reply], None], follow_up: FollowUp | None) -> None:
        self._close()
        together = self._together if self._holds and follow_up is None else None
        self._order = OrderedFold(partitions, fold, self._settings.fold_buffer_mb, together)
        self._follow_up = follow_up

    def _close(self) -> None:
        self._follow_up = None
        if self._order is not None:
            self._order.close()
            self._order = None

    @property
    def awaited(self) -> list[int]:
        """Partitions whose reply is still out."""
        return [] if self._order is None else self._order.missing

    @property
    def is_follow_up(self) -> bool:
        """Whether the present exchange is a further one of the round."""
        return self._follow_up is not None

    def receive(self, partition: int, reply: Reply | None, error: str = "") -> None:
        """Take the reply of a client, in any order.

        Args:
            partition: Partition id of the client.
            reply: Its checked reply; None if it failed.
            error: Why it failed.

        Raises:
            RoundFailedError: The client failed and the policy is ``fail-fast``.
        """
        if self._order is None or partition not in self._order.missing:
            logger.warning("client %d: a reply that nobody waits for is ignored", partition)
            return
        if reply is None:
            self._refuse(partition, error)
        self._order.add(partition, reply)

    @property
    def _holds(self) -> bool:
        """Whether replies wait until all are in: the median of their own round then bounds them too."""
        return self._method.holds or self._settings.defence is not Defence.NONE

    def _together(self, replies: list[Reply]) -> Iterable[Reply]:
        """Measure replies that were held, and defend against those that lie."""
        plain = list(filter(None, (self._try(self._plain, reply) for reply in replies)))
        good = list(filter(None, (self._try(self._bounded, reply) for reply in plain)))
        return self._defend(good) if good and self._settings.defence is not Defence.NONE else good

    def _try(self, step: Callable[[Reply], Reply], reply: Reply) -> Reply | None:
        try:
            return step(reply)
        except (MessageError, CurvatureError) as problem:
            self._refuse(reply.partition, str(problem))
            return None

    def _plain(self, reply: Reply) -> Reply:
        plain = self._method.plain(reply)
        self._measure(plain)
        return plain

    def _bounded(self, reply: Reply) -> Reply:
        self._check_norms(reply.partition)
        return reply

    def _defend(self, replies: list[Reply]) -> Iterable[Reply]:
        """Give the replies that the defence lets through, in the form in which it does."""
        settings, groups = self._settings, [_groups(reply) for reply in replies]
        kept = most_common_form(groups)
        self._leave_out(replies, kept, "its tensors are not those of most clients")
        replies, groups = [replies[i] for i in kept], [groups[i] for i in kept]
        f = num_liars(settings.defence_share, len(replies))
        if settings.defence is Defence.MULTI_KRUM:
            kept = multi_krum(groups, f)
            self._leave_out(replies, kept, "multi-krum")
            yield from (replies[i] for i in kept)
        elif settings.defence is Defence.CLIP:
            origins = [self._method.origin(reply) for reply in replies]
            bounds = clip_bounds(groups, origins, settings.defence_norm)
            yield from (_regrouped(r, clip(g, x, bounds)) for r, g, x in zip(replies, groups, origins, strict=True))
        else:
            middle = coordinatewise(groups, None if settings.defence is Defence.MEDIAN else f)
            yield from (_regrouped(reply, middle) for reply in replies)

    def _leave_out(self, replies: list[Reply], kept: list[int], why: str) -> None:
        left_out = [reply.partition for place, reply in enumerate(replies) if place not in kept]
        self.report.left_out += left_out
        if left_out:
            self.note(f"left out of the mean, {why}: client{'s' * (len(left_out) > 1)} {', '.join(map(str, left_out))}")

    def _measure(self, reply: Reply) -> None:
        if self._settings.max_update_ratio:
            for name, norm in self._method.norms(reply).items():
                self._norms.setdefault(name, {})[reply.partition] = norm

    def _check_norms(self, partition: int) -> None:
        for name, norms in self._norms.items():
            reference = max(self._medians.get(name, ()), default=0.0)
            if self._holds:
                reference = max(reference, float(np.median(list(norms.values()))))
            if partition in norms and self._is_beyond(norms[partition], reference):
                raise self._beyond(partition, name, reference)

    def _is_beyond(self, norm: float, reference: float) -> bool:
        return 0 < reference < np.inf and norm > self._settings.max_update_ratio * reference

    def _beyond(self, partition: int, name: str, reference: float) -> MessageError:
        ratio = self._settings.max_update_ratio
        return MessageError(
            f"client {partition}, norm of its {name}",
            expected=f"at most {ratio * reference:.3g} (max-update-ratio = {ratio:g} times the clients' median)",
            got=f"{self._norms[name][partition]:.3g}",
            do="lower the learning rate or raise the damping on that client; raise max-update-ratio if this is honest",
        )

    def _judge_first_norms(self) -> None:
        """Refuse, once all replies are in, what no earlier round could bound; it is in the sums, so the round is spoiled."""
        for name, norms in self._norms.items():
            if name in self._medians or self._holds:
                continue
            reference = float(np.median(list(norms.values())))
            for partition in sorted(norms):
                if self._is_beyond(norms[partition], reference):
                    self._refuse(partition, str(self._beyond(partition, name, reference)))
                    self._spoiled = True

    def _remember_norms(self) -> None:
        for name, norms in self._norms.items():
            median = float(np.median(list(norms.values())))
            if np.isfinite(median):
                self._medians[name] = [*self._medians.get(name, ()), median][-REFERENCE_ROUNDS:]
        self._norms = {}

    def _fold(self, reply: Reply) -> None:
        partition = reply.partition
        try:
            if not self._holds:
                self._measure(reply)
                self._check_norms(partition)
            self._method.fold(reply)
        except (MessageError, CurvatureError) as problem:
            self._refuse(partition, str(problem))
            return
        if STORE_LOST in reply.metrics:
            self.note(f"client {partition} has lost what it kept since round {self.last_folded.get(partition, 0)}")
        self.report.folded.append(partition)
        self.report.num_examples[partition] = reply.num_examples
        self.report.metrics[partition] = reply.metrics

    def _answer(self, reply: Reply) -> None:
        try:
            self._method.answer(reply)
        except MessageError as problem:
            self._refuse(reply.partition, str(problem))

    def note(self, text: str) -> None:
        """Log a remark about the round, and keep it for the round's row."""
        self.report.notes.append(text)
        logger.warning("round %d: %s", self.report.server_round, text)

    def _refuse(self, partition: int, reason: str) -> None:
        if self._follow_up is not None:
            # The reason may begin with the client, whom the note and the log name first.
            reason = f"{self._follow_up.name}: " + re.sub(rf"^client {partition}[:,] ", "", reason)
            if not self._follow_up.required:
                self.note(f"client {partition}, {reason[-REASON_LENGTH:]}")
                return
        self.report.refused[partition] = reason
        shown = reason if len(reason) <= REASON_LENGTH else "... " + reason[-REASON_LENGTH:]
        logger.error("round %d, client %d: %s", self.report.server_round, partition, shown)
        if self._settings.on_failure == "fail-fast":
            raise self.failure(f"client {partition}: {shown} (on-failure = fail-fast ends the run)")

    def failure(self, reason: str) -> RoundFailedError:
        """Give up the round, and compose the error that ends the run."""
        self._close()
        return RoundFailedError(f"round {self.report.server_round}, {reason}")

    def follow_up(self) -> Mapping[int, Records]:
        """End an exchange: clients that are still missing count as failed, and the method may ask for another.

        Returns:
            Partition -> what the client receives; empty once the round has no further exchange.

        Raises:
            RoundFailedError: The policy is ``fail-fast``.
        """
        self._give_up_waiting()
        self._judge_first_norms()
        asked = self._method.follow_up(enough=self._is_enough)
        if asked is None or not asked.records:
            return {}
        self._open(asked.records, self._answer, asked)
        return asked.records

    def _give_up_waiting(self) -> None:
        for partition in self.awaited:
            self.receive(partition, None, f"no reply within {self._settings.round_timeout:g} s")

    @property
    def _num_valid(self) -> int:
        # Replies that a defence leaves out were valid ones, and it keeps more than half of them.
        valid = [*self.report.folded, *self.report.left_out]
        return len([partition for partition in valid if partition not in self.report.refused])

    @property
    def _is_enough(self) -> bool:
        return not self._spoiled and self._num_valid >= self._quorum

    @property
    def _quorum(self) -> int:
        return self._settings.quorum(len(self.report.sampled))

    def end(self) -> Arrays | None:
        """End the round: the clients that are still missing count as failed.

        Returns:
            The new model, or None if nothing changes: the round is below the quorum, a reply that was folded is refused
            after all, or the outcome is not finite.

        Raises:
            RoundFailedError: Too many rounds in a row changed nothing, or the policy is ``fail-fast``.
        """
        if self._order is None:
            raise RoundFailedError("the end of a round that was not begun: call begin first")
        self._give_up_waiting()
        self._close()
        self._judge_first_norms()
        enough = self._is_enough
        self._remember_norms()
        if not enough:
            self._note_failed_round()
            return None
        model = self._finish()
        if model is None:
            return None
        self.failed_in_a_row = 0
        self.report.accepted = True
        self.last_folded |= dict.fromkeys(self.report.folded, self.report.server_round)
        return model

    def _finish(self) -> Arrays | None:
        """Let the method end the round; if it cannot, or model or state would not be finite, take its state back."""
        method = self._method
        arrays, state = method.state_arrays(), method.state()
        try:
            with np.errstate(over="ignore", invalid="ignore"):  # Told below, by the tensor's name.
                model = method.finish()
            for name, value in model.items():
                check_finite(value, f"aggregation, tensor '{name}'")
            for name, value in method.state_arrays().items():
                check_finite(value, f"aggregation, server state '{name}'")
        except (MessageError, CurvatureError) as problem:
            method.load_state(state, self.last_folded)
            method.load_state_arrays(arrays)
            self._note_failed_round(str(problem))
            return None
        return model

    def _note_failed_round(self, problem: str = "") -> None:
        self.failed_in_a_row += 1
        reasons = "; ".join(f"client {p}: {last_line(reason)}" for p, reason in self.report.refused.items())
        if self._spoiled:
            problem = f"{reasons}; a round without an earlier one to compare with"
        problem = (
            f"round {self.report.server_round}: "
            + (
                problem
                or f"expected at least {self._quorum} valid replies, got {self._num_valid} of "
                f"{len(self.report.sampled)} ({reasons})"
            )
            + "; the model is unchanged"
        )
        logger.error("%s", problem)
        if self.failed_in_a_row >= self._settings.max_consecutive_failed_rounds:
            raise RoundFailedError(
                f"{problem}; this was failure {self.failed_in_a_row} in a row "
                "(max-consecutive-failed-rounds), so the run ends"
            )

    def state(self) -> dict[str, Any]:
        """Give the plain state for a checkpoint, which keeps ``last_folded`` beside it."""
        return {"failed-in-a-row": self.failed_in_a_row, "norms": {k: list(v) for k, v in self._medians.items()}}

    def load_state(self, state: Mapping[str, Any], last_folded: Mapping[int, int]) -> None:
        """Take back the state of a checkpoint."""
        self.failed_in_a_row = int(state["failed-in-a-row"])
        self._medians = {name: list(medians) for name, medians in state.get("norms", {}).items()}
        self.last_folded = dict(last_folded)


def _groups(reply: Reply) -> Groups:
    return {"update": {**reply.arrays, **reply.buffers}, **reply.records}


def _regrouped(reply: Reply, groups: Groups) -> Reply:
    """Put the tensors that a defence gives in the place of a reply's own."""
    update = groups["update"]
    return replace(
        reply,
        arrays={name: update.get(name, value) for name, value in reply.arrays.items()},
        buffers={name: update.get(name, value) for name, value in reply.buffers.items()},
        records={record: {**arrays, **groups[record]} for record, arrays in reply.records.items()},
    )


def sample_partitions(
    seed: int, server_round: int, num_partitions: int, fraction: float, *, least: int | None = None, stream: int = 0
) -> list[int]:
    """Sample the clients of a round.

    A pure function of its arguments: extra evaluations, other draws and the number of workers do not change it.

    Args:
        seed: Seed of the run.
        server_round: Round, from 1.
        num_partitions: Number of clients ``N``.
        fraction: Share ``C`` to sample; ``max(1, round(C N))`` are.
        least: Least number ``m`` to sample, as Flower counts: ``max(int(C N), m)`` are.
        stream: Another number gives samples that have nothing to do with these.

    Returns:
        Partition ids in increasing order.

    Raises:
        RosterError: There are fewer than ``m``.
    """
    size = max(1, round(fraction * num_partitions)) if least is None else max(int(num_partitions * fraction), least)
    if size > num_partitions:
        raise RosterError(
            f"round {server_round}",
            expected=f"at least {least} nodes (min_train_nodes)",
            got=str(num_partitions),
            do="start more nodes, or lower the least number",
        )
    if size == num_partitions:
        return list(range(num_partitions))
    generator = np.random.default_rng([seed, server_round, stream] if stream else [seed, server_round])
    return sorted(int(i) for i in generator.choice(num_partitions, size, replace=False))


def last_line(text: str) -> str:
    """Give the last line of a client's error, which tells more than the first of its traceback."""
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    return lines[-1][-REASON_LENGTH:] if lines else "no reason given"
