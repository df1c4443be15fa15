"""``fedapps report``: run folders as tables and figures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fedapps.cli.common import told
from fedapps.results.personal import client_gains, client_table, personal_table
from fedapps.results.plots import plot_compare, plot_gains, plot_run
from fedapps.results.report import Run, compare_table, load_run, run_table
from fedapps.results.tables import to_csv, to_markdown, to_rich


def report(
    folders: Annotated[list[Path], typer.Argument(help="Run folders.", metavar="DIR...")],
    target: Annotated[float | None, typer.Option(help="Accuracy for the rounds-to-target column.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the tables and figures.")] = None,
) -> None:
    """Turn one or several run folders into a table and a figure."""
    with told() as console:
        runs = [load_run(path) for path in folders]
        rows = run_table(runs, target) if len(runs) == 1 else compare_table(runs, target)
        console.print(to_rich(rows))
        place = out or (folders[0] if len(runs) == 1 else Path())
        place.mkdir(parents=True, exist_ok=True)
        figure = place / ("plot.png" if len(runs) == 1 else "compare.png")
        if len(runs) == 1:
            plot_run(runs[0], figure)
        else:
            plot_compare(runs, figure, target)
        console.print(f"figure   {figure}", soft_wrap=True)
        if out is not None:
            (out / "table.md").write_text(to_markdown(rows), encoding="utf-8")
            (out / "table.csv").write_text(to_csv(rows), encoding="utf-8")
        _report_personal(console, runs, place, write=out is not None)


def _report_personal(console: Console, runs: list[Run], place: Path, *, write: bool) -> None:
    """Report personal models, if the runs have any: a table, their clients, and the gains over the reference methods."""
    rows = personal_table(runs)
    if not rows:
        return
    console.print(to_rich(rows, "personal models on the clients' own test data"))
    if write:
        (place / "personal.md").write_text(to_markdown(rows), encoding="utf-8")
        (place / "personal.csv").write_text(to_csv(rows), encoding="utf-8")
        (place / "clients.csv").write_text(to_csv(client_table(runs)), encoding="utf-8")
    gains = client_gains(runs)
    if gains:
        plot_gains(gains, place / "gains.png", quantity=rows[0].metric)
        console.print(f"gains    {place / 'gains.png'}", soft_wrap=True)
