from __future__ import annotations

import math
import os
import subprocess
import sys
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import numpy as np
import pytest

from fedapps.errors import CheckpointError
from fedapps.results.checkpoint import Checkpoint
from fedapps.results.run_folder import RunFolder

NOON = datetime(2026, 1, 31, 12, 5, 9, tzinfo=UTC)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path / "runs", method="fedpm", task="digits", seed=3, now=NOON)


@pytest.mark.parametrize(
    ("method", "task", "name"),
    [
        ("fedpm", "digits", "20260131T120509Z-fedpm-digits-7"),
        ("my.mod:METHOD", "my_pkg.my_mod:MyTask", "20260131T120509Z-my.mod-METHOD-my_pkg.my_mod-MyTask-7"),
        ("../..", "/etc/ä b", "20260131T120509Z-..-..-etc-b-7"),
        ("", ":", "20260131T120509Z-unnamed-unnamed-7"),
        ("m", "t" * 300, "20260131T120509Z-m-" + "t" * 60 + "-7"),
    ],
    ids=["built in", "own", "hostile", "empty", "long"],
)
def test_the_name_is_safe_for_files(tmp_path: Path, method: str, task: str, name: str) -> None:
    folder = RunFolder.create(tmp_path / "runs", method=method, task=task, seed=7, now=NOON)
    assert folder.path == tmp_path / "runs" / name
    assert folder.path.is_dir()


def test_names_never_collide_and_are_in_utc(tmp_path: Path) -> None:
    zone = timezone(timedelta(hours=9))
    folders = [
        RunFolder.create(tmp_path, method="fedpm", task="digits", seed=0, now=now)
        for now in (NOON, NOON, NOON.astimezone(zone))
    ]
    name = "20260131T120509Z-fedpm-digits-0"
    assert [folder.path.name for folder in folders] == [name, f"{name}-2", f"{name}-3"]


def test_the_present_is_the_default_time(tmp_path: Path) -> None:
    before = datetime.now(UTC).replace(microsecond=0)
    name = RunFolder.create(tmp_path, method="m", task="t", seed=0).path.name
    time = datetime.strptime(name.split("-")[0], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
    assert before <= time <= datetime.now(UTC)


def test_a_relative_path_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"absolute path, got 'runs/x'"):
        RunFolder(Path("runs/x"))


def test_only_a_run_folder_opens(folder: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CheckpointError, match=r"folder with settings\.toml"):
        RunFolder.open(folder.path)
    with pytest.raises(CheckpointError, match="got no such folder"):
        RunFolder.open(tmp_path / "nowhere")
    folder.write_settings({"method": "fedpm"})
    assert RunFolder.open(folder.path) == folder
    monkeypatch.chdir(folder.path.parent)
    assert RunFolder.open(Path(folder.path.name)) == folder


