"""What is wrong with a federation, of keys, nodes and data: each fault with its place and its cure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.serialization import load_ssh_public_key
from flwr.proto.node_pb2 import NodeInfo
from flwr.supercore.primitives.asymmetric import public_key_to_bytes

import fedapps
from fedapps.deploy import check
from fedapps.deploy.folder import DeployError, Federation, init
from fedapps.errors import SettingsError
from fedapps.results.environment import installed_versions
from fedapps.server_apps.greeting import MARK
from fedapps.simulation.connection import Connection
from fedapps.simulation.processes import free_ports

CONNECTION = Connection("study", "localhost:8443", None, insecure=False)
FACTS = {
    "name": "hospital-a", "examples": 200, "features": [30], "classes": ["benign", "malignant"], "dtype": "float64",
    "num-examples": 140, "device": "cpu", "version": "0.1.0",
}  # fmt: skip


@pytest.fixture
def federation(tmp_path: Path) -> Federation:
    """One whose SuperLink does not run."""
    return init(tmp_path / "study", ["localhost"], ["hospital-a", "hospital-b"], free_ports(1)[0])


def faults(findings: Any) -> list[str]:
    return [str(finding) for finding in findings if isinstance(finding, DeployError)]


def key_of(path: Path) -> bytes:
    return public_key_to_bytes(load_ssh_public_key(path.read_bytes()))  # type: ignore[arg-type]


def test_every_node_is_registered_and_online_or_named(federation: Federation) -> None:
    keys = {path.stem: path for path in (federation.folder / "user" / "keys").iterdir()}
    a, b = (key_of(keys[name]) for name in ("hospital-a", "hospital-b"))
    online = NodeInfo(node_id=1, status="online", public_key=a)
    other = NodeInfo(
        node_id=3, status="offline", public_key=b"x", name="hospital-c", last_deactivated_at="2026-01-02T03:04:05"
    )

    def found(*nodes: NodeInfo) -> list[str]:
        return faults(check.check_nodes(nodes, keys, CONNECTION))

    [unknown] = found(online)
    assert "hospital-b, key" in unknown
    assert "expected a key that the SuperLink knows, got one that is not registered" in unknown
    assert "user/register.sh, or flwr supernode register hospital-b.pub study" in unknown
    [offline] = found(
        online, NodeInfo(node_id=2, status="registered", public_key=b, registered_at="2026-01-01T00:00:00")
    )
    assert "hospital-b, key" in offline
    assert "expected online, got registered since 2026-01-01T00:00:00; start it there" in offline
    assert found(online, NodeInfo(node_id=2, status="online", public_key=b)) == []
    [revoked] = found(online, NodeInfo(node_id=2, status="unregistered", public_key=b))
    assert "hospital-b, key" in revoked
    assert "got one that was unregistered, which is for good; for a node that comes back make a new key" in revoked
    gone = NodeInfo(node_id=4, status="unregistered", public_key=b"y", name="hospital-x")
    assert found(online, NodeInfo(node_id=2, status="online", public_key=b), gone) == []
    both = found(online, NodeInfo(node_id=2, status="online", public_key=b), other)
    assert [line.partition(",")[0] for line in both] == ["hospital-c"]
    assert "at least one registered" in faults(check.check_nodes([], {}, CONNECTION))[0]


def greeted(**changes: Any) -> dict[str, Any]:
    node = {"id": "1", "label": "hospital-a", "key": "0123", "facts": FACTS}
    return {
        "versions": {"fedapps": fedapps.__version__, **installed_versions()}, "nodes": [node], "problem": "", **changes,
    }  # fmt: skip


def test_a_handshake_tells_what_each_node_would_train_on() -> None:
    [server, node] = check.describe_greeting(greeted())
    assert str(server).startswith(f"server: fedapps {fedapps.__version__}, flwr ")
    assert node == (
        "hospital-a: examples 200, features [30], classes ['benign', 'malignant'], dtype float64,"
        " of the examples 140 to train on, the others held out, on cpu, fedapps 0.1.0"
    )


def test_a_handshake_tells_who_is_refused_and_which_versions_differ() -> None:
    refused = {
        "id": "2", "label": "hospital-b", "key": "4567",
        "refused": "<class 'fedapps.client_apps.rules.ClientError'>:<'TaskError: file x: expected at least one example'>",
    }  # fmt: skip
    renamed = {"id": "1", "label": "hospital-c", "key": "89ab", "facts": FACTS}
    found = faults(
        check.describe_greeting(
            greeted(
                nodes=[refused, renamed],
                versions={**installed_versions(), "fedapps": "0.0.9"},
                problem="nodes with data of their own: expected 2 or more. Refused: node 2: ...",
            )
        )
    )
    assert found == [
        f"versions: expected fedapps 0.0.9 as on the server, got {fedapps.__version__};"
        " install the same version on every machine, and restart its service",
        "hospital-b: TaskError: file x: expected at least one example",
        "hospital-c, key 89ab: expected name = 'hospital-c' in node.toml, as its key was registered, got 'hospital-a';"
        " correct node.toml there, or unregister the key and register it under the other name",
        "start of the run: nodes with data of their own: expected 2 or more.",
    ]


def test_the_handshake_is_found_in_a_log() -> None:
    line = json.dumps({"nodes": []})
    assert check.read_greeting(f"INFO: x\n\x1b[92mINFO\x1b[0m :      {MARK}{line}\x1b[0m\nINFO: y") == {"nodes": []}
    assert check.read_greeting("INFO: nothing of the kind") is None


def own_data(federation: Federation, text: str, settings: Mapping[str, Any] | None = None) -> list[check.Finding]:
    """What the check says of a node's data, without a SuperLink."""
    folder = federation.folder / "nodes" / "hospital-a"
    (folder / "data" / "site.svm").write_text(text)
    with (folder / "node.toml").open("a") as file:
        file.write("task-options = \"file = 'site.svm'\"\n")
    findings = list(check.check_folder(folder, {"task": "libsvm", **(settings or {})}))
    assert "nothing that listens there" in str(findings[-2])
    return findings


