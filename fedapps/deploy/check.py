"""What is wrong with a federation, seen from one of its machines.

Every function yields what it found: a sentence where all is well, a `DeployError` with its cure where something is not.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key
from flwr.app import Context, RecordDict
from flwr.common.config import parse_config_args
from flwr.proto.node_pb2 import NodeInfo
from flwr.supercore.primitives.asymmetric import public_key_to_bytes

import fedapps
from fedapps.deploy.folder import (
    CA,
    NODE_CONFIG,
    NODE_KEY,
    PUBLIC_KEYS,
    SERVER_CERTIFICATE,
    SERVER_KEY,
    SETTINGS,
    DeployError,
    read_certificate,
    read_tls_key,
)
from fedapps.deploy.link import Finding, check_link, check_private, check_server_certificate
from fedapps.errors import FedAppsError, LaunchError
from fedapps.messages.node_facts import TOLD, shown
from fedapps.methods import get_method, resolve_settings
from fedapps.results.environment import installed_versions
from fedapps.server_apps.greeting import MARK
from fedapps.settings import Scalar, flatten
from fedapps.simulation.app_folder import Components
from fedapps.simulation.connection import Connection, flower_home, read_connection
from fedapps.simulation.flower_environment import flower_environment
from fedapps.simulation.launcher import RunStatus, run_on_superlink
from fedapps.simulation.own_modules import own_modules
from fedapps.simulation.start import on_superlink
from fedapps.strategies.roster import fingerprint

GREETING = "fedapps.server_apps.greeting:app"
NODE_WAIT = 15.0
"""Seconds that a check waits for nodes, where the settings do not say."""

ONLINE, UNREGISTERED = "online", "unregistered"
"""Flower's words for the state of a node."""

_SAME_VERSION = "install the same version on every machine, and restart its service"
_START = "start it there: ./start.sh in its folder, or its unit or container; its log says why it has ended"


def check_versions() -> Iterator[Finding]:
    """Say what is installed here."""
    versions = {"fedapps": fedapps.__version__, "python": platform.python_version(), **installed_versions()}
    yield "here: " + ", ".join(
        f"{name} {versions[name]}" for name in ("fedapps", "flwr", "torch", "python") if name in versions
    )


def check_connection(
    name: str, run_config: Mapping[str, Any] | None, *, python_path: Sequence[Path] = ()
) -> Iterator[Finding]:
    """Check a federation from the machine that starts runs.

    Args:
        name: Name of the connection; empty for the default one.
        run_config: The settings of a run, to ask every node what it would train on; None asks no node.
        python_path: As for `run_on_superlink`.

    Raises:
        LaunchError: There is no such connection.
        SettingsError: A setting is wrong.
    """
    environment = flower_environment(python_path)
    connection = read_connection(name, environment)
    config = None if run_config is None else _as_run(run_config)
    yield from check_versions()
    faults = [*check_link(connection)]
    yield from faults
    if any(isinstance(fault, DeployError) for fault in faults):
        return
    try:
        nodes = list_nodes(connection)
    except DeployError as error:
        yield error
        return
    keys = {path.stem: path for path in sorted((flower_home(environment) / PUBLIC_KEYS).glob("*.pub"))}
    yield from check_nodes(nodes, keys, connection)
    if config is not None:
        yield from check_greeting(config, connection, environment, python_path)


def faults_of_link(name: str) -> list[str]:
    """Say what keeps this machine from a SuperLink: names, certificate, port or clock; nothing where that is well.

    Args:
        name: Name of the connection; empty, or one that there is not, has none.
    """
    try:
        findings = [*check_link(read_connection(name, os.environ))] if name else []
    except (LaunchError, DeployError):
        return []
    return [str(fault) for fault in findings if isinstance(fault, DeployError)]


