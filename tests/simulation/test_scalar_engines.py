"""Scalar-only runs write the same journal, byte for byte, in process, in Flower's simulation and on SuperNodes."""

from __future__ import annotations

import importlib
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from fedapps.methods import resolve_settings
from fedapps.results.replay import replay, verify, write_replayed
from fedapps.results.run_folder import RunFolder
from fedapps.results.summary import RunStatus
from fedapps.settings import flatten
from fedapps.simulation.launcher import run_on_superlink
from fedapps.simulation.start import Engine, Start, start

from . import runs
from .deployment import Deployment, loopback_deployment

ROWS = Path(__file__).parents[1] / "data" / "language"

pytestmark = pytest.mark.engine

DIGITS: dict[str, Any] = {
    "method": "hiso", "task": "digits-mlp", "partition": "iid", "partition-column": "", "evaluate-every": 0,
    "weighting": "uniform", "local-steps": 1, "hiso.fingerprint-every": 4,
}  # fmt: skip
"""The digits in equal parts; the server holds no model during the rounds."""


def test_two_workers_of_the_simulation_write_the_journal_of_one_process(tmp_path: Path) -> None:
    """Six clients, two sampled, on two workers: a client's message finds the replica that another one's left there."""
    config = {**DIGITS, "num-server-rounds": 11, "fraction-train": 0.34, "lr": 0.03}
    inprocess = runs.short_run(tmp_path / "inprocess", config, 6)
    how = Start(engine=Engine.SIMULATION, num_clients=6, workers=2)
    ended = start({**runs.SITES, **config}, how, tmp_path / "runs", lambda row: None)
    assert ended.status is RunStatus.COMPLETED, ended.reason
    assert ended.folder is not None
    folder = RunFolder.open(ended.folder)
    assert {len(row["folded"]) for row in folder.read_metrics() if row["phase"] == "train"} == {2}
    assert folder.journal_path.read_bytes() == inprocess.folder.journal_path.read_bytes()
    assert verify(folder.journal_path, folder.initial_path) == [4, 8]
    replayed, other = (replay(f.journal_path, f.initial_path) for f in (folder, inprocess.folder))
    assert replayed.fingerprint == other.fingerprint
    written = write_replayed(replayed, tmp_path / "replayed").read_bytes()
    assert written == folder.model_path.read_bytes() == inprocess.folder.model_path.read_bytes()


def test_a_node_with_a_resident_worker_writes_the_journal_of_one_process(tmp_path: Path, own_module: str) -> None:
    """A tiny language model on two SuperNodes; the worker of one is killed after a round, and ends with its node."""
    model = importlib.import_module("fedapps_language").tiny_folder(tmp_path / "model")
    config: dict[str, Any] = {
        **DIGITS, "task": "sst2", "task-options": f'model = "{model}"\nmax-length = 64', "data-dir": str(ROWS),
        "num-server-rounds": 3, "batch-size": 4, "lr": 0.01, "hiso.fingerprint-every": 3,
    }  # fmt: skip
    inprocess = runs.short_run(tmp_path / "inprocess", config, 2)
    run, state = tmp_path / "run", tmp_path / "state-1"

    def workers() -> list[int]:
        log = "".join(path.read_text() for path in state.glob("workers/*/log"))
        return [int(pid) for pid in re.findall(r"resident worker (\d+): run", log)]

    def kill_once() -> None:
        rows = (run / "metrics.jsonl").read_text() if (run / "metrics.jsonl").exists() else ""
        if '"train"' in rows and len(workers()) == 1 and not killed:
            killed.extend(workers())
            os.kill(killed[0], signal.SIGKILL)

    killed: list[int] = []
    rules = {"data-dirs": f"{ROWS},{tmp_path}"}
    own = [{"common-data": True}, {"common-data": True, "resident-worker": True}]
    with loopback_deployment(2, tmp_path, rules=rules, own=own) as place:
        run_in(place, {**config, "run-dir": str(run)}, on_poll=kill_once)
        assert (tmp_path / "state-0" / "replicas").exists()
        assert not (tmp_path / "state-0" / "workers").exists()
    folder = RunFolder.open(run)
    assert folder.journal_path.read_bytes() == inprocess.folder.journal_path.read_bytes()
    assert folder.model_path.read_bytes() == inprocess.folder.model_path.read_bytes()
    assert [row["folded"] for row in folder.read_metrics() if row["phase"] == "train"] == [[0, 1]] * 3
    first, second = workers()
    assert killed == [first]
    for _ in range(100):
        if not Path(f"/proc/{second}").exists():
            break
        time.sleep(0.1)
    else:
        pytest.fail("the worker outlives its node")


def run_in(place: Deployment, config: dict[str, Any], **how: Any) -> None:
    """Run on a deployment, to the end."""
    settings = flatten(resolve_settings({**runs.SITES, **config}), "hiso")
    outcome = run_on_superlink(settings, connection=place.connection, environment=place.environment, **how)
    assert outcome.status == "completed", outcome.log_tail
