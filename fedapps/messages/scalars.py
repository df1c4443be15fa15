"""What travels where only scalars do: slices of the journal down, scalars and fingerprints of replicas up.

===========  =====================================================================================================
record       content
===========  =====================================================================================================
``journal``  down: rounds of the journal as in `fedapps.zeroth_order.wire`, ``base`` (fingerprint of the first model),
             ``next-first-step`` and ``next-mu``; ``confirm`` where the client is only to name the state that the rounds
             lead to
``scalars``  up: ``values`` (float32, ``tau`` rows of ``P``), ``server-round``, and ``fingerprint`` of the client's
             replica; or ``need-from``, a round, from a client whose journal is lost
===========  =====================================================================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from fedapps.errors import MessageError
from fedapps.messages.schema import ARRAYS, METRICS, SERVER_ROUND, Entries, Reply
from fedapps.zeroth_order.errors import ScalarError
from fedapps.zeroth_order.journal import Slice
from fedapps.zeroth_order.scheme import Scalars, check_scalars
from fedapps.zeroth_order.wire import pack_scalars, pack_slice, unpack_scalars, unpack_slice

JOURNAL = "journal"
SCALARS = "scalars"
NEED_FROM = "need-from"
CONFIRM = "confirm"

SHA256_BYTES = 32


@dataclass(frozen=True)
class JournalPart:
    """What a client receives in place of a model.

    Attributes:
        part: The rounds of the journal that it has not acknowledged.
        base: Fingerprint of the model before round 1, 64 hexadecimal digits.
        first_step: First step of the round that follows.
        mu: Radius of its probes.
        confirm: Whether the client is only to name the state that the rounds lead to.
    """

    part: Slice
    base: str
    first_step: int
    mu: float
    confirm: bool = False

    def to_entries(self) -> Entries:
        """Give the entries of the record ``journal``."""
        entries: Entries = {
            **pack_slice(self.part),
            "base": bytes.fromhex(self.base),
            "next-first-step": self.first_step,
            "next-mu": self.mu,
        }
        return {**entries, CONFIRM: True} if self.confirm else entries

    @classmethod
    def from_entries(cls, entries: Mapping[str, Any]) -> JournalPart:
        """Read the entries.

        Args:
            entries: The record ``journal``; empty where the message has none.

        Returns:
            What the client received.

        Raises:
            MessageError: The record or an entry is absent or of another type.
            JournalError: The rounds are malformed.
        """
        try:
            base, first_step, mu = entries["base"].hex(), int(entries["next-first-step"]), float(entries["next-mu"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise MessageError(
                "server's message",
                expected=f"a record '{JOURNAL}' with a slice and the first model's fingerprint",
                got=f"{', '.join(entries) or 'nothing'} ({type(error).__name__}: {error})",
                do="use fedapps.strategies.hiso.HiSo on the server",
            ) from error
        return cls(unpack_slice(entries, "server's message"), base, first_step, mu, bool(entries.get(CONFIRM)))


def pack_reply(entries: Entries, server_round: int, metrics: MetricRecord) -> RecordDict:
    """Pack a client's reply, in which no tensor travels.

    Args:
        entries: What the record ``scalars`` holds beside the round.
        server_round: The round.
        metrics: The metrics record.

    Returns:
        The content of the reply.
    """
    record = ConfigRecord({SERVER_ROUND: server_round, **entries})
    return RecordDict({ARRAYS: ArrayRecord({}), SCALARS: record, METRICS: metrics})


def scalar_entries(scalars: Scalars, fingerprint: str | None) -> Entries:
    """Give the entries of a round's scalars.

    Args:
        scalars: ``tau`` rows of ``P``.
        fingerprint: Of the replica that they were measured on, where it was asked for.

    Returns:
        The entries.
    """
    entries: Entries = {"values": pack_scalars([value for row in scalars for value in row])}
    return entries if fingerprint is None else {**entries, **fingerprint_entry(fingerprint)}


def fingerprint_entry(fingerprint: str) -> Entries:
    """Give the entry that names the state of a client's replica."""
    return {"fingerprint": bytes.fromhex(fingerprint)}


def read_scalars(reply: Reply, server_round: int, shape: tuple[int, int]) -> Scalars:
    """Read a round's scalars.

    Args:
        reply: A checked reply.
        server_round: The round.
        shape: ``(tau, P)``.

    Returns:
        The scalars, finite.

    Raises:
        MessageError: They are missing, malformed, not finite, or of another round.
    """
    entries = reply.entries.get(SCALARS, {})
    data = entries.get("values")
    if not isinstance(data, bytes):
        need = need_of(reply.entries)
        got = ", ".join(reply.entries) or "none"
        raise MessageError(
            reply.where,
            expected=f"'values' in record '{SCALARS}'",
            got=got if need is None else f"that it lacks the journal from round {need}",
            do="use fedapps.client_apps.hiso.train",
        )
    if entries.get(SERVER_ROUND) != server_round:
        got, do = f"round {entries.get(SERVER_ROUND)!r}", "answer the last message only"
        raise MessageError(reply.where, expected=f"scalars of round {server_round}", got=got, do=do)
    try:
        scalars = unpack_scalars(data, shape[1])
        check_scalars(scalars, where=reply.where, shape=shape)
    except ScalarError as problem:
        raise MessageError(str(problem)) from problem
    except ValueError as problem:
        expected, do = f"{shape[0]} rows of {shape[1]} scalars", "send one scalar a step and probe"
        raise MessageError(reply.where, expected=expected, got=str(problem), do=do) from problem
    return scalars


def fingerprint_of(content: Mapping[str, Any]) -> str | None:
    """Read the fingerprint of a client's replica.

    Args:
        content: The records of a reply.

    Returns:
        64 hexadecimal digits; None if the reply names no state, or something else than a SHA-256.
    """
    found = _entry(content, "fingerprint")
    return found.hex() if isinstance(found, bytes) and len(found) == SHA256_BYTES else None


def need_of(content: Mapping[str, Any]) -> int | None:
    """Read from which round a client asks for the journal.

    Args:
        content: The records of a reply.

    Returns:
        The round; None if the client does not ask.
    """
    need = _entry(content, NEED_FROM)
    return need if isinstance(need, int) and need >= 0 else None


def _entry(content: Mapping[str, Any], key: str) -> Any:
    record = content.get(SCALARS)
    return record.get(key) if isinstance(record, Mapping) else None
