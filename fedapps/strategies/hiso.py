r"""HiSo, DeComFL and HiSo with momentum: only scalars travel, the server's side.

HiSo, arXiv 2506.02370, Algorithm 1; DeComFL, arXiv 2405.15861. A round adds the clients' directional derivatives

.. math:: G_{kp} = \sum_i p_i\, g_{i,kp}

to the journal, and every replica of the model, the server's too, applies them. Which update rule does that is one word
of the scheme (`fedapps.zeroth_order.rules`), so the three methods are one strategy. No tensor travels: a sampled client
receives the rounds of the journal that it has not acknowledged, and answers ``tau x P`` numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from fedapps.errors import MessageError
from fedapps.records import (
    ARRAYS,
    CONFIG,
    CONFIRM,
    JOURNAL,
    METRICS,
    REBUILT,
    Arrays,
    Reply,
    pack_arrays,
    unpack_arrays,
)
from fedapps.settings import Settings
from fedapps.strategies.kept_journal import KeptJournal
from fedapps.strategies.options import RoundOptions
from fedapps.strategies.rounds import RoundMixin
from fedapps.strategies.scalar_options import ScalarOptions
from fedapps.strategies.scalar_replies import fingerprint_of, majority, need_of, read_scalars
from fedapps.zeroth_order.aggregate import aggregate_scalars
from fedapps.zeroth_order.dispatch import kernel_checksum
from fedapps.zeroth_order.journal import Slice
from fedapps.zeroth_order.scheme import Record, Scalars, Scheme, radius
from fedapps.zeroth_order.wire import pack_slice


class HiSo(RoundMixin, Strategy):
    """The journal's keeper: it samples, aggregates scalars, and builds the model only when it is asked for.

    Under Flower's unmodified ``start`` the journal is in memory, all tensors count as trainable, and ``train_config`` must
    hold ``lr``.

    Args:
        options: The shared options.
        scalars: What a round does.

    Attributes:
        scalars: As given.
        kept: The run's journal and the model that it leads to; None before the first model is known.

    Example:
        >>> HiSo(scalars=ScalarOptions(scheme=Scheme(7, "decomfl"), tau=2)).scalars.tau
        2
    """

    def __init__(self, *, options: RoundOptions | None = None, scalars: ScalarOptions | None = None) -> None:
        self.set_up_rounds(options or RoundOptions(weighting="uniform"))
        self.roster.kernel = kernel_checksum()
        self.scalars = scalars or ScalarOptions(scheme=Scheme(self.options.seed))
        self.kept: KeptJournal | None = None
        self._lr = 0.0
        self._config = ConfigRecord({})
        self._scalars: dict[int, Scalars] = {}
        self._weights: dict[int, float] = {}
        self._needs: dict[int, int] = {}
        self._resends: dict[int, Message] = {}
        self._out_again: list[Message] = []
        self._unsettled: Record | None = None
        self._votes: dict[int, str] = {}
        self._asked: dict[int | None, Message] = {}
        self._num_records: int | None = None

    @classmethod
    def from_settings(cls, settings: Settings, experiment: str) -> HiSo:
        """Build the strategy of a run.

        Args:
            settings: The settings.
            experiment: Identity of the experiment.

        Returns:
            The strategy.
        """
        options = RoundOptions.from_settings(settings, experiment)
        return cls(options=options, scalars=ScalarOptions.from_settings(settings))

    def open_journal(
        self,
        arrays: Arrays,
        trainable: Sequence[str] | None = None,
        *,
        base: str = "model",
        revision: str | None = None,
        path: Path | None = None,
        load: Callable[[], Arrays] | None = None,
    ) -> None:
        """Start the journal, or go on with it after `load_state`.

        Args:
            arrays: The model before round 1.
            trainable: Names of the trainable tensors, in the model's order; None for all.
            base: Name of that model.
            revision: Its revision, if it has one.
            path: Where the journal lies; None keeps it in memory.
            load: Loads `arrays` again, so that the server need not hold them; None holds them.

        Raises:
            JournalError: The file exists, or cannot be read, or is another model's.
            CheckpointError: The file is not the checkpoint's.
        """
        names = list(arrays) if trainable is None else trainable
        self.kept = KeptJournal(
            self.scalars.scheme,
            arrays,
            names,
            base=base,
            revision=revision,
            path=path,
            records=self._num_records,
            load=load,
        )

    def _opened(self) -> KeptJournal:
        if self.kept is None:
            raise RuntimeError("no journal yet: call open_journal first")
        return self.kept

    def model(self) -> Arrays:
        """Build the model after the last round, or bring the one that was built before up to date.

        Returns:
            Name -> array, read-only and changed by later rounds, in the order of the first model.

        Raises:
            AstrayError: It differs from a fingerprint of the journal.
        """
        return self._opened().model()

    # What travels ----------------------------------------------------------------------------

    def arrays_to_send(self, arrays: ArrayRecord) -> ArrayRecord:
        """Send no tensor.

        Args:
            arrays: The model.

        Returns:
            An empty record.
        """
        return ArrayRecord({})

    def records_for(self, partition: int, through: int) -> dict[str, ConfigRecord]:
        """Give the rounds of the journal that a client has not acknowledged.

        A client whose reply of round ``f`` was folded keeps the journal up to round ``f - 1`` with it.

        Args:
            partition: The client.
            through: The last round that the client is to know.

        Returns:
            Record ``journal``: the slice in columns, the base model's fingerprint, and first step and radius of the
            next round.
        """
        after = self._needs.get(partition, max(self.last_folded.get(partition, 0) - 1, 0))
        part = self._opened().journal.slice(min(after, through), through)
        return {JOURNAL: ConfigRecord(self._slice_record(part))}

    def _slice_record(self, part: Slice) -> dict[str, Any]:
        return {
            **pack_slice(part),
            "base": bytes.fromhex(self._opened().journal.header.base.fingerprint),
            "next-first-step": part.through * self.scalars.tau,
            "next-mu": self._mu(part.through + 1),
        }

    def _mu(self, server_round: int) -> float:
        return radius(self.scalars.mu, self.scalars.mu_decay, server_round)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Compose the messages of a round, as `RoundMixin` does.

        Args:
            server_round: The round, from 1.
            arrays: The model.
            config: Entries to send to every client, ``lr`` among them.
            grid: Flower's grid.

        Returns:
            One message for each sampled partition.

        Raises:
            MessageError: ``lr`` is missing.
        """
        lr = config.get("lr")
        if not isinstance(lr, int | float):
            do = "pass train_config=ConfigRecord({'lr': ...}) to the strategy's start"
            raise MessageError("train config, entry 'lr'", expected="a number", got=repr(lr), do=do)
        if self.kept is None:
            self.open_journal(unpack_arrays(RecordDict({ARRAYS: arrays}), ARRAYS, "server"))
        self._lr, self._config, self._resends, self._out_again = float(lr), config, {}, []
        return super().configure_train(server_round, arrays, config, grid)

    def receive_message(self, message: Message) -> None:
        """Take a reply; a client that lacks more of the journal gets it within the round.

        Args:
            message: The reply.
        """
        partition = self._partition_of_reply(message)
        need = None if message.has_error() else need_of(message.content)
        if partition is None or need is None or partition in self._resends:
            super().receive_message(message)
            return
        self._resends[partition] = self._messages[partition] = self._sent_again(
            self._messages[partition], partition, need
        )
        self._out_again.append(self._resends[partition])

    def _sent_again(self, sent: Message, partition: int, need: int) -> Message:
        """Compose a message once more, with the journal from where its client needs it."""
        self._needs[partition] = need
        self.note(f"client {partition} has lost its journal: sent again from round {need}")
        through = int(sent.content.config_records[JOURNAL]["through"])  # type: ignore[arg-type]
        return Message(
            RecordDict({**sent.content, **self.records_for(partition, through)}),
            dst_node_id=sent.metadata.dst_node_id,
            message_type=sent.metadata.message_type,
            group_id=sent.metadata.group_id,
            ttl=sent.metadata.ttl,
        )

    def take_resends(self) -> list[Message]:
        """Hand over the messages for clients that lack more of the journal.

        Returns:
            The messages, each once.
        """
        messages, self._out_again = self._out_again, []
        return messages

    # A round ---------------------------------------------------------------------------------

    def check_model(self, arrays: Arrays) -> None:
        """Take a model of any floating type: none is averaged.

        Args:
            arrays: The model.
        """

    def begin(self, arrays: Arrays) -> None:
        """Start a round.

        Args:
            arrays: Not used: the model is what the journal leads to.
        """
        self._scalars, self._weights = {}, {}

    def fold(self, reply: Reply) -> None:
        """Take a client's scalars.

        Args:
            reply: A checked reply.

        Raises:
            MessageError: They are missing, malformed, not finite, of another round, or measured on another replica.
        """
        scalars = read_scalars(reply, self.report.server_round, (self.scalars.tau, self.scalars.num_probes))
        self._check_fingerprint(reply)
        self._scalars[reply.partition] = scalars
        self._weights[reply.partition] = self.options.weight(reply.num_examples)
        self._needs.pop(reply.partition, None)

    def _check_fingerprint(self, reply: Reply) -> None:
        """Refuse scalars of a replica that went astray; the journal's last state is the one before the round."""
        records = self._opened().journal.records
        expected, found = records[-1].fingerprint if records else None, fingerprint_of(reply.content)
        if None not in (expected, found) and found != expected:
            do = "the client rebuilds its replica at its next message"
            where = f"{reply.where}, fingerprint"
            raise MessageError(where, expected=str(expected)[:16], got=str(found)[:16], do=do)

    def finish(self) -> Arrays:
        """Aggregate; the round is written into the journal by `settle`.

        Returns:
            No array: `model` builds them.
        """
        options, server_round = self.scalars, self.report.server_round
        G = aggregate_scalars(
            self._scalars, rule=options.aggregation, weights=self._weights, trim=options.trim, clip=options.clip
        )
        self._unsettled = Record(
            server_round, (server_round - 1) * options.tau, self._lr, self._mu(server_round), options.nu,
            options.eps, G, len(self._scalars), momentum=options.momentum,
        )  # fmt: skip
        self._scalars, self._votes = {}, {}
        return {}

    def confirmations(self) -> list[Message]:
        """Ask the clients of an ended round which state it leads to, where a fingerprint is due.

        They apply the round, which they would do anyway, and answer with the fingerprint of their replicas.

        Returns:
            A message for each client whose scalars were folded; none where no fingerprint is due, or a client's would be
            the only vote, which confirms nothing.
        """
        record = self._unsettled
        if record is None or not self.scalars.fingerprint_due(record.round):
            return []
        if len(self.report.folded) + (self._opened().replica is not None) < 2:
            return []
        part = Slice(record.round - 1, record.round, (record,))
        journal = ConfigRecord({**self._slice_record(part), CONFIRM: True})
        for partition in self.report.folded:
            config = self._client_config(record.round, partition, self._config)
            content = RecordDict({ARRAYS: ArrayRecord({}), CONFIG: config, JOURNAL: journal})
            self._messages[partition] = Message(
                content,
                dst_node_id=self.roster.node_of[partition],
                message_type=MessageType.TRAIN,
                group_id=str(record.round),
                ttl=self.options.round_timeout + 60.0,
            )
        return list(self._messages.values())

    def receive_confirmation(self, message: Message) -> None:
        """Take a client's answer to `confirmations`; one that failed has no vote.

        Args:
            message: The reply.

        Raises:
            RoundFailedError: A worker process died.
        """
        partition = self._partition_of_reply(message)
        found = None if message.has_error() else fingerprint_of(message.content)
        if partition is None:
            return
        if found is not None:
            self._votes[partition] = found
            metrics = message.content.get(METRICS)
            self.report.values["rebuilt"] += isinstance(metrics, MetricRecord) and metrics.get(REBUILT) == 1
            return
        reason = self._reason_of(message, partition) if message.has_error() else "a reply without a fingerprint"
        self.note(f"client {partition} did not confirm the round: {reason[-200:]}")

    def settle(self) -> None:
        """Write the ended round into the journal, with the fingerprint on which clients and server mostly agree."""
        record, kept = self._unsettled, self._opened()
        if record is None:
            return
        self._unsettled, self._messages = None, {}
        if self.scalars.fingerprint_due(record.round):
            own = kept.fingerprint_after(record)
            cast = [*self._votes.values(), *([own] if own else [])]
            agreed = majority(cast)
            if own is not None and not self._votes:
                # Nobody was asked, as under Flower's own loop: the clients compare it in their next round.
                agreed = own
            elif own is not None and own != agreed:
                # Clients of one process answer from one replica. What base and journal lead to outvotes them all.
                agreed = self._built_again(kept, record, own)
            record = replace(record, fingerprint=agreed)
            for partition, found in self._votes.items():
                if found != agreed and len(cast) > 1:
                    self.note(f"client {partition}: its replica went astray and is built again at its next message")
        kept.append(record)

    def _built_again(self, kept: KeptJournal, record: Record, own: str | None) -> str | None:
        """Build the server's replica again from base and journal, and name the state after the round."""
        kept.rebuild()
        built = kept.fingerprint_after(record)
        if built != own:
            self.note("the server's replica had gone astray and was built again")
            self.report.values["rebuilt"] += 1
        return built

    def end_round(self) -> Arrays | None:
        """End the round, as `RoundMixin` does, and count what had to be sent or built again.

        Returns:
            The new model, or None if the round is below the quorum.
        """
        for message in self.take_resends():  # Under Flower's own loop nothing is sent within a round.
            partition = next(p for p, sent in self._messages.items() if sent is message)
            self.receive(partition, None, "its journal was lost; it is sent again with the next round")
        arrays = super().end_round()
        rebuilt = sum(metrics.get(REBUILT) == 1 for metrics in self.report.metrics.values())
        self.report.values |= {"rebuilt": rebuilt, "resent": len(self._resends)}
        return arrays

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Fold all replies of a round, as `RoundMixin` does, and build the model, which Flower's own loop goes on with.

        Args:
            server_round: The round.
            replies: The replies, in any order.

        Returns:
            The new model and the mean train metrics, or None twice if the round is below the quorum.
        """
        arrays, metrics = super().aggregate_train(server_round, replies)
        self.settle()
        return (None if arrays is None else pack_arrays(self.model())), metrics

    # Evaluation ------------------------------------------------------------------------------

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Ask every client to evaluate its replica, as `RoundMixin` does.

        Args:
            server_round: The round.
            arrays: The model.
            config: Entries to send to every client.
            grid: Flower's grid.

        Returns:
            One message for each partition that has a node.
        """
        messages = super().configure_evaluate(server_round, arrays, config, grid)
        self._asked = {self.roster.partition_of(message.metadata.dst_node_id): message for message in messages}
        self._out_again = []
        return messages

    def evaluation_results(self, replies: Iterable[Message]) -> tuple[dict[int, dict[str, float]], dict[int, int]]:
        """Sort evaluation replies by partition; a client that lacks more of the journal is asked again, once.

        Args:
            replies: The replies, in any order.

        Returns:
            Partition -> metrics, and partition -> number of examples.
        """
        return super().evaluation_results(reply for reply in replies if not self._lacks_journal(reply))

    def _lacks_journal(self, reply: Message) -> bool:
        need = None if reply.has_error() else need_of(reply.content)
        if need is None:
            return False
        partition = self.roster.partition_of(reply.metadata.src_node_id)
        sent = self._asked.pop(partition, None)
        if partition is None or sent is None:
            self.note(f"client {partition} was not measured: it lacks the journal from round {need}")
        else:
            self._out_again.append(self._sent_again(sent, partition, need))
        return True

    # Resume ----------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Give the plain state that a checkpoint keeps beside the journal."""
        needs = {str(partition): need for partition, need in self._needs.items()}
        return {**super().state(), "records": len(self._opened().journal.records), "needs": needs}

    def load_state(self, state: Mapping[str, Any], last_folded: Mapping[int, int]) -> None:
        """Take back the plain state of a checkpoint.

        Args:
            state: What `state` gave.
            last_folded: Partition -> round of its last folded reply.
        """
        super().load_state(state, last_folded)
        self._num_records = int(state["records"])
        self._needs = {int(partition): int(need) for partition, need in state["needs"].items()}