def check_folder(folder: Path, run_config: Mapping[str, Any] | None) -> Iterator[Finding]:
    """Check a machine from the folder that ``fedapps deploy init`` made for it.

    Args:
        folder: ``server`` or ``nodes/NAME``, or a copy of it.
        run_config: The settings of a run, to say what this node would train on; None leaves it out.

    Raises:
        DeployError: It is no such folder.
        SettingsError: A setting is wrong.
    """
    folder = folder.absolute()
    if (folder / NODE_CONFIG).exists():
        yield from check_versions()
        yield from _check_node(folder, None if run_config is None else _as_run(run_config))
    elif (folder / SERVER_CERTIFICATE).exists():
        yield from check_versions()
        yield from _check_server(folder)
    else:
        raise DeployError(
            str(folder),
            expected=f"the folder of a node or of the server, with {NODE_CONFIG} or {SERVER_CERTIFICATE}",
            got="neither",
            do="give one that `fedapps deploy init` made; from the machine that starts runs give the connection's name",
        )


def _as_run(run_config: Mapping[str, Any]) -> dict[str, Scalar]:
    """Resolve settings as a run on a SuperLink does."""
    settings = resolve_settings(on_superlink({"node-wait": NODE_WAIT, **run_config}))
    return flatten(settings, get_method(settings.method).group)


# The server's machine -------------------------------------------------------------------------------


def _check_server(folder: Path) -> Iterator[Finding]:
    try:
        authority, certificate = read_certificate(folder / CA), read_certificate(folder / SERVER_CERTIFICATE)
        key, port = read_tls_key(folder / SERVER_KEY), read_settings(folder)["PORT"]
    except DeployError as error:
        yield error
        return
    yield from check_private(folder / SERVER_KEY)
    if key.public_key() != certificate.public_key():
        yield DeployError(
            str(folder / SERVER_KEY),
            expected=f"the key of {SERVER_CERTIFICATE}",
            got="another one",
            do="copy both again from the folder of the federation",
        )
    faults = [*check_server_certificate(certificate, "localhost", authority, str(folder / SERVER_CERTIFICATE))]
    yield from faults
    if not any(isinstance(fault, DeployError) for fault in faults):
        yield from check_link(Connection("", f"localhost:{port}", folder / CA, insecure=False))


def read_settings(folder: Path) -> dict[str, str]:
    """Read what a start script reads.

    Raises:
        DeployError: The file is missing or lacks something.
    """
    path = folder / SETTINGS
    try:
        lines = path.read_text(encoding="utf-8").split()
    except (OSError, ValueError) as error:
        lines = [f"{type(error).__name__}={error}"]
    settings = dict(line.partition("=")[::2] for line in lines)
    if "PORT" in settings or {"SUPERLINK", "RUNTIME_PORT"} <= settings.keys():
        return settings
    raise DeployError(
        str(path),
        expected="PORT of a SuperLink, or SUPERLINK and RUNTIME_PORT of a node",
        got=", ".join(lines) or "nothing",
        do="copy it again from the folder of the federation",
    )


# A node's machine -----------------------------------------------------------------------------------


def _check_node(folder: Path, config: dict[str, Scalar] | None) -> Iterator[Finding]:
    yield from check_private(folder / NODE_KEY)
    try:
        public, address = read_node_key(folder / NODE_KEY), read_settings(folder)["SUPERLINK"]
        node_config = read_node_config(folder / NODE_CONFIG)
    except DeployError as error:
        yield error
        return
    connection = Connection("", address, folder / CA, insecure=False)
    faults = [*check_link(connection)]
    yield from faults
    if not any(isinstance(fault, DeployError) for fault in faults):
        try:
            known = {node.public_key: node for node in list_nodes(connection)}
            yield _state_of(str(node_config.get("name", folder.name)), known.get(public), fingerprint(public), "")
        except DeployError as error:
            yield error
    if config is not None:
        yield _greet_here(folder, node_config, config)


def read_node_key(path: Path) -> bytes:
    """Read a SuperNode's private key, and give the public one as the SuperLink lists it.

    Raises:
        DeployError: The file is missing or holds no such key.
    """
    try:
        key = load_ssh_private_key(path.read_bytes(), None)
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise TypeError(f"a key of type {type(key).__name__}")
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise DeployError(
            str(path),
            expected="an elliptic-curve key in the OpenSSH format",
            got=f"{type(error).__name__}: {error}",
            do="copy it again from the folder of the federation",
        ) from error
    return public_key_to_bytes(key.public_key())


