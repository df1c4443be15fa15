"""A client's replica of the model: from its journal, its cache and what the server sent.

What a client must keep is its journal, kilobytes in its `ClientStore`. The replica that the journal leads to is a cache:
one per process under the in-process engine and the simulation, where any client's message may advance it, and one per node
on a SuperNode, where a message may be a new process: a memory-mapped `fedapps.zeroth_order.store.Store` in the state
folder, which a process that stays (`fedapps.client_apps.resident`) keeps mapped from one message to the next.

Beside a replica lie the rounds that it was made of. They are compared with the message's journal: after a resume of the
server a replica may have applied rounds that were cut off, and is then built again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from logging import getLogger
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from fedapps.client_apps.work import ClientWork
from fedapps.errors import FedAppsError
from fedapps.messages.scalars import JOURNAL, JournalPart
from fedapps.methods.zeroth_order import scheme_of
from fedapps.private_files import OWNER_ONLY, private_folder
from fedapps.results.storage import write_atomically
from fedapps.zeroth_order.errors import AstrayError, JournalError, ReplicaError
from fedapps.zeroth_order.journal import BaseModel, Header, Journal
from fedapps.zeroth_order.layout import fingerprint, layout_of
from fedapps.zeroth_order.quiet import trainable_parameters
from fedapps.zeroth_order.replica import Replica
from fedapps.zeroth_order.scheme import Record, Scheme
from fedapps.zeroth_order.store import NO_STATE, OTHER_RUN, Store
from fedapps.zeroth_order.tensors import like

if TYPE_CHECKING:
    from fedapps.tasks.torch_task import TorchTask

logger = getLogger("flwr")


class NeedMoreError(FedAppsError):
    """The client's journal ends before the slice begins.

    Attributes:
        after: The round from which it needs the journal.
    """

    def __init__(self, after: int) -> None:
        super().__init__(f"journal needed from round {after}")
        self.after = after


@dataclass(frozen=True)
class CaughtUp:
    """A client whose replica is at the round that the server wants.

    Attributes:
        received: What the server sent.
        model: The model; its trainable parameters are the replica's.
        state: The update rule's state, slot -> name -> tensor on the model's device.
        header: The run's header.
        journal: The journal up to that round.
        fingerprint: Of the replica, where the journal holds one for its round or the server asks for it.
        rebuilt: Whether the replica had to be built again.
        lost: Whether the client's own journal was lost, and its process's used.
    """

    received: JournalPart
    model: torch.nn.Module
    state: dict[str, dict[str, Any]]
    header: Header
    journal: Journal
    fingerprint: str | None
    rebuilt: bool
    lost: bool


@dataclass
class _Held:
    """A replica, the journal that it was made of, and whether an interrupted update was found when it was opened."""

    key: tuple[Any, ...]
    model: torch.nn.Module
    header: Header
    keeper: Replica | Store
    applied: Journal
    rebuilt: bool = False

    @property
    def replica(self) -> Replica:
        return self.keeper.replica if isinstance(self.keeper, Store) else self.keeper

    def made_of(self, journal: Journal, through: int, *, confirm: bool) -> bool:
        """Tell whether the replica's rounds are the journal's, and have led to the fingerprints of the journal."""
        at = self.replica.round
        mine, theirs = _until(self.applied.records, at), _until(journal.records, at)
        if confirm and mine and mine[-1].round == through:
            mine[-1] = replace(mine[-1], fingerprint=None)  # The server asks what it is.
        return at <= through and mine == theirs


_held: _Held | None = None
"""This process's replica: of one run at a time, so that memory does not grow."""


