"""What clients of a scalar-only method answer: scalars, a fingerprint, or the round from which they need the journal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from flwr.app import ConfigRecord, RecordDict

from fedapps.errors import MessageError
from fedapps.records import NEED_FROM, SCALARS, SERVER_ROUND, Reply
from fedapps.zeroth_order.errors import ScalarError
from fedapps.zeroth_order.scheme import Scalars, check_scalars
from fedapps.zeroth_order.wire import unpack_scalars

SHA256_BYTES = 32


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
    record = reply.content.get(SCALARS)
    data = record.get("values") if isinstance(record, ConfigRecord) else None
    if not isinstance(record, ConfigRecord) or not isinstance(data, bytes):
        need = need_of(reply.content)
        got = ", ".join(reply.content) if need is None else f"that it lacks the journal from round {need}"
        do = "use fedapps.client_apps.hiso.train"
        raise MessageError(reply.where, expected=f"'values' in record '{SCALARS}'", got=got, do=do)
    if record.get(SERVER_ROUND) != server_round:
        got, do = f"round {record.get(SERVER_ROUND)!r}", "answer the last message only"
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


def fingerprint_of(content: RecordDict) -> str | None:
    """Read the fingerprint of a client's replica.

    Args:
        content: The content of a reply.

    Returns:
        64 hexadecimal digits; None if the reply names no state, or something else than a SHA-256.
    """
    record = content.get(SCALARS)
    found = record.get("fingerprint") if isinstance(record, ConfigRecord) else None
    return found.hex() if isinstance(found, bytes) and len(found) == SHA256_BYTES else None


def need_of(content: RecordDict) -> int | None:
    """Read from which round a client asks for the journal.

    Args:
        content: The content of a reply.

    Returns:
        The round; None if the client does not ask.
    """
    record = content.get(SCALARS)
    need = record.get(NEED_FROM) if isinstance(record, ConfigRecord) else None
    return need if isinstance(need, int) and need >= 0 else None


def majority(votes: Iterable[str]) -> str | None:
    """Find what more than half of the votes name.

    Args:
        votes: Fingerprints, one a voter.

    Returns:
        The fingerprint; None if there is no majority, or only one vote: it confirms nothing.
    """
    cast = list(votes)
    named = Counter(cast).most_common(1)
    return named[0][0] if len(cast) > 1 and 2 * named[0][1] > len(cast) else None
