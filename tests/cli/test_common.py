"""What several commands share: their options, and how an error is printed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fedapps.cli import common
from fedapps.errors import SettingsError
from fedapps.results.run_folder import RunFolder

Call = Callable[..., str]


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["run", "--method", "fedmp"], "did you mean 'fedpm'?"),
        (["run", "--task", "digit"], "did you mean 'digits'?"),
        (["run", "--set", "learning-rate=0.1"], "SettingsError: setting 'learning-rate'"),
        (["run", "--set", "lr"], "expected KEY=VALUE"),
        (["run", "--config", "nowhere.toml"], "--config nowhere.toml: expected a TOML file"),
        (["run", "--resume", "nowhere"], "run folder nowhere: expected a folder with settings.toml, got no such folder"),
        pytest.param(
            ["run", "--partition", "iid", "--clients", "1500", "--engine", "inprocess"], "1500", marks=pytest.mark.slow
        ),
        (["report", "nowhere"], "no such folder"),
        (["compare", "--methods", "fedpm,fedpm"], "at least one value, each once"),
        (["compare", "--methods", "fedpm", "--seeds", "0,x"], "--seeds: expected values separated by commas"),
        (["run", "--task", "my_pkg.nothing:MyTask"], "my_pkg"),
        (["run", "--set", "[/bold]=1"], "setting '[/bold]': expected a known key"),
        (["run", "--set", "lr=[/x]"], "got '[/x]'"),
        (["run", "--config", "[/x] :boom:.toml"], "--config [/x] :boom:.toml: expected a TOML file"),
        (["run", "--resume", "[/x]"], "run folder [/x]: expected a folder"),
        (["run", "--superlink", "lab"], "add [superlink.lab] with the SuperLink's address"),
        (["run", "--task", "..:x"], "task '..:x': expected a module '..'"),
        (["run", "--method", "..:x"], "method '..:x': expected an importable module:attribute"),
        (["run", "--set", "seed=" + "9" * 30], "setting 'seed': expected a finite number"),
        (["run", "--rounds", "9" * 30], "setting 'num-server-rounds': expected an integer of at most 64 bits"),
        (["run", "--set", "lr=" + "9" * 5000], "setting 'lr': expected a value of type float"),
        (["run", "--set", "compute-threads=1000000"], "setting 'compute-threads': expected a finite number >= 1 and <= "),
        (["run", "--set", "task-options=" + "a=[" + "[" * 50_000], "setting 'task-options': expected TOML"),
        (["run", "--clients", "1000000", "--engine", "inprocess"], "for each of 1000000 clients"),
        (["run", "--clients", "9" * 30, "--engine", "inprocess"], f"for each of {'9' * 30} clients"),
        (["run", "--set", "run-dir=/x"], "--set, key 'run-dir': expected another key: commands have an option"),
        (["run", "--set", "run-dir=/x"], "give --out FOLDER"),
        (["run", "--set", "resume=true"], "give --resume FOLDER"),
        (["run", "--set", "accept-changes=true"], "give --accept-changes"),
        (["compare", "--methods", "fedavg", "--set", "run-dir=/x"], "give --out FOLDER"),
        (["run", "--device", "cuda:9"], "setting 'device': expected a device of this machine"),
    ],
)  # fmt: skip
def test_a_mistake_is_told_in_one_message_with_exit_code_1(
    call: Call, arguments: list[str], match: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    output = call(*arguments, code=1)
    assert match in " ".join(output.split())
    assert "Traceback" not in output
    assert len(output.strip().splitlines()) == 1
    assert len(output) < 2000
    assert list(tmp_path.glob("runs/*")) == []


@pytest.mark.parametrize(
    "content", [b"\xff\xfe\x00", b"a = " + b"[" * 100_000, b"lr = 1" + b"0" * 5000, None],
    ids=["binary", "deep", "many digits", "a folder"],
)  # fmt: skip
def test_a_preset_that_is_none_is_told_in_one_line(call: Call, tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "preset.toml"
    path.mkdir() if content is None else path.write_bytes(content)
    output = call("run", "--config", str(path), code=1)
    assert output.startswith(f"SettingsError: --config {path}: expected a TOML file with settings, got ")
    assert len(output.strip().splitlines()) == 1


def test_a_preset_that_says_where_a_run_lies_is_refused_unless_it_is_that_of_a_run(tmp_path: Path) -> None:
    preset, of_a_run = tmp_path / "preset.toml", RunFolder(tmp_path).settings_path
    for path in (preset, of_a_run):
        path.write_text('run-dir = "/x"\nlr = 0.5\n', encoding="utf-8")
    with pytest.raises(SettingsError, match=rf"--config {preset}, key 'run-dir'.* give --out FOLDER"):
        common.gather({}, [preset], None)
    values = common.gather({}, [of_a_run], None)
    assert (values["run-dir"], values["lr"]) == ("", 0.5)


@pytest.mark.slow
def test_the_folder_of_all_runs_is_that_of_the_environment(tmp_path: Path) -> None:
    """In a process of its own, as every command is."""
    for given, expected in ((None, "runs"), (str(tmp_path / "mine"), str(tmp_path / "mine"))):
        environment = {name: value for name, value in os.environ.items() if name != "FEDAPPS_RUNS"}
        environment |= {} if given is None else {"FEDAPPS_RUNS": given}
        code = "from fedapps.cli import common; print(common.DEFAULT_OUT)"
        output = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
        )
        assert output.stdout.strip() == expected
