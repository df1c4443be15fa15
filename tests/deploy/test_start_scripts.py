"""The start scripts, with programs that note how they were called in place of Flower's."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from flwr.superlink.cli.flower_superlink import _parse_args_run_superlink
from flwr.supernode.cli.flower_supernode import _parse_args_run_supernode

from fedapps.deploy.folder import Federation, init

PROGRAM = """#!{python}
import json, os, signal, sys
calls = "{calls}"
with open(calls, "a") as file:
    file.write(json.dumps([os.getpid(), os.getcwd(), sys.argv[1:], dict(os.environ)]) + "\\n")
if len(open(calls).readlines()) < {ends}:
    sys.exit(1)
signal.pause()
"""


@pytest.fixture
def federation(tmp_path: Path) -> Federation:
    return init(tmp_path / "study", ["superlink.example.org"], ["hospital-a"], 8443)


def put(folder: Path, name: str, text: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    (folder / name).chmod(0o700)


def started(script: Path, program: str, bin_: Path, ends: int) -> tuple[subprocess.Popen[bytes], list[list[Any]]]:
    """Start a script whose program ends at once until it is called the `ends`-th time; give its calls up to then."""
    calls = bin_ / "calls"
    put(bin_, program, PROGRAM.format(python=sys.executable, calls=calls, ends=ends))
    put(bin_, "sleep", "#!/bin/sh\n")  # Nobody waits for 10 s.
    path = f"{bin_}:{os.environ['PATH']}"
    process = subprocess.Popen([str(script)], env={"PATH": path}, cwd="/", stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not calls.exists() or len(calls.read_text().splitlines()) < ends:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return process, [json.loads(line) for line in calls.read_text().splitlines()]


@pytest.mark.usefixtures("default_signals")
def test_a_supernode_is_started_until_it_stays_and_ends_with_its_script(federation: Federation, tmp_path: Path) -> None:
    """As after a crash, when Flower refuses it until its old connection has expired."""
    own = federation.folder / "nodes" / "hospital-a"
    process, calls = started(own / "start.sh", "flower-supernode", tmp_path / "bin", ends=4)
    try:
        assert len(calls) == 4
        pid, folder, arguments, environment = calls[-1]
        assert folder == str(own)
        known = _parse_args_run_supernode().parse_args(arguments)
        assert (known.superlink, known.root_certificates, known.insecure) == (
            "superlink.example.org:8443",
            "ca.crt",
            False,
        )
        assert (known.auth_supernode_private_key, known.node_config, known.port) == ("node.key", "node.toml", 9094)
        assert environment["FLWR_HOME"] == f"{own}/flwr"
        assert (environment["FLWR_TELEMETRY_ENABLED"], environment["FLWR_DISABLE_UPDATE_CHECK"]) == ("0", "1")
    finally:
        process.terminate()
    assert process.wait(timeout=10) == 0
    with pytest.raises(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


@pytest.mark.usefixtures("default_signals")
def test_the_superlink_takes_the_place_of_its_script(federation: Federation, tmp_path: Path) -> None:
    own = federation.folder / "server"
    process, [(pid, folder, arguments, environment)] = started(
        own / "start.sh", "flower-superlink", tmp_path / "bin", ends=1
    )
    try:
        assert (pid, folder) == (process.pid, str(own))
        known = _parse_args_run_superlink().parse_args(arguments)
        assert (known.ssl_ca_certfile, known.ssl_certfile, known.ssl_keyfile) == ("ca.crt", "server.crt", "server.key")
        assert (known.host, known.port, known.database) == ("0.0.0.0", 8443, "superlink.db")
        assert known.enable_supernode_auth
        assert not known.insecure
        assert not known.runtime_dependency_install
        assert environment["FEDAPPS_RUNS"] == f"{own}/runs"
    finally:
        process.terminate()
    process.wait(timeout=10)


@pytest.mark.parametrize("machine", ["server", "nodes/hospital-a"])
def test_without_flower_a_script_says_so(federation: Federation, machine: str) -> None:
    script = federation.folder / machine / "start.sh"
    ended = subprocess.run([str(script)], check=False, env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True)
    assert ended.returncode == 1
    assert "got none; install fedapps as the README says" in ended.stderr
