"""The command line: ``fedapps run``, ``compare``, ``advise``, ``methods``, ``tasks``, ``report``, ``replay`` and more."""

from __future__ import annotations

import json
import os
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

import fedapps
from fedapps.cli_journal import add_journal_commands
from fedapps.cli_models import add_models_commands
from fedapps.errors import FedAppsError, SettingsError
from fedapps.methods import METHODS
from fedapps.results.personal import client_gains, client_table, personal_table
from fedapps.results.plots import plot_compare, plot_gains, plot_run
from fedapps.results.report import Run, compare_table, load_run, run_table
from fedapps.results.run_folder import RunFolder
from fedapps.results.settings_file import from_toml
from fedapps.results.summary import RunStatus
from fedapps.results.tables import RunRow, to_csv, to_markdown, to_rich
from fedapps.results.units import human_bytes, human_seconds
from fedapps.settings import default_config, toml_float
from fedapps.simulation.advise import advise as advise_fedclup
from fedapps.simulation.start import LOG, Ended, Engine, Start, start
from fedapps.simulation.sweep import Trial
from fedapps.simulation.sweep import compare as run_comparison
from fedapps.tasks import list_tasks
from fedapps.tasks.language.published import MODELS_VARIABLE, models_folder

cli = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Second-order, scalar-only zeroth-order and personalised federated learning on Flower.",
)

DEFAULT_OUT = Path("runs")

SHOWN_METRICS = (
    ("validation-accuracy", "validation"), ("test-accuracy", "test"), ("test-loss", "test loss"),
    ("test-statistical-error", "statistical error"), ("client-personal-test-accuracy", "personal models"),
    ("client-personal-test-accuracy-worst-decile", "their worst tenth"),
    ("client-global-test-accuracy", "global model on the same"),
    ("test-f1", "F1"), ("test-exact-match", "exact match"),
    ("client-personal-test-statistical-error", "statistical error of personal models"),
    ("client-global-test-statistical-error", "of the global model"),
)  # fmt: skip
"""Metrics that a line of an evaluation shows, and what it calls them."""


class Format(StrEnum):
    """How a list is printed."""

    TABLE = "table"
    JSON = "json"


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


# Options that `run` and `compare` share.
TaskOption = Annotated[str | None, typer.Option(help="Name of a task, or my_pkg.my_mod:MyTask.")]
ClientsOption = Annotated[int, typer.Option(min=1, help="Number of clients.")]
RoundsOption = Annotated[int | None, typer.Option(min=1, help="Rounds in all.")]
PartitionOption = Annotated[str | None, typer.Option(help="dirichlet, iid, classes or column.")]
AlphaOption = Annotated[float | None, typer.Option(help="Concentration of the Dirichlet split.")]
DataOption = Annotated[Path | None, typer.Option(help="Folder with data files; default $FEDAPPS_DATA.")]
DeviceOption = Annotated[str | None, typer.Option(help="auto, cpu, cuda or cuda:<index>.")]
ConfigOption = Annotated[list[Path] | None, typer.Option(help="TOML file with settings; later ones win.")]
SetOption = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any setting, in TOML syntax.")]
OutOption = Annotated[Path | None, typer.Option(help="Folder of all runs.  [default: runs]")]
WorkersOption = Annotated[
    int | None, typer.Option(min=0, help="Worker processes; default: one a core, in-process none.")
]


