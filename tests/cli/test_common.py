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
    ],
)  # fmt: skip
def test_a_mistake_is_told_in_one_message_with_exit_code_1(
    call: Call, arguments: list[str], match: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    output = call(*arguments, code=1)
    assert match in " ".join(output.split())
    assert "Traceback" not in output
