"""``fedapps deploy``: set up a federation on real machines, and find out what is wrong with one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fedapps.cli import common
from fedapps.deploy import check as checks
from fedapps.deploy import folder as folders
from fedapps.deploy.certificates import names_of
from fedapps.errors import SettingsError

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


@group.command()
def check(
    connection: Annotated[
        str, typer.Argument(metavar="[CONNECTION]", help="Where runs are started: name of the SuperLink connection.")
    ] = "",
    folder: Annotated[
        Path | None, typer.Option(help="On another machine: its folder, that of the server or of a node.")
    ] = None,
    method: Annotated[
        str | None, typer.Option(help="Method of the run to come; with it or --task, nodes are greeted.")
    ] = None,
    task: common.TaskOption = None,
    config: common.ConfigOption = None,
    set_: common.SetOption = None,
) -> None:
    """Say what is wrong with a federation, and the cure: versions, certificates, clock, keys, nodes, and their data."""
    with common.told() as console:
        if connection and folder is not None:
            raise SettingsError(
                "fedapps deploy check",
                expected="a connection or a folder",
                got=f"'{connection}' and {folder}",
                do="give the connection where runs are started, and --folder on the other machines",
            )
        asks = any((method, task, config, set_))
        values = common.gather({"method": method, "task": task}, config, set_) if asks else None
        if folder is not None:
            findings = checks.check_folder(folder, values)
        else:
            findings = checks.check_connection(connection, values, python_path=[Path.cwd()])
        faults = 0
        for finding in findings:
            if isinstance(finding, str):
                console.print(common.styled("green", "ok", f"       {finding}"), soft_wrap=True)
            else:
                faults += 1
                console.print(common.styled("bold red", "problem", f"  {_one_line(str(finding))}"), soft_wrap=True)
    if faults:
        raise typer.Exit(1)


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _show_next(console: Console, federation: folders.Federation) -> None:
    console.print(
        f"federation {federation.connection}: SuperLink {federation.address}, nodes {', '.join(federation.nodes) or 'none'}"
    )
    console.print(f"The steps from here are in {federation.folder / 'README.md'}")
