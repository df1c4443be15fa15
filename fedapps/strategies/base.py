"""Flower's side of a round: hooks that greet nodes, address messages, and hand replies to `Rounds`.

A strategy of this package is a `RoundStrategy` with the three calls of `fedapps.strategies.rounds.RoundMethod`. It runs under
Flower's unmodified ``start``, under this package's own loop, which folds while replies arrive, and behind the legacy adapter.
"""

from __future__ import annotations

import json
import math
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from logging import getLogger
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from typing_extensions import override

from fedapps.averaging import check_averageable
from fedapps.curvature.layout import Layout
from fedapps.defences import update_norm
from fedapps.errors import MessageError, RosterError
from fedapps.messages.schema import (
    AGREED,
    ARRAYS,
    BUFFERS,
    CLIENT,
    CONFIG,
    METRICS,
    NUM_EXAMPLES,
    SERVER_ROUND,
    Announced,
    Arrays,
    Entries,
    Packed,
    Records,
    Reply,
    check_size,
    pack,
    pack_arrays,
    read_metrics,
    read_reply,
    unpack_arrays,
)
from fedapps.settings import RoundSettings, Settings
from fedapps.strategies.exchange import exchange, is_remote
from fedapps.strategies.roster import Roster
from fedapps.strategies.rounds import FollowUp, Rounds, last_line, sample_partitions
from fedapps.strategies.words import read_words
from fedapps.tasks.base import Task

logger = getLogger("flwr")

EVALUATION_STREAM = 1
"""Of the samples of evaluation, which have nothing to do with those of training."""

ACTOR_DIED = 0
"""Flower's error code for a client whose worker process died; the simulation engine never replaces that worker."""


class RunFiles(Protocol):
    """What a strategy may write into the folder of its run."""

    @property
    def journal_path(self) -> Path:
        """Where a journal lies."""

    def write_initial(self, arrays: Arrays) -> None:
        """Keep the model before round 1."""


@dataclass
class _Phase:
    """A phase of a round: what its messages have in common, and which are out.

    Attributes:
        kind: Flower's type of message: train or evaluate.
        server_round: The round.
        through: The last round whose outcome the clients are to know: the one before in training, the present one in
            evaluation.
        model: The model.
        config: Entries that every client receives.
        grid: Flower's grid.
        packed: Arrays that are packed already.
        messages: Partition -> the last message to its client.
        again: Clients that are to get their message once more.
        asked_again: All clients that were to get it once more.
    """

    kind: str
    server_round: int
    through: int
    model: Arrays
    config: ConfigRecord
    grid: Grid
    packed: Packed
    messages: dict[int, Message] = field(default_factory=dict)
    again: list[int] = field(default_factory=list)
    asked_again: set[int] = field(default_factory=set)


