"""``fedapps compare``, and ``fedapps report`` on what it leaves."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from fedapps.errors import CheckpointError
from fedapps.results.run_folder import RunFolder

Call = Callable[..., str]


@pytest.mark.slow
def test_compare_tunes_every_method_on_the_same_grid_and_records_it(
    call: Call, sites: list[str], tmp_path: Path
) -> None:
    output = call("compare", "--methods", "fedavg,fedpm", *sites[:-2], "--seeds", "0,1", "--lr-grid", "0.01,0.1",
                  "--target", "0.5", "--jobs", "2", "--out", str(tmp_path))  # fmt: skip
    [folder] = list(tmp_path.iterdir())
    record: dict[str, Any] = json.loads((folder / "compare.json").read_text())
    tuning = [(t["method"], t["lr"], t["seed"]) for t in record["trials"] if t["tuning"]]
    assert tuning == [("fedavg", 0.01, 0), ("fedavg", 0.1, 0), ("fedpm", 0.01, 0), ("fedpm", 0.1, 0)]
    for method in ("fedavg", "fedpm"):
        scores = {t["lr"]: t["score"] for t in record["trials"] if t["method"] == method and t["tuning"]}
        assert scores[record["chosen-lr"][method]] == max(scores.values())
        others = [t for t in record["trials"] if t["method"] == method and not t["tuning"]]
        assert [(t["seed"], t["lr"]) for t in others] == [(1, record["chosen-lr"][method])]
    assert {row["runs"] for row in record["table"]} == {2}
    assert (folder / "compare.png").stat().st_size > 10_000
    assert "rounds to 0.5" in output
    runs = [str(folder / t["folder"]) for t in record["trials"]]
    report = call("report", *runs, "--out", str(tmp_path / "report"))
    assert "fedpm" in report
    assert (tmp_path / "report" / "table.csv").exists()
    as_json = json.loads(call("report", *runs, "--format", "json"))
    assert [row["method"] for row in as_json] == [f"{m} (lr={lr})" for m in ("fedavg", "fedpm") for lr in (0.01, 0.1)]
    accuracy = "final-global-server-test-accuracy-mean"
    as_csv = list(csv.DictReader(io.StringIO(call("report", *runs, "--format", "csv"))))
    assert [float(row[accuracy]) for row in as_csv] == [row[accuracy] for row in as_json]
    markdown = call("report", *runs, "--format", "markdown")
    assert markdown == (tmp_path / "report" / "table.md").read_text()
    assert markdown.count("| fedavg (lr=0.1) |") == 3
    chosen = json.loads(call("report", str(folder), "--target", "0.5", "--format", "json"))
    assert chosen == record["table"]
    (one,) = json.loads(call("report", runs[0], "--format", "json"))
    assert (one["method"], one["rounds"], one["status"]) == ("fedavg", 2, "completed")
    assert one["seconds-start-up"] > 0


@pytest.mark.slow
def test_no_table_is_cut_in_a_pipe_nor_at_80_columns(call: Call, sites: list[str], tmp_path: Path) -> None:
    """Every heading and number of the Markdown is in the text, in lines of the terminal's width, or of any in a pipe."""
    call("compare", "--methods", "fedavg,localtrain", *sites, "--target", "0.5", "--jobs", "1", "--out", str(tmp_path))
    runs = [str(path) for path in sorted(tmp_path.glob("*/runs/*"))]
    command = [
        sys.executable,
        "-m",
        "fedapps.cli",
        "report",
        *runs,
        "--target",
        "0.5",
        "--out",
        str(tmp_path / "report"),
    ]
    for columns in ("", "80", "40"):
        environment = {**os.environ, "COLUMNS": columns}
        output = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
        table = [line for line in output.splitlines() if line.startswith(("│", "┃"))]
        assert max(map(len, table)) <= int(columns or 10_000)
        assert (max(map(len, table)) > 80) == (not columns)
        words = set(re.findall(r"[^\s│┃]+", "\n".join(table)))
        text = (tmp_path / "report" / "table.md").read_text()
        cells = [cell for line in text.splitlines() if line.startswith("|") for cell in line.split("|")]
        expected = {word for cell in cells for word in re.findall(r"[^\s,]+", cell)} - {"---"}
        assert "…" not in output
        assert expected <= words


KILLED = ["--methods", "fedavg,fedpm", "--lr-grid", "0.05,0.1", "--jobs", "1", "--rounds", "30"]


