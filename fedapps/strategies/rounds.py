"""What every strategy does the same way: handshake, sampling, checks, order, failure policy.

A method is three calls on top of it: ``begin(arrays)``, ``fold(reply)`` for each valid reply in order of partition
ids, and ``finish()``. `RoundMixin` provides Flower's hooks from them, so a strategy runs under Flower's unmodified
``start``, under this package's own loop, which folds while replies arrive, and behind the legacy adapter.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from logging import getLogger
from typing import Any, Self

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid

from fedapps.errors import CurvatureError, MessageError, RoundFailedError, TaskError
from fedapps.personalization.proximal import unstable_step
from fedapps.records import (
    ARRAYS,
    CONFIG,
    METRICS,
    NUM_EXAMPLES,
    SERVER_ROUND,
    STEP_LIMIT,
    STORE_LOST,
    Arrays,
    Reply,
    check_reply,
    check_size,
    pack_arrays,
    unpack_arrays,
)
from fedapps.settings import Settings
from fedapps.strategies.folding import OrderedFold
from fedapps.strategies.options import RoundOptions, sample_partitions
from fedapps.strategies.roster import Roster

logger = getLogger("flwr")

ACTOR_DIED = 0
"""Flower's error code for a client whose worker process died; the simulation engine never replaces that worker."""

REASON_LENGTH = 600
"""Characters of a client's error that a log line shows: Flower sends the whole traceback of its worker."""


