r"""HiSo, DeComFL and HiSo with momentum: only scalars travel, the server's side.

HiSo, arXiv 2506.02370, Algorithm 1; DeComFL, arXiv 2405.15861. A round adds the clients' directional derivatives

.. math:: G_{kp} = \sum_i p_i\, g_{i,kp}

to the journal, and every replica of the model, the server's too, applies them. Which update rule does that is one word
of the scheme (`fedapps.zeroth_order.rules`), so the three methods are one strategy. No tensor travels: a sampled client
receives the rounds of the journal that it has not acknowledged, and answers ``tau x P`` numbers. Where a fingerprint is due,
the clients of the round are asked once more: they apply it, which they would do anyway, and name the state of their replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid
from typing_extensions import override

from fedapps.defences import update_norm
from fedapps.errors import MessageError, SettingsError
from fedapps.messages.method_facts import tell_method
from fedapps.messages.scalars import JOURNAL, SCALARS, JournalPart, fingerprint_of, need_of, read_scalars
from fedapps.messages.schema import ARRAYS, REBUILT, Announced, Arrays, Entries, Records, Reply, unpack_arrays
from fedapps.methods.zeroth_order import DeComFLSettings, HiSoSettings, scheme_of
from fedapps.settings import RoundSettings, Settings
from fedapps.strategies.base import RoundStrategy, RunFiles, lr_of
from fedapps.strategies.kept_journal import KeptJournal
from fedapps.strategies.rounds import FollowUp
from fedapps.strategies.votes import judge
from fedapps.tasks.base import Task
from fedapps.zeroth_order.aggregate import Aggregation, aggregate_scalars
from fedapps.zeroth_order.dispatch import kernel_checksum
from fedapps.zeroth_order.journal import Slice
from fedapps.zeroth_order.layout import Ranges
from fedapps.zeroth_order.scheme import Record, Scalars

LARGEST_SCALAR = 1e15
"""Largest scalar of a round: ``D * D`` is finite in float32 up to ``|D| = 1e19``, and the entries of a direction are below 1e4
where ``H`` is 1e-6."""


class HiSo(RoundStrategy):
    """The journal's keeper: it samples, aggregates scalars, and builds the model only when it is asked for.

    Under Flower's unmodified ``start`` the journal is in memory, all tensors count as trainable, and ``train_config`` must
    hold ``lr``.

    Args:
        settings: As `RoundStrategy`; weights are uniform if left out.
        own: The method's own settings.
        rule: The update rule: ``hiso``, ``decomfl`` or ``hiso-momentum``.
        tau: Local steps, at least 1.
        **rounds: Further arguments of `RoundStrategy`.

    Attributes:
        scheme: What the journal's header fixes.
        kept: The run's journal and the model that it leads to; None before the first model is known.

    Raises:
        SettingsError: ``tau`` is below 1.

    Example:
        >>> HiSo(own=HiSoSettings(nu=0.1), tau=2).scheme.method
        'hiso'
    """

    holds = True
    """Scalars are few, and those of one probe may be tiny for all clients of a round, so that it bounds no other round."""

    def __init__(
        self,
        settings: RoundSettings | None = None,
        *,
        own: DeComFLSettings | None = None,
        rule: str = "hiso",
        tau: int = 1,
        **rounds: Any,
    ) -> None:
        super().__init__(settings, **(rounds if settings else {"weighting": "uniform", **rounds}))
        if tau < 1:
            raise SettingsError(
                "setting 'local-steps'",
                expected="at least 1: all clients of a scalar-only method take the same number of steps",
                got=str(tau),
                do="say how many",
            )
        self.roster.kernel = kernel_checksum()
        self.own = own or HiSoSettings()
        self.tau = tau
        self.scheme = scheme_of(self.settings.seed, rule, self.own)
        self.kept: KeptJournal | None = None
        self._lr = 0.0
        self._scalars: dict[int, Scalars] = {}
        self._weights: dict[int, float] = {}
        self._record: Record | None = None
        self._votes: dict[int, str] = {}
        self._resumed: Mapping[str, Any] = {}

    @override
    @classmethod
    def own_arguments(cls, settings: Settings) -> dict[str, Any]:
        return {"own": settings.own, "rule": settings.method, "tau": settings.local_steps}

    # The journal -----------------------------------------------------------------------------

    @override
    def open(self, arrays: Arrays, task: Task, files: RunFiles, *, resumed: bool) -> Arrays:
        """Open the run's journal; the model that it starts from is kept unless it is a published one."""
        first = task.first_model
        if not resumed and not first.published:
            files.write_initial(arrays)
        self.open_journal(
            arrays,
            task.trainable_names(),
            fixed=task.fixed_elements(),
            base=first.id,
            revision=first.revision,
            path=files.journal_path,
            load=lambda: task.initial_arrays(self.settings.seed),
        )
        return {}

    def open_journal(
        self,
        arrays: Arrays,
        trainable: Sequence[str] | None = None,
        *,
        fixed: Mapping[str, Ranges] | None = None,
        base: str = "model",
        revision: str | None = None,
        path: Path | None = None,
        load: Callable[[], Arrays] | None = None,
    ) -> None:
        """Start the journal, or go on with it after `load_state`.

        Args:
            arrays: The model before round 1.
            trainable: Names of the trainable tensors, in the model's order; None for all.
            fixed: Name -> elements that no round moves.
            base: Name of that model.
            revision: Its revision, if it has one.
            path: Where the journal lies; None keeps it in memory.
            load: Loads `arrays` again, so that the server need not hold them; None holds them.

        Raises:
            JournalError: The file exists, or cannot be read, or is another model's.
            CheckpointError: The file is not the checkpoint's.
        """
        names = list(arrays) if trainable is None else trainable
        records = int(self._resumed["records"]) if self._resumed else None
        self.kept = KeptJournal(
            self.scheme, arrays, names, fixed=fixed, base=base, revision=revision, path=path, records=records, load=load
        )
        self.kept.needs = {int(partition): int(need) for partition, need in self._resumed.get("needs", {}).items()}

    def _opened(self) -> KeptJournal:
        if self.kept is None:
            raise RuntimeError("no journal yet: call open_journal first")
        return self.kept

    @override
    def model(self, arrays: Arrays | None = None) -> Arrays:
        """Build the model after the last round, or bring the one that was built before up to date.

        Returns:
            Name -> array, read-only and changed by later rounds, in the order of the first model.

        Raises:
            AstrayError: It differs from a fingerprint of the journal.
        """
        return self._opened().model()

    @override
    def check_model(self, arrays: Arrays) -> None:
        """Take a model of any floating type: none is averaged."""

    # What travels ----------------------------------------------------------------------------

    @override
    def records_for(self, partition: int, through: int, model: Arrays) -> Records:
        """Send the rounds of the journal that the client has not acknowledged, and no tensor."""
        last_folded = self.rounds.last_folded.get(partition, 0)
        return self._journal_records(self._opened().part_for(partition, last_folded, through))

    def _journal_records(self, part: Slice, *, confirm: bool = False) -> Records:
        base = self._opened().journal.header.base.fingerprint
        sent = JournalPart(part, base, part.through * self.tau, self.own.mu_of(part.through + 1), confirm)
        return {ARRAYS: {}, JOURNAL: sent.to_entries()}

    @override
    def told_clients(self) -> Entries:
        return tell_method(self.scheme.method, self.own, seed=self.settings.seed, local_steps=self.tau)

    @override
    def announced(self, model: Arrays) -> Announced:
        """Announce that no tensor comes back."""
        return {ARRAYS: {}}

    @override
    def asks_again(self, partition: int, content: RecordDict) -> str:
        need = need_of(content)
        if need is None:
            return ""
        self._opened().needs[partition] = need
        values = self.rounds.report.values
        values["resent"] = values.get("resent", 0) + 1
        return f"the journal from round {need}"

    @override
    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Compose the messages of a round, as `RoundStrategy` does.

        Raises:
            MessageError: ``lr`` is missing in the config.
        """
        lr = lr_of(config)
        if self.kept is None:
            self.open_journal(unpack_arrays(RecordDict({ARRAYS: arrays}), ARRAYS, "server"))
        self._lr = lr
        return super().configure_train(server_round, arrays, config, grid)

    # A round ---------------------------------------------------------------------------------

    @override
    def begin(self, model: Arrays) -> None:
        self._scalars, self._weights, self._record, self._votes = {}, {}, None, {}
        self.rounds.report.values |= {"rebuilt": 0, "resent": 0}

    @override
    def plain(self, reply: Reply) -> Reply:
        """Read a client's scalars into a record of arrays."""
        scalars = read_scalars(reply, self.rounds.report.server_round, (self.tau, self.own.num_probes))
        self._check_fingerprint(reply)
        return replace(reply, records={SCALARS: {"values": np.array(scalars, np.float32)}})

    @override
    def norms(self, reply: Reply) -> Mapping[str, float]:
        return {SCALARS: update_norm(reply.records[SCALARS], {})}

    @override
    def fold(self, reply: Reply) -> None:
        """Take a client's scalars."""
        scalars = tuple(tuple(map(float, row)) for row in reply.records[SCALARS]["values"])
        self._scalars[reply.partition] = scalars
        self._weights[reply.partition] = self.settings.weight(reply.num_examples)
        self._opened().needs.pop(reply.partition, None)
        self._count_rebuilt(reply)

    def _check_fingerprint(self, reply: Reply) -> None:
        """Refuse scalars of a replica that went astray; the journal's last state is the one before the round."""
        records = self._opened().journal.records
        expected, found = records[-1].fingerprint if records else None, fingerprint_of(reply.entries)
        if None not in (expected, found) and found != expected:
            do = "the client rebuilds its replica at its next message"
            where = f"{reply.where}, fingerprint"
            raise MessageError(where, expected=str(expected)[:16], got=str(found)[:16], do=do)

    def _count_rebuilt(self, reply: Reply) -> None:
        self.rounds.report.values["rebuilt"] += reply.metrics.get(REBUILT) == 1

    @override
    def follow_up(self, *, enough: bool) -> FollowUp | None:
        """Ask the clients of the round which state it leads to, where a fingerprint is due.

        Nobody is asked where a client's would be the only vote, which confirms nothing.
        """
        if not enough or self._record is not None:
            return None
        self._record = record = self._aggregate()
        voters = self.rounds.report.folded
        if not self._fingerprint_due(record) or len(voters) + (self._opened().replica is not None) < 2:
            return None
        records = self._journal_records(Slice(record.round - 1, record.round, (record,)), confirm=True)
        return FollowUp("confirmation", dict.fromkeys(voters, records), required=False)

    def _aggregate(self) -> Record:
        own, server_round = self.own, self.rounds.report.server_round
        G = aggregate_scalars(
            self._scalars,
            rule=Aggregation(own.aggregation),
            weights=self._weights,
            trim=own.trim,
            clip=own.clip or None,
        )
        return Record(
            server_round, (server_round - 1) * self.tau, self._lr, own.mu_of(server_round), getattr(own, "nu", 0.0),
            getattr(own, "eps", 0.0), G, len(self._scalars), momentum=getattr(own, "momentum", None),
        )  # fmt: skip

    def _fingerprint_due(self, record: Record) -> bool:
        every = self.own.fingerprint_every
        return every > 0 and record.round % every == 0

    @override
    def answer(self, reply: Reply) -> None:
        """Take a client's vote."""
        found = fingerprint_of(reply.entries)
        if found is None:
            raise MessageError(reply.where, expected="the fingerprint of its replica", got="none")
        self._votes[reply.partition] = found
        self._count_rebuilt(reply)

    @override
    def finish(self) -> Arrays:
        """Write the round into the journal, with the fingerprint on which clients and server mostly agree."""
        kept, record = self._opened(), self._record or self._aggregate()
        self._check_squares(record)
        if self._fingerprint_due(record):
            own = kept.fingerprint_after(record)
            verdict = judge(self._votes, own, lambda: self._built_again(kept, record, own))
            record = replace(record, fingerprint=verdict.agreed)
            for partition in verdict.astray:
                self.rounds.note(f"client {partition}: its replica went astray and is built again at its next message")
        kept.append(record)
        self._scalars = {}
        return {}

    def _check_squares(self, record: Record) -> None:
        """Refuse scalars of which ``H`` would become infinite in float32, and then stay so: every later step would be 0."""
        largest = max(abs(value) for row in record.scalars for value in row)
        if largest > LARGEST_SCALAR:
            raise MessageError(
                "the clients' scalars",
                expected=f"at most {LARGEST_SCALAR:g}, beyond which the diagonal H or the model overflows",
                got=f"{largest:.3g}",
                do="lower the learning rate, or set clip",
            )

    def _built_again(self, kept: KeptJournal, record: Record, own: str | None) -> str | None:
        """Build the server's replica again from base and journal, and name the state after the round."""
        kept.rebuild()
        built = kept.fingerprint_after(record)
        if built != own:
            self.rounds.note("the server's replica had gone astray and was built again")
            self.rounds.report.values["rebuilt"] += 1
        return built

    # Resume ----------------------------------------------------------------------------------

    @override
    def state(self) -> dict[str, Any]:
        kept = self._opened()
        needs = {str(partition): need for partition, need in kept.needs.items()}
        return {**super().state(), "records": len(kept.journal.records), "needs": needs}

    @override
    def load_state(self, state: Mapping[str, Any], last_folded: Mapping[int, int]) -> None:
        super().load_state(state, last_folded)
        self._resumed = state
