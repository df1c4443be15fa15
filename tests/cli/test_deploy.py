"""``fedapps deploy``: what it prints, and how it ends."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from fedapps.deploy.certificates import names_of
from fedapps.deploy.folder import Federation, read_certificate
from fedapps.simulation.processes import free_ports


@pytest.fixture
def folder(call: Callable[..., str], tmp_path: Path) -> Path:
    """A federation with a named node and two numbered ones, whose SuperLink does not run."""
    path = tmp_path / "study"
    hosts = ["--host", "localhost", "--host", "10.0.0.5"]
    out = call(
        "deploy", "init", str(path), *hosts, "--node", "hospital-a", "--nodes", "2", "--port", str(free_ports(1)[0])
    )
    assert "federation study: SuperLink localhost:" in out
    assert "nodes hospital-a, node-1, node-2" in out
    assert str(path / "README.md") in out.replace("\n", "")
    return path


def test_a_federation_is_made_extended_and_renewed(call: Callable[..., str], folder: Path) -> None:
    assert "study: expected a folder that is new or empty" in call("deploy", "init", str(folder), "--host", "a", code=1)
    assert "hospital-c" in call("deploy", "add", str(folder), "--node", "hospital-c")
    assert Federation.open(folder).nodes == ("hospital-a", "node-1", "node-2", "hospital-c")
    assert "restart the SuperLink" in call("deploy", "renew", str(folder), "--host", "b.example.org")
    assert "b.example.org" in names_of(read_certificate(folder / "server" / "server.crt"))
    assert "expected the folder of a federation" in call("deploy", "add", str(folder / "user"), "--node", "x", code=1)


def test_each_problem_is_a_line_and_the_exit_code_is_1(
    call: Callable[..., str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLWR_HOME", str(folder / "user"))
    (folder / "nodes" / "hospital-a" / "node.key").chmod(0o644)
    out = call("deploy", "check", "--folder", str(folder / "nodes" / "hospital-a"), code=1)
    problems = [line for line in out.splitlines() if line.startswith("problem")]
    assert len(problems) == 2
    assert "chmod 600" in problems[0]
    assert "nothing that listens there; start the SuperLink" in problems[1]
    for where in ([], ["study"]):
        out = call("deploy", "check", *where, code=1)
        assert [line[:7] for line in out.splitlines() if "nothing that listens there" in line] == ["problem"]
    assert "SuperLink connection 'other'" in call("deploy", "check", "other", code=1)
    assert "expected a connection or a folder" in call("deploy", "check", "study", "--folder", str(folder), code=1)


def test_a_run_says_what_keeps_it_from_its_superlink(
    call: Callable[..., str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLWR_HOME", str(folder / "user"))
    out = call("run", "--superlink", "study", "--task", "libsvm", code=1)
    assert "nothing that listens there; start the SuperLink, and check its port" in " ".join(out.split())
