"""End every process of a Flower service, however its launcher ends.

A SuperLink or SuperNode starts its helpers in sessions of their own, so a signal to one process
group misses them; Ray leaves agents behind for good when its raylet is killed; and a launcher
that is killed itself, or whose terminal is closed, cannot tidy up. So whole *sessions* are ended,
and a second process stands by: run as a script, this module waits for the end of its standard
input, which the kernel closes when the launcher is gone, and then does the same work.

    python reaper.py PID FOLDER     with lines on standard input: a session id each, then "done"

Only the standard library is imported, for the script is run by its path and isolated.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_PROC = Path("/proc")
_PAUSE = 0.05


class _Process(NamedTuple):
    pid: int
    parent: int
    session: int


def sessions_of(sessions: Iterable[int]) -> set[int]:
    """Return the sessions with those that their members' children have opened, and so on.

    Args:
        sessions: Session ids; the id is the process id of the session's first process.

    Returns:
        The given ids and all that were found.
    """
    found = set(sessions)
    table = _processes()
    while True:
        inside = {process.pid for process in table if process.session in found}
        opened = {process.session for process in table if process.parent in inside} - found
        if not opened:
            return found
        found |= opened


def members(sessions: Iterable[int]) -> set[int]:
    """Return the ids of the processes that live in the sessions; what has ended does not count.

    Args:
        sessions: Session ids.

    Returns:
        Process ids; empty where the system has no ``/proc``.
    """
    wanted = set(sessions)
    return {process.pid for process in _processes() if process.session in wanted}


def end_sessions(leader: int, sessions: Iterable[int], *, grace: float = 5.0, settle: float = 2.0) -> set[int]:
    """End all processes of a service: ask its first process, then the others, then kill the rest.

    Args:
        leader: The service's own process, first of its session. It gets SIGTERM.
        sessions: The sessions of its helpers, as far as known; more are looked for.
        grace: Seconds that the service has to end.
        settle: Seconds that its helpers then have.

    Returns:
        Ids of the processes that withstood SIGKILL; normally empty.
    """
    sessions = sessions_of({leader, *sessions})
    _signal({leader} & members({leader}), signal.SIGTERM)
    _wait_until(lambda: leader not in members({leader}), grace)
    for number, seconds in ((signal.SIGTERM, settle), (signal.SIGKILL, grace)):
        _signal(members(sessions), number)
        _wait_until(lambda: not members(sessions), seconds)
    return members(sessions)


def stand_by(leader: int, folder: Path, lines: Iterable[str]) -> None:
    """Read session ids until ``done`` or the end; at the end without ``done``, tidy up.

    Args:
        leader: The service's own process.
        folder: The service's temporary folder, removed when tidying up.
        lines: What the launcher says.
    """
    sessions: set[int] = set()
    for line in lines:
        if line.strip() == "done":
            return
        sessions.add(int(line))
    end_sessions(leader, sessions)
    shutil.rmtree(folder, ignore_errors=True)


def _processes() -> list[_Process]:
    table = []
    for entry in _PROC.glob("[0-9]*/stat"):
        with suppress(OSError):
            # The name stands in parentheses and may hold any character.
            state, parent, _, session = entry.read_text().rsplit(")", 1)[1].split()[:4]
            if state not in "ZX":
                table.append(_Process(int(entry.parent.name), int(parent), int(session)))
    return table


def _signal(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _wait_until(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(_PAUSE)


if __name__ == "__main__":
    stand_by(int(sys.argv[1]), Path(sys.argv[2]), sys.stdin)
