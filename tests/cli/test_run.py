"""``fedapps run`` as a user types it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedapps.cli import common
from fedapps.errors import RosterError
from fedapps.results.run_folder import RunFolder
from fedapps.results.summary import RunStatus
from fedapps.server_apps import run
from fedapps.simulation.start import Ended

Call = Callable[..., str]


def only_run(root: Path) -> RunFolder:
    [path] = [p for p in root.iterdir() if p.is_dir()]
    return RunFolder.open(path)


def test_run_prints_a_line_a_round_a_summary_and_leaves_the_folder(
    call: Call, sites: list[str], tmp_path: Path
) -> None:
    output = call("run", "--method", "fedpm", *sites, "--out", str(tmp_path))
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


@pytest.mark.slow
def test_resume_takes_settings_and_clients_from_the_folder(call: Call, sites: list[str], tmp_path: Path) -> None:
    call("run", "--method", "fedavg", *sites, "--out", str(tmp_path))
    folder = only_run(tmp_path)
    output = call("run", "--resume", str(folder.path), "--rounds", "3", "--engine", "inprocess")
    assert "round   3" in output
    assert "round   1" not in output
    summary = folder.read_summary()
    assert summary is not None
    assert summary["rounds"] == 3


def test_a_resume_with_another_number_of_clients_is_refused(call: Call, sites: list[str], tmp_path: Path) -> None:
    call("run", "--method", "fedavg", *sites, "--out", str(tmp_path))
    resume = "run", "--resume", str(only_run(tmp_path).path), "--rounds", "3", "--engine", "inprocess"
    output = call(*resume, "--clients", "4", code=1)
    assert output.startswith("SettingsError: --clients at the resume of ")
    assert "expected 3, got 4" in output
    assert "round   3" in call(*resume, "--clients", "3")


@pytest.mark.slow
def test_what_a_resume_would_change_is_named_and_accepted_on_request(
    call: Call, sites: list[str], tmp_path: Path
) -> None:
    call("run", "--method", "fedavg", *sites, "--out", str(tmp_path))
    folder = only_run(tmp_path)
    resume = "run", "--resume", str(folder.path), "--rounds", "3", "--engine", "inprocess", "--set", "lr=0.7"
    output = call(*resume, code=1)
    assert "lr = 0.7 where it was 0.1" in output
    assert len(output.strip().splitlines()) == 1, "neither a table of the part before nor paths"
    assert "round   3" in call(*resume, "--accept-changes")
    assert folder.read_settings()["lr"] == 0.7


def test_a_client_s_error_is_printed_as_it_is(call: Call, sites: list[str], own_module: str, tmp_path: Path) -> None:
    """Text of a client never ends the run of the server, whatever markup it holds."""
    task = [
        "--task",
        f"{own_module}:BracketSites",
        "--set",
        "task-options='sizes = \"8,7,8\"'",
        "--set",
        "batch-size=0",
    ]
    output = call(
        "run", "--method", "fedavg", *sites, *task, "--set", "validation-fraction=0.0", "--out", str(tmp_path)
    )
    assert "client 1: RuntimeError: a[/x] b[bold]c :boom:" in output
    assert "a[/x] b[bold]c :boom:" in (only_run(tmp_path).path / "flower.log").read_text()


def test_a_run_that_is_refused_at_its_start_shows_no_table(
    call: Call, sites: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise RosterError("clients: [/x] nobody came")

    monkeypatch.setattr(run, "describe_environment", refuse)  # The settings are on file already.
    output = call("run", "--method", "fedavg", *sites, "--out", str(tmp_path), code=1)
    lines = [line for line in output.splitlines() if line.strip()]
    assert lines[0] == "failed: RosterError: clients: [/x] nobody came"
    assert [line.split()[0] for line in lines[1:]] == ["log"]


def test_a_preset_and_options_override_each_other_in_order(call: Call, sites: list[str], tmp_path: Path) -> None:
    preset = tmp_path / "preset.toml"
    preset.write_text("lr = 0.7\nseed = 4\n[fedpm]\ndamping = 0.3\n")
    call("run", "--method", "fedpm", *sites[:-2], "--config", str(preset), "--set", "seed=5", "--seed", "6",
         "--out", str(tmp_path / "runs"))  # fmt: skip
    settings = only_run(tmp_path / "runs").read_settings()
    assert (settings["lr"], settings["seed"], settings["fedpm.damping"]) == (0.7, 6, 0.3)


def test_a_file_where_a_folder_belongs_is_told_in_one_message(call: Call, sites: list[str], tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("not a folder")
    output = call("run", "--method", "fedavg", *sites, "--out", str(tmp_path / "runs"), code=1)
    assert "Traceback" not in output
    assert "Error: [Errno" in output
    assert str(tmp_path / "runs") in output


def test_a_run_that_fails_says_so_and_ends_with_exit_code_1(call: Call, sites: list[str], tmp_path: Path) -> None:
    output = call("run", "--method", "fedavg", *sites, "--set", "lr=1e30", "--set", "local-epochs=3", "--set",
                  "max-consecutive-failed-rounds=1", "--out", str(tmp_path), code=1)  # fmt: skip
    assert "failed: RoundFailedError: round 1: expected at least 1 valid replies, got 0 of 3" in output
    summary = only_run(tmp_path).read_summary()
    assert summary is not None
    assert summary["status"] == "failed"


@pytest.mark.parametrize(
    ("options", "root"),
    [
        ([], "runs"),
        (["--out", "out"], "out"),
        (["--set", "collect-mb=0"], None),
        (["--set", "collect-mb=0", "--out", "out"], "out"),
    ],
    ids=["default", "a folder", "nothing is sent", "a folder that the server has, too"],
)
def test_a_run_on_a_superlink_comes_here_unless_it_is_to_stay_there(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], root: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(common, "DEFAULT_OUT", Path("runs"))
    given: list[Path | None] = []

    def start(values: Any, how: Any, root: Path | None, on_row: Any) -> Ended:
        given.append(root)
        return Ended(RunStatus.COMPLETED, "", None)

    monkeypatch.setattr(importlib.import_module("fedapps.cli.run"), "start", start)
    output = call("run", "--superlink", "lab", *options)
    assert given == [root and Path(root)]
    assert "The results are on the server" in output


def test_a_copy_without_a_checkpoint_is_resumed_on_a_superlink(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its server was killed before it sent one; the numbers of clients and rounds are the server's to know."""
    RunFolder(tmp_path).write_settings({"method": "fedavg", "task": "digits", "run-dir": "/srv/runs/one"})
    given: list[dict[str, Any]] = []

    def start(values: Any, how: Any, root: Path | None, on_row: Any) -> Ended:
        given.append(values)
        return Ended(RunStatus.COMPLETED, "", None)

    monkeypatch.setattr(importlib.import_module("fedapps.cli.run"), "start", start)
    call("run", "--resume", str(tmp_path), "--superlink", "lab")
    assert (given[0]["run-dir"], given[0]["resume"]) == (str(tmp_path), True)