@pytest.mark.engine
@pytest.mark.usefixtures("default_signals")
def test_a_killed_comparison_goes_on_where_it_was(call: Call, sites: list[str], tmp_path: Path) -> None:
    """SIGKILL while a run is between two checkpoints: completed runs stay as they are, that one goes on, the rest follows.

    Every number is that of a comparison that nobody killed.
    """
    options = [*sites[:-2], *KILLED]
    call("compare", *options, "--out", str(tmp_path / "straight"))
    command = [sys.executable, "-m", "fedapps.cli", "compare", *options, "--out", str(tmp_path / "killed")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    half = wait_for_half_a_run(tmp_path / "killed", process)
    process.kill()
    process.wait()
    (folder,) = (tmp_path / "killed").iterdir()
    record = json.loads((folder / "compare.json").read_text())
    assert record["status"] == "unfinished"
    done = {folder / t["folder"]: (folder / t["folder"] / "metrics.jsonl").stat() for t in record["trials"]}
    assert 1 <= len(done) < 4
    wait_for_the_worker(half)
    assert 0 < rounds_of(half) < 30, "the worker ended with its parent"
    output = call("compare", "--resume", str(folder), "--jobs", "1")
    assert "fedpm" in output
    assert {path: (path / "metrics.jsonl").stat() for path in done} == done
    assert len(list((folder / "runs").iterdir())) == 4, "no run was made twice"
    rows = [json.loads(line) for line in (half / "metrics.jsonl").read_text().splitlines()]
    assert [row["round"] for row in rows if row["phase"] == "train"] == list(range(1, 31))
    assert len([row for row in rows if row["phase"] == "start-up"]) == 2
    assert numbers(folder) == numbers(next((tmp_path / "straight").iterdir()))


def numbers(folder: Path) -> Any:
    """What a comparison computed, without folders and seconds."""
    record = json.loads((folder / "compare.json").read_text())
    kept = ("method", "seed", "point", "tuning", "status", "score", "score_round", "final", "best")
    trials = [{key: trial[key] for key in kept} for trial in record["trials"]]
    return record["status"], record["chosen"], record["data"], trials


def rounds_of(run: Path) -> int:
    lines = (run / "metrics.jsonl").read_text().splitlines() if (run / "metrics.jsonl").exists() else []
    return sum('"phase": "train"' in line for line in lines)


def wait_for_half_a_run(root: Path, process: subprocess.Popen[bytes]) -> Path:
    """Wait until one run is completed and recorded, and another one is at work and has checkpoints."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        assert process.poll() is None, "the comparison ended before it could be killed"
        for folder in root.iterdir() if root.exists() else ():
            recorded = json.loads(path.read_text())["trials"] if (path := folder / "compare.json").exists() else []
            for run in (folder / "runs").iterdir() if recorded else ():
                if not (run / "summary.json").exists() and 3 <= rounds_of(run) <= 20:
                    return run
        time.sleep(0.01)
    raise AssertionError("no run got half-way")


def wait_for_the_worker(run: Path) -> None:
    """The worker ends with its parent, at once but not before it."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        with suppress(CheckpointError), RunFolder(run).locked():
            return
        time.sleep(0.02)
    raise AssertionError("the worker outlived its parent")


@pytest.mark.slow
def test_a_task_without_accuracy_is_compared_by_its_loss(call: Call, tmp_path: Path) -> None:
    """Rounds to a target are those until the loss is as low."""
    output = call("compare", "--task", "synthetic-linear", "--methods", "fedavg,ditto", "--clients", "10", "--rounds", "3",
                  "--lr-grid", "0.01,0.4", "--target", "1.0", "--jobs", "2", "--out", str(tmp_path))  # fmt: skip
    (folder,) = tmp_path.iterdir()
    record = json.loads((folder / "compare.json").read_text())
    for method in ("fedavg", "ditto", "globaltrain"):
        scores = {t["lr"]: t["score"] for t in record["trials"] if t["method"] == method}
        assert scores[record["chosen-lr"][method]] == min(scores.values())
    assert {t["score_metric"] for t in record["trials"]} == {"validation-loss", "client-personal-validation-loss"}
    rows = {row["method"]: row for row in record["table"]}
    assert rows["fedavg"]["final-personal-clients-test-loss-mean"] is None
    assert rows["ditto"]["final-personal-clients-test-statistical-error-mean"] > 0
    assert "loss" in output
    for name in ("table.md", "table.csv", "compare.png", "personal.csv", "gains.png"):
        assert (folder / name).stat().st_size > 100
