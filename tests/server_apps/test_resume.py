"""Which run may be resumed, and with what: settings, version, data and journal are those of its checkpoint."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fedapps
from fedapps.errors import CheckpointError, RoundFailedError
from fedapps.results.run_folder import RunFolder
from fedapps.tasks import Task

from ..simulation import runs
from .test_run import raised

pytestmark = pytest.mark.usefixtures("own_module")

MORE = {"num-server-rounds": 3, "resume": True}


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(folder)): p.read_bytes()
        for p in sorted(folder.rglob("*"))
        if p.is_file() and p.name != ".lock"
    }


def rewrite_states(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the state of both checkpoints, and the checksums that belong to it."""
    for name in ("checkpoint", "checkpoint.previous"):
        path = folder / name / "state.json"
        state = json.loads(path.read_text())
        change(state)
        path.write_text(json.dumps(state))
        manifest = json.loads(path.with_name("manifest.json").read_text())
        manifest["state.json"] = hashlib.sha256(path.read_bytes()).hexdigest()
        path.with_name("manifest.json").write_text(json.dumps(manifest))


def other_lr(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    return {"lr": 0.2}


def other_settings_on_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the command line hands over where the file was changed by hand."""
    path = folder / "settings.toml"
    path.write_text(path.read_text().replace("lr = 0.1", "lr = 0.2"))
    return {"lr": RunFolder.open(folder).read_settings()["lr"]}


def other_version(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(fedapps, "__version__", "99.0")
    return {}


def other_data(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(Task, "checksums", lambda self: {"train": "f" * 64, "test": "e" * 64})
    return {}


def other_scalar(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """One that no fingerprint covers."""
    path = folder / "journal.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert "fingerprint" not in rows[-1]
    rows[-1]["scalars"][0][0] *= 2.0
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {}


CHANGES: dict[str, tuple[str, Callable[..., dict[str, Any]], str]] = {
    "a setting": ("fedavg", other_lr, r"lr = 0\.2 where it was 0\.1"),
    "a setting on file": ("fedavg", other_settings_on_file, r"lr = 0\.2 where it was 0\.1"),
    "the version": ("fedavg", other_version, r"fedapps 99\.0 where it was 0\."),
    "the data": (
        "fedavg",
        other_data,
        "data 'test' with checksum e{16} where it was .*; data 'train' with checksum f{16}",
    ),
    "the journal": ("hiso", other_scalar, r"journal\.jsonl with checksum"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_differs_is_named_and_can_be_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    method, make, match = CHANGES[change]
    config = {"method": method, "weighting": "uniform"}
    folder = tmp_path / "run"
    runs.short_run(folder, config)
    config |= make(folder, monkeypatch)
    before = contents(folder)
    with pytest.raises(CheckpointError, match=rf"{match}.*--accept-changes"):
        runs.short_run(folder, {**config, **MORE})
    assert contents(folder) == before, "a refusal changes nothing"
    left = runs.short_run(folder, {**config, **MORE, "accept-changes": True})
    assert left.summary["rounds"] == 3
    [noted] = left.folder.read_environment()["accepted-changes"]
    assert noted["after-round"] == 2
    assert noted["changes"]
    # The next checkpoint is of what was accepted, and the note stays.
    left = runs.short_run(folder, {**config, **MORE, "num-server-rounds": 4})
    assert left.folder.read_environment()["accepted-changes"] == [noted]


def test_what_decides_only_about_rounds_to_come_may_change(tmp_path: Path) -> None:
    runs.short_run(tmp_path / "run", {})
    left = runs.short_run(tmp_path / "run", {**MORE, "second-node": "refused", "round-timeout": 9.0})
    assert left.summary["rounds"] == 3
    assert "accepted-changes" not in left.folder.read_environment()


def test_a_checkpoint_of_an_earlier_version_is_accepted_and_said(tmp_path: Path, log: Any) -> None:
    """One that says nothing of what it was made with, beside settings without the keys that came later."""
    straight = runs.short_run(tmp_path / "straight", {"num-server-rounds": 3})
    folder = tmp_path / "run"
    runs.short_run(folder, {})
    rewrite_states(folder, lambda state: state.pop("made-with"))
    settings = (folder / "settings.toml").read_text().splitlines(keepends=True)
    new = ("accept-changes", "weighting", "lr-decay")
    (folder / "settings.toml").write_text("".join(line for line in settings if not line.startswith(new)))
    resumed = runs.short_run(folder, MORE)
    runs.assert_same_model(resumed.model, straight.model)
    assert "noted neither version, data nor journal" in log.text
    with pytest.raises(CheckpointError, match="weighting = 'uniform' where it was 'examples'"):
        runs.short_run(folder, {**MORE, "num-server-rounds": 4, "weighting": "uniform"})


@pytest.mark.parametrize("lost", ["model.safetensors", "summary.json"])
@pytest.mark.parametrize("method", ["fedavg", "hiso"])
def test_a_run_killed_after_its_last_checkpoint_is_completed(tmp_path: Path, method: str, lost: str) -> None:
    config = {"method": method, "weighting": "uniform"}
    straight = runs.short_run(tmp_path / "run", config)
    shutil.copytree(tmp_path / "run", tmp_path / "killed")
    (tmp_path / "killed" / lost).unlink()
    completed = runs.short_run(tmp_path / "killed", {**config, "resume": True})
    runs.assert_same_model(completed.model, straight.model)
    assert completed.summary == straight.summary
    assert completed.folder.read_metrics() == straight.folder.read_metrics()
    with pytest.raises(CheckpointError, match="more than 2 rounds, since those are done"):
        runs.short_run(tmp_path / "killed", {**config, "resume": True})


def test_two_resumes_of_one_run_are_one_too_many(tmp_path: Path) -> None:
    left = runs.short_run(tmp_path / "run", {})
    before = contents(tmp_path / "run")
    with left.folder.locked(), pytest.raises(CheckpointError, match="expected a run that no process works on"):
        runs.short_run(tmp_path / "run", MORE)
    assert contents(tmp_path / "run") == before


def test_a_run_without_an_accepted_round_is_failed(tmp_path: Path) -> None:
    """Also one that ends before so many rounds in a row failed that the policy ends it."""
    faults = {(r, p): raised for r in (1, 2) for p in range(3)}
    with pytest.raises(
        RoundFailedError, match=r"at least one accepted round, got none of 2.*client 0: .*sensor offline"
    ):
        runs.short_run(tmp_path / "run", {}, faults=faults)
    left = runs.Left(RunFolder.open(tmp_path / "run"))
    assert left.summary["status"] == "failed"
    assert not left.folder.model_path.exists()
    # Two more rounds, one of them accepted, are a run.
    assert runs.short_run(tmp_path / "run", {**MORE, "num-server-rounds": 4}).summary["status"] == "completed"


def test_a_state_that_the_strategy_cannot_read_is_named(tmp_path: Path) -> None:
    runs.short_run(tmp_path / "run", {})
    rewrite_states(tmp_path / "run", lambda state: state["strategy-state"].clear())
    before = contents(tmp_path / "run")
    match = "expected the state of method 'fedavg' in the checkpoint, got no key "
    with pytest.raises(CheckpointError, match=match):
        runs.short_run(tmp_path / "run", MORE)
    after = contents(tmp_path / "run")
    assert {name for name in after if after[name] != before.get(name)} <= {"settings.toml", "environment.json"}
