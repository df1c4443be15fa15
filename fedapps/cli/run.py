"""``fedapps run``: train with one method, a line a round."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from fedapps.cli import common
from fedapps.deploy.check import faults_of_link
from fedapps.errors import LaunchError, SettingsError
from fedapps.methods import resolve_settings
from fedapps.results.plots import plot_run
from fedapps.results.report import load_run, run_table
from fedapps.results.run_folder import RunFolder
from fedapps.results.summary import RunStatus
from fedapps.results.tables import RunRow
from fedapps.results.units import human_bytes, human_seconds
from fedapps.simulation.start import COLLECT_MB, LOG, Ended, Engine, Start, start

SHOWN_METRICS = (
    ("validation-accuracy", "validation"), ("test-accuracy", "test"), ("test-loss", "test loss"),
    ("test-statistical-error", "statistical error"), ("client-personal-test-accuracy", "personal models"),
    ("client-personal-test-accuracy-worst-decile", "their worst tenth"),
    ("client-global-test-accuracy", "global model on the same"),
    ("client-validation-accuracy-weighted", "clients' validation"), ("client-test-accuracy-weighted", "clients' test"),
    ("test-f1", "F1"), ("test-exact-match", "exact match"),
    ("client-personal-test-statistical-error", "statistical error of personal models"),
    ("client-global-test-statistical-error", "of the global model"),
)  # fmt: skip
"""Metrics that a line of an evaluation shows, and what it calls them."""


def run(
    method: Annotated[str | None, typer.Option(help="Name of a method, or my_pkg.my_mod:METHOD.")] = None,
    task: common.TaskOption = None,
    clients: Annotated[int | None, typer.Option(min=1, help="Number of clients.  [default: 10]")] = None,
    rounds: common.RoundsOption = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of every random draw.")] = None,
    partition: common.PartitionOption = None,
    alpha: common.AlphaOption = None,
    config: common.ConfigOption = None,
    set_: common.SetOption = None,
    engine: Annotated[Engine, typer.Option(help="Where clients run.")] = Engine.SIMULATION,
    superlink: Annotated[str, typer.Option(help="Name of a SuperLink connection: run there instead.")] = "",
    workers: common.WorkersOption = None,
    device: common.DeviceOption = None,
    data_dir: common.DataOption = None,
    out: common.OutOption = None,
    resume: Annotated[Path | None, typer.Option(help="Run folder to go on with; --rounds is the total.")] = None,
    accept_changes: Annotated[
        bool, typer.Option("--accept-changes", help="Go on although settings, version, data or journal have changed.")
    ] = False,
) -> None:
    """Train with one method, and write a run folder with metrics, figure and model."""
    options = {
        "method": method, "task": task, "num-server-rounds": rounds, "seed": seed, "partition": partition,
        "alpha": alpha, "device": device, "data-dir": data_dir, "accept-changes": accept_changes,
    }  # fmt: skip
    with common.told() as console:
        values = common.gather(options, config, set_, resume)
        num_clients = _num_clients(clients, None if superlink else resume)
        how = Start(
            engine=engine, num_clients=num_clients, workers=workers, superlink=superlink, python_path=[Path.cwd()]
        )
        stays = superlink and not out and values.get("collect-mb", COLLECT_MB) == 0
        root = None if stays else out or common.DEFAULT_OUT
        with _progress(console, values) as on_row:
            try:
                ended = start(values, how, root, on_row)
            except LaunchError as error:
                raise LaunchError("\n".join([str(error), *faults_of_link(superlink)])) from error
        _show_run(console, ended)
    if ended.status is not RunStatus.COMPLETED:
        raise typer.Exit(1)


def _num_clients(given: int | None, resume: Path | None) -> int:
    before = None if resume is None else RunFolder.open(resume).load_checkpoint(arrays=False).num_partitions
    if given and before and given != before:
        do = "leave --clients out: the checkpoint knows it"
        raise SettingsError(f"--clients at the resume of {resume}", expected=str(before), got=str(given), do=do)
    return given or before or 10


@contextmanager
def _progress(console: Console, values: Mapping[str, Any]) -> Iterator[Callable[[dict[str, Any]], None]]:
    total = resolve_settings(values).num_server_rounds
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        TextColumn("left"), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("starting", total=total)
        last: dict[str, Any] = {}

        def on_row(row: dict[str, Any]) -> None:
            nonlocal last
            if row["phase"] == "train":
                last = row
                progress.update(bar, description="rounds", completed=row["round"])
                for partition, reason in row["refused"].items():
                    console.print(f"round {row['round']}, client {partition}: {_last_line(reason)}", style="yellow")
            elif row["phase"] == "evaluate":
                train = last if last.get("round") == row["round"] else {}
                console.print(_round_line(row, train), soft_wrap=True)
            elif any(key in row for key, _ in SHOWN_METRICS):
                console.print(_round_line(row, {}), soft_wrap=True)

        yield on_row


def _round_line(row: Mapping[str, Any], train: Mapping[str, Any]) -> str:
    parts = [f"round {row['round']:>3}"]
    parts += [f"{name} {float(row[key]):.4f}" for key, name in SHOWN_METRICS if key in row]
    if train:
        parts.append(f"{len(train['folded'])}/{len(train['sampled'])} clients")
        parts.append(f"down {human_bytes(train['payload-down'])}, up {human_bytes(train['payload-up'])}")
        parts.append(human_seconds(train["seconds"]))
    return "  ".join(parts)


def _last_line(text: str) -> str:
    return text.strip().splitlines()[-1] if text.strip() else "no reason given"


def _show_run(console: Console, ended: Ended) -> None:
    if ended.status is not RunStatus.COMPLETED:
        console.print(common.styled("bold red", str(ended.status), f": {ended.reason}"), soft_wrap=True)
    if ended.note:
        console.print(common.styled("yellow", "note", f": {ended.note}"), soft_wrap=True)
    if ended.folder is None:
        console.print("The results are on the server; its log says where.")
        return
    loaded = load_run(ended.folder) if (ended.folder / "settings.toml").exists() else None
    if loaded is not None and loaded.rows:  # Else it was refused before anything was measured.
        console.print(_vertical(run_table([loaded])[0]))
        plot_run(loaded, ended.folder / "plot.png")
        console.print(f"figure   {ended.folder / 'plot.png'}", soft_wrap=True)
        if (ended.folder / "model.safetensors").exists():
            console.print(f"model    {ended.folder / 'model.safetensors'}", soft_wrap=True)
        console.print(f"folder   {ended.folder}", soft_wrap=True)
    console.print(f"log      {ended.folder / LOG}", soft_wrap=True)


def _vertical(row: RunRow) -> Table:
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in row.cells().items():
        table.add_row(name, value)
    return table
