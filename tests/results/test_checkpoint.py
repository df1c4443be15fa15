from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedapps.errors import CheckpointError
from fedapps.results import checkpoint as module
from fedapps.results.checkpoint import CURRENT, NEXT, PREVIOUS, Checkpoint, MadeWith, load_checkpoint, save_checkpoint


def checkpoint_of(server_round: int) -> Checkpoint:
    """A checkpoint whose every part depends on the round."""
    return Checkpoint(
        server_round=server_round,
        experiment="fedpm-digits-0-ab12",
        method="fedpm",
        task="my_pkg.my_mod:MyTask",
        num_partitions=3,
        arrays={"w": np.full((2, 3), server_round, np.float32), "a.steps": np.array(server_round, np.int64)},
        strategy_arrays={"moment": np.full(2, -server_round, np.float64)},
        strategy_state={
            "generator": {"state": 2**127 + server_round, "inc": [1, None, True, "nan"]},
            "last-loss": math.inf,
            "scale": 0.1 * server_round,
        },
        last_folded={0: server_round, 2: server_round - 1},
        made_with=MadeWith({"lr": 0.1, "resume": False}, "0.1", {"train": "ab"}, f"journal {server_round}"),
    )


def assert_equal(found: Checkpoint, expected: Checkpoint) -> None:
    for field in dataclasses.fields(Checkpoint):
        got, want = getattr(found, field.name), getattr(expected, field.name)
        if field.name in ("arrays", "strategy_arrays"):
            assert list(got) == list(want)
            for name, array in want.items():
                assert (got[name].dtype, got[name].shape) == (array.dtype, array.shape)
                np.testing.assert_array_equal(got[name], array)
        else:
            assert got == want, field.name


def test_a_checkpoint_comes_back_and_the_previous_one_is_kept(tmp_path: Path) -> None:
    for server_round in (1, 2, 3):
        save_checkpoint(tmp_path, checkpoint_of(server_round))
        assert_equal(load_checkpoint(tmp_path), checkpoint_of(server_round))
    shutil.rmtree(tmp_path / CURRENT)
    assert_equal(load_checkpoint(tmp_path), checkpoint_of(2))
    assert sorted(path.name for path in tmp_path.iterdir()) == [PREVIOUS]


class KilledError(BaseException):
    """Stands for the end of the process."""


class Killer:
    """Kills the process before its n-th step on disk; a write or a removal can also be cut off half way."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left = -1
        for name in ("mkdir", "rename", "unlink"):
            monkeypatch.setattr(Path, name, self.before(getattr(Path, name)))
        monkeypatch.setattr(Path, "write_text", self.write(Path.write_text))
        monkeypatch.setattr(module, "save_arrays", self.write(module.save_arrays))
        monkeypatch.setattr(shutil, "rmtree", self.remove(shutil.rmtree))
        monkeypatch.setattr(os, "fsync", lambda _: None)

    def dies(self) -> bool:
        self.left -= 1
        return self.left == 0

    def before(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **kwargs: Any) -> Any:
            if self.dies():
                raise KilledError
            return function(*args, **kwargs)

        return step

    def write(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def step(path: Path, *args: Any, **kwargs: Any) -> None:
            if self.dies():
                raise KilledError
            function(path, *args, **kwargs)
            if self.dies():
                os.truncate(path, path.stat().st_size // 2)
                raise KilledError

        return step

    def remove(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def step(path: Path, **kwargs: Any) -> None:
            if self.dies():
                raise KilledError
            if path.exists() and self.dies():
                for file in sorted(path.iterdir())[:1]:
                    os.unlink(file)
                raise KilledError
            function(path, **kwargs)

        return step

    def save(self, folder: Path, checkpoint: Checkpoint, step: int) -> bool:
        """Save, and say whether it was killed at the step."""
        self.left = step
        try:
            save_checkpoint(folder, checkpoint)
        except KilledError:
            return True
        finally:
            self.left = -1
        return False


@pytest.mark.slow
def test_a_kill_at_any_step_leaves_a_checkpoint_that_loads_and_never_goes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two kills in a row, each at every step: what loads is whole, at least as late as before, and saving goes on."""
    killer = Killer(monkeypatch)
    start = tmp_path / "start"
    start.mkdir()
    for server_round in (1, 2):
        save_checkpoint(start, checkpoint_of(server_round))
    loaded_after_first = set()
    first = second = 0
    while True:
        first += 1
        once = tmp_path / f"once-{first}"
        shutil.copytree(start, once)
        if not killer.save(once, checkpoint_of(3), first):
            break
        after_first = load_checkpoint(once)
        assert_equal(after_first, checkpoint_of(after_first.server_round))
        loaded_after_first.add(after_first.server_round)
        second = 0
        while True:
            second += 1
            twice = tmp_path / f"twice-{first}-{second}"
            shutil.copytree(once, twice)
            killed = killer.save(twice, checkpoint_of(after_first.server_round + 1), second)
            after_second = load_checkpoint(twice)
            assert_equal(after_second, checkpoint_of(after_second.server_round))
            assert after_first.server_round <= after_second.server_round <= after_first.server_round + 1
            save_checkpoint(twice, checkpoint_of(after_second.server_round + 1))
            assert load_checkpoint(twice).server_round == after_second.server_round + 1
            assert sorted(path.name for path in twice.iterdir()) == [CURRENT, PREVIOUS]
            shutil.rmtree(twice / CURRENT)
            assert load_checkpoint(twice).server_round == after_second.server_round, "what was kept is whole, too"
            shutil.rmtree(twice)
            if not killed:
                assert after_second.server_round == after_first.server_round + 1
                break
    assert loaded_after_first == {2, 3}
    assert first > 12, "every step of a save was tried"
    assert second > 12, "every step of the save after it was tried"


