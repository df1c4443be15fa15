"""The folder of a federation: what goes to which machine, who can read it, and that no key is ever lost."""

from __future__ import annotations

import configparser
import re
import stat
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.common.config import parse_config_args

from fedapps.client_apps.rules import NodeRules
from fedapps.deploy.certificates import names_of
from fedapps.deploy.folder import DeployError, Federation, add_nodes, init, read_certificate, renew

HOSTS = ["superlink.example.org", "10.0.0.5"]
NODES = ["hospital-a", "hospital-b"]


@pytest.fixture
def federation(tmp_path: Path) -> Federation:
    return init(tmp_path / "study", HOSTS, NODES, 8443)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_secrets_are_for_their_owner_and_stay_on_their_machine(federation: Federation) -> None:
    folder = federation.folder
    secrets = {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*.key")}
    assert {str(path) for path in secrets} == {
        "authority/ca.key", "server/server.key", "nodes/hospital-a/node.key", "nodes/hospital-b/node.key",
    }  # fmt: skip
    for path in folder.rglob("*"):
        if path.is_dir():
            assert stat.S_IMODE(path.stat().st_mode) == 0o700, path
        elif path.suffix == ".key":
            assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    everything = contents(folder)
    assert all(
        [name for name, text in everything.items() if text == key] == [str(path)] for path, key in secrets.items()
    )
    private = [name for name, text in everything.items() if b"PRIVATE KEY" in text]
    assert sorted(private) == sorted(map(str, secrets))


def test_keys_and_certificates_belong_together(federation: Federation) -> None:
    folder = federation.folder
    authority = read_certificate(folder / "authority" / "ca.crt")
    server = read_certificate(folder / "server" / "server.crt")
    server.verify_directly_issued_by(authority)
    assert set(HOSTS) <= set(names_of(server))
    for machine in ("server", "user", "nodes/hospital-a", "nodes/hospital-b"):
        assert read_certificate(folder / machine / "ca.crt") == authority
    for name in NODES:
        key = load_ssh_private_key((folder / "nodes" / name / "node.key").read_bytes(), None)
        public = (folder / "user" / "keys" / f"{name}.pub").read_bytes()
        assert public == (folder / "nodes" / name / f"{name}.pub").read_bytes()
        assert key.public_key().public_numbers() == _public_numbers(public)


def _public_numbers(public: bytes) -> object:
    from cryptography.hazmat.primitives.serialization import load_ssh_public_key

    return load_ssh_public_key(public).public_numbers()  # type: ignore[union-attr]


def test_a_federation_is_not_made_twice(federation: Federation) -> None:
    before = contents(federation.folder)
    with pytest.raises(DeployError, match=r"study.*a federation with keys.*fedapps deploy add .*fedapps deploy renew"):
        init(federation.folder, HOSTS, NODES, 8443)
    with pytest.raises(DeployError, match=r"nodes.*hospital-b twice"):
        add_nodes(federation, ["hospital-b"])
    assert contents(federation.folder) == before
    assert Federation.open(federation.folder) == federation


def test_a_key_that_no_record_knows_is_not_overwritten(federation: Federation) -> None:
    """As after a copy of the folder's record from a backup."""
    add_nodes(federation, ["hospital-c"])
    before = contents(federation.folder)
    with pytest.raises(DeployError, match=r"hospital-c/node\.key: expected no such file yet"):
        add_nodes(federation, ["hospital-c"])
    assert contents(federation.folder) == before


def test_files_of_somebody_else_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "study").mkdir()
    (tmp_path / "study" / "thesis.tex").write_text("x")
    with pytest.raises(DeployError, match="a folder with other files"):
        init(tmp_path / "study", HOSTS, NODES, 8443)
    assert list(contents(tmp_path / "study")) == ["thesis.tex"]


def test_a_node_is_added_beside_those_that_are_there(federation: Federation) -> None:
    before = contents(federation.folder)
    larger = add_nodes(federation, ["hospital-c"])
    assert larger.nodes == ("hospital-a", "hospital-b", "hospital-c")
    after = contents(federation.folder)
    changed = {name for name in before if after[name] != before[name]}
    assert changed == {"federation.toml"}
    assert {name.split("/")[1] for name in after.keys() - before.keys()} == {"hospital-c", "keys"}
    assert "RUNTIME_PORT=9096" in (federation.folder / "nodes" / "hospital-c" / "settings.env").read_text()


