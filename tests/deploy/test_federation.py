"""Three nodes with keys and data of their own behind TLS: three methods, and a node that is killed and comes back."""

from __future__ import annotations

import csv
import os
import shlex
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from fedapps.results.run_folder import RunFolder
from fedapps.simulation.processes import free_ports

from ..helpers.fedapps_stores import replica_round
from .terminal import Terminal, own_ports, terminal

ROWS = {"site-1": 30, "site-2": 45, "site-3": 60}
ROUNDS = 11

pytestmark = pytest.mark.engine


def test_three_nodes_train_with_three_methods_and_a_killed_one_comes_back(tmp_path: Path) -> None:
    """Site 2 dies in round 2 of HiSo; the rounds go on with the others until it is back, with its own replica."""
    pytest.importorskip("torch")
    pytest.importorskip("pyarrow")
    study, ports = tmp_path / "study", free_ports(4)
    environment = {
        "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "OMP_NUM_THREADS": "1", "FLWR_HOME": f"{study}/user",
    }  # fmt: skip
    with terminal(tmp_path, environment) as shell:
        nodes = " ".join(f"--node {name}" for name in ROWS)
        shell.run(f"fedapps deploy init study --host localhost --port {ports[0]} {nodes}")
        own_ports(study, list(ROWS), ports[1:])
        shell.run("study/server/start.sh &\nuntil fedapps deploy check --folder study/server; do sleep 1; done")
        shell.run("study/user/register.sh")
        for name, rows in ROWS.items():
            write_table(study / "nodes" / name / "data" / "own.csv", rows, seed=rows)
            with (study / "nodes" / name / "node.toml").open("a") as file:
                file.write("task-options = 'file = \"own.csv\"'\nresident-worker = true\n")
            shell.run(f"study/nodes/{name}/start.sh > {name}.log 2>&1 &")
        shell.run('until [ "$(fedapps deploy check study | grep -c online,)" = 3 ]; do sleep 1; done')

        for method in ("fedpm", "fedclup"):
            folder = federated(shell, tmp_path, method, "table", rounds=1)
            assert folded(folder) == [[0, 1, 2]]
            assert [row["examples"] for row in folder.read_nodes()] == list(ROWS.values())
        for name in ROWS:
            assert list((study / "nodes" / name / "state").rglob("round-1.safetensors")), name

        shell.run(f"({command('hiso', 'table-net', ROUNDS, **{'round-timeout': 30.0})}) > hiso.log 2>&1 & hiso=$!")
        shell.run("""until grep -qs '"train"' runs/*-hiso-*/metrics.jsonl; do sleep 0.1; done""")
        kill_node(study / "nodes" / "site-2")
        shell.run("wait $hiso")
        folder = folder_of(tmp_path, "hiso", "table-net")
        check_ended(folder)
        assert folded(folder)[:2] == [[0, 1, 2], [0, 2]]
        assert folded(folder)[-1] == [0, 1, 2], "site-2 is not back"
        for name in ROWS:
            assert replica_round(folder.path, study / "nodes" / name / "state") >= ROUNDS - 1, name
        assert "starting from the base model" not in (tmp_path / "site-2.log").read_text().split("has ended", 1)[1]


def write_table(path: Path, rows: int, seed: int) -> None:
    """Two kinds, which differ in the first of four columns."""
    import numpy as np

    random = np.random.default_rng(seed)
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["a", "b", "c", "d", "kind"])
        for row in range(rows):
            table.writerow([*random.normal([2 * (row % 2), 0, 0, 0]).tolist(), ("no", "yes")[row % 2]])


def command(method: str, task: str, rounds: int, **settings: Any) -> str:
    """Write the command of a run of all three nodes."""
    own = {"task-options": "label = 'kind'", "min-available-nodes": len(ROWS), "client-evaluation": "none", **settings}
    sets = " ".join("--set " + shlex.quote(f"{key}={value!r}") for key, value in own.items())
    return f"fedapps run --superlink study --method {method} --task {task} --rounds {rounds} --out runs {sets}"


def federated(shell: Terminal, place: Path, method: str, task: str, rounds: int) -> RunFolder:
    shell.run(command(method, task, rounds))
    folder = folder_of(place, method, task)
    check_ended(folder)
    return folder


def folder_of(place: Path, method: str, task: str) -> RunFolder:
    [path] = (place / "runs").glob(f"*-{method}-{task}-0")
    return RunFolder.open(path)


def check_ended(folder: RunFolder) -> None:
    summary = folder.read_summary()
    assert summary is not None
    assert summary["status"] == "completed", summary


def folded(folder: RunFolder) -> list[list[int]]:
    return [row["folded"] for row in folder.read_metrics() if row["phase"] == "train"]


def kill_node(folder: Path) -> None:
    """Kill a SuperNode with all that it has started, as a crash would; its start script stays."""
    there = {int(cwd.parent.name) for cwd in Path("/proc").glob("[0-9]*/cwd") if leads_to(cwd, folder)}
    commands = {pid: Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ") for pid in there}
    assert any("flower-supernode" in command for command in commands.values())
    for pid, command in commands.items():
        if "start.sh" not in command:
            os.kill(pid, signal.SIGKILL)


def leads_to(link: Path, folder: Path) -> bool:
    try:
        return link.readlink() == folder
    except OSError:  # It has ended, or is another user's.
        return False