class RoundStrategy(Strategy):
    """Flower's strategy hooks, around the calls of a method.

    Args:
        settings: Sampling, weights, quorum, failure policy, limits, as one object.
        **words: In place of it any of its fields, such as ``seed`` and ``min_replies``, and in any case the words of Flower's
            own strategies with their meaning there (`fedapps.strategies.words.FlowerWords`): ``fraction_evaluate``,
            ``min_train_nodes``, ``weighted_by_key`` and so on. ``handshake=True`` asks nodes who they are, by a query.

    Without a handshake, which only a ClientApp with a query handler can answer, clients are numbered by the ids of their nodes,
    and those that come after the first round get the next numbers. Flower gives a node that is started anew a new id: it is a
    new client then, of which the strategy knows nothing, and a method that sums over all clients refuses it. Such a method
    asks for the handshake of itself where clients weigh as many examples as they have; not with ``weighting="uniform"``.

    Attributes:
        settings: How rounds run.
        words: Flower's words.
        rounds: The rounds, with the report of the last one.
        roster: The nodes by partition.
        trainable: Names of the trainable tensors, as the task says; None where there is no task to ask.
    """

    holds: bool = False

    takes_newcomers: ClassVar[bool] = True
    """Whether a node with data of its own may join after the first round; not where the server sums over all clients."""

    def __init__(self, settings: RoundSettings | None = None, **words: Any) -> None:
        self.settings, self.words = read_words(type(self), settings, words)
        needs_facts = not self.takes_newcomers and self.settings.weighting == "examples"
        self.roster = Roster(
            node_wait=self.settings.node_wait,
            num_clients=self.least_nodes,
            timeout=self.settings.round_timeout,
            first_stays=self.settings.second_node == "refused",
            asks=self.words.handshake or needs_facts,
        )
        self.roster.newcomers = self.takes_newcomers
        self.rounds = Rounds(self, self.settings)
        self.trainable: frozenset[str] | None = None
        self._noted: set[str] = set()
        self._phase: _Phase | None = None
        # Partition -> content of its last reply, for functions of one's own that summarise metrics.
        self._contents: dict[int, RecordDict] = {}

    @property
    def least_nodes(self) -> int:
        """The nodes that must be there before the first round."""
        return max(self.settings.min_available_nodes, self.words.least_nodes)

    @classmethod
    def from_settings(cls, settings: Settings, experiment: str) -> Self:
        """Build the strategy of a run.

        Args:
            settings: The settings.
            experiment: Identity of the experiment; clients file their state under it.

        Returns:
            The strategy.
        """
        evaluate = settings.client_evaluation != "none" or settings.exports
        strategy = cls(settings, fraction_evaluate=float(evaluate), handshake=True, **cls.own_arguments(settings))
        strategy.roster.method, strategy.roster.experiment = settings.method, experiment
        return strategy

    @classmethod
    def own_arguments(cls, settings: Settings) -> dict[str, Any]:  # noqa: ARG003 - used where it is overridden
        """Give the method's own arguments of the constructor.

        Args:
            settings: The settings of a run.

        Returns:
            Name -> value; none unless overridden.

        Raises:
            SettingsError: The settings do not go together, which is told before anyone trains.
        """
        return {}

    # The method ------------------------------------------------------------------------------

    @abstractmethod
    def begin(self, model: Arrays) -> None:
        """Start a round; see `RoundMethod.begin`."""

    @abstractmethod
    def fold(self, reply: Reply) -> None:
        """Fold one reply; see `RoundMethod.fold`."""

    @abstractmethod
    def finish(self) -> Arrays:
        """End the round; see `RoundMethod.finish`."""

    def plain(self, reply: Reply) -> Reply:
        """Give a reply in comparable form; see `RoundMethod.plain`."""
        return reply

    def origin(self, reply: Reply) -> Arrays:
        """Say what tensors are measured from; see `RoundMethod.origin`. The model unless overridden."""
        return self.rounds.model

    def norms(self, reply: Reply) -> Mapping[str, float]:
        """Measure a reply; see `RoundMethod.norms`. The norms of its update and of that of its buffers unless overridden."""
        origin = self.origin(reply)
        norms = {"update": update_norm(reply.arrays, origin)}
        return norms | {"buffers": update_norm(reply.buffers, origin)} if reply.buffers else norms

    def follow_up(self, *, enough: bool) -> FollowUp | None:
        """Ask for a further exchange; see `RoundMethod.follow_up`. None unless overridden."""
        return None

    def answer(self, reply: Reply) -> None:
        """Take the answer to a follow-up; see `RoundMethod.answer`."""
        raise RuntimeError(f"{type(self).__name__}: a follow-up whose answers nobody takes")

    def sample(self, server_round: int) -> list[int]:
        """Choose the clients of a round.

        Args:
            server_round: The round.

        Returns:
            Partition ids, ascending: a seeded sample of ``fraction_train`` of them; where nodes have data of their own and
            come and go, of those that are there.
        """
        roster = self.roster
        clients = range(roster.num_partitions) if roster.fixed else sorted(roster.node_of)
        return [clients[place] for place in self.places(MessageType.TRAIN, server_round, len(clients))]

    def places(self, kind: str, server_round: int, num_clients: int) -> list[int]:
        """Draw the clients of a training or an evaluation, by their places among those that there are.

        Args:
            kind: Flower's type of message: train or evaluate.
            server_round: The round.
            num_clients: How many there are.

        Returns:
            Their places, ascending.

        Raises:
            RosterError: There are fewer than the least number that trains.
        """
        settings, words = self.settings, self.words
        if kind == MessageType.TRAIN and words.trains:
            share, least = settings.fraction_train, words.min_train_nodes
            return sample_partitions(settings.seed, server_round, num_clients, share, least=least)
        if kind == MessageType.TRAIN or not words.fraction_evaluate or not num_clients:
            return []
        # Nodes may have gone since the training, which waited for as many: those that are left are measured.
        share, least = words.fraction_evaluate, words.min_evaluate_nodes
        least = None if least is None else min(least, num_clients)
        stream = EVALUATION_STREAM
        return sample_partitions(settings.seed, server_round, num_clients, share, least=least, stream=stream)

    def records_for(self, partition: int, through: int, model: Arrays) -> Records:
        """Say what one client receives.

        Args:
            partition: The client.
            through: The last round whose outcome it is to know.
            model: The model.

        Returns:
            Record -> arrays or entries; those of ``config`` are added to the round's. The model unless overridden.
        """
        return {ARRAYS: model}

    def told_clients(self) -> Entries:
        """Say what ClientApps of another project must know of the method.

        Returns:
            Entries for ``config``, see `fedapps.messages.method_facts`; none unless overridden.
        """
        return {}

    def announced(self, model: Arrays) -> Announced:
        """Say which records of arrays a reply may hold.

        Args:
            model: The model that was sent out.

        Returns:
            Record -> tensors of the same shapes and dtypes; tensors and buffers of the model unless overridden.
        """
        buffers = model if self.trainable is None else {k: v for k, v in model.items() if k not in self.trainable}
        return {ARRAYS: model, BUFFERS: buffers}

    def asks_again(self, partition: int, content: RecordDict) -> str:
        """Recognise a reply that asks for the message once more, because the client lacks something.

        Args:
            partition: The client.
            content: The content of its reply.

        Returns:
            What it lacks, which `records_for` gives from now on; ``""`` for any other reply.
        """
        return ""

    def curvature_layout(self) -> Layout | None:
        """Say which tensors the clients precondition, and why not the others.

        Returns:
            The layout; None for a method without curvature, or if it is not known yet.
        """
        return None

    def check_model(self, arrays: Arrays) -> None:
        """Refuse a model that the method cannot train, with a `TaskError`: one that cannot be averaged."""
        check_averageable(arrays, type(self).__name__)

    def share_of_all(self, partition: int) -> float:
        """Give a client's weight ``p_i`` over all ``N`` clients, for sums that hold something of every one of them.

        Raises:
            RosterError: The client's node did not tell its number of examples.
        """
        facts = self.roster.facts
        if not facts and self.settings.weighting == "uniform" and self.roster.num_partitions:
            return 1.0 / self.roster.num_partitions
        if partition not in facts:
            raise RosterError(
                f"{type(self).__name__}, weights of the clients",
                expected="the number of examples of every client, from its answer to the query",
                got=f"no answer from client {partition}",
                do="weigh all clients alike, by RoundSettings(weighting='uniform'), or use fedapps.client_apps on every node",
            )
        weights = {p: self.settings.weight(facts[p].num_examples) for p in sorted(facts)}
        return weights[partition] / sum(weights.values())

    def note_once(self, kind: str, text: str) -> None:
        """Note a remark of its kind the first time only."""
        if kind not in self._noted:
            self._noted.add(kind)
            self.rounds.note(text)

    # A run -----------------------------------------------------------------------------------

    def open(self, arrays: Arrays, task: Task, files: RunFiles, *, resumed: bool) -> Arrays:
        """Prepare for a run in a folder; called after `load_state` of a resumed one.

        Args:
            arrays: The first model.
            task: The task.
            files: The run's folder.
            resumed: Whether the run goes on from a checkpoint.

        Returns:
            What the run holds, sends and keeps in checkpoints: the model, or nothing where `model` builds it on demand.
        """
        self.trainable = frozenset(task.trainable_names())
        return arrays

    def model(self, arrays: Arrays) -> Arrays:
        """Give the present model.

        Args:
            arrays: What the run holds: what `open` or the last round gave.

        Returns:
            The model, by name.
        """
        return arrays

    def state_arrays(self) -> Arrays:
        """Give the arrays that the strategy keeps over rounds, for a checkpoint."""
        return {}

    def load_state_arrays(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Take back the arrays of a checkpoint, as `state_arrays` gave them; called after `load_state`."""

    def state(self) -> dict[str, Any]:
        """Give the plain state that a checkpoint keeps beside `state_arrays`."""
        return self.rounds.state()

    def load_state(self, state: Mapping[str, Any], last_folded: Mapping[int, int]) -> None:
        """Take back the plain state of a checkpoint.

        Args:
            state: What `state` gave.
            last_folded: Partition -> round of its last folded reply.
        """
        self.rounds.load_state(state, last_folded)

    # Flower's hooks --------------------------------------------------------------------------

    @override
    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Greet new nodes, sample partitions, begin the round and compose its messages, in order of partition ids.

        Raises:
            RosterError: Clients are missing.
            TaskError: The method cannot train the model.
            MessageError: A message is larger than ``max_message_mb``.
        """
        if not self.words.trains:
            return []
        self.roster.refresh(grid)
        phase = self._begin_phase(MessageType.TRAIN, server_round, server_round - 1, arrays, config, grid)
        self.check_model(phase.model)
        sampled = self.sample(server_round)
        self.rounds.begin(server_round, phase.model, sampled)
        for partition in sampled:
            if partition in self.roster.node_of:
                self._address(phase, partition, self.records_for(partition, phase.through, phase.model))
            else:
                self.rounds.receive(partition, None, "its node is gone")
        return list(phase.messages.values())

    def _begin_phase(
        self, kind: str, server_round: int, through: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> _Phase:
        model = unpack_arrays(RecordDict({ARRAYS: arrays}), ARRAYS, "server")
        packed: Packed = {id(model): (model, arrays)}
        self._phase = _Phase(kind, server_round, through, model, config, grid, packed)
        return self._phase

    def _address(self, phase: _Phase, partition: int, records: Records) -> Message:
        """Compose the message to a client, the only place where one is."""
        known = partition in self.rounds.report.folded and self.rounds.is_follow_up
        config = {
            **phase.config,
            SERVER_ROUND: phase.server_round,
            "experiment": self.roster.experiment,
            # A client whose reply was folded already goes on from what it kept with that.
            "last-folded": phase.server_round if known else self.rounds.last_folded.get(partition, 0),
            **self._own_data_entries(partition),
            # An experiment has a name in a run of this package, whose clients have the run config.
            **({} if self.roster.experiment else self.told_clients()),
            **records.get(CONFIG, {}),
        }
        content = self.words.outward(pack({**records, CONFIG: config}, phase.packed))
        check_size(content, self.settings.max_message_mb)
        phase.messages[partition] = Message(
            content,
            dst_node_id=self.roster.node_of[partition],
            message_type=phase.kind,
            group_id=str(phase.server_round),
            # A reply that comes after the round is over is of no use to anybody.
            ttl=self.settings.round_timeout + 60.0,
        )
        return phase.messages[partition]

    def _own_data_entries(self, partition: int) -> dict[str, Any]:
        """Say who a node with data of its own is, and what all have agreed on."""
        roster = self.roster
        return {} if roster.task is None else {CLIENT: partition, AGREED: json.dumps(roster.agreed)}

    @override
    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Fold all replies of a round; nothing comes out of a round below the quorum.

        Raises:
            RoundFailedError: As the failure policy says.
        """
        if not self.words.trains:
            return None, None
        self.take_replies(replies)
        arrays = self.rounds.end()
        if arrays is None:
            return None, None
        return pack_arrays(self.model(arrays)), self.train_metrics()

    def take_replies(self, replies: Iterable[Message]) -> None:
        """Take the replies to `configure_train`, and hold the further exchanges that the method asks for.

        Args:
            replies: The replies, in any order.

        Raises:
            RoundFailedError: A worker process died, or a client failed and the policy is ``fail-fast``.
        """
        phase = self._present_phase()
        for reply in replies:
            self._receive(phase, reply)
        while messages := self._next_exchange(phase):
            for reply in exchange(phase.grid, messages, self.settings.round_timeout):
                self._receive(phase, reply)

    def _present_phase(self) -> _Phase:
        if self._phase is None:
            raise RuntimeError("replies before messages: call configure_train or configure_evaluate first")
        return self._phase

    def _next_exchange(self, phase: _Phase) -> list[Message]:
        """Compose the messages of the next exchange: to clients that ask again, else to those of a follow-up."""
        again, phase.again = phase.again, []
        if again or phase.kind == MessageType.EVALUATE:
            return [self._address(phase, p, self.records_for(p, phase.through, phase.model)) for p in again]
        return [self._address(phase, p, records) for p, records in self.rounds.follow_up().items()]

    def _receive(self, phase: _Phase, message: Message) -> None:
        """Take a reply as Flower's grid hands it over."""
        # An error reply may come from the SuperLink itself, so the message that it answers tells the client.
        asked = message.metadata.reply_to_message_id
        partition = next((p for p, sent in phase.messages.items() if sent.metadata.message_id == asked), None)
        if partition is None:
            logger.warning("a reply from node %d that nobody waits for is ignored", message.metadata.src_node_id)
            return
        if message.has_error():
            self.rounds.receive(partition, None, self._reason_of(phase, message, partition))
        elif not self._asked_again(phase, partition, message.content):
            self.receive(partition, message.content, phase.model)

    def receive(self, partition: int, content: RecordDict, model: Arrays) -> None:
        """Check the content of a reply, and hand it to the round.

        Args:
            partition: The client.
            content: The content.
            model: The model that was sent out.

        Raises:
            RoundFailedError: It is refused and the policy is ``fail-fast``.
        """
        announced, words = self.announced(model), self.words
        if words.train_metrics_aggr_fn and not self.rounds.is_follow_up:
            self._contents[partition] = content
        try:
            # Refused before it can wait for its turn: a bad reply costs no memory.
            reply = read_reply(
                words.inward(content, announced),
                partition,
                announced,
                follow_up=self.rounds.is_follow_up,
                weighted_by=words.weighted_by_key,
            )
            self._check_examples(reply)
        except MessageError as problem:
            self.rounds.receive(partition, None, str(problem))
        else:
            self.rounds.receive(partition, reply)

    def _check_examples(self, reply: Reply) -> None:
        """Refuse a weight that is not what the client's node told in the handshake."""
        facts = self.roster.facts.get(reply.partition)
        told = facts is not None and self.words.weighted_by_key == NUM_EXAMPLES
        if facts and told and not self.rounds.is_follow_up and reply.num_examples != facts.num_examples:
            raise MessageError(
                f"{reply.where}, metric '{NUM_EXAMPLES}'",
                expected=f"the {facts.num_examples} examples that its node told",
                got=str(reply.num_examples),
                do="report all examples that the client trains on",
            )

    def _asked_again(self, phase: _Phase, partition: int, content: RecordDict) -> bool:
        """Tell whether a client is to get its message again: once a phase, and that of the round's start only."""
        done = partition in phase.asked_again or self.rounds.is_follow_up
        lacks = "" if done else self.asks_again(partition, content)
        if lacks:
            self.rounds.note(f"client {partition} lacks {lacks}: it is sent again")
            phase.asked_again.add(partition)
            phase.again.append(partition)
        return bool(lacks)

    def _reason_of(self, phase: _Phase, message: Message, partition: int) -> str:
        """Say why a client failed; a dead worker ends the run, since the simulation engine never replaces it.

        A node of a SuperLink may send any code that it likes, and ends nothing by it.
        """
        reason = (message.error.reason or "no reason given").strip()
        if message.error.code == ACTOR_DIED and not is_remote(phase.grid):
            raise self.rounds.failure(
                f"client {partition}: its worker process died "
                f"({last_line(reason)}). The simulation engine never replaces a dead worker, so the run ends. Most "
                "often the memory ran out: use fewer workers, a smaller model or a smaller batch, and --resume."
            )
        return reason

    def train_metrics(self) -> MetricRecord:
        """Average the clients' metrics of the last round, weighted by their number of examples.

        Returns:
            Means of the metrics that every client reported, or what ``train_metrics_aggr_fn`` makes of the folded replies.
        """
        if function := self.words.train_metrics_aggr_fn:
            return function([self._contents[p] for p in sorted(self.rounds.report.folded)], self.words.weighted_by_key)
        return mean_metrics(self.rounds.report.metrics, self.rounds.report.num_examples)

    @override
    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Compose a message to every client that has a node, or to ``fraction_evaluate`` of them.

        Raises:
            RosterError: Clients are missing.
            MessageError: A message is larger than ``max_message_mb``.
        """
        if not self.words.fraction_evaluate:
            return []
        if not self.words.trains:
            self.roster.refresh(grid)
        phase = self._begin_phase(MessageType.EVALUATE, server_round, server_round, arrays, config, grid)
        clients = sorted(self.roster.node_of)
        for partition in (clients[p] for p in self.places(MessageType.EVALUATE, server_round, len(clients))):
            self._address(phase, partition, self.records_for(partition, server_round, phase.model))
        return list(phase.messages.values())

    @override
    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Average the clients' evaluation metrics, weighted by their number of examples; None without a usable reply."""
        metrics, num_examples = self.evaluation_results(replies)
        if metrics and (function := self.words.evaluate_metrics_aggr_fn):
            return function([self._contents[p] for p in metrics], self.words.weighted_by_key)
        return mean_metrics(metrics, num_examples) if metrics else None

    def evaluation_results(self, replies: Iterable[Message]) -> tuple[dict[int, dict[str, float]], dict[int, float]]:
        """Sort evaluation replies by partition; clients that ask again get their message once more.

        Args:
            replies: The replies, in any order; failed ones are logged and left out.

        Returns:
            Partition -> metrics, and partition -> number of examples, for clients that have test data.
        """
        found: dict[int, tuple[dict[str, float], float]] = {}
        for reply in replies:
            self._take_evaluation(reply, found)
        phase = self._phase
        while phase is not None and phase.kind == MessageType.EVALUATE and (messages := self._next_exchange(phase)):
            for reply in exchange(phase.grid, messages, self.settings.round_timeout):
                self._take_evaluation(reply, found)
        ordered = sorted(found.items())
        return {p: metrics for p, (metrics, _) in ordered}, {p: count for p, (_, count) in ordered}

    def _take_evaluation(self, reply: Message, found: dict[int, tuple[dict[str, float], float]]) -> None:
        partition = self.roster.partition_of(reply.metadata.src_node_id)
        if partition is None or reply.has_error():
            reason = last_line(reply.error.reason or "") if reply.has_error() else "unknown node"
            logger.error("evaluation, client %s: %s", partition, reason)
            return
        phase = self._present_phase()
        if self._asked_again(phase, partition, reply.content):
            return
        if lacks := self.asks_again(partition, reply.content):
            self.rounds.note(f"client {partition} was not measured: it lacks {lacks}")
            return
        key = self.words.weighted_by_key
        if self.words.evaluate_metrics_aggr_fn:
            self._contents[partition] = reply.content
        content = self.words.inward(reply.content, {})
        try:
            metrics = read_metrics(content, f"client {partition}", key)
        except MessageError as problem:
            logger.error("evaluation: %s", problem)
            return
        record = content.get(METRICS)
        count = record.get(key, 0) if isinstance(record, MetricRecord) else 0
        if isinstance(count, int if key == NUM_EXAMPLES else int | float) and count > 0:
            found[partition] = (metrics, count)

    @override
    def summary(self) -> None:
        """Log what a reader of the log needs to repeat the run."""
        logger.info("%s %s", type(self).__name__, self.settings)


def lr_of(config: ConfigRecord) -> float:
    """Read the learning rate in force from a round's config, for strategies that take the step themselves.

    Args:
        config: The config.

    Returns:
        ``lr``.

    Raises:
        MessageError: It is absent, or no number.
    """
    lr = config.get("lr")
    if not isinstance(lr, int | float):
        raise MessageError(
            "train config, entry 'lr'",
            expected="a number",
            got=repr(lr),
            do="pass train_config=ConfigRecord({'lr': ...}) to the strategy's start",
        )
    return float(lr)


def mean_metrics(metrics: Mapping[int, Mapping[str, float]], num_examples: Mapping[int, float]) -> MetricRecord:
    """Average metrics over clients, weighted by their number of examples.

    Args:
        metrics: Partition -> metric -> value.
        num_examples: Partition -> number of examples.

    Returns:
        The means of the metrics that every client has, in partition order, over the clients whose value is finite; where
        those are not all, their number as ``<metric>-clients``. A metric that is finite nowhere is NaN.
    """
    shared = set.intersection(*(set(values) for values in metrics.values())) if metrics else set()
    means: dict[str, Any] = {}
    for name in sorted(shared):
        clients = [p for p in sorted(metrics) if math.isfinite(metrics[p][name])]
        total = sum(num_examples[p] for p in clients)
        means[name] = sum(num_examples[p] * metrics[p][name] for p in clients) / total if clients else math.nan
        if len(clients) < len(metrics):
            means[f"{name}-clients"] = len(clients)
    return MetricRecord(means)