def read_node_config(path: Path) -> dict[str, Any]:
    """Read a node's configuration as Flower does.

    Raises:
        DeployError: It is no TOML.
    """
    try:
        return dict(parse_config_args([str(path)]))
    except (OSError, ValueError) as error:
        raise DeployError(
            str(path), expected="TOML with the node's configuration", got=str(error), do="correct the file"
        ) from error


def _greet_here(folder: Path, node_config: dict[str, Any], config: Mapping[str, Scalar]) -> Finding:
    """Say what a server's handshake would be answered: here and in the node's folder, by its own rules."""
    from fedapps.client_apps.app import facts_of_node  # With torch: only where it is asked for.

    if own := node_config.get("data-dir"):
        node_config = {**node_config, "data-dir": str(folder / str(own))}  # So that errors name the whole path.
    try:
        with contextlib.chdir(folder):
            facts = facts_of_node(Context(1, 1, node_config, RecordDict(), dict(config)))
    except FedAppsError as error:
        return DeployError(f"data of {folder.name}: {error}")
    return (
        f"{facts.name or folder.name}: {_told(vars(facts) | dict(facts.told) | {'num-examples': facts.num_examples})}"
    )


# All nodes ------------------------------------------------------------------------------------------


def list_nodes(connection: Connection) -> list[NodeInfo]:
    """List the nodes that a SuperLink knows or knew, with their keys, which ``flwr supernode list`` does not show.

    Raises:
        DeployError: The SuperLink does not answer so.
    """
    import httpx  # Flower's own
    from flwr.proto.control_pb2 import ListNodesRequest
    from flwr.supercore.control import ControlHttpClient
    from flwr.supercore.error import FlowerError
    from flwr.supercore.interceptors.http.runtime_version import RuntimeVersionHttpInterceptor

    client = ControlHttpClient.from_server_address(
        connection.address,
        connection.insecure,
        str(connection.root_certificates) if connection.root_certificates else None,
        interceptors=[RuntimeVersionHttpInterceptor(component_name="fedapps")],
    )
    try:
        return list(client.ListNodes(ListNodesRequest()).nodes_info)
    except (httpx.HTTPError, ValueError) as error:
        told = FlowerError.from_json(error.response.text) if isinstance(error, httpx.HTTPStatusError) else None
        raise DeployError(
            f"nodes of {connection.address}",
            expected="a list of them",
            got=f"{told.message} {told.public_details or ''}".strip() if told else f"{type(error).__name__}: {error}",
            do="check that a SuperLink of Flower 1.42 or newer listens there, and that this machine has the same version",
        ) from error
    finally:
        client.close()


def check_nodes(nodes: Sequence[NodeInfo], keys: Mapping[str, Path], connection: Connection) -> Iterator[Finding]:
    """Check that every node is registered and online.

    Args:
        nodes: What the SuperLink knows.
        keys: The public keys that it should know: name -> file.
        connection: The connection, for the cures.
    """
    unnamed = {node.public_key: node for node in nodes}
    for name, path in keys.items():
        public = public_key_to_bytes(load_ssh_public_key(path.read_bytes()))  # type: ignore[arg-type]
        yield _state_of(name, unnamed.pop(public, None), fingerprint(public), f" {connection.name}")
    for node in (node for node in unnamed.values() if node.status != UNREGISTERED):
        yield _state_of(node.name or f"node {node.node_id}", node, fingerprint(node.public_key), f" {connection.name}")
    if not nodes and not keys:
        yield DeployError(
            "nodes",
            expected="at least one registered",
            got="none",
            do=f"flwr supernode register NAME.pub {connection.name}",
        )