@contextmanager
def caught_up(work: ClientWork) -> Iterator[CaughtUp]:
    """Bring the client's replica to the round that the message leads to.

    Args:
        work: The round; its message holds a slice of the journal.

    Yields:
        The client, caught up. The replica must be as it was when the context is left.

    Raises:
        NeedMoreError: The client lost its journal, and nothing here holds the rounds before the slice.
        MessageError: The message holds no slice.
        JournalError: The slice is malformed, or the run's first model is not this task's.
        AstrayError: The replica differs from the journal's fingerprint although it was built again.
    """
    received = JournalPart.from_entries(work.records.get(JOURNAL, {}))
    part, confirm = received.part, received.confirm
    with _open(work, received.base) as held:
        own = load_journal(work, held.header, part.after)
        known = own or _prefix(held.applied, part.after)
        if known is None:
            raise NeedMoreError(0)
        known.extend(part.records, part.through)
        rebuilt, found = _bring(work, held, known, part.through, confirm=confirm)
        state = _state_for(held, work.device)
        yield CaughtUp(received, held.model, state, held.header, known, found, rebuilt, lost=own is None)


def load_journal(work: ClientWork, header: Header, after: int) -> Journal | None:
    """Load the journal that the client kept with its last folded reply.

    Args:
        work: The round.
        header: The run's header.
        after: The round that the server's slice follows.

    Returns:
        The journal up to that round; None if it is lost, ends before, or is another run's.
    """
    stored = work.store.load(work.last_folded)
    if stored is None:
        return Journal(header) if after == 0 else None
    try:
        journal = Journal.from_text(stored["journal"].tobytes().decode(), work.where)
        journal.through = max(journal.through, int(stored["through"]))
    except (JournalError, KeyError, ValueError) as error:
        logger.error("%s: its journal cannot be read (%s)", work.where, error)
        return Journal(header) if after == 0 else None
    return _prefix(journal, after) if journal.header == header else None


def save_journal(work: ClientWork, journal: Journal) -> None:
    """Keep the journal; it takes effect once the server has folded the reply.

    Args:
        work: The round.
        journal: The journal up to the round before.
    """
    text = np.frombuffer(journal.to_text().encode(), np.uint8)
    state = {"journal": text, "through": np.array(journal.through)}
    work.store.save(work.server_round, state, last_folded=work.last_folded)


def _prefix(journal: Journal, after: int) -> Journal | None:
    if journal.through < after:
        return None
    return Journal(journal.header, _until(journal.records, after), after)


def _until(records: list[Record], last: int) -> list[Record]:
    return [record for record in records if record.round <= last]


def _bring(work: ClientWork, held: _Held, journal: Journal, through: int, *, confirm: bool) -> tuple[bool, str | None]:
    """Advance the replica, or build it again if it is another journal's, astray or half applied."""
    rebuilt = held.rebuilt
    if not held.made_of(journal, through, confirm=confirm):
        logger.warning("%s: the replica is not of the server's journal and is built again", work.where)
        held.keeper.rebuild(lambda: _base(work, held.header))
        rebuilt = True
    _keep_applied(held, work, journal)
    try:
        found = _advance(held, journal, through)
    except ReplicaError as error:
        logger.warning("%s: %s", work.where, error)
        held.keeper.rebuild(lambda: _base(work, held.header))
        rebuilt, found = True, _advance(held, journal, through)
    if confirm:
        # Kept with the round: where the majority names another state, the next message's journal differs.
        found = held.replica.fingerprint()
        named = [*journal.records[:-1], replace(journal.records[-1], fingerprint=found)]
        _keep_applied(held, work, Journal(journal.header, named, journal.through))
    return rebuilt, found


def _advance(held: _Held, journal: Journal, through: int) -> str | None:
    expected = journal.records[-1].fingerprint if journal.records else None
    # A fingerprint of the last round is compared below in any case, also where nothing is new: not twice.
    held.keeper.advance(journal.slice(held.replica.round, through), verify=expected is None)
    if expected is None:
        held.replica.check_whole()
        return None
    found = held.replica.fingerprint()
    if found != expected:
        where, do = f"replica at round {through}", "rebuild it from base and journal"
        raise AstrayError(where, expected=f"fingerprint {expected[:16]}", got=found[:16], do=do)
    return found


