"""``fedapps compare``: several methods on the same task, partition and seeds."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from fedapps.cli import common
from fedapps.errors import SettingsError
from fedapps.results.run_folder import RunFolder
from fedapps.results.summary import RunStatus
from fedapps.simulation import sweep
from fedapps.simulation.comparison import RECORD, Trial, read_record
from fedapps.simulation.start import Engine, Start

ALL_TIME = 1e9
"""Seconds before now that the time left is estimated from."""


def compare(
    methods: Annotated[str | None, typer.Option(help="Names of methods, separated by commas.")] = None,
    task: common.TaskOption = None,
    clients: Annotated[int | None, typer.Option(min=1, help="Number of clients.  [default: 10]")] = None,
    rounds: common.RoundsOption = None,
    seeds: Annotated[str | None, typer.Option(help="Seeds, separated by commas.  [default: 0]")] = None,
    lr_grid: Annotated[str, typer.Option(help="Short for --grid lr=...: learning rates to try for every method.")] = "",
    grid: Annotated[
        list[str] | None,
        typer.Option(
            help="KEY=V1,V2,... to try as well; METHOD.KEY is for one method. Repeatable.", metavar="KEY=V1,V2"
        ),
    ] = None,
    target: Annotated[
        float | None, typer.Option(help="Value to reach, of the task's own metric, for the rounds-to-target columns.")
    ] = None,
    partition: common.PartitionOption = None,
    alpha: common.AlphaOption = None,
    config: common.ConfigOption = None,
    set_: common.SetOption = None,
    engine: Annotated[Engine | None, typer.Option(help="Where clients run.  [default: inprocess]")] = None,
    workers: common.WorkersOption = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Runs at the same time.  [default: cores in-process, else 1]")
    ] = None,
    device: common.DeviceOption = None,
    data_dir: common.DataOption = None,
    out: common.OutOption = None,
    resume: Annotated[
        Path | None,
        typer.Option(help="Folder of a comparison to go on with, or to widen; what is not given is as before."),
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
        before = read_record(resume) if resume else {}
        values = _settings_of(before, resume) | common.gather(options, config, set_)
        names = _items(methods, "--methods", str) if methods else before.get("methods")
        if not names:
            raise SettingsError("--methods", expected="names of methods, separated by commas", got="none")
        where = engine or Engine(before.get("engine", Engine.INPROCESS))
        how = Start(
            engine=where, num_clients=clients or before.get("clients", 10), workers=workers, python_path=[Path.cwd()]
        )
        columns = (
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            TextColumn("left"), TimeRemainingColumn(),
        )  # fmt: skip
        # The time left follows from all rounds so far: single ones differ, by method and by what else runs.
        with Progress(*columns, console=console, transient=True, speed_estimate_period=ALL_TIME) as progress:
            bar = progress.add_task("rounds", total=None)

            def on_trial(trial: Trial, done: int, total: int) -> None:
                progress.update(bar, description=f"runs {done}/{total}, rounds")
                score = "-" if trial.score is None else f"{trial.score:.4f} at round {trial.score_round}"
                line = f"{trial.method}  seed {trial.seed}  {trial.place}  {trial.status}  best validation {score}"
                console.print(line, soft_wrap=True)

            def on_rounds(done: int, total: int) -> None:
                progress.update(bar, completed=done, total=total)

            result = sweep.compare(
                values,
                methods=names,
                seeds=_items(seeds, "--seeds", int) if seeds else before.get("seeds", [0]),
                grid=_grid(lr_grid, grid or []) or before.get("grid", {}),
                how=how,
                root=out or common.DEFAULT_OUT,
                jobs=jobs or (len(os.sched_getaffinity(0)) if where is Engine.INPROCESS else 1),
                target=before.get("target") if target is None else target,
                on_trial=on_trial,
                on_rounds=on_rounds,
                resume=resume,
            )
        for title, rows in result.sections.items():
            common.show_table(console, rows, title)
        if result.personal:
            common.show_table(
                console, [row.cells() for row in result.personal], "personal models on the clients' own test data"
            )
        console.print(result.data)
        for note in result.notes:
            console.print(common.styled("yellow", "note", f": {note}"))
        for name in ("compare.png", "gains.png", "table.md", RECORD):
            if (result.folder / name).exists():
                console.print(f"{name:<13}{result.folder / name}", soft_wrap=True)
    if any(trial.status != RunStatus.COMPLETED for trial in result.trials if not trial.tuning):
        raise typer.Exit(1)


def _settings_of(record: dict[str, Any], folder: Path | None) -> dict[str, Any]:
    """Give the settings that a comparison was started with; where the data lies on this machine, its runs know."""
    settings = dict(record.get("settings", {}))
    for path in sorted((folder / "runs").glob("*/settings.toml"))[:1] if folder else []:
        settings["data-dir"] = RunFolder.open(path.parent).read_settings().get("data-dir", "")
    return settings


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