@cli.command()
def run(
    method: Annotated[str | None, typer.Option(help="Name of a method, or my_pkg.my_mod:METHOD.")] = None,
    task: TaskOption = None,
    clients: ClientsOption = 10,
    rounds: RoundsOption = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of every random draw.")] = None,
    partition: PartitionOption = None,
    alpha: AlphaOption = None,
    config: ConfigOption = None,
    set_: SetOption = None,
    engine: Annotated[Engine, typer.Option(help="Where clients run.")] = Engine.SIMULATION,
    superlink: Annotated[str, typer.Option(help="Name of a SuperLink connection: run there instead.")] = "",
    workers: WorkersOption = None,
    device: DeviceOption = None,
    data_dir: DataOption = None,
    out: OutOption = None,
    resume: Annotated[Path | None, typer.Option(help="Run folder to go on with; --rounds is the total.")] = None,
) -> None:
    """Train with one method, and write a run folder with metrics, figure and model."""
    options = {
        "method": method, "task": task, "num-server-rounds": rounds, "seed": seed, "partition": partition,
        "alpha": alpha, "device": device, "data-dir": str(data_dir.absolute()) if data_dir else None,
    }  # fmt: skip
    console = Console()
    with _told(console):
        values = _gather(options, config, set_, resume)
        if resume is not None:
            clients = _clients_of(resume, clients)
        how = Start(engine=engine, num_clients=clients, workers=workers, superlink=superlink, python_path=[Path.cwd()])
        root = (out or DEFAULT_OUT) if not superlink or out else None
        with _progress(console, values) as on_row:
            ended = start(values, how, root, on_row)
        _show_run(console, ended)
    if ended.status is not RunStatus.COMPLETED:
        raise typer.Exit(1)


def _gather(
    options: Mapping[str, Any], config: list[Path] | None, set_: list[str] | None, resume: Path | None
) -> dict[str, Any]:
    values: dict[str, Any] = {}
    if resume is not None:
        values |= RunFolder.open(resume).read_settings()
    for path in config or []:
        values |= _read_preset(path)
    for assignment in set_ or []:
        values |= _parse_assignment(assignment)
    values |= {key: value for key, value in options.items() if value is not None}
    if resume is not None:
        values |= {"run-dir": str(resume.absolute()), "resume": True}
    else:
        values |= {"run-dir": "", "resume": False}
    if values.get("data-dir", "") == "" and os.environ.get("FEDAPPS_DATA"):
        # The engines start other processes, on this machine, that may not get this one's environment.
        values["data-dir"] = str(Path(os.environ["FEDAPPS_DATA"]).absolute())
    if os.environ.get(MODELS_VARIABLE):
        # And they work in other folders.
        os.environ[MODELS_VARIABLE] = str(models_folder().absolute())
    return values


def _read_preset(path: Path) -> dict[str, Any]:
    try:
        return dict(from_toml(path.read_text(encoding="utf-8")))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise SettingsError(
            f"--config {path}", expected="a TOML file with settings", got=str(error), do="check the path"
        ) from error


def _parse_assignment(text: str) -> dict[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise SettingsError(f"--set {text!r}", expected="KEY=VALUE", got=repr(text), do="for example lr=0.1")
    return {key.strip(): _parse_value(value)}


def _parse_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}", parse_float=toml_float)["value"]
    except tomllib.TOMLDecodeError:
        return text  # A bare word is a string: --set partition=iid


def _clients_of(resume: Path, clients: int) -> int:
    return RunFolder.open(resume).load_checkpoint().num_partitions or clients


@contextmanager
def _told(console: Console) -> Iterator[None]:
    """Print the project's own errors, and those of files, as one message, and end with exit code 1."""
    try:
        yield
    except (FedAppsError, OSError) as error:
        console.print(f"[bold red]{type(error).__name__}[/]: {error}", highlight=False, markup=True)
        raise typer.Exit(1) from error
    except KeyboardInterrupt:
        console.print("[yellow]stopped[/]; go on with --resume")
        raise typer.Exit(130) from None


