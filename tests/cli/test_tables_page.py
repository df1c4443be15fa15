"""``docs/tables.md``: its commands are run as they stand there."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from fedapps.results.run_folder import RunFolder

PAGE = (Path(__file__).parents[2] / "docs" / "tables.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.slow
def test_the_commands_of_the_page_do_what_it_says(
    call: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    [script] = blocks("python")
    exec(compile(script, "tables.md", "exec"), {})
    commands = blocks("bash")
    assert len(commands) == 2
    for number, command in enumerate(commands):
        program, *arguments = shlex.split(command.replace("\\\n", " "))
        assert program == "fedapps"
        call(*arguments, "--out", str(tmp_path / f"out-{number}"))
    linear, net = (RunFolder.open(next((tmp_path / f"out-{number}").iterdir())) for number in range(2))
    for folder in (linear, net):
        summary = folder.read_summary()
        assert summary is not None
        assert summary["status"] == "completed"
        assert summary["final"]["validation-accuracy"] > 0.9
        assert list(folder.read_environment()["data-checksums"]) == [f"{tmp_path.name}/tumours.csv"]
    assert linear.read_model()["weights"].shape == (31,)
    assert [array.shape for array in net.read_model().values()] == [(16, 30), (16,), (16, 16), (16,), (2, 16), (2,)]
    assert (
        "task table: 455 training examples over 3 clients (column 'hospital'"
        in (linear.path / "flower.log").read_text()
    )
