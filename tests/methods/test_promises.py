"""What a row of the registry says of traffic and state holds for real messages; and names match tensors, never their places."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from flwr.app import ArrayRecord, Message

from ..simulation.runs import assert_same_model, client_states, short_run
from .rows import ROWS

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("own_module")]

D = 3
MODEL = 8 * D
"""Bytes of the model: one vector in float64; of its torch twin 4 a number."""

TRIANGLE = 8 * D * (D + 1) // 2
CONVEX = {"task": "fedapps_testing:Lines", "task-options": "sizes = '6,18,9'\nclients = 3"}
TORCH = {"task": "fedapps_testing:TorchLines", "task-options": "sizes = '6,18,9'"}
QUIET = {"client-test-fraction": 0.0, "client-evaluation": "none", "evaluate-every": 0, "num-server-rounds": 3}


@dataclass(frozen=True)
class Promise:
    """Bytes of every record of arrays, and of scalars, that a client gets and sends in a later round, and of what it keeps."""

    down: Mapping[str, int] = field(default_factory=lambda: {"arrays": MODEL})
    up: Mapping[str, int] = field(default_factory=lambda: {"arrays": MODEL})
    state: int = 0


MODEL_ONLY = Promise()
PERSONAL = Promise(state=MODEL)
SCALARS = Promise({"arrays": 0}, {"arrays": 0})

PROMISED: Mapping[str, Promise] = {
    **dict.fromkeys(["fedavg", "fedavgm", "fedprox", "fedadam", "fedyogi", "fedadagrad", "psgd", "globaltrain"], MODEL_ONLY),
    "localnewton": MODEL_ONLY,
    "ltda": MODEL_ONLY,
    "fedsophia": Promise(state=2 * MODEL),
    # As many rows as there are weights.
    "fedns": Promise(up={"arrays": MODEL, "sketch": D * MODEL}),
    "scaffold": Promise({"arrays": MODEL, "control": MODEL}, {"arrays": MODEL, "control": MODEL}, state=MODEL),
    "fedpm": Promise(up={"arrays": 0, "products": MODEL, "curvature": TRIANGLE}),
    "fednl": Promise(up={"arrays": MODEL, "hessian-change": 8 * (D + 1)}, state=TRIANGLE),
    "fednew": Promise({"arrays": MODEL, "direction": MODEL}, state=2 * MODEL),
    "fedclup": Promise(state=2 * MODEL),
    "pfedme": PERSONAL,
    "ditto": PERSONAL,
    "localtrain": Promise({"arrays": 0}, {"arrays": 0}, state=MODEL),
    "fedzo": Promise({"arrays": MODEL // 2}, {"arrays": MODEL // 2}),
    **dict.fromkeys(["hiso", "decomfl", "hiso-momentum"], SCALARS),
}  # fmt: skip

ENTRIES = {"config", "metrics", "layout", "journal", "scalars"}
"""Records that hold no array, of some 50 to 350 bytes here whatever the model."""


def config_of(method: str) -> dict[str, Any]:
    return {**QUIET, **(CONVEX if "convex" in ROWS[method].task_kinds else TORCH), "method": method, "batch-size": 0}


def test_every_row_has_its_promise() -> None:
    assert PROMISED.keys() == {name for name in ROWS if ":" not in name}


@pytest.mark.parametrize("method", PROMISED)
def test_messages_and_stores_have_the_promised_bytes(tmp_path: Path, method: str) -> None:
    left, promise = short_run(tmp_path / "run", config_of(method)), PROMISED[method]
    rows = [row for row in left.folder.read_ledger() if row["round"] == 3 and row["partition"] == 1]
    for direction, promised in (("down", promise.down), ("up", promise.up)):
        [payload] = [row["payload"] for row in rows if row["direction"] == direction]
        assert {name: size for name, size in payload.items() if name not in ENTRIES} == promised
        assert all(size < 400 for name, size in payload.items() if name in ENTRIES)
    kept = client_states(left.folder.path).get(1, {})
    numbers = {name: value for name, value in kept.items() if name not in ("generation", "through", "journal", "steps")}
    assert sum(value.nbytes for value in numbers.values()) == promise.state
    assert bool(kept) == (ROWS[method].client_state != "none")


def backwards(reply: Message) -> Message:
    """The tensors of each record in the opposite order."""
    for name, record in list(reply.content.items()):
        if isinstance(record, ArrayRecord):
            reply.content[name] = ArrayRecord(dict(reversed(list(record.items()))))
    return reply


@pytest.mark.parametrize("method", [name for name, row in ROWS.items() if "torch" in row.task_kinds])
def test_names_match_tensors_whatever_their_order(tmp_path: Path, method: str) -> None:
    config = {"method": method, "task": "fedapps_testing:BatchNormSites"}
    straight = short_run(tmp_path / "straight", config)
    faults = {(number, partition): backwards for number in (1, 2) for partition in range(3)}
    assert_same_model(straight.model, short_run(tmp_path / "backwards", config, faults=faults).model)