@contextmanager
def _open(work: ClientWork, base: str) -> Iterator[_Held]:
    global _held
    settings = work.settings
    folder = _store_folder(work) if work.node.state_dir is not None else None
    key = (work.experiment, base, _scheme(work), settings.task, settings.task_options, work.device, folder)
    if _held is None or _held.key != key or not _still_whole(_held, folder):
        _held = None  # Its memory first: there may not be enough for two.
        _held = _opened(work, base, key, folder)
    if isinstance(_held.keeper, Store):
        with _held.keeper:
            yield _held
    else:
        yield _held


def _opened(work: ClientWork, base: str, key: tuple[Any, ...], folder: Path | None) -> _Held:
    """Open the node's store, whose memory the parameters become views of (on another device copies); else a new replica."""
    model, threads = _build(work), work.settings.compute_threads
    theta = trainable_parameters(model)
    header = _header(work, base, theta)
    if folder is not None:
        store = Store(folder, header, lambda: _base(work, header), threads=threads)
        rebuilt = store.rebuilt not in (None, NO_STATE, OTHER_RUN)
        return _Held(key, model, header, store, _read_applied(folder, header), rebuilt)
    Journal(header).check_model(header.layout, fingerprint(header.layout, theta))
    replica = Replica(_scheme(work), theta, fixed=header.layout.fixed, threads=threads)
    return _Held(key, model, header, replica, Journal(header))


def _still_whole(held: _Held, folder: Path | None) -> bool:
    """Open a store again that this process has mapped; other processes may have changed it and its journal."""
    if folder is None or not isinstance(held.keeper, Store):
        return True
    held.rebuilt = False
    if not held.keeper.reopen():
        return False
    held.applied = _read_applied(folder, held.header)
    return True


def _state_for(held: _Held, device: str) -> dict[str, dict[str, Any]]:
    """Point the model at the replica, and give the state as tensors beside it."""
    replica, parameters = held.replica, trainable_parameters(held.model)
    if not isinstance(held.keeper, Store):
        return {slot: dict(tensors) for slot, tensors in replica.state.items()}
    for name, parameter in parameters.items():
        parameter.data = like(replica.theta[name].reshape(-1), parameter, tuple(parameter.shape))  # type: ignore[assignment]
    one = torch.empty(0, dtype=torch.float32, device=device)
    return {
        slot: {name: like(values.reshape(-1), one, tuple(values.shape)) for name, values in tensors.items()}
        for slot, tensors in replica.state.items()
    }


def _scheme(work: ClientWork) -> Scheme:
    return scheme_of(work.settings.seed, work.settings.method, work.settings.own)


def _header(work: ClientWork, base: str, theta: dict[str, torch.nn.Parameter]) -> Header:
    first = work.task.first_model
    return Header(
        _scheme(work), BaseModel(first.id, first.revision, base), layout_of(theta, work.task.fixed_elements())
    )


def _build(work: ClientWork) -> torch.nn.Module:
    return cast("TorchTask", work.task).initial_module(work.device)


def _base(work: ClientWork, header: Header) -> dict[str, Any]:
    """Load the parameters before round 1, and check that they are the run's."""
    arrays = work.task.initial_arrays(work.settings.seed)
    theta = {tensor.name: arrays[tensor.name] for tensor in header.layout.tensors}
    Journal(header).check_model(layout_of(theta, header.layout.fixed), fingerprint(header.layout, theta))
    return theta


def _store_folder(work: ClientWork) -> Path:
    """One replica a node, not one a run: it is as large as the model."""
    return private_folder(Path(work.node.state_dir or ""), "replicas", f"client-{work.node.partition}")


def _applied_path(folder: Path) -> Path:
    return folder / "applied.jsonl"


def _read_applied(folder: Path, header: Header) -> Journal:
    try:
        journal = Journal.read(_applied_path(folder))
    except JournalError:
        return Journal(header)
    return journal if journal.header == header else Journal(header)


def _keep_applied(held: _Held, work: ClientWork, journal: Journal) -> None:
    """Say what the replica is about to be made of, before it is."""
    held.applied = Journal(journal.header, list(journal.records), journal.through)
    if isinstance(held.keeper, Store):
        write_atomically(_applied_path(_store_folder(work)), journal.to_text(), mode=OWNER_ONLY)
