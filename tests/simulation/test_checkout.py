"""``flwr run .`` on a plain checkout, and on what ``fedapps init`` writes, takes the same keys."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from fedapps.cli.init import write_project
from fedapps.results.run_folder import RunFolder
from fedapps.simulation.flower_cli import FlowerCli
from fedapps.simulation.flower_environment import flower_program
from fedapps.simulation.processes import CONNECTION, SuperLink

CHECKOUT = Path(__file__).parents[2]


def flwr_run(app: Path, config: str, superlink: SuperLink, log: Path) -> RunFolder:
    """Submit an app with Flower's own command, wait for its end, and give its run folder."""
    submitted = subprocess.run(
        [flower_program("flwr"), "run", str(app), CONNECTION, "--format", "json", "--run-config", config,
         "--federation-config", "num-supernodes=4 client-resources-num-cpus=1 init-args-num-cpus=1"],
        env={**os.environ, **superlink.environment}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert submitted.returncode == 0, submitted.stdout + submitted.stderr
    run_id = json.loads(submitted.stdout)["run-id"]
    cli = FlowerCli(CONNECTION, superlink.environment)
    with cli.follow(run_id, log) as stream:
        stream.wait(120)
    assert cli.info(run_id).ending == "completed", log.read_text()[-3000:]
    told = [line.partition("run folder: ")[2] for line in log.read_text().splitlines() if "run folder: " in line]
    assert len(told) == 2  # first and last
    return RunFolder.open(Path(told[0]))


@pytest.mark.engine
def test_flwr_run_on_a_checkout_and_on_a_project_of_ones_own(tmp_path: Path) -> None:
    app = tmp_path / "checkout"
    app.mkdir()
    for name in ("pyproject.toml", "LICENSE", "README.md"):
        shutil.copy(CHECKOUT / name, app)
    shutil.copytree(CHECKOUT / "fedapps", app / "fedapps", ignore=shutil.ignore_patterns("__pycache__"))
    write_project(tmp_path / "ward")
    environment = {"FEDAPPS_RUNS": str(tmp_path / "runs"), "OMP_NUM_THREADS": "1"}
    config = 'method="fedavg" num-server-rounds=1 local-epochs=1 lr=0.2 fraction-train=0.5'
    with SuperLink(simulation=True, environment=environment, log_path=tmp_path / "superlink.log") as superlink:
        folder = flwr_run(app, config, superlink, tmp_path / "run.log")
        config = 'method="fedclup" fedclup.export=true num-server-rounds=1 partition="iid"'
        own = flwr_run(tmp_path / "ward", config, superlink, tmp_path / "own.log")
    settings = folder.read_settings()
    assert (settings["method"], settings["lr"], settings["batch-size"]) == ("fedavg", 0.2, 32)
    [row] = [row for row in folder.read_metrics() if row["phase"] == "train"]
    assert len(row["folded"]) == 2
    assert folder.path.parent == own.path.parent == tmp_path / "runs"
    settings = own.read_settings()
    assert (settings["task"], settings["method"], settings["fedclup.export"]) == ("ward:MyTask", "fedclup", True)
    assert settings["run-dir"] == str(own.path)
    [row] = [row for row in own.read_metrics() if row["phase"] == "train"]
    assert row["folded"] == [0, 1, 2, 3]