@dataclass
class RoundReport:
    """What happened in a round.

    Attributes:
        server_round: The round.
        sampled: Partitions that were asked.
        folded: Partitions whose reply was folded.
        refused: Partition -> why its reply was not folded, or, in a second exchange of the round, does not count.
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
    num_examples: dict[int, int] = field(default_factory=dict)
    metrics: dict[int, dict[str, float]] = field(default_factory=dict)
    accepted: bool = False
    notes: list[str] = field(default_factory=list)
    values: dict[str, float] = field(default_factory=dict)


class RoundMixin:
    """Flower's strategy hooks, from the three calls of a method.

    Put it before Flower's ``Strategy``, or before one of Flower's own strategies, in the list of bases.

    Attributes:
        options: The shared options.
        roster: The nodes by partition.
        report: What happened in the last round.
        last_folded: Partition -> round of its last folded reply.
        failed_in_a_row: Rounds below the quorum since the last accepted one.
    """

    options: RoundOptions
    roster: Roster
    report: RoundReport
    last_folded: dict[int, int]
    failed_in_a_row: int

    @classmethod
    def from_settings(cls, settings: Settings, experiment: str) -> Self:
        """Build the strategy of a run; a strategy with options of its own overrides this.

        Args:
            settings: The settings.
            experiment: Identity of the experiment.

        Returns:
            The strategy.
        """
        return cls(options=RoundOptions.from_settings(settings, experiment))  # type: ignore[call-arg]

    def set_up_rounds(self, options: RoundOptions) -> None:
        """Prepare the shared state; a strategy calls it in its constructor.

        Args:
            options: The shared options.
        """
        self.options = options
        self.roster = Roster(
            method=options.method,
            experiment=options.experiment,
            node_wait=options.node_wait,
            num_clients=options.num_clients,
            timeout=options.round_timeout,
        )
        self.report = RoundReport(0, [])
        self.last_folded = {}
        self.failed_in_a_row = 0
        self._warned_of_step = False
        self._sent: Arrays = {}
        self._messages: dict[int, Message] = {}
        self._order: OrderedFold | None = None

    # The method ------------------------------------------------------------------------------

    @abstractmethod
    def begin(self, arrays: Arrays) -> None:
        """Start a round.

        Args:
            arrays: The model that is sent out, by name.
        """

    @abstractmethod
    def fold(self, reply: Reply) -> None:
        """Fold one reply into the running sums; called in order of partition ids.

        Args:
            reply: A checked reply.

        Raises:
            MessageError: The reply does not fulfil what the method asks of it; the sums are unchanged.
        """

    @abstractmethod
    def finish(self) -> Arrays:
        """End the round.

        Returns:
            The new model, by name, in the order of the old one.
        """

    def sample(self, server_round: int) -> list[int]:
        """Choose the clients of a round.

        Args:
            server_round: The round.

        Returns:
            Partition ids, ascending: a seeded sample of ``fraction_train`` of them.
        """
        options = self.options
        return sample_partitions(options.seed, server_round, self.roster.num_partitions, options.fraction_train)

    def arrays_to_send(self, arrays: ArrayRecord) -> ArrayRecord:
        """Choose what clients receive.

        Args:
            arrays: The model.

        Returns:
            The model; a method whose clients need none of it sends less.
        """
        return arrays

    def records_for(self, partition: int, through: int) -> dict[str, ConfigRecord]:
        """Give what one client receives beside model and config; nothing by default.

        Args:
            partition: The client.
            through: The last round whose outcome the client is to know: the one before in training, the present one in
                evaluation.

        Returns:
            Record name -> record.
        """
        return {}

    def take_resends(self) -> list[Message]:
        """Hand over messages to send once more within the round, to clients that asked for it; none by default.

        Returns:
            The messages, each once.
        """
        return []

    def state_arrays(self) -> Arrays:
        """Give the arrays that the strategy keeps over rounds, for a checkpoint."""
        return {}

    def load_state_arrays(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Take back the arrays of a checkpoint.

        Args:
            arrays: What `state_arrays` gave.
        """

    # A round, without Flower's messages ------------------------------------------------------

    def preconditioned(self) -> Collection[str] | None:
        """Name the tensors that the clients precondition.

        Returns:
            The names, as the first client told in the handshake; None if none has.
        """
        facts = next(iter(self.roster.facts.values()), None)
        return None if facts is None else facts.preconditioned

    def check_model(self, arrays: Arrays) -> None:
        """Refuse a model that cannot be averaged: bfloat16 travels as patterns, which NumPy takes for whole numbers.

        Args:
            arrays: The model.

        Raises:
            TaskError: A tensor is in bfloat16.
        """
        name = next((name for name, value in arrays.items() if value.dtype == np.uint16), None)
        if name is not None:
            raise TaskError(
                f"{type(self).__name__}, model tensor '{name}'",
                expected="numbers that can be averaged, such as float32",
                got="bfloat16",
                do="use float32 (dtype in task-options of a language task), train adapters (lora-rank), or take a "
                "scalar-only method",
            )

    def begin_round(self, server_round: int, arrays: Arrays, sampled: Iterable[int]) -> None:
        """Start a round.

        Args:
            server_round: The round.
            arrays: The model that is sent out.
            sampled: Partitions that are asked.

        Raises:
            TaskError: The model cannot be averaged.
        """
        self.check_model(arrays)
        self.report = RoundReport(server_round, sorted(sampled))
        self._sent = arrays
        self._order = OrderedFold(self.report.sampled, self._fold_checked, self.options.fold_buffer_mb)
        self.begin(arrays)

    def receive(self, partition: int, content: RecordDict | None, error: str = "") -> None:
        """Take the reply of a client, in any order.

        Args:
            partition: Partition id of the client.
            content: The content of its reply; None if it failed.
            error: Why it failed.

        Raises:
            RoundFailedError: The client failed and the policy is ``fail-fast``.
        """
        if self._order is None or partition not in self._order.missing:
            logger.warning("client %d: a reply that nobody waits for is ignored", partition)
            return
        if content is not None:
            try:
                # Refused before it can wait for its turn: a bad reply costs no memory.
                check_reply(content, partition, self._sent)
            except MessageError as problem:
                content, error = None, str(problem)
        if content is None:
            self._refuse(partition, error)
        self._order.add(partition, content)

    def _fold_checked(self, partition: int, content: RecordDict) -> None:
        reply = check_reply(content, partition, self._sent)
        try:
            self.fold(reply)
        except (MessageError, CurvatureError) as problem:
            self._refuse(partition, str(problem))
            return
        if STORE_LOST in reply.metrics:
            self.note(f"client {partition} has lost what it kept since round {self.last_folded.get(partition, 0)}")
        limit = reply.metrics.pop(STEP_LIMIT, None)
        if limit is not None and not self._warned_of_step:
            self._warned_of_step = True
            self.note(f"client {partition}: {unstable_step(limit)}")
        self.report.folded.append(partition)
        self.report.num_examples[partition] = reply.num_examples
        self.report.metrics[partition] = reply.metrics

    def note(self, text: str) -> None:
        """Log a remark about the round, and keep it for the round's row.

        Args:
            text: The remark.
        """
        self.report.notes.append(text)
        logger.warning("round %d: %s", self.report.server_round, text)

    def _refuse(self, partition: int, reason: str) -> None:
        self.report.refused[partition] = reason
        shown = reason if len(reason) <= REASON_LENGTH else "... " + reason[-REASON_LENGTH:]
        logger.error("round %d, client %d: %s", self.report.server_round, partition, shown)
        if self.options.on_failure == "fail-fast":
            self._close()
            raise RoundFailedError(
                f"round {self.report.server_round}, client {partition}: {shown} (on-failure = fail-fast ends the run)"
            )

    def end_round(self) -> Arrays | None:
        """End the round: the clients that are still missing count as failed.

        Returns:
            The new model, or None if the round is below the quorum and nothing changes.

        Raises:
            RoundFailedError: Too many rounds in a row were below the quorum, or the policy is ``fail-fast``.
        """
        if self._order is None:
            raise RoundFailedError("end_round without begin_round: call begin_round first")
        self._give_up_waiting()
        self._close()
        if self._num_valid() < self.options.min_replies:
            self._note_failed_round()
            return None
        arrays = self.finish()
        self.failed_in_a_row = 0
        self.report.accepted = True
        self.last_folded |= dict.fromkeys(self.report.folded, self.report.server_round)
        return arrays

    def _awaited(self) -> list[int]:
        """List the partitions whose reply is still out."""
        return [] if self._order is None else self._order.missing

    def _give_up_waiting(self) -> None:
        for partition in self._awaited():
            self.receive(partition, None, f"no reply within {self.options.round_timeout:g} s")

    def _num_valid(self) -> int:
        """Count the replies that make up the quorum."""
        return len(self.report.folded)

    def _close(self) -> None:
        if self._order is not None:
            self._order.close()
            self._order = None
        self._messages = {}

    def _note_failed_round(self) -> None:
        self.failed_in_a_row += 1
        reasons = "; ".join(f"client {p}: {_last_line(reason)}" for p, reason in self.report.refused.items())
        problem = (
            f"round {self.report.server_round}: expected at least {self.options.min_replies} valid replies, got "
            f"{self._num_valid()} of {len(self.report.sampled)} ({reasons}); the model is unchanged"
        )
        logger.error("%s", problem)
        if self.failed_in_a_row >= self.options.max_consecutive_failed_rounds:
            raise RoundFailedError(
                f"{problem}; this was failure {self.failed_in_a_row} in a row "
                "(max-consecutive-failed-rounds), so the run ends"
            )

    # Flower's hooks --------------------------------------------------------------------------

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Greet new nodes, sample partitions and compose their messages.

        Args:
            server_round: The round, from 1.
            arrays: The model.
            config: Entries to send to every client; left unchanged.
            grid: Flower's grid.

        Returns:
            One message for each sampled partition that has a node, in order of partition ids.

        Raises:
            RosterError: Clients are missing.
            MessageError: The message is larger than ``max_message_mb``.
        """
        self.roster.refresh(grid)
        options = self.options
        sampled = self.sample(server_round)
        payload = self.arrays_to_send(arrays)
        check_size(RecordDict({ARRAYS: payload}), options.max_message_mb)
        # The order of the calls matters: `begin_round` is entered with the model that the messages carry.
        self.begin_round(server_round, unpack_arrays(RecordDict({ARRAYS: arrays}), ARRAYS, "server"), sampled)
        for partition in sampled:
            if (node_id := self.roster.node_of.get(partition)) is None:
                self.receive(partition, None, "its node is gone")
                continue
            records = {CONFIG: self._client_config(server_round, partition, config)}
            content = RecordDict({ARRAYS: payload, **records, **self.records_for(partition, server_round - 1)})
            self._messages[partition] = Message(
                content,
                dst_node_id=node_id,
                message_type=MessageType.TRAIN,
                group_id=str(server_round),
                # A reply that comes after the round is over is of no use to anybody.
                ttl=options.round_timeout + 60.0,
            )
        return list(self._messages.values())

    def _client_config(self, server_round: int, partition: int, config: ConfigRecord) -> ConfigRecord:
        return ConfigRecord(
            {
                **config,
                SERVER_ROUND: server_round,
                "experiment": self.options.experiment,
                "last-folded": self.last_folded.get(partition, 0),
            }
        )

    def receive_message(self, message: Message) -> None:
        """Take a reply as Flower's grid hands it over.

        Args:
            message: The reply.

        Raises:
            RoundFailedError: A worker process died, or a client failed and the policy is ``fail-fast``.
        """
        partition = self._partition_of_reply(message)
        if partition is None:
            logger.warning("a reply from node %d that nobody waits for is ignored", message.metadata.src_node_id)
            return
        if not message.has_error():
            self.receive(partition, message.content)
            return
        self.receive(partition, None, self._reason_of(message, partition))

    def _reason_of(self, message: Message, partition: int) -> str:
        """Say why a client failed; a dead worker ends the run, since the simulation engine never replaces it."""
        reason = (message.error.reason or "no reason given").strip()
        if message.error.code == ACTOR_DIED:
            self._close()
            raise RoundFailedError(
                f"round {self.report.server_round}, client {partition}: its worker process died "
                f"({_last_line(reason)}). The simulation engine never replaces a dead worker, so the run ends. Most "
                "often the memory ran out: use fewer workers, a smaller model or a smaller batch, and --resume."
            )
        return reason

    def _partition_of_reply(self, message: Message) -> int | None:
        # An error reply may come from the SuperLink itself, so the message that it answers tells the client.
        asked = message.metadata.reply_to_message_id
        for partition, sent in self._messages.items():
            if sent.metadata.message_id == asked:
                return partition
        return None

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Fold all replies of a round.

        Args:
            server_round: The round.
            replies: The replies, in any order.

        Returns:
            The new model and the mean train metrics, or None twice if the round is below the quorum.

        Raises:
            RoundFailedError: As the failure policy says.
        """
        for reply in replies:
            self.receive_message(reply)
        arrays = self.end_round()
        if arrays is None:
            return None, None
        return pack_arrays(arrays), self.train_metrics()

    def train_metrics(self) -> MetricRecord:
        """Average the clients' metrics of the last round, weighted by their number of examples.

        Returns:
            Means of the metrics that every client reported.
        """
        return mean_metrics(self.report.metrics, self.report.num_examples)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Ask every client to evaluate the model.

        Args:
            server_round: The round.
            arrays: The model.
            config: Entries to send to every client.
            grid: Flower's grid.

        Returns:
            One message for each partition that has a node; none without ``evaluate_clients``.
        """
        if not self.options.evaluate_clients:
            return []
        payload = self.arrays_to_send(arrays)
        return [
            Message(
                RecordDict(
                    {
                        ARRAYS: payload,
                        CONFIG: self._client_config(server_round, partition, config),
                        **self.records_for(partition, server_round),
                    }
                ),
                dst_node_id=node_id,
                message_type=MessageType.EVALUATE,
                group_id=str(server_round),
                ttl=self.options.round_timeout + 60.0,
            )
            for partition, node_id in sorted(self.roster.node_of.items())
        ]

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Average the clients' evaluation metrics, weighted by their number of examples.

        Args:
            server_round: The round.
            replies: The replies, in any order.

        Returns:
            The means, or None without a usable reply.
        """
        metrics, num_examples = self.evaluation_results(replies)
        return mean_metrics(metrics, num_examples) if metrics else None

    def evaluation_results(self, replies: Iterable[Message]) -> tuple[dict[int, dict[str, float]], dict[int, int]]:
        """Sort evaluation replies by partition.

        Args:
            replies: The replies, in any order; failed ones are logged and left out.

        Returns:
            Partition -> metrics, and partition -> number of examples, for clients that have test data.
        """
        metrics: dict[int, dict[str, float]] = {}
        num_examples: dict[int, int] = {}
        for reply in replies:
            partition = self.roster.partition_of(reply.metadata.src_node_id)
            if partition is None or reply.has_error():
                reason = _last_line(reply.error.reason or "") if reply.has_error() else "unknown node"
                logger.error("evaluation, client %s: %s", partition, reason)
                continue
            record = reply.content.get(METRICS)
            values = dict(record) if isinstance(record, MetricRecord) else {}
            count = values.pop(NUM_EXAMPLES, 0)
            if isinstance(count, int) and count > 0:
                metrics[partition] = {k: float(v) for k, v in values.items() if isinstance(v, int | float)}
                num_examples[partition] = count
        return dict(sorted(metrics.items())), dict(sorted(num_examples.items()))

    def summary(self) -> None:
        """Log what a reader of the log needs to repeat the run."""
        logger.info("%s", self.options)

    # Resume ----------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Give the plain state that a checkpoint keeps beside `state_arrays`."""
        return {"failed-in-a-row": self.failed_in_a_row}

    def load_state(self, state: Mapping[str, Any], last_folded: Mapping[int, int]) -> None:
        """Take back the plain state of a checkpoint.

        Args:
            state: What `state` gave.
            last_folded: Partition -> round of its last folded reply.
        """
        self.failed_in_a_row = int(state["failed-in-a-row"])
        self.last_folded = dict(last_folded)


def mean_metrics(metrics: Mapping[int, Mapping[str, float]], num_examples: Mapping[int, int]) -> MetricRecord:
    """Average metrics over clients, weighted by their number of examples.

    Args:
        metrics: Partition -> metric -> value.
        num_examples: Partition -> number of examples.

    Returns:
        The means of the metrics that every client has, in partition order.
    """
    total = sum(num_examples[partition] for partition in metrics)
    shared = set.intersection(*(set(values) for values in metrics.values())) if metrics else set()
    return MetricRecord(
        {name: sum(num_examples[p] * metrics[p][name] for p in sorted(metrics)) / total for name in sorted(shared)}
    )


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    return lines[-1][-REASON_LENGTH:] if lines else "no reason given"
