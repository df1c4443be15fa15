"""Fixtures of runs: no replica left by another test, Flower's log, nodes with state folders of their own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from flwr.app import Context

from fedapps.client_apps import replicas
from fedapps.client_apps.rules import NodeRules
from fedapps.client_apps.work import Node

TRUSTING = NodeRules(trust_server=True, common_data=True)


@pytest.fixture(autouse=True)
def _no_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test finds the replica of another one."""
    monkeypatch.setattr(replicas, "_held", None)


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Path]:
    """Give every client a node of its own with a state folder, as SuperNodes have: replicas lie in memory-mapped stores."""

    def folder(partition: int) -> Path:
        return tmp_path / "nodes" / str(partition)

    def of(context: Context, *_: object) -> Node:
        partition = int(context.node_config["partition-id"])
        return Node(partition, int(context.node_config["num-partitions"]), folder(partition), TRUSTING)

    monkeypatch.setattr(Node, "of", of)
    return folder
