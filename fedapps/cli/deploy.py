"""``fedapps deploy``: set up a federation on real machines, and find out what is wrong with one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fedapps.cli import common
from fedapps.deploy import folder as folders
from fedapps.deploy.certificates import names_of

group = typer.Typer(no_args_is_help=True, help="Set up a federation on real machines, and check it.")

FolderArgument = Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the federation.")]
HostOption = Annotated[
    list[str] | None, typer.Option(metavar="NAME", help="DNS name or address of the SuperLink; repeat for more.")
]
NodeOption = Annotated[list[str] | None, typer.Option(metavar="NAME", help="Name of a node; repeat for more.")]


@group.command()
def init(
    folder: FolderArgument,
    host: HostOption = None,
    node: NodeOption = None,
    nodes: Annotated[int, typer.Option(min=0, help="So many nodes named node-1, node-2, ... besides.")] = 0,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the SuperLink.")] = 8443,
) -> None:
    """Make certificates, keys, configuration and start scripts, in one folder for each machine."""
    with common.told() as console:
        names = [*(node or []), *(f"node-{k}" for k in range(1, nodes + 1))]
        federation = folders.init(folder, host or [], names, port)
        _show_next(console, federation)


@group.command()
def add(folder: FolderArgument, node: NodeOption = None) -> None:
    """Add nodes to a federation; what is there stays as it is."""
    with common.told() as console:
        federation = folders.add_nodes(folders.Federation.open(folder), node or [])
        _show_next(console, federation)


@group.command()
def renew(folder: FolderArgument, host: HostOption = None) -> None:
    """Sign a new certificate for the SuperLink, with its old names or new ones."""
    with common.told() as console:
        federation = folders.Federation.open(folder)
        certificate = folders.renew(federation, host or [])
        path = federation.folder / "server" / folders.SERVER_CERTIFICATE
        console.print(
            f"{path}: for {', '.join(names_of(certificate))}, until {certificate.not_valid_after_utc:%Y-%m-%d}"
        )
        console.print("Copy it to the SuperLink's machine and restart the SuperLink.")


def _show_next(console: Console, federation: folders.Federation) -> None:
    console.print(
        f"federation {federation.connection}: SuperLink {federation.address}, nodes {', '.join(federation.nodes) or 'none'}"
    )
    console.print(f"The steps from here are in {federation.folder / 'README.md'}")
