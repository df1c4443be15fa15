"""``fedapps methods`` and ``fedapps tasks``: what there is."""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Annotated

import typer
from rich.table import Table

from fedapps.cli.common import plain_console
from fedapps.methods import METHODS
from fedapps.tasks import TASKS


class Format(StrEnum):
    """How a list is printed."""

    TABLE = "table"
    JSON = "json"


def methods(
    format_: Annotated[Format, typer.Option("--format", help="How to print the list.")] = Format.TABLE,
) -> None:
    """List the methods."""
    rows = [
        {
            "name": row.name, "title": row.title, "family": row.family, "tasks": ", ".join(row.task_kinds),
            "server": row.mixing,
            "travels down": row.travels_down, "travels up": row.travels_up, "client keeps": row.client_state,
            "paper": row.paper,
        }
        for row in METHODS
    ]  # fmt: skip
    _show_list(rows, format_)


def tasks(
    format_: Annotated[Format, typer.Option("--format", help="How to print the list.")] = Format.TABLE,
) -> None:
    """List the tasks."""
    rows = [
        {
            "name": row.name, "kind": str(row.kind), "about": row.about, "data": row.source, "licence": row.licence,
            "download": "yes" if row.download else "no",
        }
        for row in TASKS
    ]  # fmt: skip
    _show_list(rows, format_)


def _show_list(rows: list[dict[str, str]], format_: Format) -> None:
    if format_ is Format.JSON:
        print(json.dumps(rows, indent=1))
        return
    table = Table()
    for name in rows[0]:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*row.values())
    plain_console().print(table)
