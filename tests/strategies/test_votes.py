"""Votes on a state; what comes of them in a round is tested in ``test_hiso.py``."""

from __future__ import annotations

import pytest

from fedapps.strategies.votes import judge, majority

A, B, C = "a" * 64, "b" * 64, "c" * 64


@pytest.mark.parametrize(
    ("votes", "expected"),
    [
        ([], None),
        ([A], None),
        ([A, A, B], A),
        ([B, A, A], A),
        ([A, B], None),
        ([A, A, B, B], None),
        ([A, A, B, C], None),
        ([A, B, C], None),
    ],
    ids=[
        "nobody",
        "one confirms nothing",
        "two of three",
        "in any order",
        "a tie",
        "two and two",
        "half",
        "all differ",
    ],
)
def test_a_majority_is_more_than_half_of_the_votes(votes: list[str], expected: str | None) -> None:
    assert majority(votes) == expected


@pytest.mark.parametrize(
    ("votes", "own", "built", "agreed", "astray"),
    [
        ({}, None, None, None, []),
        ({}, A, None, A, []),
        ({0: A}, None, None, None, []),
        ({0: A}, A, None, A, []),
        ({0: A, 1: B, 2: A}, None, None, A, [1]),
        ({0: A, 1: B}, A, None, A, [1]),
        ({0: A, 1: B}, None, None, None, [0, 1]),
        ({0: B, 1: B, 2: B}, A, A, A, [0, 1, 2]),
        ({0: B, 1: B}, A, B, B, []),
        ({0: B}, A, A, A, [0]),
        ({0: B, 1: C}, A, A, A, [0, 1]),
    ],
    ids=[
        "nobody",
        "the server alone",
        "one client alone confirms nothing",
        "one client and the server",
        "two of three clients",
        "the server decides",
        "a tie leaves nothing agreed",
        "what base and journal lead to outvotes all clients",
        "the server was astray",
        "one client against the server",
        "nobody agrees with anybody",
    ],
)
def test_a_verdict_weighs_clients_and_the_servers_replica(
    votes: dict[int, str], own: str | None, built: str | None, agreed: str | None, astray: list[int]
) -> None:
    """The server's replica is built again only where the majority is against it."""
    calls = []
    verdict = judge(votes, own, lambda: (calls.append(1), built)[1])
    assert (verdict.agreed, verdict.astray) == (agreed, astray)
    assert len(calls) == (built is not None)
