"""The grid that measures every message: whatever comes, it ends no run."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, RecordDict

from fedapps.results import ledger
from fedapps.server_apps import metered_grid
from fedapps.server_apps.metered_grid import MeteredGrid
from fedapps.strategies import FedPM
from fedapps.strategies.exchange import GridWrapper


class OneReply(GridWrapper):
    """Gives one reply."""

    def __init__(self, content: RecordDict) -> None:
        super().__init__(None)  # type: ignore[arg-type]
        asked = Message(RecordDict(), dst_node_id=5, message_type=MessageType.TRAIN)
        self._reply = Message(content, reply_to=asked)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [self._reply]


HOSTILE = {
    "magic alone": b"\x93NUMPY",
    "a zip": b"PK\x03\x04",
    "a length beyond the bytes": b"\x93NUMPY\x01\x00\xff\xff" + b"\0" * 20,
    "nothing": b"",
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_malformed_array_is_measured_by_the_bytes_that_came(data: bytes) -> None:
    array = Array(dtype="float32", shape=(10**12,), stype="numpy.ndarray", data=data)
    grid = MeteredGrid(OneReply(RecordDict({"arrays": ArrayRecord({"w": array})})))
    assert len(list(grid.pull_messages(["1"]))) == 1
    [row] = grid.take_rows(FedPM())
    assert 0 <= row["payload"]["arrays"] <= len(data)
    assert row["serialised"] > 0


def test_a_message_that_cannot_be_measured_is_handed_on_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **named: object) -> ledger.Row:
        raise RecursionError("too deep")

    monkeypatch.setattr(metered_grid, "message_row", fail)
    grid = MeteredGrid(OneReply(RecordDict({"layout": ConfigRecord({"layout": "[]"})})))
    assert len(list(grid.pull_messages(["1"]))) == 1
    [row] = grid.take_rows(FedPM())
    assert row["unreadable"] == "too deep"
    assert ledger.sum_bytes([row])["wire-up"] == 0