def _state_of(name: str, node: NodeInfo | None, key: str, connection: str) -> Finding:
    if node is None:
        return DeployError(
            f"{name}, key {key}",
            expected="a key that the SuperLink knows",
            got="one that is not registered",
            do=f"register it where runs are started: user/register.sh, or flwr supernode register {name}.pub{connection}",
        )
    if node.status == UNREGISTERED:
        return DeployError(
            f"{name}, key {key}",
            expected="a registered key",
            got="one that was unregistered, which is for good",
            do=f"for a node that comes back make a new key, fedapps deploy add DIR --node NAME; else remove {name}.pub from"
            " user/keys",
        )
    if node.status != ONLINE:
        got = f"{node.status} since {(node.last_deactivated_at or node.registered_at)[:19]}"
        return DeployError(f"{name}, key {key}", expected="online", got=got, do=_START)
    return f"{name}: online, key {key}, node id {node.node_id}"


def check_greeting(
    config: Mapping[str, Scalar], connection: Connection, environment: Mapping[str, str], python_path: Sequence[Path]
) -> Iterator[Finding]:
    """Start a run that greets the nodes only, and say what each would train on.

    Args:
        config: The settings of the run, resolved.
        connection: Where.
        environment: Variables for Flower's command line.
        python_path: As for `run_on_superlink`.
    """
    with tempfile.TemporaryDirectory(prefix="fedapps-check-") as folder:
        log_path = Path(folder, "log")
        try:
            outcome = run_on_superlink(
                config,
                connection=connection.name,
                python_path=python_path,
                environment=environment,
                log_path=log_path,
                modules=own_modules(config, python_path),
                components=Components(serverapp=GREETING),
            )
        except LaunchError as error:
            yield DeployError(f"handshake: {error}")
            return
        greeted = read_greeting(log_path.read_text(encoding="utf-8", errors="replace"))
    if outcome.status is not RunStatus.COMPLETED or greeted is None:
        yield DeployError(f"handshake on the server: {outcome.details or outcome.log_tail}")
        return
    yield from describe_greeting(greeted)


def read_greeting(log: str) -> dict[str, Any] | None:
    """Find what the ServerApp of `fedapps.server_apps.greeting` has logged; None if it has not."""
    for line in log.splitlines():
        _, mark, text = line.partition(MARK)
        if mark:
            return dict(json.JSONDecoder().raw_decode(text)[0])
    return None


def describe_greeting(greeted: Mapping[str, Any]) -> Iterator[Finding]:
    """Say what came of a handshake: each node's data, and each refusal.

    Args:
        greeted: The object that the ServerApp has logged.
    """
    here = {"fedapps": fedapps.__version__, **installed_versions()}
    there = greeted["versions"]
    yield "server: " + ", ".join(
        f"{name} {there[name]}" for name in ("fedapps", "flwr", "torch", "python") if name in there
    )
    for name in ("fedapps", "flwr"):
        if here[name] != there[name]:
            yield DeployError(
                "versions", expected=f"{name} {there[name]} as on the server", got=here[name], do=_SAME_VERSION
            )
    for node in greeted["nodes"]:
        name = node["label"] or f"node {node['id']}"
        if "refused" in node:
            yield DeployError(f"{name}: {_reason(node['refused'])}")
        else:
            known = node["facts"]["name"]
            yield f"{known or name}: {_told(node['facts'])}"
            if known and node["label"] and known != node["label"]:
                yield DeployError(
                    f"{node['label']}, key {node['key']}",
                    expected=f"name = '{node['label']}' in {NODE_CONFIG}, as its key was registered",
                    got=f"'{known}'",
                    do=f"correct {NODE_CONFIG} there, or unregister the key and register it under the other name",
                )
    if greeted["problem"]:
        # The refusals were told one by one.
        yield DeployError(f"start of the run: {greeted['problem'].partition(' Refused: ')[0]}")


def _reason(refused: str) -> str:
    """Take the message out of how Flower writes an exception."""
    found = re.fullmatch(r"<class '[\w.]+'>:<(['\"])(.*)\1>", refused, re.DOTALL)
    return found[2] if found else refused


def _told(facts: Mapping[str, Any]) -> str:
    """Describe what a node would train on."""
    parts = [f"{key} {shown(facts[key])}" for key in TOLD if facts.get(key) not in (None, "")]
    parts.append(f"of the examples {facts['num-examples']} to train on, the others held out")
    return ", ".join([*parts, f"on {facts['device']}", f"fedapps {facts['version']}"])
