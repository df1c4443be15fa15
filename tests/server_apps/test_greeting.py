"""The ServerApp that only greets: it tells of every node what the run would make of it, and trains nothing."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context, RecordDict
from flwr.proto.node_pb2 import NodeInfo

import fedapps
from fedapps.deploy.check import read_greeting
from fedapps.server_apps.greeting import app
from fedapps.simulation.inprocess import InProcessGrid, set_server_identity
from fedapps.strategies.roster import fingerprint

CONFIG: dict[str, Any] = {
    "task": "libsvm", "partition": "local", "method": "fedpm", "client-test-fraction": 0.2,
    "client-validation-fraction": 0.0, "node-wait": 0.2,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedapps.strategies.roster.NODE_POLL", 0.01)


def greet(files: dict[str, Path], caplog: pytest.LogCaptureFixture, **changes: Any) -> dict[str, Any]:
    """Greet nodes with a file each; each was registered under its name, with a key of its own."""
    config = {**CONFIG, **changes}
    grid = InProcessGrid(len(files), config)
    infos = []
    for context, (name, path) in zip(grid._contexts.values(), files.items(), strict=True):
        context.node_config = {"name": name, "data-dir": str(path.parent), "task-options": f'file = "{path.name}"'}
        infos.append(NodeInfo(node_id=context.node_id, name=name, public_key=name.encode()))
    grid.get_nodes = lambda: infos  # type: ignore[method-assign]
    set_server_identity(grid.run.run_id)
    caplog.set_level(logging.INFO, "flwr")
    logging.getLogger("flwr").addHandler(caplog.handler)
    try:
        app(grid, Context(grid.run.run_id, 1, {}, RecordDict(), config))
    finally:
        logging.getLogger("flwr").removeHandler(caplog.handler)
    found = read_greeting(caplog.text)
    assert found is not None
    return found


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    """Of hospitals a and b, 10 and 20 rows."""
    paths = {f"hospital-{name}": tmp_path / f"{name}.svm" for name in "ab"}
    for path, n in zip(paths.values(), (10, 20), strict=True):
        path.write_text("+1 1:1 2:1\n-1 2:3\n" * (n // 2))
    return paths


def test_every_node_is_told_with_its_data(files: dict[str, Path], caplog: pytest.LogCaptureFixture) -> None:
    found = greet(files, caplog)
    assert found["problem"] == ""
    assert found["versions"]["fedapps"] == fedapps.__version__
    assert [node["label"] for node in found["nodes"]] == ["hospital-a", "hospital-b"]
    for node, n in zip(found["nodes"], (10, 20), strict=True):
        assert node["key"] == fingerprint(node["label"].encode())
        assert node["facts"] == {
            "name": node["label"], "examples": n, "num-examples": n * 4 // 5, "features": [2], "classes": [-1, 1],
            "dtype": "float64", "device": "cpu", "version": fedapps.__version__,
        }  # fmt: skip


def test_an_empty_file_is_told_without_what_files_hold(
    files: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    files["hospital-b"].write_text("")
    found = greet(files, caplog)
    good, bad = found["nodes"]
    assert good["facts"]["examples"] == 10
    assert "expected at least one example" in bad["refused"]
    assert "expected 2 or more (min-available-nodes), got 1" in found["problem"]


def test_a_file_wider_than_the_run_says_is_refused_by_line(
    files: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    files["hospital-b"].write_text("+1 1:1 5:1\n-1 2:3\n" * 5)
    good, bad = greet(files, caplog, **{"task-options": "num-features = 2"})["nodes"]
    assert good["facts"]["features"] == [2]
    assert "b.svm, line 1: expected 'label index:value ...'" in bad["refused"]
