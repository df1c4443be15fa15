"""The journal of a run on the server, and the model that it leads to.

The server of a scalar-only method keeps scalars. Model and state of the update rule are functions of the first model and
the journal, so they are built only when somebody asks for them (an evaluation, a fingerprint, the end of the run) and then
catch up with all rounds at once. A server that is never asked holds no model.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from fedapps.errors import CheckpointError
from fedapps.messages.schema import Arrays
from fedapps.zeroth_order.journal import BaseModel, Header, Journal, JournalFile, Slice
from fedapps.zeroth_order.layout import Ranges, fingerprint, layout_of
from fedapps.zeroth_order.replica import Replica
from fedapps.zeroth_order.scheme import Record, Scheme


class KeptJournal:
    """A journal in memory and, if it has a path, on disk, with the model that it leads to on demand.

    Args:
        scheme: What the header fixes.
        arrays: The model before round 1, by name.
        trainable: Names of the trainable tensors, in the model's order.
        fixed: Name -> elements that no round moves.
        base: Name of that model.
        revision: Its revision, if it has one.
        path: Where the journal lies; None keeps it in memory.
        records: None starts a journal; a number goes on with the file, which holds so many rounds.
        load: Loads `arrays` again, so that they need not be held; None holds them.

    Attributes:
        journal: The journal.
        replica: The server's replica, at the round of the last call of `model`; None before.
        needs: Client that has lost its journal -> the round from which it asked for it.

    Raises:
        JournalError: The file exists, or cannot be read, or is another model's.
        CheckpointError: The file is not the checkpoint's.
    """

    def __init__(
        self,
        scheme: Scheme,
        arrays: Arrays,
        trainable: Sequence[str],
        *,
        fixed: Mapping[str, Ranges] | None = None,
        base: str = "model",
        revision: str | None = None,
        path: Path | None = None,
        records: int | None = None,
        load: Callable[[], Arrays] | None = None,
    ) -> None:
        theta = {name: arrays[name] for name in trainable}
        layout = layout_of(theta, fixed)
        if records is None or path is None:
            header = Header(scheme, BaseModel(base, revision, fingerprint(layout, theta)), layout)
            self._file = JournalFile.create(path, header) if path else None
            self.journal = self._file.journal if self._file else Journal(header)
        else:
            self._file = JournalFile.open(path)
            self.journal = self._file.journal
            # Another layout is named before a fingerprint is computed over it.
            self.journal.check_model(layout)
            self.journal.check_model(layout, fingerprint(layout, theta))
            _check_resumed(self.journal, scheme, records, path)
        if self._file is not None:
            weakref.finalize(self, self._file.close)
        self.replica: Replica | None = None
        self.needs: dict[int, int] = {}
        self._load = load or (lambda: arrays)
        self._first: Arrays = {}

    def append(self, record: Record) -> None:
        """Add a round.

        Args:
            record: The round.
        """
        (self._file or self.journal).append(record)

    def part_for(self, partition: int, last_folded: int, through: int) -> Slice:
        """Give the rounds that a client has not acknowledged.

        A client whose reply of round ``f`` was folded keeps the journal up to round ``f - 1`` with it.

        Args:
            partition: The client.
            last_folded: Round of its last folded reply; 0 if there is none.
            through: The last round that it is to know.

        Returns:
            The rounds, from where it said that it needs them if it did.
        """
        after = self.needs.get(partition, max(last_folded - 1, 0))
        return self.journal.slice(min(after, through), through)

    def model(self) -> Arrays:
        """Give the model after the last round of the journal.

        Returns:
            Name -> array, read-only and changed by later rounds, in the order of the first model.

        Raises:
            AstrayError: It differs from a fingerprint of the journal.
        """
        replica = self._up_to_date()
        return {name: _read_only(replica.theta.get(name, value)) for name, value in self._first.items()}

    def fingerprint_after(self, record: Record) -> str | None:
        """Name the state that a round leads to which is not in the journal yet.

        Args:
            record: The round.

        Returns:
            The fingerprint; None if no model is held.
        """
        if self.replica is None:
            return None
        replica = self._up_to_date()
        replica.advance(Slice(replica.round, record.round, (record,)))
        return replica.fingerprint()

    def rebuild(self) -> None:
        """Build the model from the first one and the whole journal, whatever is held.

        Raises:
            AstrayError: It differs from a fingerprint of the journal.
        """
        self.replica = None
        self._up_to_date()

    def _up_to_date(self) -> Replica:
        if self.replica is None or self.replica.round > self.journal.through:
            # Ahead of the journal is only a replica whose round could not be written.
            first = self._load()
            trainable = [tensor.name for tensor in self.journal.header.layout.tensors]
            self.replica = Replica(
                self.journal.header.scheme,
                {name: np.array(first[name], order="C") for name in trainable},
                fixed=self.journal.header.layout.fixed,
            )
            # The first values of the trainable tensors are not held a second time, only their names and order.
            self._first = {name: _NOTHING if name in self.replica.theta else value for name, value in first.items()}
        self.replica.advance(self.journal.slice(self.replica.round))
        return self.replica


_NOTHING = np.empty(0, np.float32)


def _read_only(array: object) -> np.ndarray:
    view = np.asarray(array).view()
    view.flags.writeable = False
    return view


def _check_resumed(journal: Journal, scheme: Scheme, records: int, path: Path) -> None:
    if journal.header.scheme != scheme or len(journal.records) != records:
        raise CheckpointError(
            str(path),
            expected=f"{records} rounds of {scheme}",
            got=f"{len(journal.records)} of {journal.header.scheme}",
            do="restore the journal that belongs to the checkpoint",
        )
