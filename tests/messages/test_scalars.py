"""Scalars up: what a reply says, and what is refused; the rounds that they make are tested with HiSo."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, MetricRecord, RecordDict

from fedapps.errors import MessageError
from fedapps.messages.scalars import (
    JournalPart,
    fingerprint_of,
    need_of,
    pack_reply,
    read_scalars,
    scalar_entries,
)
from fedapps.messages.schema import Reply, read_reply
from fedapps.zeroth_order.journal import Slice
from fedapps.zeroth_order.wire import pack_scalars

A = "a" * 64
SCALARS = ((1.0, -2.0, 3.0), (0.5, 0.25, -1.0))


def content(**values: Any) -> RecordDict:
    return RecordDict({"scalars": ConfigRecord(values)})


def test_a_reply_names_a_state_or_a_round_only_in_the_right_form() -> None:
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


def test_a_reply_carries_its_scalars_and_nothing_of_a_model() -> None:
    sent = pack_reply(scalar_entries(SCALARS, A), 4, MetricRecord({"num-examples": 9, "train-loss": 0.5}))
    reply = read_reply(sent, 2, {"arrays": {}})
    assert read_scalars(reply, 4, (2, 3)) == SCALARS
    assert fingerprint_of(reply.entries) == A
    assert (reply.num_examples, reply.arrays, reply.num_bytes) == (9, {}, 0)
    assert fingerprint_of(dict(pack_reply(scalar_entries(SCALARS, None), 4, MetricRecord()))) is None


def entries(**values: Any) -> dict[str, Any]:
    return {"scalars": {"server-round": 4, **values}}


@pytest.mark.parametrize(
    ("entries", "match"),
    [
        ({}, "expected 'values' in record 'scalars', got none"),
        (entries(values="1"), "expected 'values' in record 'scalars', got scalars"),
        (entries(**{"need-from": 3}), "got that it lacks the journal from round 3"),
        (entries(values=pack_scalars([0.0] * 6), **{"server-round": 5}), "expected scalars of round 4, got round 5"),
        (entries(values=b"\0" * 23), "expected 2 rows of 3 scalars, got 23 bytes"),
        (entries(values=pack_scalars([0.0] * 9)), "expected 2 rows of 3 numbers, got 3 rows"),
        (entries(values=pack_scalars([0.0] * 5 + [np.nan])), "expected finite scalars, got nan"),
    ],
    ids=["no record", "a text", "a need", "another round", "torn", "too many", "NaN"],
)
def test_scalars_in_another_form_are_refused_with_the_client(entries: dict[str, Any], match: str) -> None:
    with pytest.raises(MessageError, match=match) as caught:
        read_scalars(Reply(7, 1, {}, entries=entries), 4, (2, 3))
    assert "client 7" in str(caught.value)


def test_a_part_of_the_journal_survives_the_message() -> None:
    part = JournalPart(Slice(2, 5, ()), A, first_step=10, mu=1e-3, confirm=True)
    assert JournalPart.from_entries(dict(ConfigRecord(part.to_entries()))) == part
    with pytest.raises(MessageError, match=r"server's message: expected a record 'journal' .* got nothing"):
        JournalPart.from_entries({})
