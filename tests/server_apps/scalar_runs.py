"""Short scalar-only runs of six tiny clients, and what they left."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedapps import methods
from fedapps.results.replay import replay
from fedapps.strategies.hiso import HiSo
from fedapps.tasks import PartitionConfig, PartitionKind
from fedapps.zeroth_order.journal import Journal

from ..simulation import runs

METHODS = [method.name for method in methods.METHODS if method.replicas]

TINY: dict[str, Any] = {
    "lr": 0.02, "local-steps": 2, "weighting": "uniform", "num-server-rounds": 6, "method": "hiso",
    "node-wait": 0.0,
    "task-options": 'sizes = "6,7,8,9,6,5"',
}  # fmt: skip
"""Six tiny clients, two local steps."""


def tiny(path: Path, config: dict[str, Any] | None = None, clients: int = 6, **how: Any) -> runs.Left:
    return runs.short_run(path, {**TINY, **(config or {})}, clients, **how)


def journal_of(run: runs.Left) -> bytes:
    return run.folder.journal_path.read_bytes()


def sampled_as(monkeypatch: pytest.MonkeyPatch, sample: Callable[[int], list[int]]) -> None:
    monkeypatch.setattr(HiSo, "sample", lambda self, server_round: sample(server_round))


def payloads(run: runs.Left, direction: str, record: str) -> list[int]:
    rows = [r for r in run.folder.read_ledger() if r["kind"] == "train" and r["direction"] == direction]
    return [row["payload"][record] for row in rows]


def assert_caught_up(node: Path, journal: Journal, run: runs.Left) -> None:
    from fedapps.zeroth_order.store import Store

    [folder] = (node / "replicas").iterdir()

    def nothing() -> Any:
        raise AssertionError("the store is not whole")

    with Store(folder, journal.header, nothing) as store:
        assert store.replica.round == run.summary["rounds"]
        runs.assert_same_model({name: np.array(value) for name, value in store.replica.theta.items()}, run.model)
        assert store.replica.fingerprint() == replay(run.folder.journal_path, run.folder.initial_path).fingerprint


def by_site() -> PartitionConfig:
    return PartitionConfig(PartitionKind.COLUMN, column="site")
