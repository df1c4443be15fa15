from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedapps.zeroth_order import replica as replica_module
from fedapps.zeroth_order import store as module
from fedapps.zeroth_order.errors import AstrayError, ReplicaError
from fedapps.zeroth_order.journal import BaseModel, Header, Journal
from fedapps.zeroth_order.layout import layout_of
from fedapps.zeroth_order.number_formats import NumberFormat, narrow
from fedapps.zeroth_order.replica import Replica
from fedapps.zeroth_order.scheme import Record, Scheme
from fedapps.zeroth_order.store import Store


def base() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    w = random.standard_normal((30, 7)).astype(np.float32)
    return {"w": w, "half": narrow(w[:3] * 2, NumberFormat.BFLOAT16), "b": np.ones((), np.float32)}


HEADER = Header(Scheme(5, "hiso-momentum"), BaseModel("toy", None, "ab" * 32), layout_of(base()))
JOURNAL = Journal(
    HEADER,
    [Record(r, r, 0.05, 1e-3, 0.2, 1e-4, ((0.5, -1.0 / 2**r),), 2, None, 0.5) for r in range(1, 10)],
)


def unexpected() -> dict[str, np.ndarray]:
    raise AssertionError("the base model was loaded again")


def fingerprint_at(round_: int) -> str:
    replica = Replica(HEADER.scheme, base())
    replica.advance(JOURNAL.slice(0, round_))
    return replica.fingerprint()


def test_a_state_is_found_again_and_goes_on(tmp_path: Path) -> None:
    with Store(tmp_path / "s", HEADER, base) as store:
        assert store.rebuilt == "no state"
        assert store.advance(JOURNAL.slice(0, 4)) == 4
    with Store(tmp_path / "s", HEADER, unexpected) as store:
        assert (store.rebuilt, store.replica.round) == (None, 4)
        assert store.replica.fingerprint() == fingerprint_at(4)
        assert store.advance(JOURNAL.slice(2)) == 5
        assert store.advance(JOURNAL.slice(2)) == 0
    with Store(tmp_path / "s", HEADER, unexpected) as store:
        assert store.replica.round == 9
        assert store.replica.fingerprint() == fingerprint_at(9)
        assert store.replica.theta["half"].dtype == np.uint16


def test_a_store_that_stays_mapped_is_taken_up_again_where_nothing_else_changed_it(tmp_path: Path) -> None:
    with Store(tmp_path, HEADER, base) as stays:
        stays.advance(JOURNAL.slice(0, 4))
    assert stays.reopen()
    stays.advance(JOURNAL.slice(4, 6))
    stays.close()
    with Store(tmp_path, HEADER, unexpected) as other:
        assert other.replica.fingerprint() == fingerprint_at(6)
    assert stays.reopen()
    assert stays.replica.fingerprint() == fingerprint_at(6)
    with pytest.raises(BlockingIOError), open(tmp_path / "lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    stays.close()


def _goes_on(folder: Path) -> None:
    with Store(folder, HEADER, unexpected) as other:
        other.advance(JOURNAL.slice(4, 5))


def _begins_again(folder: Path) -> None:
    (folder / "state.json").unlink()
    with Store(folder, HEADER, base) as other:
        other.advance(JOURNAL.slice(0, 4))


def _is_another_run(folder: Path) -> None:
    header = dataclasses.replace(HEADER, base=BaseModel("other", None, "ab" * 32))
    with Store(folder, header, base) as other:
        other.advance(Journal(header, JOURNAL.records).slice(0, 4))


def _is_cut_short(folder: Path) -> None:
    mark = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps({**mark, "applying": True}))


@pytest.mark.parametrize("change", [_goes_on, _begins_again, _is_another_run, _is_cut_short, shutil.rmtree])
def test_a_store_that_another_process_changed_is_not_taken_up_again(
    tmp_path: Path, change: Callable[[Path], None]
) -> None:
    folder = tmp_path / "s"
    with Store(folder, HEADER, base) as stays:
        stays.advance(JOURNAL.slice(0, 4))
    change(folder)
    assert not stays.reopen()
    with Store(folder, HEADER, base) as store:  # The lock is free again, and whatever happened is made good.
        store.advance(JOURNAL.slice(store.replica.round))
        assert store.replica.fingerprint() == fingerprint_at(9)


def in_child(work: Any) -> int:
    """Run `work` in a process of its own, which may be killed; returns its exit code."""
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("tensor", ["first", "second", "last"])
def test_a_process_killed_within_an_update_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tensor: str
) -> None:
    with Store(tmp_path, HEADER, base) as store:
        store.advance(JOURNAL.slice(0, 4))
    real, shape = replica_module.apply_rounds, {"first": (30, 7), "second": (3, 7), "last": ()}[tensor]

    def killed(values: Any, *args: Any, **options: Any) -> None:
        real(values, *args, **options)
        if values.shape == shape:
            os.kill(os.getpid(), signal.SIGKILL)

    def update() -> None:
        monkeypatch.setattr(replica_module, "apply_rounds", killed)
        with Store(tmp_path, HEADER, base) as store:
            store.advance(JOURNAL.slice(4))

    assert in_child(update) == -signal.SIGKILL
    with Store(tmp_path, HEADER, base) as store:
        assert store.rebuilt == "an update from round 4 was cut short"
        assert store.replica.round == 0
        store.advance(JOURNAL.slice(0))
        assert store.replica.fingerprint() == fingerprint_at(9)


