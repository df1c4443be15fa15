"""Fixtures: Flower's identity of the server, and environment variables that keep Flower quiet and local."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")
os.environ.setdefault("FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION", "1")

from fedapps.simulation.inprocess import set_server_identity


@pytest.fixture(autouse=True)
def _server_identity() -> None:
    """Flower lets only a running server create messages."""
    set_server_identity(1)


@pytest.fixture(autouse=True)
def _own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is written into the home of whoever runs the tests."""
    monkeypatch.setenv("FEDAPPS_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("FEDAPPS_STATE", str(tmp_path / "state"))


@pytest.fixture
def own_module(monkeypatch: pytest.MonkeyPatch) -> str:
    """Name of a module of a user's own, on the path of this process and of its workers."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "helpers"))
    return "fedapps_testing"