def test_a_kill_during_the_first_save_leaves_none_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killer = Killer(monkeypatch)
    assert killer.save(tmp_path, checkpoint_of(1), 4)
    with pytest.raises(CheckpointError, match=r"checkpoint: no such folder; checkpoint\.previous: no such folder"):
        load_checkpoint(tmp_path)
    save_checkpoint(tmp_path, checkpoint_of(1))
    assert load_checkpoint(tmp_path).server_round == 1


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def instead(path: Path) -> None:
    path.unlink()
    path.mkdir()


def forge(folder: Path, state: str) -> None:
    """Give a checkpoint another state, with the checksum that belongs to it."""
    (folder / "state.json").write_text(state)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["state.json"] = hashlib.sha256(state.encode()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(manifest))


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "no manifest": (lambda folder: (folder / "manifest.json").unlink(), r"manifest\.json is missing"),
    "torn manifest": (
        lambda folder: (folder / "manifest.json").write_text('{"arrays'),
        r"manifest\.json cannot be read",
    ),
    "manifest of another kind": (lambda folder: (folder / "manifest.json").write_text("[]"), "cannot be read"),
    "manifest without a file": (lambda folder: (folder / "manifest.json").write_text("{}"), "cannot be read"),
    "no model": (lambda folder: (folder / "arrays.safetensors").unlink(), r"arrays\.safetensors is missing"),
    "one bit of the model": (lambda folder: flip_a_bit(folder / "arrays.safetensors"), "differs from its checksum"),
    "one bit of the moments": (lambda folder: flip_a_bit(folder / "strategy.safetensors"), "differs from its checksum"),
    "other state": (lambda folder: flip_a_bit(folder / "state.json"), r"state\.json differs from its checksum"),
    "gone": (shutil.rmtree, "no such folder"),
    "a manifest that is not UTF-8": (lambda folder: (folder / "manifest.json").write_bytes(b"\xff"), "cannot be read"),
    "a deep manifest": (lambda folder: (folder / "manifest.json").write_text("[" * 100_000), "cannot be read"),
    "a folder for the manifest": (lambda folder: instead(folder / "manifest.json"), "cannot be read"),
    "a folder for the model": (lambda folder: instead(folder / "arrays.safetensors"), "arrays.safetensors is missing"),
    "a file for the checkpoint": (lambda folder: (shutil.rmtree(folder), folder.write_text("")), "no such folder"),
    "a whole state of another kind": (lambda folder: forge(folder, "[]"), "state.json cannot be read"),
    "a whole state without its round": (lambda folder: forge(folder, "{}"), "no key 'server-round'"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_told_and_the_previous_one_used(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module._log, "propagate", True)
    harm, defect = DAMAGES[damage]
    for server_round in (1, 2):
        save_checkpoint(tmp_path, checkpoint_of(server_round))
    harm(tmp_path / CURRENT)
    assert load_checkpoint(tmp_path).server_round == 1
    assert "going on from checkpoint.previous/" in caplog.text
    harm(tmp_path / PREVIOUS)
    with pytest.raises(CheckpointError, match=f"checkpoint: .*{defect}.*; checkpoint.previous: .*{defect}"):
        load_checkpoint(tmp_path)


def test_saving_goes_on_over_whatever_lies_there(tmp_path: Path) -> None:
    for name in (NEXT, CURRENT, PREVIOUS):
        (tmp_path / name).write_text("somebody's file")
    for server_round in (1, 2, 3):
        save_checkpoint(tmp_path, checkpoint_of(server_round))
    assert load_checkpoint(tmp_path).server_round == 3


def test_a_look_at_a_checkpoint_reads_no_arrays(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, checkpoint_of(1))
    assert_equal(
        load_checkpoint(tmp_path, arrays=False), dataclasses.replace(checkpoint_of(1), arrays={}, strategy_arrays={})
    )


def test_a_checkpoint_that_does_not_say_what_it_was_made_with_loads(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, checkpoint_of(1))
    state = json.loads((tmp_path / CURRENT / "state.json").read_text())
    del state["made-with"]
    forge(tmp_path / CURRENT, json.dumps(state))
    assert_equal(load_checkpoint(tmp_path), dataclasses.replace(checkpoint_of(1), made_with=None))


def test_loading_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killer = Killer(monkeypatch)
    save_checkpoint(tmp_path, checkpoint_of(1))
    killer.save(tmp_path, checkpoint_of(2), 9)
    before = {str(path): path.stat().st_mtime_ns for path in sorted(tmp_path.rglob("*"))}
    assert any(NEXT in path for path in before)
    load_checkpoint(tmp_path)
    assert before == {str(path): path.stat().st_mtime_ns for path in sorted(tmp_path.rglob("*"))}


@pytest.mark.parametrize(
    ("state", "match"),
    [
        ({"seen": {1: 2}}, r"strategy_state\['seen'\], key 1: expected a string key, got int"),
        ({"pair": [(1, 2)]}, r"strategy_state\['pair'\]\[0\]: expected None, bool.*got tuple"),
        ({"x": np.float32(1)}, r"strategy_state\['x'\]: .*got float32"),
    ],
    ids=["integer key", "tuple", "NumPy scalar"],
)
def test_state_that_json_would_change_is_refused_before_anything_is_written(
    tmp_path: Path, state: dict[str, Any], match: str
) -> None:
    with pytest.raises(CheckpointError, match=match):
        save_checkpoint(tmp_path, dataclasses.replace(checkpoint_of(1), strategy_state=state))
    assert list(tmp_path.iterdir()) == []