def test_a_given_folder_is_claimed_once(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "mine"
    RunFolder.claim(path)
    (path / "log.txt").write_text("of the launcher")
    folder = RunFolder.claim(path)
    folder.write_settings({"method": "fedpm"})
    with pytest.raises(CheckpointError, match=r"folder that holds a run;.* resume"):
        RunFolder.claim(path)
    with pytest.raises(CheckpointError, match="got a file"):
        RunFolder.claim(path / "log.txt")


def test_settings_environment_summary_and_model_come_back(folder: RunFolder) -> None:
    settings = {"method": "fedpm", "fedpm.damping": 0.1, "seed": 3, "resume": False}
    folder.write_settings(settings)
    assert folder.read_settings() == settings
    folder.write_environment({"python": "3.11", "packages": {"numpy": "2"}})
    assert folder.read_environment() == {"python": "3.11", "packages": {"numpy": "2"}}
    assert folder.read_summary() is None
    summary = {"status": "failed", "rounds": 2, "final": {"test-loss": math.inf}, "totals": {"seconds": 1.5}}
    folder.write_summary(summary)
    assert folder.read_summary() == summary
    arrays = {"w": np.ones((2, 2), np.float32), "n": np.array(4)}
    folder.write_model(arrays)
    back = folder.read_model()
    assert list(back) == ["w", "n"]
    assert back["n"].shape == ()
    np.testing.assert_array_equal(back["w"], arrays["w"])
    assert not [path for path in folder.path.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_the_final_model_is_as_readable_as_the_umask_says(folder: RunFolder, umask: int) -> None:
    before = os.umask(umask)
    try:
        folder.write_model({"w": np.zeros(2)})
    finally:
        os.umask(before)
    assert folder.model_path.stat().st_mode & 0o777 == 0o666 & ~umask


def test_files_that_cannot_be_read_are_named(folder: RunFolder) -> None:
    with pytest.raises(CheckpointError, match=r"expected model\.safetensors, got a run without a final model"):
        folder.read_model()
    folder.settings_path.write_text("lr = = 1")
    with pytest.raises(CheckpointError, match=r"settings\.toml: expected settings as TOML"):
        folder.read_settings()
    for settings in (b"\xff", b"lr = [1]", b"seed = 'x'", b"a = " + b"[" * 100_000):
        folder.settings_path.write_bytes(settings)
        with pytest.raises(CheckpointError, match=r"settings\.toml: expected settings as TOML"):
            folder.read_settings()
    seconds = '"totals": {"seconds": 0}'
    for text in (
        "{",
        "[]",
        "[" * 100_000,
        '{"status": "completed"}',
        f'{{"status": 1, "rounds": 1, "final": {{}}, {seconds}}}',
        f'{{"status": "failed", "rounds": "two", "final": {{}}, {seconds}}}',
        f'{{"status": "failed", "rounds": 2, "final": {{"x": []}}, {seconds}}}',
    ):
        folder.summary_path.write_text(text)
        with pytest.raises(CheckpointError, match=r"summary\.json: expected a summary as JSON"):
            folder.read_summary()


def test_going_back_to_a_round_removes_later_rows_torn_lines_and_the_summary(folder: RunFolder) -> None:
    """After a resume the files read as if the run had never gone on."""
    for server_round in range(4):
        folder.append_metrics({"round": server_round, "phase": "evaluate", "loss": math.nan, "x": 0.1 * server_round})
        folder.append_ledger({"round": server_round, "payload": {"arrays": 8}})
    folder.write_summary({"status": "completed"})
    kept = folder.metrics_path.read_bytes().splitlines(keepends=True)[:3]
    for path in (folder.metrics_path, folder.ledger_path):
        with path.open("a") as file:
            file.write('{"round": 2, "torn')
    folder.truncate_after(2)
    assert folder.metrics_path.read_bytes() == b"".join(kept)
    assert [row["round"] for row in folder.read_ledger()] == [0, 1, 2]
    assert folder.read_summary() is None
    folder.append_metrics({"round": 3, "phase": "train"})
    assert [row["round"] for row in folder.read_metrics()] == [0, 1, 2, 3]


def test_nothing_is_cut_before_everything_is_read(folder: RunFolder) -> None:
    folder.append_metrics({"round": 1, "phase": "train"})
    folder.append_metrics({"round": 2, "phase": "train"})
    folder.journal_path.write_bytes(b"\xff\n")
    with pytest.raises(CheckpointError, match=r"journal\.jsonl, line 1"):
        folder.truncate_after(1)
    assert len(folder.read_metrics()) == 2


def test_one_process_at_a_time_works_on_a_run(folder: RunFolder) -> None:
    """The kernel gives the lock back when its holder is killed."""
    script = (
        "import sys; from pathlib import Path; from fedapps.results.run_folder import RunFolder\n"
        "with RunFolder(Path(sys.argv[1])).locked():\n    print('held', flush=True)\n    sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", script, str(folder.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        refusal = f"expected a run that no process works on, got one that process {holder.pid} works on"
        with pytest.raises(CheckpointError, match=refusal), folder.locked():
            pass
        holder.kill()
    with folder.locked(), pytest.raises(CheckpointError, match="no process works on"), folder.locked():
        pass
    with folder.locked():
        pass


def test_going_back_without_rows_is_nothing(folder: RunFolder) -> None:
    folder.truncate_after(5)
    assert list(folder.path.iterdir()) == []


def test_a_checkpoint_lies_in_the_folder(folder: RunFolder) -> None:
    checkpoint = Checkpoint(
        server_round=2,
        experiment="e",
        method="fedpm",
        task="digits",
        num_partitions=2,
        arrays={"w": np.ones(2)},
        strategy_arrays={},
        strategy_state={},
        last_folded={1: 2},
    )
    with pytest.raises(CheckpointError, match="no such folder"):
        folder.load_checkpoint()
    folder.save_checkpoint(checkpoint)
    assert (folder.path / "checkpoint").is_dir()
    found = folder.load_checkpoint()
    assert (found.server_round, found.last_folded) == (2, {1: 2})
