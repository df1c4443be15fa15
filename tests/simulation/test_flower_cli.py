"""Answers of Flower's command line are read as they are meant; a made-up command line gives them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from fedapps.errors import LaunchError
from fedapps.simulation.flower_cli import FlowerCli, RunInfo

# Takes its answers in turn from a file, and notes how it was called.
FLWR = """
import json, os, sys, time
folder = os.environ["FAKE"]
with open(folder + "/calls", "a") as calls:
    print(*sys.argv[1:], file=calls)
with open(folder + "/" + sys.argv[1]) as answers:
    answer = json.load(answers)
time.sleep(answer["seconds"])
print(answer["out"])
sys.exit(answer["code"])
"""


class FakeFlower:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.cli = FlowerCli("there", {"FAKE": str(folder)})

    def answers(self, command: str, answer: object, *, code: int = 0, seconds: float = 0.0) -> None:
        out = answer if isinstance(answer, str) else json.dumps(answer)
        (self.folder / command).write_text(json.dumps({"out": out, "code": code, "seconds": seconds}))

    def calls(self) -> list[str]:
        path = self.folder / "calls"
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def flower(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeFlower:
    program = tmp_path / "flwr"
    program.write_text(f"#!{sys.executable} -S\n{FLWR}")
    program.chmod(0o755)
    monkeypatch.setattr("fedapps.simulation.flower_cli.flower_program", lambda name: str(tmp_path / name))
    return FakeFlower(tmp_path)


def test_a_run_is_submitted_to_the_connection(flower: FakeFlower) -> None:
    flower.answers("run", {"success": True, "run-id": "17"})
    assert flower.cli.submit(Path("/app"), "num-supernodes=3 init-args-num-cpus=1") == "17"
    assert flower.calls() == ["run /app there --federation-config num-supernodes=3 init-args-num-cpus=1 --format json"]


@pytest.mark.parametrize(
    ("status", "details", "info", "finished", "ending"),
    [
        ("running", "N/A", RunInfo("running", ""), False, ""),
        ("finished:completed", "N/A", RunInfo("finished:completed", ""), True, "completed"),
        ("finished:failed", "a reason", RunInfo("finished:failed", "a reason"), True, "failed"),
    ],
)
def test_the_status_of_a_run_is_read(
    flower: FakeFlower, status: str, details: str, info: RunInfo, finished: bool, ending: str
) -> None:
    flower.answers("list", {"success": True, "runs": [{"status": status, "status-details": details}]})
    assert flower.cli.info("17") == info
    assert (info.finished, info.ending) == (finished, ending)


@pytest.mark.parametrize(
    ("out", "code", "message"),
    [
        pytest.param({"success": False, "error-message": "no such\nSuperLink"}, 0, "no such\nSuperLink", id="refused"),
        pytest.param("not JSON at all", 2, "exit code 2; Flower says:\nnot JSON at all", id="crash"),
    ],
)
def test_a_refusal_is_an_error_in_flowers_words(flower: FakeFlower, out: object, code: int, message: str) -> None:
    flower.answers("run", out, code=code)
    with pytest.raises(LaunchError, match=f"command 'flwr run': expected success, got (.|\n)*{message}"):
        flower.cli.submit(Path("/app"))


def test_an_answer_that_does_not_come_is_an_error(flower: FakeFlower, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedapps.simulation.flower_cli._CALL_SECONDS", 0.3)
    flower.answers("list", "", seconds=60.0)
    with pytest.raises(LaunchError, match=r"command 'flwr list': .*answer"):
        flower.cli.info("17")


@pytest.mark.slow
@pytest.mark.usefixtures("default_signals")
def test_a_run_whose_submission_is_interrupted_is_stopped(flower: FakeFlower) -> None:
    flower.answers("run", {"success": True, "run-id": "17"}, seconds=1.0)
    flower.answers("stop", {"success": True, "run-id": "17"})

    def interrupt() -> None:
        while not flower.calls():
            time.sleep(0.01)
        signal.raise_signal(signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        flower.cli.submit(Path("/app"))
    assert flower.calls() == ["run /app there --format json", "stop 17 there --format json"]


def test_a_log_that_is_followed_again_replaces_only_its_own_lines(flower: FakeFlower) -> None:
    path = flower.folder / "flower.log"
    path.write_text("of an earlier run\n")
    flower.answers("log", "line")
    for _ in range(2):
        with flower.cli.follow("17", path, offset=18) as process:
            assert process.wait() == 0
    assert path.read_text() == "of an earlier run\nline\n"
    assert flower.calls()[0] == "log 17 there --stream"


def test_following_ends_with_the_block(flower: FakeFlower) -> None:
    flower.answers("log", "", seconds=60.0)
    with pytest.raises(subprocess.TimeoutExpired), flower.cli.follow("17", flower.folder / "flower.log") as process:
        process.wait(0.2)
    assert process.returncode == -signal.SIGKILL
