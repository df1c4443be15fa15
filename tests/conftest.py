"""Fixtures of all tests, what their markers do, and environment variables that keep Flower quiet and local."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")
os.environ.setdefault("FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION", "1")
# Tests run side by side: one thread each. Before torch and BLAS are imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from fedapps.simulation.inprocess import set_server_identity

SUPERLINK = ("tests/deploy/", "test_superlink.py", "resident_worker", "a_deployment")
"""Parts of the names of tests that run on a SuperLink and SuperNodes."""


def pytest_configure() -> None:
    """No test can cut the power, and what a killed process wrote is in the kernel's cache: waiting for a disk shows nothing."""
    os.fsync = lambda _: None


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("engine"):
            # Two rows: a SuperLink and its nodes mostly wait for each other, Ray does not.
            superlink = any(part in item.nodeid for part in SUPERLINK)
            item.add_marker(pytest.mark.xdist_group("superlink" if superlink else "engines"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        torch = pytest.importorskip("torch")
        if not torch.cuda.is_available():
            pytest.skip("no CUDA device")


@pytest.fixture
def default_signals() -> Iterator[None]:
    """Signals do what they do in a terminal, here and in processes that are started, whoever ignores them outside.

    A script that starts the tests in the background ignores SIGINT for them, and ``nohup`` ignores SIGHUP.
    """
    before = {
        signal.SIGINT: signal.signal(signal.SIGINT, signal.default_int_handler),
        signal.SIGTERM: signal.signal(signal.SIGTERM, signal.SIG_DFL),
        signal.SIGHUP: signal.signal(signal.SIGHUP, signal.SIG_DFL),
    }
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


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


class LogLines(logging.Handler):
    """Collects the lines of Flower's log."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    @property
    def text(self) -> str:
        return "\n".join(self.lines)


@pytest.fixture
def log() -> Iterator[LogLines]:
    """The lines that go to Flower's log while the test runs."""
    handler = LogLines()
    logging.getLogger("flwr").addHandler(handler)
    yield handler
    logging.getLogger("flwr").removeHandler(handler)
