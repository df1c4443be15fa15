"""Sessions are found, ended and guarded."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fedapps.simulation.reaper import end_sessions, members, sessions_of, stand_by

# Opens a session for a child that ignores SIGTERM, says the child's id, and sleeps.
LEADER = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], start_new_session=True, stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(100)
"""
STUBBORN = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
time.sleep(100)
"""


@pytest.fixture
def service() -> Iterator[tuple[subprocess.Popen[str], int]]:
    command = [sys.executable, "-c", LEADER, STUBBORN]
    leader = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert leader.stdout is not None
    child = int(leader.stdout.readline())
    yield leader, child
    end_sessions(leader.pid, {child}, grace=1.0, settle=0.0)
    leader.wait()


def test_sessions_opened_by_members_are_found_and_no_others(service: tuple[subprocess.Popen[str], int]) -> None:
    leader, child = service
    assert sessions_of({leader.pid}) == {leader.pid, child}
    assert members({leader.pid, child}) == {leader.pid, child}
    assert os.getpid() not in members(sessions_of({leader.pid}))


@pytest.mark.slow
def test_a_helper_in_its_own_session_that_ignores_sigterm_is_ended(
    service: tuple[subprocess.Popen[str], int],
) -> None:
    leader, child = service
    assert end_sessions(leader.pid, set(), settle=0.2) == set()
    assert leader.wait() == -15
    assert not Path(f"/proc/{child}/exe").exists()


@pytest.mark.slow
def test_a_helper_is_ended_after_its_leader_is_gone(service: tuple[subprocess.Popen[str], int]) -> None:
    leader, child = service
    sessions = sessions_of({leader.pid})
    leader.kill()
    leader.wait()
    assert members(sessions) == {child}
    assert end_sessions(leader.pid, sessions, settle=0.2) == set()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("says", "ends"),
    [
        pytest.param(lambda child: [f"{child}\n", "done\n"], False, id="done"),
        pytest.param(lambda child: [f"{child}\n"], True, id="silence"),
        pytest.param(lambda child: [], True, id="silence before the sessions are known"),
    ],
)
def test_the_guard_tidies_up_unless_told_that_all_is_done(
    service: tuple[subprocess.Popen[str], int], tmp_path: Path, says: Callable[[int], list[str]], ends: bool
) -> None:
    leader, child = service
    folder = tmp_path / "folder"
    folder.mkdir()
    started = time.monotonic()
    stand_by(leader.pid, folder, says(child))
    assert folder.exists() is not ends
    assert members({leader.pid, child}) == (set() if ends else {leader.pid, child})
    assert time.monotonic() - started < 8.0
