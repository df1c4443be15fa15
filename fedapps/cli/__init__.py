"""The command line: ``fedapps run``, ``compare``, ``advise``, ``methods``, ``tasks``, ``report``, ``replay`` and more."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

import fedapps
from fedapps.cli import advise, compare, deploy, init, journal, lists, models, report, run

cli = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Second-order, scalar-only zeroth-order and personalised federated learning on Flower.",
)


def _show_version(value: bool) -> None:
    if value:
        print(f"fedapps {fedapps.__version__}")
        raise typer.Exit


@cli.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Second-order, scalar-only zeroth-order and personalised federated learning on Flower."""


for _command in (
    run.run, compare.compare, advise.advise, lists.methods, lists.tasks, report.report, journal.replay, init.init,
):  # fmt: skip
    cli.command()(_command)
cli.add_typer(deploy.group, name="deploy")
cli.add_typer(journal.group, name="journal")
cli.add_typer(models.group, name="models")


def main() -> None:
    """Run the command line."""
    sys.path.insert(0, str(Path.cwd()))  # Tasks and methods of one's own are imported from here.
    cli()
