"""Votes on a fingerprint: which state clients and server say that a round leads to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple


class Verdict(NamedTuple):
    """What came of the votes.

    Attributes:
        agreed: The fingerprint that counts; None where nothing is agreed upon.
        astray: Clients whose replicas are in another state.
    """

    agreed: str | None
    astray: list[int]


def judge(votes: Mapping[int, str], own: str | None, build_again: Callable[[], str | None]) -> Verdict:
    """Find the state that a round leads to.

    Args:
        votes: Client -> fingerprint of its replica; clients that did not answer have no vote.
        own: Fingerprint of the server's replica; None where it holds none.
        build_again: Builds the server's replica again from base and journal, and names its state.

    Returns:
        The verdict.
    """
    cast = [*votes.values(), *([own] if own else [])]
    agreed = majority(cast)
    if own is not None and not votes:
        agreed = own  # Nobody was asked: the clients compare it in their next round.
    elif own is not None and own != agreed:
        # Clients of one process answer from one replica. What base and journal lead to outvotes them all.
        agreed = build_again()
    astray = [partition for partition, found in votes.items() if found != agreed] if len(cast) > 1 else []
    return Verdict(agreed, astray)


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
