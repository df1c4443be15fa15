"""A terminal in which the commands of a page are run, and what they started is ended."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from fedapps.simulation import reaper


class Terminal:
    """A shell that keeps variables, working folder and background processes from one block of commands to the next.

    Args:
        folder: Where it works; the output of each block goes to a file there.
        process: The shell, which reads its standard input.
    """

    def __init__(self, folder: Path, process: subprocess.Popen[str]) -> None:
        self._folder, self._process = folder, process
        self._blocks = 0
        self.seconds: list[float] = []

    def run(self, commands: str, *, seconds: float = 300.0, code: int = 0) -> str:
        """Run commands, all of them.

        Args:
            commands: As they would be typed.
            seconds: The longest wait.
            code: The exit code that is expected of the last one that fails; 0 if none may.

        Returns:
            What they wrote.
        """
        self._blocks += 1
        script, out, done = (self._folder / f"block-{self._blocks}.{end}" for end in ("sh", "out", "done"))
        script.write_text(commands, encoding="utf-8")
        began = time.monotonic()
        assert self._process.stdin is not None
        self._process.stdin.write(f"run_block {script} {out} {done}\n")
        self._process.stdin.flush()
        while not done.exists() or not done.read_text():
            assert self._process.poll() is None, out.read_text()
            assert time.monotonic() < began + seconds, f"no end after {seconds} s:\n{commands}\n{out.read_text()}"
            time.sleep(0.1)
        self.seconds.append(time.monotonic() - began)
        text = out.read_text(encoding="utf-8", errors="replace")
        assert int(done.read_text()) == code, f"{commands}\n{text}"
        return text


# The commands are read into this shell, not into a child, so that what they export stays.
_SHELL = """
run_block() { fails=0; trap 'fails=$?' ERR; . "$1" > "$2" 2>&1 < /dev/null; trap - ERR; echo "$fails" > "$3"; }
while read -r line; do eval "$line"; done
"""


@contextmanager
def terminal(folder: Path, environment: Mapping[str, str]) -> Iterator[Terminal]:
    """Open a terminal; everything that it starts ends with the block, and if this process is killed."""
    process = subprocess.Popen(
        ["bash", "-c", _SHELL],
        cwd=folder,
        env=os.environ | dict(environment),
        stdin=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    guard = subprocess.Popen(
        [sys.executable, "-IS", reaper.__file__, str(process.pid), str(folder / "nothing")],
        stdin=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield Terminal(folder, process)
    finally:
        sessions = reaper.sessions_of({process.pid})
        left = reaper.end_sessions(process.pid, sessions)
        process.wait(timeout=10)
        guard.communicate("done\n")
        assert not left


def own_ports(study: Path, nodes: Sequence[str], ports: Sequence[int]) -> None:
    """Give each node's processes a free port of this machine, which they share here."""
    for name, port in zip(nodes, ports, strict=False):
        settings = study / "nodes" / name / "settings.env"
        settings.write_text(re.sub(r"(?<=RUNTIME_PORT=)\d+", str(port), settings.read_text()))
