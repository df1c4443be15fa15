"""What several commands share: their options, and how an error is printed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

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
