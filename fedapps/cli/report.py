"""``fedapps report``: run folders as tables and figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fedapps.cli.common import show_table, styled, told
from fedapps.results.personal import client_gains, client_table, personal_table
from fedapps.results.plots import plot_compare, plot_gains, plot_run
from fedapps.results.report import Run, compare_sections, compare_table, load_run, remarks, run_table
from fedapps.results.tables import Record, to_csv, to_json_rows, to_markdown
from fedapps.simulation.comparison import RECORD, read_record


class Format(StrEnum):
    """How a report is printed."""

    TABLE = "table"
    MARKDOWN = "markdown"
    CSV = "csv"
    JSON = "json"


_FOR_PROGRAMS: Mapping[Format, Callable[[Sequence[Record]], str]] = {Format.CSV: to_csv, Format.JSON: to_json_rows}


def report(
    folders: Annotated[
        list[Path],
        typer.Argument(help="Run folders; a comparison's folder stands for its chosen runs.", metavar="DIR..."),
    ],
    target: Annotated[
        float | None, typer.Option(help="Value to reach, of the task's own metric, for the rounds-to-target columns.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the tables and figures.")] = None,
    format_: Annotated[
        Format, typer.Option("--format", help="How to print; all but table print the table and nothing else.")
    ] = Format.TABLE,
) -> None:
    """Turn one or several run folders into a table and a figure."""
    with told() as console:
        runs = [run for path in folders for run in _runs_in(path)]
        one = run_table(runs, target) if len(runs) == 1 else []
        several = compare_table(runs, target) if len(runs) > 1 else []
        sections = compare_sections(several) if several else {"": [row.cells() for row in one]}
        records = [row.data() for row in (several or one)]
        markdown = "\n".join(
            f"{title}:\n\n{to_markdown(rows)}".removeprefix(":\n\n") for title, rows in sections.items()
        )
        notes = remarks(runs)
        markdown += "".join(f"\nNote: {note}.\n" for note in notes)
        if format_ in _FOR_PROGRAMS:
            print(_FOR_PROGRAMS[format_](records), end="")
        elif format_ is Format.MARKDOWN:
            print(markdown, end="")
        else:
            for title, rows in sections.items():
                show_table(console, rows, title or None)
            for note in notes:
                console.print(styled("yellow", "note", f": {note}"))
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            (out / "table.md").write_text(markdown, encoding="utf-8")
            (out / "table.csv").write_text(to_csv(records), encoding="utf-8")
        if out is None and format_ is not Format.TABLE:
            return
        told_console = console if format_ is Format.TABLE else Console(stderr=True)
        place = out or (folders[0] if len(folders) == 1 else Path())
        figure = place / ("plot.png" if len(runs) == 1 else "compare.png")
        if len(runs) == 1:
            plot_run(runs[0], figure)
        else:
            plot_compare(runs, figure, target)
        told_console.print(f"figure   {figure}", soft_wrap=True)
        _report_personal(told_console, runs, place, write=out is not None, show=format_ is Format.TABLE)


def _runs_in(folder: Path) -> list[Run]:
    if not (folder / RECORD).exists():
        return [load_run(folder)]
    record = read_record(folder)
    chosen = [t for t in record["trials"] if t["folder"] and t["point"] == record["chosen"].get(t["method"])]
    return [load_run(folder / trial["folder"]) for trial in chosen]


def _report_personal(console: Console, runs: list[Run], place: Path, *, write: bool, show: bool) -> None:
    """Report personal models, if the runs have any: a table, their clients, and the gains over the reference methods."""
    rows = personal_table(runs)
    if not rows:
        return
    if show:
        show_table(console, [row.cells() for row in rows], "personal models on the clients' own test data")
    if write:
        (place / "personal.md").write_text(to_markdown([row.cells() for row in rows]), encoding="utf-8")
        (place / "personal.csv").write_text(to_csv([row.data() for row in rows]), encoding="utf-8")
        (place / "clients.csv").write_text(to_csv([row.data() for row in client_table(runs)]), encoding="utf-8")
    gains = client_gains(runs)
    if gains:
        plot_gains(gains, place / "gains.png", quantity=rows[0].metric)
        console.print(f"gains    {place / 'gains.png'}", soft_wrap=True)