@contextmanager
def _progress(console: Console, values: Mapping[str, Any]) -> Iterator[Callable[[dict[str, Any]], None]]:
    total = int(values.get("num-server-rounds", default_config({})["num-server-rounds"]))
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
                console.print(_round_line(row, train), highlight=False, soft_wrap=True)
            elif any(key in row for key, _ in SHOWN_METRICS):
                console.print(_round_line(row, {}), highlight=False, soft_wrap=True)

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
        console.print(f"[bold red]{ended.status}[/]: {ended.reason}", highlight=False)
    if ended.folder is None:
        console.print("The results are on the server; its log says where.")
        return
    if (ended.folder / "settings.toml").exists():
        loaded = load_run(ended.folder)
        console.print(_vertical(run_table([loaded])[0]))
        if loaded.rows:
            plot_run(loaded, ended.folder / "plot.png")
            console.print(f"figure   {ended.folder / 'plot.png'}", highlight=False, soft_wrap=True)
        if (ended.folder / "model.safetensors").exists():
            console.print(f"model    {ended.folder / 'model.safetensors'}", highlight=False, soft_wrap=True)
    console.print(f"log      {ended.folder / LOG}", highlight=False, soft_wrap=True)
    console.print(f"folder   {ended.folder}", highlight=False, soft_wrap=True)


def _vertical(row: RunRow) -> Table:
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in row.cells().items():
        table.add_row(name, value)
    return table


@cli.command()
def compare(
    methods: Annotated[str, typer.Option(help="Names of methods, separated by commas.")],
    task: TaskOption = None,
    clients: ClientsOption = 10,
    rounds: RoundsOption = None,
    seeds: Annotated[str, typer.Option(help="Seeds, separated by commas.")] = "0",
    lr_grid: Annotated[str, typer.Option(help="Learning rates to try for every method, separated by commas.")] = "",
    grid: Annotated[
        list[str] | None,
        typer.Option(
            help="KEY=V1,V2,... to try as well; METHOD.KEY is for one method. Repeatable.", metavar="KEY=V1,V2"
        ),
    ] = None,
    target: Annotated[float | None, typer.Option(help="Accuracy for the rounds-to-target column.")] = None,
    partition: PartitionOption = None,
    alpha: AlphaOption = None,
    config: ConfigOption = None,
    set_: SetOption = None,
    engine: Annotated[Engine, typer.Option(help="Where clients run.")] = Engine.INPROCESS,
    workers: WorkersOption = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Runs at the same time.  [default: cores in-process, else 1]")
    ] = None,
    device: DeviceOption = None,
    data_dir: DataOption = None,
    out: OutOption = None,
    resume: Annotated[
        Path | None, typer.Option(help="Folder of a comparison to go on with: its completed runs are kept.")
    ] = None,
) -> None:
    """Compare methods on the same task, partition and seeds, each tuned on the same grid.

    METHOD.KEY, in --config, --set and --grid, is for one method alone: --set ditto.local-steps=5.
    """
    options = {
        "task": task, "num-server-rounds": rounds, "partition": partition, "alpha": alpha, "device": device,
        "data-dir": str(data_dir.absolute()) if data_dir else None,
    }  # fmt: skip
    console = Console()
    with _told(console):
        how = Start(engine=engine, num_clients=clients, workers=workers, python_path=[Path.cwd()])
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        with Progress(*columns, console=console, transient=True) as progress:
            bar = progress.add_task("runs", total=None)

            def on_trial(trial: Trial, done: int, total: int) -> None:
                progress.update(bar, completed=done, total=total)
                score = "-" if trial.score is None else f"{trial.score:.4f} at round {trial.score_round}"
                line = f"{trial.method}  seed {trial.seed}  {trial.place}  {trial.status}  best validation {score}"
                console.print(line, highlight=False)

            result = run_comparison(
                _gather(options, config, set_, None),
                methods=_items(methods, "--methods", str),
                seeds=_items(seeds, "--seeds", int),
                grid=_grid(lr_grid, grid or []),
                how=how,
                root=out or DEFAULT_OUT,
                jobs=jobs or (len(os.sched_getaffinity(0)) if engine is Engine.INPROCESS else 1),
                target=target,
                on_trial=on_trial,
                resume=resume,
            )
        console.print(to_rich(result.table))
        if result.personal:
            console.print(to_rich(result.personal, "personal models on the clients' own test data"))
        for note in result.notes:
            console.print(f"[yellow]note[/]: {note}", highlight=False)
        for name in ("compare.png", *(["gains.png"] if result.gains else []), "table.md", "compare.json"):
            console.print(f"{name:<13}{result.folder / name}", highlight=False, soft_wrap=True)
    if any(trial.status != RunStatus.COMPLETED for trial in result.trials if not trial.tuning):
        raise typer.Exit(1)


