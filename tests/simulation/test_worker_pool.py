from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fedapps.simulation.worker_pool import kill_pool, worker_pool

SCRIPT = """
import os, sys, time
from pathlib import Path

from fedapps.simulation.worker_pool import worker_pool


def work(path):
    Path(path).write_text(str(os.getpid()))
    time.sleep(600)


if __name__ == "__main__":
    with worker_pool(1) as pool:
        pool.submit(work, sys.argv[1]).result()
"""


def test_workers_are_other_processes() -> None:
    with worker_pool(1) as pool:
        assert pool.submit(os.getpid).result(timeout=60) != os.getpid()


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "terminated"])
@pytest.mark.usefixtures("default_signals")
def test_a_busy_worker_ends_with_its_parent(tmp_path: Path, end: signal.Signals) -> None:
    script, said = tmp_path / "parent.py", tmp_path / "worker.pid"
    script.write_text(SCRIPT)
    parent = subprocess.Popen([sys.executable, str(script), str(said)])
    worker = int(_wait(lambda: said.exists() and said.read_text()))
    parent.send_signal(end)
    parent.wait(timeout=30)
    assert _wait(lambda: not _alive(worker))


def test_a_pool_is_ended_with_what_its_workers_are_at() -> None:
    pool = worker_pool(2)
    pids = [pool.submit(os.getpid).result(timeout=60)]
    futures = [pool.submit(time.sleep, 600) for _ in range(4)]
    _wait(lambda: futures[0].running())
    pids += [process.pid for process in multiprocessing.active_children()]
    kill_pool(pool)
    assert all(future.done() for future in futures)
    assert not any(_alive(pid) for pid in pids)


def _wait(condition):
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.05)
    raise AssertionError("waited for a minute")


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
