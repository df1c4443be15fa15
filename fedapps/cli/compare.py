"""``fedapps compare``: several methods on the same task, partition and seeds."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from fedapps.cli import common
from fedapps.errors import SettingsError
from fedapps.results.summary import RunStatus
from fedapps.results.tables import to_rich
from fedapps.simulation import sweep
from fedapps.simulation.start import Engine, Start


def compare(
    methods: Annotated[str, typer.Option(help="Names of methods, separated by commas.")],
    task: common.TaskOption = None,
    clients: common.ClientsOption = 10,
    rounds: common.RoundsOption = None,
    seeds: Annotated[str, typer.Option(help="Seeds, separated by commas.")] = "0",
    lr_grid: Annotated[str, typer.Option(help="Learning rates to try for every method, separated by commas.")] = "",
    grid: Annotated[
        list[str] | None,
        typer.Option(
            help="KEY=V1,V2,... to try as well; METHOD.KEY is for one method. Repeatable.", metavar="KEY=V1,V2"
        ),
    ] = None,
    target: Annotated[float | None, typer.Option(help="Accuracy for the rounds-to-target column.")] = None,
    partition: common.PartitionOption = None,
    alpha: common.AlphaOption = None,
    config: common.ConfigOption = None,
    set_: common.SetOption = None,
    engine: Annotated[Engine, typer.Option(help="Where clients run.")] = Engine.INPROCESS,
    workers: common.WorkersOption = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Runs at the same time.  [default: cores in-process, else 1]")
    ] = None,
    device: common.DeviceOption = None,
    data_dir: common.DataOption = None,
    out: common.OutOption = None,
    resume: Annotated[
        Path | None, typer.Option(help="Folder of a comparison to go on with: its completed runs are kept.")
    ] = None,
) -> None:
    """Compare methods on the same task, partition and seeds, each tuned on the same grid.

    METHOD.KEY, in --config, --set and --grid, is for one method alone: --set ditto.local-steps=5.
    """
    options = {
        "task": task, "num-server-rounds": rounds, "partition": partition, "alpha": alpha, "device": device,
        "data-dir": data_dir,
    }  # fmt: skip
    with common.told() as console:
        how = Start(engine=engine, num_clients=clients, workers=workers, python_path=[Path.cwd()])
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        with Progress(*columns, console=console, transient=True) as progress:
            bar = progress.add_task("runs", total=None)

            def on_trial(trial: sweep.Trial, done: int, total: int) -> None:
                progress.update(bar, completed=done, total=total)
                score = "-" if trial.score is None else f"{trial.score:.4f} at round {trial.score_round}"
                line = f"{trial.method}  seed {trial.seed}  {trial.place}  {trial.status}  best validation {score}"
                console.print(line)

            result = sweep.compare(
                common.gather(options, config, set_),
                methods=_items(methods, "--methods", str),
                seeds=_items(seeds, "--seeds", int),
                grid=_grid(lr_grid, grid or []),
                how=how,
                root=out or common.DEFAULT_OUT,
                jobs=jobs or (len(os.sched_getaffinity(0)) if engine is Engine.INPROCESS else 1),
                target=target,
                on_trial=on_trial,
                resume=resume,
            )
        console.print(to_rich(result.table))
        if result.personal:
            console.print(to_rich(result.personal, "personal models on the clients' own test data"))
        for note in result.notes:
            console.print(common.styled("yellow", "note", f": {note}"))
        for name in ("compare.png", *(["gains.png"] if result.gains else []), "table.md", "compare.json"):
            console.print(f"{name:<13}{result.folder / name}", soft_wrap=True)
    if any(trial.status != RunStatus.COMPLETED for trial in result.trials if not trial.tuning):
        raise typer.Exit(1)


def _grid(lr_grid: str, further: list[str]) -> dict[str, list[Any]]:
    grid = {"lr": _items(lr_grid, "--lr-grid", float)} if lr_grid else {}
    for text in further:
        key, equals, values = text.partition("=")
        if not equals or key in grid:
            expected = "KEY=V1,V2,... with each key once"
            raise SettingsError(f"--grid {text!r}", expected=expected, got=repr(text))
        grid[key] = _items(values, f"--grid {key}", common.parse_value)
    return grid


def _items(text: str, option: str, kind: Callable[[str], Any]) -> list[Any]:
    try:
        values = [kind(part.strip()) for part in text.split(",") if part.strip()]
    except ValueError as error:
        raise SettingsError(option, expected="values separated by commas", got=repr(text), do=str(error)) from error
    if not values or len(set(values)) != len(values):
        raise SettingsError(option, expected="at least one value, each once", got=repr(text))
    return values