def test_a_base_that_cannot_be_loaded_leaves_no_state(tmp_path: Path) -> None:
    def broken() -> dict[str, np.ndarray]:
        raise OSError("hub is down")

    with pytest.raises(OSError, match="hub is down"):
        Store(tmp_path, HEADER, broken)
    with Store(tmp_path, HEADER, base) as store:
        assert store.rebuilt is not None
        assert store.replica.fingerprint() == fingerprint_at(0)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda f: (f / "state.json").write_text("{"), "no state"),
        (lambda f: (f / "state.json").write_text("[]"), "no state"),
        (lambda f: (f / "state.bin").unlink(), "no state"),
        (lambda f: os.truncate(f / "state.bin", 100), "a file of another size"),
        (
            lambda f: (f / "state.json").write_text(
                json.dumps(json.loads((f / "state.json").read_text()) | {"boot": "before"})
            ),
            "the machine was restarted",
        ),
    ],
    ids=["torn mark", "no mark", "no file", "short file", "another boot"],
)
def test_a_damaged_store_starts_anew(tmp_path: Path, damage: Any, reason: str) -> None:
    with Store(tmp_path, HEADER, base) as store:
        store.advance(JOURNAL.slice(0))
    damage(tmp_path)
    with Store(tmp_path, HEADER, base) as store:
        assert store.rebuilt == reason
        store.advance(JOURNAL.slice(0))
        assert store.replica.fingerprint() == fingerprint_at(9)


def test_a_state_of_another_run_is_not_used(tmp_path: Path) -> None:
    with Store(tmp_path, HEADER, base) as store:
        store.advance(JOURNAL.slice(0))
    other = dataclasses.replace(HEADER, scheme=dataclasses.replace(HEADER.scheme, seed=6))
    with Store(tmp_path, other, base) as store:
        assert store.rebuilt == "the state of another run"
        assert store.replica.round == 0


def test_a_state_that_went_astray_is_rebuilt(tmp_path: Path) -> None:
    records = [dataclasses.replace(r, fingerprint=fingerprint_at(9) if r.round == 9 else None) for r in JOURNAL.records]
    journal = Journal(HEADER, records)
    with Store(tmp_path, HEADER, base) as store:
        store.advance(journal.slice(0, 4))
        store.replica.theta["w"][0, 0] += 1
        with pytest.raises(AstrayError):
            store.advance(journal.slice(4))
    with Store(tmp_path, HEADER, base) as store:
        assert store.rebuilt == "an update from round 4 was cut short"
        store.advance(journal.slice(0))
        store.replica.theta["w"][0, 0] += 1
        store.rebuild(base)
        store.advance(journal.slice(0))
        assert store.replica.fingerprint() == fingerprint_at(9)


def test_a_gap_changes_nothing(tmp_path: Path) -> None:
    with Store(tmp_path, HEADER, base) as store, pytest.raises(ReplicaError, match="expected a slice from round 0"):
        store.advance(JOURNAL.slice(3))
    with Store(tmp_path, HEADER, unexpected) as store:
        assert store.rebuilt is None


def test_two_processes_take_turns(tmp_path: Path) -> None:
    with Store(tmp_path, HEADER, base) as store:
        reading, writing = os.pipe()

        def other() -> None:
            os.write(writing, b"?")
            with Store(tmp_path, HEADER, unexpected) as opened:
                os.write(writing, str(opened.replica.round).encode())

        child = os.fork()
        if child == 0:
            try:
                other()
            finally:
                os._exit(0)
        assert os.read(reading, 1) == b"?"
        store.advance(JOURNAL.slice(0))
    os.waitpid(child, 0)
    assert os.read(reading, 9) == b"9"


def test_tensors_lie_at_multiples_of_64_bytes(tmp_path: Path) -> None:
    with Store(tmp_path, HEADER, base) as store:
        for tensors in (store.replica.theta, *store.replica.state.values()):
            assert all(values.ctypes.data % 64 == 0 for values in tensors.values())


def test_without_an_id_of_the_boot_no_state_outlives_its_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_BOOT_ID", tmp_path / "none")
    Store(tmp_path / "s", HEADER, base).close()

    def reopened() -> None:
        with Store(tmp_path / "s", HEADER, base) as store:
            assert store.rebuilt == "the machine was restarted"

    assert in_child(reopened) == 0


def test_a_replica_is_for_its_owner_only(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with Store(tmp_path / "s", HEADER, base) as store:
            store.advance(JOURNAL.slice(0, 4))
    finally:
        os.umask(before)
    assert {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "s").iterdir()} == dict.fromkeys(
        ["lock", "state.bin", "state.json"], 0o600
    )
    assert (tmp_path / "s").stat().st_mode & 0o777 == 0o700