def _grid(lr_grid: str, further: list[str]) -> dict[str, list[Any]]:
    grid = {"lr": _items(lr_grid, "--lr-grid", float)} if lr_grid else {}
    for text in further:
        key, equals, values = text.partition("=")
        if not equals or key in grid:
            expected = "KEY=V1,V2,... with each key once"
            raise SettingsError(f"--grid {text!r}", expected=expected, got=repr(text))
        grid[key] = _items(values, f"--grid {key}", _parse_value)
    return grid


def _items(text: str, option: str, kind: Callable[[str], Any]) -> list[Any]:
    try:
        values = [kind(part.strip()) for part in text.split(",") if part.strip()]
    except ValueError as error:
        raise SettingsError(option, expected="values separated by commas", got=repr(text), do=str(error)) from error
    if not values or len(set(values)) != len(values):
        raise SettingsError(option, expected="at least one value, each once", got=repr(text))
    return values


@cli.command()
def advise(
    task: TaskOption = None,
    clients: ClientsOption = 10,
    partition: PartitionOption = None,
    alpha: AlphaOption = None,
    config: ConfigOption = None,
    set_: SetOption = None,
    device: DeviceOption = None,
    data_dir: DataOption = None,
) -> None:
    """Say what FedCLUP should be set to on a task, from one cheap round of local fits."""
    options = {
        "task": task, "partition": partition, "alpha": alpha, "device": device,
        "data-dir": str(data_dir.absolute()) if data_dir else None,
    }  # fmt: skip
    console = Console()
    with _told(console):
        values = _gather(options, config, set_, None)
        advice = advise_fedclup(values, clients)
    for line in advice.lines():
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    if advice.report.decided:
        console.print(f"\n{advice.command(values)}", highlight=False, markup=False, soft_wrap=True)


@cli.command()
def methods(
    format_: Annotated[Format, typer.Option("--format", help="How to print the list.")] = Format.TABLE,
) -> None:
    """List the methods."""
    rows = [
        {
            "name": row.name, "title": row.title, "family": row.family, "server": row.mixing,
            "travels down": row.travels_down, "travels up": row.travels_up, "client keeps": row.client_state,
            "paper": row.paper,
        }
        for row in METHODS
    ]  # fmt: skip
    _show_list(rows, format_)


@cli.command()
def tasks(
    format_: Annotated[Format, typer.Option("--format", help="How to print the list.")] = Format.TABLE,
) -> None:
    """List the tasks."""
    rows = [
        {
            "name": row.name, "kind": str(row.kind), "about": row.about, "data": row.source, "licence": row.licence,
            "download": "yes" if row.download else "no",
        }
        for row in list_tasks()
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
    Console().print(table)


@cli.command()
def report(
    folders: Annotated[list[Path], typer.Argument(help="Run folders.", metavar="DIR...")],
    target: Annotated[float | None, typer.Option(help="Accuracy for the rounds-to-target column.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the tables and figures.")] = None,
) -> None:
    """Turn one or several run folders into a table and a figure."""
    console = Console()
    with _told(console):
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
        console.print(f"figure   {figure}", highlight=False, soft_wrap=True)
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
        console.print(f"gains    {place / 'gains.png'}", highlight=False, soft_wrap=True)


add_journal_commands(cli, _told)
add_models_commands(cli, _told)


def main() -> None:
    """Run the command line."""
    sys.path.insert(0, str(Path.cwd()))  # Tasks and methods of one's own are imported from here.
    cli()
