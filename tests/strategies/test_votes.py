"""Tests of ``fedapps/strategies/scalar_replies.py``; what a malformed reply leads to is tested in ``test_hiso.py``."""

from __future__ import annotations

import pytest
from fedapps.strategies.scalar_replies import fingerprint_of, majority, need_of
from flwr.app import ConfigRecord, MetricRecord, RecordDict

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


def test_a_reply_names_a_state_or_a_round_only_in_the_right_form() -> None:
    def content(**values: bytes | int | str) -> RecordDict:
        return RecordDict({"scalars": ConfigRecord(values)})  # type: ignore[arg-type]  # a mapping of scalars

    assert fingerprint_of(content(fingerprint=bytes.fromhex(A))) == A
    assert need_of(content(**{"need-from": 3})) == 3
    for other in (
        RecordDict({}),
        RecordDict({"scalars": MetricRecord({"need-from": 3})}),
        content(fingerprint=A),
        content(fingerprint=b""),
        content(fingerprint=b"\1" * 33),
    ):
        assert fingerprint_of(other) is None
    for other in (RecordDict({}), content(**{"need-from": -1}), content(**{"need-from": "3"})):
        assert need_of(other) is None
