"""The command line as a user types it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedapps.cli import cli
from fedapps.methods import METHODS
from fedapps.results.run_folder import RunFolder

runner = CliRunner()

pytestmark = pytest.mark.usefixtures("own_module")

SITES = [
    "--task", "fedapps_testing:Sites", "--engine", "inprocess", "--clients", "3", "--rounds", "2", "--partition", "column",
    "--set", "partition-column=site", "--set", "lr=0.1", "--set", "local-epochs=1", "--set", "validation-fraction=0.2",
    "--set", "task-options='sizes = \"8,8,8\"'",
]  # fmt: skip


def call(*arguments: str, code: int = 0) -> str:
    result = runner.invoke(cli, list(arguments), env={"COLUMNS": "200"})
    assert result.exit_code == code, result.output
    return result.output


def only_run(root: Path) -> RunFolder:
    [path] = [p for p in root.iterdir() if p.is_dir()]
    return RunFolder.open(path)


def test_run_prints_a_line_a_round_a_summary_and_leaves_the_folder(tmp_path: Path) -> None:
    output = call("run", "--method", "fedpm", *SITES, "--out", str(tmp_path))
    folder = only_run(tmp_path)
    assert [line.split()[:2] for line in output.splitlines() if line.startswith("round ")] == [
        ["round", "0"], ["round", "1"], ["round", "2"],
    ]  # fmt: skip
    assert "completed" in output
    assert str(folder.path / "plot.png") in output
    for name in ("settings.toml", "environment.json", "metrics.jsonl", "ledger.jsonl", "summary.json", "plot.png",
                 "model.safetensors", "flower.log", "checkpoint/manifest.json"):  # fmt: skip
        assert (folder.path / name).exists(), name
    assert folder.read_settings()["method"] == "fedpm"
    assert "round 2/2: 3 of 3 clients" in (folder.path / "flower.log").read_text()


def test_resume_takes_settings_and_clients_from_the_folder(tmp_path: Path) -> None:
    call("run", "--method", "fedavg", *SITES, "--out", str(tmp_path))
    folder = only_run(tmp_path)
    output = call("run", "--resume", str(folder.path), "--rounds", "3", "--engine", "inprocess")
    assert "round   3" in output
    assert "round   1" not in output
    summary = folder.read_summary()
    assert summary is not None
    assert summary["rounds"] == 3


def test_a_preset_and_options_override_each_other_in_order(tmp_path: Path) -> None:
    preset = tmp_path / "preset.toml"
    preset.write_text("lr = 0.7\nseed = 4\n[fedpm]\ndamping = 0.3\n")
    call("run", "--method", "fedpm", *SITES[:-8], "--config", str(preset), "--set", "seed=5", "--set",
         "task-options='sizes = \"8,8,8\"'", "--set", "partition-column=site", "--seed", "6",
         "--out", str(tmp_path / "runs"))  # fmt: skip
    settings = only_run(tmp_path / "runs").read_settings()
    assert (settings["lr"], settings["seed"], settings["fedpm.damping"]) == (0.7, 6, 0.3)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["run", "--method", "fedmp"], "did you mean 'fedpm'?"),
        (["run", "--task", "digit"], "did you mean 'digits'?"),
        (["run", "--set", "learning-rate=0.1"], "SettingsError: setting 'learning-rate'"),
        (["run", "--set", "lr"], "expected KEY=VALUE"),
        (["run", "--config", "nowhere.toml"], "--config nowhere.toml: expected a TOML file"),
        (["run", "--resume", "nowhere"], "run folder nowhere: expected a folder with settings.toml, got no such folder"),
        (["run", "--partition", "iid", "--clients", "1500", "--engine", "inprocess"], "1500"),
        (["report", "nowhere"], "no such folder"),
        (["compare", "--methods", "fedpm,fedpm"], "at least one value, each once"),
        (["compare", "--methods", "fedpm", "--seeds", "0,x"], "--seeds: expected values separated by commas"),
        (["run", "--task", "my_pkg.nothing:MyTask"], "my_pkg"),
    ],
)  # fmt: skip
def test_a_mistake_is_told_in_one_message_with_exit_code_1(
    arguments: list[str], match: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    output = call(*arguments, code=1)
    assert match in " ".join(output.split())
    assert "Traceback" not in output


def test_a_file_where_a_folder_belongs_is_told_in_one_message(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("not a folder")
    output = call("run", "--method", "fedavg", *SITES, "--out", str(tmp_path / "runs"), code=1)
    assert "Traceback" not in output
    assert "Error: [Errno" in output
    assert str(tmp_path / "runs") in output


def test_a_run_that_fails_says_so_and_ends_with_exit_code_1(tmp_path: Path) -> None:
    output = call("run", "--method", "fedavg", *SITES, "--set", "lr=1e30", "--set", "local-epochs=3", "--set",
                  "max-consecutive-failed-rounds=1", "--out", str(tmp_path), code=1)  # fmt: skip
    assert "failed: RoundFailedError: round 1: expected at least 1 valid replies, got 0 of 3" in output
    summary = only_run(tmp_path).read_summary()
    assert summary is not None
    assert summary["status"] == "failed"


def test_compare_tunes_every_method_on_the_same_grid_and_records_it(tmp_path: Path) -> None:
    output = call("compare", "--methods", "fedavg,fedpm", *SITES[:-8], "--set", "partition-column=site", "--set",
                  "validation-fraction=0.2", "--set", "local-epochs=1", "--set", "task-options='sizes = \"8,8,8\"'",
                  "--seeds", "0,1", "--lr-grid", "0.01,0.1", "--target", "0.5", "--jobs", "2",
                  "--out", str(tmp_path))  # fmt: skip
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
    report = call("report", *(str(folder / t["folder"]) for t in record["trials"]), "--out", str(tmp_path / "report"))
    assert "fedpm" in report
    assert (tmp_path / "report" / "table.csv").exists()


def test_lists_name_every_method_and_task() -> None:
    methods = json.loads(call("methods", "--format", "json"))
    assert [row["name"] for row in methods] == [method.name for method in METHODS]
    tasks = json.loads(call("tasks", "--format", "json"))
    assert {"digits", "a9a", "w8a", "libsvm"} <= {row["name"] for row in tasks}
    for command in ("methods", "tasks"):
        table = call(command)
        assert all(row["name"] in table for row in (methods if command == "methods" else tasks))


def test_version() -> None:
    assert call("--version").startswith("fedapps 0.")
