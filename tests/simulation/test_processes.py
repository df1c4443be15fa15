"""Services start on free ports, say why they do not, and leave nothing behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

from fedapps.errors import LaunchError
from fedapps.simulation.processes import CONNECTION, Service, SuperLink, SuperNode, free_ports
from fedapps.simulation.reaper import members

# Stands for a Flower service: listens on its port, with a helper in a session of its own.
SERVICE = """
import os, socket, subprocess, sys, time
mode, port = sys.argv[1], int(sys.argv[-1])
print("this is", mode, flush=True)
if mode == "broken":
    sys.exit("the reason why it is broken")
if mode == "unlucky" and not os.path.exists(os.environ["FLWR_HOME"] + "/tried"):
    open(os.environ["FLWR_HOME"] + "/tried", "w").close()
    sys.exit("[Errno 98] bind: address already in use")
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"], start_new_session=True)
server = socket.socket()
if mode != "deaf":
    server.bind(("127.0.0.1", port))
    server.listen()
time.sleep(100)
"""
LAUNCHER = """
import sys, time
from fedapps.simulation.processes import Service
with Service(sys.argv[1], ["good"]) as service:
    print(service.folder, *service.sessions, flush=True)
    time.sleep(100)
"""


@pytest.fixture
def program(tmp_path: Path) -> str:
    path = tmp_path / "service"
    path.write_text(f"#!{sys.executable}\n{SERVICE}")
    path.chmod(0o755)
    return str(path)


def test_free_ports_are_distinct_and_can_be_bound() -> None:
    ports = free_ports(20)
    assert len(set(ports)) == 20
    for port in ports:
        with socket.socket() as each:
            each.bind(("127.0.0.1", port))


def test_a_service_is_ready_inside_the_block_and_gone_after_it(program: str, tmp_path: Path) -> None:
    with Service(program, ["good"], log_path=tmp_path / "log") as service:
        socket.create_connection(("127.0.0.1", service.port)).close()
        sessions, folder = service.sessions, service.folder
        assert len(members(sessions)) == len(sessions) == 2
        assert Path(service.environment["FLWR_HOME"]).is_dir()
    assert members(sessions) == set()
    assert not folder.exists()
    assert (tmp_path / "log").read_text() == "this is good\n"


def test_an_exception_inside_the_block_ends_the_service_and_goes_on(program: str) -> None:
    service = Service(program, ["good"])

    def interrupted() -> None:
        with service:
            seen.append((service.sessions, service.folder))
            raise KeyboardInterrupt

    seen: list[tuple[frozenset[int], Path]] = []
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    [(sessions, folder)] = seen
    assert members(sessions) == set()
    assert not folder.exists()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
@pytest.mark.usefixtures("default_signals")
def test_a_service_does_not_outlive_a_launcher_that_is_killed(program: str, number: signal.Signals) -> None:
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER, program], stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    folder, *ids = launcher.stdout.readline().split()
    sessions = {int(each) for each in ids}
    assert len(members(sessions)) == 2
    launcher.send_signal(number)
    launcher.wait()
    deadline = time.monotonic() + 10.0
    while (members(sessions) or Path(folder).exists()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert members(sessions) == set()
    assert not Path(folder).exists()


def test_a_service_that_ends_at_once_is_an_error_with_its_last_words(program: str) -> None:
    service = Service(program, ["broken"])
    with pytest.raises(LaunchError, match=r"exit code 1(.|\n)*the reason why it is broken"), service:
        pass
    assert not service.folder.exists()


@pytest.mark.slow
def test_a_service_that_never_listens_is_an_error_after_a_bounded_wait(program: str) -> None:
    service = Service(program, ["deaf"])
    service.start()
    try:
        with pytest.raises(LaunchError, match=r"not listening on 127.0.0.1:\d+ after 1 s"):
            service.wait_until_ready(seconds=1.0)
    finally:
        service.stop()
    service.stop()  # A second time is harmless.


def test_a_port_that_is_taken_meanwhile_is_given_up_for_another(program: str, tmp_path: Path) -> None:
    with Service(program, ["unlucky"], log_path=tmp_path / "log") as service:
        assert not service.ended
    assert (tmp_path / "log").read_text().count("this is unlucky") == 2


def test_an_answer_from_another_process_on_the_port_does_not_count(
    program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        monkeypatch.setattr("fedapps.simulation.processes.free_ports", lambda count: [other.getsockname()[1]] * count)
        service = Service(program, ["deaf"])
        service.start()
        try:
            with pytest.raises(LaunchError, match="not listening"):
                service.wait_until_ready(seconds=0.5)
        finally:
            service.stop()


def test_check_raises_once_the_service_has_ended(program: str) -> None:
    with Service(program, ["good"]) as service:
        service.check()
        os.kill(min(service.sessions), signal.SIGKILL)
        deadline = time.monotonic() + 5.0
        while not service.ended and time.monotonic() < deadline:
            time.sleep(0.01)
        with pytest.raises(LaunchError, match=r"exit code -9(.|\n)*this is good"):
            service.check()


@pytest.mark.engine
def test_a_superlink_writes_its_connection_to_a_configuration_of_its_own(tmp_path: Path) -> None:
    with SuperLink(simulation=False, log_path=tmp_path / "log") as superlink:
        config = tomllib.loads((superlink.home / "config.toml").read_text())
        assert config["superlink"]["default"] == CONNECTION
        assert config["superlink"][CONNECTION] == {"address": superlink.address, "insecure": True}


def test_a_node_config_that_the_command_line_cannot_carry_is_refused() -> None:
    with pytest.raises(LaunchError, match=r"node-config 'state-dir': .*apostrophes"):
        SuperNode("127.0.0.1:1", {"state-dir": "it's here"})
