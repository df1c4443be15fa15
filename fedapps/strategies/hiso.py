r"""HiSo, DeComFL and HiSo with momentum: only scalars travel, the server's side.

HiSo, arXiv 2506.02370, Algorithm 1; DeComFL, arXiv 2405.15861. A round adds the clients' directional derivatives

.. math:: G_{kp} = \sum_i p_i\, g_{i,kp}

to the journal, and every replica of the model, the server's too, applies them. Which update rule does that is one word
of the scheme (`fedapps.zeroth_order.rules`), so the three methods are one strategy. No tensor travels: a sampled client
receives the rounds of the journal that it has not acknowledged, and answers ``tau x P`` numbers.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from fedapps.errors import CheckpointError, MessageError, explain
from fedapps.records import ARRAYS, JOURNAL, NEED_FROM, REBUILT, SCALARS, SERVER_ROUND, Arrays, Reply, unpack_arrays
from fedapps.settings import Settings
from fedapps.strategies.options import RoundOptions
from fedapps.strategies.rounds import RoundMixin
from fedapps.strategies.scalar_options import ScalarOptions
from fedapps.zeroth_order.aggregate import aggregate_scalars
from fedapps.zeroth_order.dispatch import kernel_checksum
from fedapps.zeroth_order.errors import ScalarError
from fedapps.zeroth_order.journal import BaseModel, Header, Journal, JournalFile, Slice
from fedapps.zeroth_order.layout import fingerprint, layout_of
from fedapps.zeroth_order.replica import Replica
from fedapps.zeroth_order.scheme import Record, Scalars, Scheme, check_scalars
from fedapps.zeroth_order.wire import pack_slice, unpack_scalars


class HiSo(RoundMixin, Strategy):
    """The journal's keeper: it samples, aggregates scalars and keeps a replica of the model for evaluation.

    Under Flower's unmodified ``start`` the journal is in memory (`journal`), all tensors count as trainable, and
    ``train_config`` must hold ``lr``.

    Args:
        options: The shared options.
        scalars: What a round does.

    Attributes:
        scalars: As given.
        journal: The run's journal; None before the model is known.
        replica: The server's replica; None before the model is known.

    Example:
        >>> HiSo(scalars=ScalarOptions(scheme=Scheme(7, "decomfl"), tau=2)).scalars.tau
        2
    """

    def __init__(self, *, options: RoundOptions | None = None, scalars: ScalarOptions | None = None) -> None:
        self.set_up_rounds(options or RoundOptions(weighting="uniform"))
        self.roster.kernel = kernel_checksum()
        self.scalars = scalars or ScalarOptions(scheme=Scheme(self.options.seed))
        self.journal: Journal | None = None
        self.replica: Replica | None = None
        self._file: JournalFile | None = None
        self._lr = 0.0
        self._scalars: dict[int, Scalars] = {}
        self._weights: dict[int, float] = {}
        self._needs: dict[int, int] = {}
        self._resends: dict[int, Message] = {}
        self._out_again: list[Message] = []
        self._loaded: dict[str, Any] = {}

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
        path: Path | None = None,
        resumed_after: int | None = None,
    ) -> None:
        """Start or go on with the journal, and make the server's replica.

        Args:
            arrays: The model: at the start of the run, or of the checkpoint.
            trainable: Names of the trainable tensors, in the model's order; None for all.
            base: Name of the model at the start.
            path: Where the journal lies; None keeps it in memory.
            resumed_after: Round of the checkpoint that the run goes on from; the file ends with it.

        Raises:
            JournalError: The file exists, or cannot be read, or is another model's.
            CheckpointError: The file is not the checkpoint's.
        """
        theta = {name: np.array(arrays[name], order="C") for name in (arrays if trainable is None else trainable)}
        layout, scheme = layout_of(theta), self.scalars.scheme
        if resumed_after is None or path is None:
            header = Header(scheme, BaseModel(base, None, fingerprint(layout, theta)), layout)
            self._file = JournalFile.create(path, header) if path else None
            self.journal = self._file.journal if self._file else Journal(header)
            self.replica = Replica(scheme, theta)
        else:
            self._file = JournalFile.open(path)
            self.journal = self._file.journal
            self.journal.check_model(layout)
            self._check_resumed(self.journal, path)
            self.replica = Replica(scheme, theta, self._loaded["slots"] or None, round=resumed_after)
        if self._file is not None:
            weakref.finalize(self, self._file.close)

    def _check_resumed(self, journal: Journal, path: Path) -> None:
        expected = self._loaded["records"]
        if journal.header.scheme != self.scalars.scheme or len(journal.records) != expected:
            raise CheckpointError(
                explain(
                    str(path),
                    expected=f"{expected} rounds of {self.scalars.scheme}",
                    got=f"{len(journal.records)} of {journal.header.scheme}",
                    do="restore the journal that belongs to the checkpoint",
                )
            )

    def _opened(self) -> tuple[Journal, Replica]:
        if self.journal is None or self.replica is None:
            raise RuntimeError("no journal yet: call open_journal first")
        return self.journal, self.replica

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
        journal, _ = self._opened()
        after = self._needs.get(partition, max(self.last_folded.get(partition, 0) - 1, 0))
        record = ConfigRecord(
            {
                **pack_slice(journal.slice(min(after, through), through)),
                "base": bytes.fromhex(journal.header.base.fingerprint),
                "next-first-step": through * self.scalars.tau,
                "next-mu": self.mu_of(through + 1),
            }
        )
        return {JOURNAL: record}

    def mu_of(self, server_round: int) -> float:
        """Give the radius of a round.

        Args:
            server_round: The round, from 1.

        Returns:
            The radius.
        """
        return self.scalars.mu * self.scalars.mu_decay ** (server_round - 1)

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
            raise MessageError(explain("train config, entry 'lr'", expected="a number", got=repr(lr), do=do))
        if self.journal is None:
            self.open_journal(unpack_arrays(RecordDict({ARRAYS: arrays}), ARRAYS, "server"))
        self._lr, self._resends, self._out_again = float(lr), {}, []
        return super().configure_train(server_round, arrays, config, grid)

    def receive_message(self, message: Message) -> None:
        """Take a reply; a client that lacks more of the journal gets it within the round.

        Args:
            message: The reply.
        """
        partition = self._partition_of_reply(message)
        need = None if message.has_error() else _need_of(message.content)
        if partition is None or need is None or partition in self._resends:
            super().receive_message(message)
            return
        sent, self._needs[partition] = self._messages[partition], need
        self.note(f"client {partition} has lost its journal: sent again from round {need}")
        self._resends[partition] = self._messages[partition] = Message(
            RecordDict({**sent.content, **self.records_for(partition, self.report.server_round - 1)}),
            dst_node_id=sent.metadata.dst_node_id,
            message_type=MessageType.TRAIN,
            group_id=sent.metadata.group_id,
            ttl=sent.metadata.ttl,
        )
        self._out_again.append(self._resends[partition])

    def take_resends(self) -> list[Message]:
        """Hand over the messages for clients that lack more of the journal.

        Returns:
            The messages, each once.
        """
        messages, self._out_again = self._out_again, []
        return messages

    # A round ---------------------------------------------------------------------------------

    def begin(self, arrays: Arrays) -> None:
        """Start a round.

        Args:
            arrays: The server's model, by name.
        """
        self._model = arrays
        self._scalars, self._weights = {}, {}

    def fold(self, reply: Reply) -> None:
        """Take a client's scalars.

        Args:
            reply: A checked reply.

        Raises:
            MessageError: They are missing, malformed, not finite, of another round, or measured on another replica.
        """
        record = reply.content.get(SCALARS)
        if not isinstance(record, ConfigRecord) or not isinstance(record.get("values"), bytes):
            need = _need_of(reply.content)
            got = ", ".join(reply.content) if need is None else f"that it lacks the journal from round {need}"
            do = "use fedapps.client_apps.zeroth_order.train"
            raise MessageError(explain(reply.where, expected=f"'values' in record '{SCALARS}'", got=got, do=do))
        server_round = self.report.server_round
        if record.get(SERVER_ROUND) != server_round:
            got, do = f"round {record.get(SERVER_ROUND)!r}", "answer the last message only"
            raise MessageError(explain(reply.where, expected=f"scalars of round {server_round}", got=got, do=do))
        self._check_fingerprint(reply, record)
        self._scalars[reply.partition] = self._read(reply, record)
        self._weights[reply.partition] = self.options.weight(reply.num_examples)
        self._needs.pop(reply.partition, None)

    def _read(self, reply: Reply, record: ConfigRecord) -> Scalars:
        shape = (self.scalars.tau, self.scalars.num_probes)
        try:
            scalars = unpack_scalars(bytes(record["values"]), shape[1])  # type: ignore[arg-type]  # checked in fold
            check_scalars(scalars, where=reply.where, shape=shape)
        except ScalarError as problem:
            raise MessageError(str(problem)) from problem
        except ValueError as problem:
            expected, do = f"{shape[0]} rows of {shape[1]} scalars", "send one scalar a step and probe"
            raise MessageError(explain(reply.where, expected=expected, got=str(problem), do=do)) from problem
        return scalars

    def _check_fingerprint(self, reply: Reply, record: ConfigRecord) -> None:
        """Refuse scalars of a replica that went astray; the server's own state is before the round."""
        journal, _ = self._opened()
        expected = journal.records[-1].fingerprint if journal.records else None
        found = record.get("fingerprint")
        if isinstance(found, bytes) and expected is not None and found.hex() != expected:
            do = "the client rebuilds its replica at its next message"
            where = f"{reply.where}, fingerprint"
            raise MessageError(explain(where, expected=expected[:16], got=found.hex()[:16], do=do))

    def finish(self) -> Arrays:
        """Aggregate, apply to the server's replica, and write the round into the journal.

        Returns:
            The new model, by name, in the order of the old one.
        """
        journal, replica = self._opened()
        options, server_round = self.scalars, self.report.server_round
        G = aggregate_scalars(
            self._scalars, rule=options.aggregation, weights=self._weights, trim=options.trim, clip=options.clip
        )
        record = Record(
            server_round, (server_round - 1) * options.tau, self._lr, self.mu_of(server_round), options.nu,
            options.eps, G, len(self._scalars), momentum=options.momentum,
        )  # fmt: skip
        replica.advance(Slice(replica.round, server_round, (record,)), verify=False)
        if options.fingerprint_every and server_round % options.fingerprint_every == 0:
            record = replace(record, fingerprint=replica.fingerprint())
        (self._file or journal).append(record)
        self._scalars = {}
        return {
            name: np.array(replica.theta[name]) if name in replica.theta else value
            for name, value in self._model.items()
        }

    def end_round(self) -> Arrays | None:
        """End the round, as `RoundMixin` does, and count what had to be sent or built again.

        Returns:
            The new model, or None if the round is below the quorum.
        """
        for message in self.take_resends():  # Under Flower's own loop nothing is sent within a round.
            partition = next(p for p, sent in self._messages.items() if sent is message)
            self.receive(partition, None, "its journal was lost; it is sent again with the next round")
        arrays = super().end_round()
        rebuilt = sum(int(metrics.get(REBUILT, 0)) for metrics in self.report.metrics.values())
        self.report.values |= {"rebuilt": rebuilt, "resent": len(self._resends)}
        return arrays

    # Resume ----------------------------------------------------------------------------------

    def state_arrays(self) -> Arrays:
        """Give the state of the update rule."""
        _, replica = self._opened()
        return {
            f"{slot}/{name}": np.asarray(value)
            for slot, tensors in replica.state.items()
            for name, value in tensors.items()
        }

    def load_state_arrays(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Take back the state of the update rule.

        Args:
            arrays: What `state_arrays` gave.
        """
        slots: dict[str, dict[str, np.ndarray]] = {}
        for key, value in arrays.items():
            slot, _, name = key.partition("/")
            slots.setdefault(slot, {})[name] = np.array(value, order="C")
        self._loaded["slots"] = slots

    def state(self) -> dict[str, Any]:
        """Give the plain state that a checkpoint keeps beside `state_arrays`."""
        needs = {str(partition): need for partition, need in self._needs.items()}
        return {**super().state(), "records": len(self._opened()[0].records), "needs": needs}

    def load_state(self, state: Mapping[str, Any], last_folded: Mapping[int, int]) -> None:
        """Take back the plain state of a checkpoint.

        Args:
            state: What `state` gave.
            last_folded: Partition -> round of its last folded reply.
        """
        super().load_state(state, last_folded)
        self._loaded["records"] = int(state["records"])
        self._needs = {int(partition): int(need) for partition, need in state["needs"].items()}


def _need_of(content: RecordDict) -> int | None:
    """Read from which round a client asks for the journal."""
    record = content.get(SCALARS)
    need = record.get(NEED_FROM) if isinstance(record, ConfigRecord) else None
    return need if isinstance(need, int) and need >= 0 else None
