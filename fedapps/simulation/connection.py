"""The connections to SuperLinks in Flower's configuration."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fedapps.errors import LaunchError


@dataclass(frozen=True)
class Connection:
    """How a SuperLink is reached.

    Attributes:
        name: What Flower's configuration calls it.
        address: Host and port.
        root_certificates: Certificate of the authority that signed the SuperLink's; None for those of the system.
        insecure: Whether it is reached without TLS.
    """

    name: str
    address: str
    root_certificates: Path | None
    insecure: bool


def flower_home(environment: Mapping[str, str]) -> Path:
    """Give the folder of Flower's configuration."""
    return Path(environment.get("FLWR_HOME") or Path.home() / ".flwr")


def read_connection(name: str, environment: Mapping[str, str]) -> Connection:
    """Read a connection to a SuperLink that runs already.

    Args:
        name: Its name in ``$FLWR_HOME/config.toml``; empty for the default one.
        environment: The variables that Flower's commands run with.

    Raises:
        LaunchError: There is no such connection.
    """
    path = flower_home(environment) / "config.toml"
    table: object = {}
    with suppress(FileNotFoundError):
        try:
            table = tomllib.loads(path.read_text(encoding="utf-8")).get("superlink")
        except (ValueError, RecursionError) as error:
            raise LaunchError(str(path), expected="TOML", got=str(error), do="correct the file") from error
    table = table if isinstance(table, dict) else {}
    remote = {key: entry for key, entry in table.items() if _is_remote(entry)}
    name = name or str(table.get("default", ""))
    if name not in remote:
        known = ", ".join(sorted(remote)) or "none with an address of its own"
        raise LaunchError(
            f"SuperLink connection '{name}'",
            expected=f"one of the connections in {path}",
            got=f"a name that is not among them ({known})",
            do=f"add [superlink.{name}] with the SuperLink's address to that file, or set FLWR_HOME to the folder that has it",
        )
    entry = remote[name]
    certificates = entry.get("root-certificates")
    return Connection(
        name,
        str(entry["address"]),
        Path(str(certificates)).expanduser() if certificates else None,
        entry.get("insecure") is True,
    )


def _is_remote(entry: object) -> bool:
    """Whether it names a SuperLink; ``:local:`` makes Flower start one that stays behind."""
    return isinstance(entry, dict) and not str(entry.get("address", ":")).startswith(":")