def test_a_renewed_certificate_is_of_the_same_authority_and_key(federation: Federation) -> None:
    folder = federation.folder
    before, old = contents(folder), read_certificate(folder / "server" / "server.crt")
    renew(federation)
    new = read_certificate(folder / "server" / "server.crt")
    assert new.serial_number != old.serial_number
    assert (new.public_key(), names_of(new)) == (old.public_key(), names_of(old))
    after = contents(folder)
    assert {name for name in before if after[name] != before[name]} == {"server/server.crt"}
    renew(federation, ["other.example.org"])
    assert "other.example.org" in names_of(read_certificate(folder / "server" / "server.crt"))
    assert Federation.open(folder).hosts == ("other.example.org",)


def test_without_the_authority_nothing_is_signed(federation: Federation) -> None:
    (federation.folder / "authority" / "ca.key").unlink()
    before = contents(federation.folder)
    with pytest.raises(DeployError, match=r"ca\.key.*no such file.*original folder"):
        renew(federation)
    assert contents(federation.folder) == before


@pytest.mark.parametrize(
    ("hosts", "nodes", "message"),
    [
        ([], NODES, "at least one name of the SuperLink"),
        (["https://host"], NODES, "without port and https://.*'https://host'"),
        (["host:8443"], NODES, "--port"),
        (["10.0.0.256"], NODES, "'10.0.0.256'"),
        (HOSTS, ["a/../b"], "name of the node.*'a/../b'"),
        (HOSTS, ["a", "a"], "a twice"),
    ],
)
def test_an_unusable_name_leaves_nothing_behind(
    tmp_path: Path, hosts: list[str], nodes: list[str], message: str
) -> None:
    with pytest.raises(DeployError, match=message):
        init(tmp_path / "study", hosts, nodes, 8443)
    assert list(tmp_path.iterdir()) == []


def test_scripts_parse_and_nothing_is_left_to_fill_in(federation: Federation) -> None:
    scripts = list(federation.folder.rglob("*.sh"))
    assert len(scripts) == 4
    for path in scripts:
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
        subprocess.run(["bash", "-n", str(path)], check=True)
        subprocess.run(["sh", "-n", str(path)], check=True)
    for name, text in contents(federation.folder).items():
        assert not re.search(rb"@[A-Z_]+@", text), name


def test_units_start_what_lies_in_the_folder(federation: Federation) -> None:
    for machine, unit in (("server", "fedapps-superlink.service"), ("nodes/hospital-a", "fedapps-supernode.service")):
        parsed = configparser.ConfigParser(strict=True, interpolation=None)
        parsed.optionxform = str  # type: ignore[assignment,method-assign]
        parsed.read(federation.folder / machine / unit)
        service = parsed["Service"]
        assert (
            service["ExecStart"]
            == f"{service['WorkingDirectory']}/start.sh"
            == f"/opt/fedapps/{Path(machine).name}/start.sh"
        )
        assert (federation.folder / machine / "start.sh").exists()
        assert (service["Restart"], parsed["Unit"]["StartLimitIntervalSec"]) == ("always", "0")


def test_compose_files_build_and_mount_the_folder(federation: Federation) -> None:
    for machine, service in (("server", "superlink"), ("nodes/hospital-a", "supernode")):
        own = federation.folder / machine
        compose = yaml.safe_load((own / "compose.yaml").read_text())["services"][service]
        assert compose["volumes"] == [".:/federation"]
        assert compose.get("ports", []) == (["8443:8443"] if service == "superlink" else [])
        assert (own / compose["build"] / "Dockerfile").read_text().count("WORKDIR /federation") == 1
        cuda = yaml.safe_load((own / "compose.cuda.yaml").read_text())["services"][service]
        assert "/whl/cu" in (own / cuda["build"]["dockerfile"]).read_text()
        assert cuda["deploy"]["resources"]["reservations"]["devices"][0]["capabilities"] == ["gpu"]
        # What the image is built from holds no secret.
        assert (own / ".dockerignore").read_text().splitlines() == ["*", "!fedapps-*.whl"]


def test_configurations_are_those_of_flower_and_of_the_rules(federation: Federation) -> None:
    folder = federation.folder
    config = tomllib.loads((folder / "user" / "config.toml").read_text())["superlink"]
    assert config["default"] == "study"
    assert config["study"] == {
        "address": "superlink.example.org:8443", "root-certificates": str(folder / "user" / "ca.crt"),
    }  # fmt: skip
    node_config = parse_config_args([str(folder / "nodes" / "hospital-a" / "node.toml")])
    assert node_config["name"] == "hospital-a"
    rules = NodeRules.of(node_config, "test")
    assert (rules.data_dir, rules.state_dir) == ("data", "state")
    settings = (folder / "nodes" / "hospital-b" / "settings.env").read_text()
    assert settings == "SUPERLINK=superlink.example.org:8443\nRUNTIME_PORT=9095\n"