def test_a_node_says_what_it_would_train_on(federation: Federation) -> None:
    """Of ten rows two are for the test and one for validation; a path in node.toml is relative to its folder."""
    findings = own_data(federation, "+1 1:2 3:1\n-1 2:1\n" * 5)
    assert str(findings[-1]).startswith(
        "hospital-a: examples 10, features [3], classes [-1, 1], dtype float64, of the examples 7 to train on"
    )


def test_an_empty_file_is_a_problem_of_the_node(federation: Federation) -> None:
    fault = own_data(federation, "")[-1]
    assert isinstance(fault, DeployError)
    assert (
        f"data of hospital-a: file {federation.folder}/nodes/hospital-a/data/site.svm: expected at least one example, got none"
        in str(fault)
    )


def test_what_a_node_does_not_allow_is_a_problem_of_the_run(federation: Federation) -> None:
    fault = own_data(federation, "+1 1:1\n-1 1:2\n" * 5, {"local-steps": 10**6})[-1]
    assert isinstance(fault, DeployError)
    assert "setting 'local-steps': expected at most 100000 on this node, got 1000000" in str(fault)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("node.key", "rubbish", "node.key: expected an elliptic-curve key in the OpenSSH format, got ValueError"),
        ("node.toml", "name = hospital", "node.toml: expected TOML with the node's configuration"),
        ("settings.env", "SUPERLINK=x", "settings.env: expected PORT of a SuperLink, or SUPERLINK and RUNTIME_PORT"),
    ],
)
def test_a_damaged_file_of_a_node(federation: Federation, name: str, content: str, message: str) -> None:
    folder = federation.folder / "nodes" / "hospital-a"
    (folder / name).write_text(content)
    [fault] = faults(check.check_folder(folder, None))
    assert message in fault


def test_a_key_of_tls_is_no_key_of_a_node(federation: Federation) -> None:
    folder = federation.folder / "nodes" / "hospital-a"
    (folder / "node.key").write_bytes((federation.folder / "server" / "server.key").read_bytes())
    [fault] = faults(check.check_folder(folder, None))
    assert "node.key: expected an elliptic-curve key in the OpenSSH format" in fault


def test_a_server_whose_key_belongs_to_another_certificate(federation: Federation, tmp_path: Path) -> None:
    other = init(tmp_path / "other", ["localhost"], [], 8443)
    folder = federation.folder / "server"
    (folder / "server.key").write_bytes((other.folder / "server" / "server.key").read_bytes())
    [key, unreachable] = faults(check.check_folder(folder, None))
    assert "server.key: expected the key of server.crt, got another one" in key
    assert "nothing that listens there" in unreachable


def test_a_folder_of_something_else(tmp_path: Path) -> None:
    with pytest.raises(DeployError, match=r"expected the folder of a node or of the server.*got neither"):
        list(check.check_folder(tmp_path, None))


def test_a_wrong_setting_is_told_before_anything_is_started(federation: Federation) -> None:
    with pytest.raises(SettingsError, match="local-steps"):
        list(check.check_folder(federation.folder / "nodes" / "hospital-a", {"local-steps": -1}))


def test_a_run_that_cannot_reach_its_superlink_says_why(
    federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLWR_HOME", str(federation.folder / "user"))
    [fault] = check.faults_of_link("study")
    assert "nothing that listens there; start the SuperLink" in fault
    assert check.faults_of_link("") == check.faults_of_link("other") == []
