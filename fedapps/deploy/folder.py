"""The folder of a federation: one part for each machine, so that nothing secret of another machine travels with it."""

from __future__ import annotations

import ipaddress
import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from fedapps import __version__
from fedapps.deploy.certificates import (
    Authority,
    make_authority,
    names_of,
    new_node_key,
    new_server_key,
    pem_of,
    sign_server,
)
from fedapps.errors import FedAppsError
from fedapps.private_files import private_folder, private_opener

SETTINGS = "settings.env"
"""Where a SuperLink listens, or which one a SuperNode connects to; read by its start script."""

NODE_CONFIG = "node.toml"
CA, SERVER_CERTIFICATE, SERVER_KEY, NODE_KEY = "ca.crt", "server.crt", "server.key", "node.key"
PUBLIC_KEYS = "keys"
"""Folder beside Flower's ``config.toml`` with the public keys of all nodes."""

FIRST_RUNTIME_PORT = 9094
"""Port on which the first SuperNode talks to its own ClientApps; each further one has the next, should they share a machine."""

INSTALLED = "/opt/fedapps"
"""Where the unit files expect the folders."""

_RECORD = "federation.toml"
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_-]{0,61}[A-Za-z0-9])?")
_DNS = re.compile(
    r"(?=.{1,253}$)[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?(\.[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?)*"
)
_CPU_WHEELS, _CUDA_WHEELS = (f"https://download.pytorch.org/whl/{kind}" for kind in ("cpu", "cu126"))
_EXECUTABLE = 0o700


class DeployError(FedAppsError):
    """The folder of a federation cannot be made or changed as asked, or something of a federation does not work."""


