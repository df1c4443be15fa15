"""The client store: both ends agree after lost replies, restarts and interrupted writes."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from fedapps.client_apps import store as store_module
from fedapps.client_apps.store import ClientStore
from fedapps.errors import MessageError


def value_of(state: dict[str, np.ndarray] | None) -> float | None:
    return None if state is None else float(state["c"])


def make_store(tmp_path: Path, partition: int = 0) -> ClientStore:
    return ClientStore(tmp_path, "fedpm-my_pkg.my_mod:MyTask-0-ab12", partition)


def test_state_is_what_the_last_folded_round_left(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    assert store.load(0) is None
    store.save(1, {"c": np.array(1.0)}, last_folded=0)
    assert value_of(make_store(tmp_path).load(1)) == 1.0
    store.save(4, {"c": np.array(4.0), "ünïcode/name": np.arange(6).reshape(2, 3)}, last_folded=1)
    state = store.load(4)
    assert state is not None
    np.testing.assert_array_equal(state["ünïcode/name"], np.arange(6).reshape(2, 3))


def test_a_reply_that_was_not_folded_leaves_no_trace(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    store.save(1, {"c": np.array(1.0)}, last_folded=0)
    store.save(2, {"c": np.array(2.0)}, last_folded=1)  # the reply of round 2 is lost
    assert value_of(store.load(1)) == 1.0
    assert store.rounds() == [1]
    store.save(3, {"c": np.array(3.0)}, last_folded=1)
    assert store.rounds() == [1, 3]
    assert value_of(store.load(3)) == 3.0


def test_a_client_that_was_never_folded_starts_anew(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    store.save(1, {"c": np.array(1.0)}, last_folded=0)
    assert store.load(0) is None
    assert store.rounds() == []


def test_two_versions_at_most_are_kept(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    for server_round in range(1, 10):
        store.load(server_round - 1)
        store.save(server_round, {"c": np.array(float(server_round))}, last_folded=server_round - 1)
        assert len(list(store.folder.iterdir())) <= 2


def test_clients_and_experiments_do_not_mix(tmp_path: Path) -> None:
    make_store(tmp_path, 0).save(1, {"c": np.array(0.0)}, last_folded=0)
    make_store(tmp_path, 1).save(1, {"c": np.array(1.0)}, last_folded=0)
    assert value_of(make_store(tmp_path, 0).load(1)) == 0.0
    assert value_of(make_store(tmp_path, 1).load(1)) == 1.0
    assert ClientStore(tmp_path, "another", 0).load(1) is None


def test_an_interrupted_write_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = make_store(tmp_path)
    store.save(1, {"c": np.array(1.0)}, last_folded=0)

    def torn(path: Path, state: object) -> None:
        path.write_bytes(b"half a file")
        raise OSError("disk full")

    monkeypatch.setattr(store_module, "save_arrays", torn)
    with pytest.raises(OSError, match="disk full"):
        store.save(2, {"c": np.array(2.0)}, last_folded=1)
    assert value_of(store.load(1)) == 1.0
    assert [path.name for path in store.folder.iterdir()] == ["round-1.safetensors"]


@pytest.mark.parametrize("damage", ["removed", "torn"])
def test_a_lost_version_is_logged_and_answered_with_none(
    tmp_path: Path, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged: list[str] = []
    monkeypatch.setattr(store_module.logger, "error", lambda text, *values: logged.append(text % values))
    store = make_store(tmp_path)
    store.save(2, {"c": np.array(2.0)}, last_folded=0)
    path = store.folder / "round-2.safetensors"
    path.unlink() if damage == "removed" else path.write_bytes(path.read_bytes()[:20])
    assert store.load(2) is None
    assert "the state of round 2 is lost" in logged[0]


@pytest.mark.parametrize("experiment", ["..", ".", "...", "x" * 300])
def test_an_experiment_that_is_no_name_of_a_folder_is_refused(tmp_path: Path, experiment: str) -> None:
    """``..`` would leave the state folder, and delete files there."""
    with pytest.raises(MessageError, match="client 3, entry 'experiment': expected a name"):
        ClientStore(tmp_path / "state", experiment, 3)


@pytest.mark.parametrize("experiment", ["../../escape", "/etc", "a/../../b", "", "\x00"])
def test_no_experiment_leaves_the_state_folder(tmp_path: Path, experiment: str) -> None:
    store = ClientStore(tmp_path / "state", experiment, 3)
    store.save(1, {"c": np.array(1.0)}, last_folded=0)
    assert store.folder.resolve().parent.parent == (tmp_path / "state").resolve()
    assert [path.name for path in tmp_path.iterdir()] == ["state"]


@pytest.mark.parametrize("umask", [0o000, 0o022])
def test_a_client_state_is_for_its_owner_only(tmp_path: Path, umask: int) -> None:
    """Whatever the umask, and also where an earlier version left folders that others can open."""
    before = os.umask(umask)
    try:
        store = make_store(tmp_path / "state")
        store.folder.mkdir(parents=True)
        store.save(1, {"c": np.array(1.0)}, last_folded=0)
        make_store(tmp_path / "new" / "state").save(1, {"c": np.array(1.0)}, last_folded=0)
    finally:
        os.umask(before)
    (new,) = (tmp_path / "new").rglob("*.safetensors")
    private = [*[*new.parents][:4], store.folder, store.folder.parent]
    assert {path.stat().st_mode & 0o777 for path in private} == {0o700}
    assert {path.stat().st_mode & 0o777 for path in tmp_path.rglob("*.safetensors")} == {0o600}
