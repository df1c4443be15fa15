"""``flwr run .`` on a plain checkout takes the same keys."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from fedapps.results.run_folder import RunFolder
from fedapps.simulation.flower_cli import FlowerCli
from fedapps.simulation.flower_environment import flower_program
from fedapps.simulation.processes import CONNECTION, SuperLink

CHECKOUT = Path(__file__).parents[2]


@pytest.mark.engine
def test_flwr_run_on_a_checkout(tmp_path: Path) -> None:
    app = tmp_path / "checkout"
    app.mkdir()
    for name in ("pyproject.toml", "LICENSE", "README.md"):
        shutil.copy(CHECKOUT / name, app)
    shutil.copytree(CHECKOUT / "fedapps", app / "fedapps", ignore=shutil.ignore_patterns("__pycache__"))
    environment = {"FEDAPPS_RUNS": str(tmp_path / "runs"), "OMP_NUM_THREADS": "1"}
    config = 'method="fedavg" num-server-rounds=1 local-epochs=1 lr=0.2 fraction-train=0.5'
    with SuperLink(simulation=True, environment=environment, log_path=tmp_path / "superlink.log") as superlink:
        submitted = subprocess.run(
            [flower_program("flwr"), "run", str(app), CONNECTION, "--format", "json", "--run-config", config,
             "--federation-config", "num-supernodes=4 client-resources-num-cpus=1 init-args-num-cpus=1"],
            env={**os.environ, **superlink.environment}, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert submitted.returncode == 0, submitted.stdout + submitted.stderr
        run_id = json.loads(submitted.stdout)["run-id"]
        cli = FlowerCli(CONNECTION, superlink.environment)
        with cli.follow(run_id, tmp_path / "run.log") as stream:
            stream.wait(120)
        assert cli.info(run_id).ending == "completed", (tmp_path / "run.log").read_text()[-3000:]
    [path] = (tmp_path / "runs").iterdir()
    folder = RunFolder.open(path)
    settings = folder.read_settings()
    assert (settings["method"], settings["lr"], settings["batch-size"]) == ("fedavg", 0.2, 32)
    [row] = [row for row in folder.read_metrics() if row["phase"] == "train"]
    assert len(row["folded"]) == 2
    log = (tmp_path / "run.log").read_text()
    assert log.count(f"run folder: {path}") == 2