@dataclass(frozen=True)
class Federation:
    """A federation as its folder says.

    Attributes:
        folder: The folder.
        hosts: Names of the SuperLink; machines reach it by the first one.
        port: Its port.
        nodes: Names of the nodes.
    """

    folder: Path
    hosts: tuple[str, ...]
    port: int
    nodes: tuple[str, ...]

    @property
    def connection(self) -> str:
        """The SuperLink's name in Flower's configuration: that of the folder."""
        return self.folder.name

    @property
    def address(self) -> str:
        """Host and port by which machines reach the SuperLink."""
        host = self.hosts[0]
        return f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"

    @classmethod
    def open(cls, folder: Path) -> Federation:
        """Open the folder of a federation.

        Args:
            folder: The folder.

        Raises:
            DeployError: It is none.
        """
        folder = folder.absolute()
        try:
            record = tomllib.loads((folder / _RECORD).read_text(encoding="utf-8"))
            return cls(folder, tuple(record["hosts"]), int(record["port"]), tuple(record["nodes"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DeployError(
                str(folder),
                expected=f"the folder of a federation, with its {_RECORD}",
                got=f"{type(error).__name__}: {error}",
                do="give the folder that `fedapps deploy init` made",
            ) from error

    def save(self) -> None:
        """Note hosts, port and nodes in the folder."""
        lines = [f"hosts = {json.dumps(self.hosts)}", f"port = {self.port}", f"nodes = {json.dumps(self.nodes)}"]
        (self.folder / _RECORD).write_text("\n".join(lines) + "\n", encoding="utf-8")


def init(folder: Path, hosts: Sequence[str], nodes: Sequence[str], port: int) -> Federation:
    """Make the folder of a new federation.

    Args:
        folder: Where; it must be missing or empty. Its name becomes that of the connection.
        hosts: DNS names and addresses of the SuperLink; machines use the first.
        nodes: Names of the nodes.
        port: Port of the SuperLink.

    Returns:
        The federation.

    Raises:
        DeployError: A name is unusable, or the folder holds something.
    """
    folder = folder.absolute()
    _check_name("folder", folder.name)
    _check_hosts(hosts)
    _check_nodes(nodes)
    if folder.exists() and any(folder.iterdir()):
        found = "a federation with keys" if (folder / _RECORD).exists() else "a folder with other files"
        raise DeployError(
            str(folder),
            expected="a folder that is new or empty",
            got=found,
            do=f"choose another one; `fedapps deploy add {folder} --node NAME` adds a node to a federation, and"
            f" `fedapps deploy renew {folder}` renews its server's certificate",
        )
    federation = Federation(folder, tuple(hosts), port, ())
    for name in ("authority", "server", "user"):
        private_folder(folder, name)
    private_folder(folder, "user", PUBLIC_KEYS)
    authority, server_key = make_authority(f"fedapps federation {federation.connection}"), new_server_key()
    _write(folder / "authority" / "ca.key", pem_of(authority.key), secret=True)
    for part in ("authority", "server", "user"):
        _write(folder / part / CA, pem_of(authority.certificate))
    _write(folder / "server" / SERVER_KEY, pem_of(server_key), secret=True)
    certificate = sign_server(authority, server_key, hosts)
    _write(folder / "server" / SERVER_CERTIFICATE, pem_of(certificate))
    _write_server(federation)
    _write_user(federation)
    _write_filled(folder / "README.md", "README.md", _facts(federation, certificate))
    return add_nodes(federation, nodes)


def add_nodes(federation: Federation, nodes: Sequence[str]) -> Federation:
    """Add nodes to a federation: what is there stays as it is.

    Args:
        federation: The federation.
        nodes: Names of the new nodes.

    Returns:
        The federation with them.

    Raises:
        DeployError: A name is unusable or taken.
    """
    folder = federation.folder
    _check_nodes([*federation.nodes, *nodes])
    for place, name in enumerate(nodes, start=len(federation.nodes)):
        own = private_folder(folder, "nodes", name)
        private_folder(folder, "nodes", name, "data")
        private, public = new_node_key()
        _write(own / NODE_KEY, private, secret=True)
        _write(own / f"{name}.pub", public)
        _write(folder / "user" / PUBLIC_KEYS / f"{name}.pub", public)
        _write(own / CA, (folder / "user" / CA).read_bytes())
        settings = f"SUPERLINK={federation.address}\nRUNTIME_PORT={FIRST_RUNTIME_PORT + place}\n"
        _write(own / SETTINGS, settings.encode())
        _write_filled(own / NODE_CONFIG, "node.toml", {"NAME": name})
        _write_machine(own, "supernode", f"SuperNode {name} of federation {federation.connection}", name, ports="")
    federation = Federation(folder, federation.hosts, federation.port, (*federation.nodes, *nodes))
    federation.save()
    return federation


def renew(federation: Federation, hosts: Sequence[str] = ()) -> x509.Certificate:
    """Sign a new certificate for the server's key; every other machine trusts it without a change.

    Args:
        federation: The federation.
        hosts: New names of the server; by default it keeps its own.

    Returns:
        The certificate, which has taken the place of the old one.

    Raises:
        DeployError: The authority's or the server's files are missing or damaged.
    """
    folder = federation.folder
    _check_hosts(hosts or federation.hosts)
    authority = Authority(read_certificate(folder / "authority" / CA), read_tls_key(folder / "authority" / "ca.key"))
    path = folder / "server" / SERVER_CERTIFICATE
    certificate = sign_server(authority, read_tls_key(folder / "server" / SERVER_KEY), hosts or federation.hosts)
    path.write_bytes(pem_of(certificate))
    if hosts:
        Federation(folder, tuple(hosts), federation.port, federation.nodes).save()
    return certificate


def read_certificate(path: Path) -> x509.Certificate:
    """Read a certificate.

    Raises:
        DeployError: The file is missing or holds none.
    """
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except (OSError, ValueError) as error:
        raise DeployError(
            str(path), expected="a certificate", got=_fault(error), do="copy it again from the folder of the federation"
        ) from error


def read_tls_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """Read the key of a certificate.

    Raises:
        DeployError: The file is missing or holds no such key.
    """
    try:
        key = load_pem_private_key(path.read_bytes(), password=None)
    except (OSError, ValueError, TypeError) as error:
        raise DeployError(
            str(path),
            expected="a key that `fedapps deploy init` made",
            got=_fault(error),
            do="work in the original folder of the federation, or make a new one",
        ) from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise DeployError(str(path), expected="an elliptic-curve key", got=type(key).__name__)
    return key


def _fault(error: Exception) -> str:
    return "no such file" if isinstance(error, FileNotFoundError) else f"{type(error).__name__}: {error}"


def _check_nodes(nodes: Sequence[str]) -> None:
    for name in nodes:
        _check_name("node", name)
    taken = sorted({name for name in nodes if nodes.count(name) > 1})
    if taken:
        raise DeployError(
            "nodes", expected="a name for each", got=f"{', '.join(taken)} twice", do="choose another name"
        )


def _check_name(what: str, name: str) -> None:
    if not _NAME.fullmatch(name):
        raise DeployError(
            f"name of the {what}",
            expected="1 to 63 letters, digits, hyphens and underscores, with a letter or digit at both ends",
            got=repr(name),
            do="choose another name",
        )


def _check_hosts(hosts: Sequence[str]) -> None:
    if not hosts:
        raise DeployError("hosts", expected="at least one name of the SuperLink", got="none", do="give it with --host")
    for host in hosts:
        try:
            ipaddress.ip_address(host)
        except ValueError:
            if not _DNS.fullmatch(host) or host.replace(".", "").isdigit():
                raise DeployError(
                    "host",
                    expected="a DNS name or an IP address, without port and https://",
                    got=repr(host),
                    do="give the port with --port",
                ) from None


def _facts(federation: Federation, certificate: x509.Certificate) -> dict[str, str]:
    return {
        "CONNECTION": federation.connection,
        "VERSION": __version__,
        "ADDRESS": f"{federation.address} ({', '.join(names_of(certificate))})",
        "PORT": str(federation.port),
        "FOLDER": str(federation.folder),
        "UNTIL": certificate.not_valid_after_utc.date().isoformat(),
    }


def _write_server(federation: Federation) -> None:
    own = federation.folder / "server"
    _write(own / SETTINGS, f"LISTEN=0.0.0.0\nPORT={federation.port}\n".encode())
    ports = f'    ports:\n      - "{federation.port}:{federation.port}"'
    _write_machine(own, "superlink", f"SuperLink of federation {federation.connection}", "server", ports=ports)


def _write_user(federation: Federation) -> None:
    own, name = federation.folder / "user", federation.connection
    config = (
        f'[superlink]\ndefault = "{name}"\n\n[superlink.{name}]\naddress = "{federation.address}"\n'
        f"root-certificates = {json.dumps(str(own / CA))}\n"
    )
    _write(own / "config.toml", config.encode())
    _write_filled(own / "register.sh", "register.sh", {"CONNECTION": name}, mode=_EXECUTABLE)


def _write_machine(own: Path, service: str, description: str, name: str, *, ports: str) -> None:
    """Write how a machine's service is started: by hand, by systemd, in a container."""
    unit = f"fedapps-{service}.service"
    facts = {"UNIT": unit, "DESCRIPTION": description, "INSTALLED": f"{INSTALLED}/{name}", "SERVICE": service}
    _write_filled(own / "start.sh", f"start-{service}.sh", {}, mode=_EXECUTABLE)
    _write_filled(own / unit, "service", facts)
    _write_filled(own / "compose.yaml", "compose.yaml", {**facts, "PORTS": ports})
    _write_filled(own / "compose.cuda.yaml", "compose.cuda.yaml", facts)
    _write_filled(own / "Dockerfile", "Dockerfile", {"TORCH_INDEX": _CPU_WHEELS})
    _write_filled(own / "Dockerfile.cuda", "Dockerfile", {"TORCH_INDEX": _CUDA_WHEELS})
    _write_filled(own / ".dockerignore", "dockerignore", {})


def _write_filled(path: Path, template: str, facts: Mapping[str, str], mode: int = 0o600) -> None:
    """Write a template with ``@NAME@`` filled in."""
    text = (resources.files("fedapps.deploy") / "templates" / template).read_text(encoding="utf-8")
    filled = re.sub(r"@([A-Z_]+)@", lambda found: facts[found[1]], text)
    _write(path, (filled.rstrip() + "\n").encode())
    path.chmod(mode)


def _write(path: Path, content: bytes, *, secret: bool = False) -> None:
    """Write a new file; one that is there stays, as it may be a key in use."""
    try:
        with open(path, "xb", opener=private_opener if secret else None) as file:
            file.write(content)
    except FileExistsError as error:
        raise DeployError(
            str(path),
            expected="no such file yet",
            got="one, which may be in use",
            do="choose another name, or move it away",
        ) from error
