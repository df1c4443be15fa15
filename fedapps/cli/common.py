"""What several commands share: their options, the settings behind these, and how an error is printed."""

from __future__ import annotations

import os
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from fedapps.errors import FedAppsError, SettingsError
from fedapps.results.run_folder import RunFolder
from fedapps.results.settings_file import from_toml
from fedapps.results.storage import UNREADABLE, fault
from fedapps.results.tables import Cells, narrow_tables
from fedapps.settings import toml_float
from fedapps.tasks.language.published import MODELS_VARIABLE, models_folder

DEFAULT_OUT = Path(os.environ.get("FEDAPPS_RUNS") or "runs")
"""Folder of all runs where ``--out`` is not given."""

OPTIONS = {
    "run-dir": "--out FOLDER, in which every run gets a folder of its own, or --resume FOLDER to go on with one",
    "resume": "--resume FOLDER",
    "accept-changes": "--accept-changes together with --resume",
}
"""Settings that say where a run lies, and the option that a command has in the place of each."""

UNBOUNDED = 100_000
"""Characters of a line where nothing bounds it."""

TaskOption = Annotated[str | None, typer.Option(help="Name of a task, or my_pkg.my_mod:MyTask.")]
ClientsOption = Annotated[int, typer.Option(min=1, help="Number of clients.")]
RoundsOption = Annotated[int | None, typer.Option(min=1, help="Rounds in all.")]
PartitionOption = Annotated[str | None, typer.Option(help="dirichlet, iid, classes or column.")]
AlphaOption = Annotated[float | None, typer.Option(help="Concentration of the Dirichlet split.")]
DataOption = Annotated[Path | None, typer.Option(help="Folder with data files; default $FEDAPPS_DATA.")]
DeviceOption = Annotated[str | None, typer.Option(help="auto, cpu, cuda or cuda:<index>.")]
ConfigOption = Annotated[list[Path] | None, typer.Option(help="TOML file with settings; later ones win.")]
SetOption = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any setting, in TOML syntax.")]
OutOption = Annotated[Path | None, typer.Option(help="Folder of all runs.  [default: $FEDAPPS_RUNS, else runs]")]
WorkersOption = Annotated[
    int | None, typer.Option(min=0, help="Worker processes; default: one a core, in-process none.")
]


def gather(
    options: Mapping[str, Any], config: list[Path] | None, set_: list[str] | None, resume: Path | None = None
) -> dict[str, Any]:
    """Collect settings: those of a run to go on with, then ``--config``, then ``--set``, then the options; later ones win.

    Args:
        options: Key of a setting -> value of its own option; None where it was not given, a path where it is one.
        config: Preset files.
        set_: ``KEY=VALUE``, in TOML syntax.
        resume: Run folder to go on with.

    Raises:
        SettingsError: A preset or an assignment cannot be read, or says where the run lies.
    """
    values: dict[str, Any] = {}
    if resume is not None:
        values |= RunFolder.open(resume).read_settings()
    for path in config or []:
        preset = _read_preset(path)
        if path.absolute() != RunFolder(path.absolute().parent).settings_path:  # That of a run says where it lay.
            _refuse_places(preset, f"--config {path}")
        values |= preset
    for assignment in set_ or []:
        assigned = _parse_assignment(assignment)
        _refuse_places(assigned, "--set")
        values |= assigned
    for key, value in options.items():
        if value is not None:
            values[key] = str(value.absolute()) if isinstance(value, Path) else value
    values |= {"run-dir": "" if resume is None else str(resume.absolute()), "resume": resume is not None}
    values["accept-changes"] = options.get("accept-changes", False)
    if values.get("data-dir", "") == "" and os.environ.get("FEDAPPS_DATA"):
        # The engines start other processes, on this machine, that may not get this one's environment.
        values["data-dir"] = str(Path(os.environ["FEDAPPS_DATA"]).absolute())
    if os.environ.get(MODELS_VARIABLE):
        # And they work in other folders.
        os.environ[MODELS_VARIABLE] = str(models_folder().absolute())
    return values


def _refuse_places(values: Mapping[str, Any], where: str) -> None:
    for key in OPTIONS.keys() & values.keys():
        raise SettingsError(
            f"{where}, key '{key}'",
            expected="another key: commands have an option for this one",
            got=repr(values[key]),
            do=f"give {OPTIONS[key]}",
        )


def _read_preset(path: Path) -> dict[str, Any]:
    try:
        return dict(from_toml(path.read_text(encoding="utf-8")))
    except UNREADABLE as error:
        raise SettingsError(
            f"--config {path}", expected="a TOML file with settings", got=fault(error), do="check the path"
        ) from error


def _parse_assignment(text: str) -> dict[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise SettingsError(f"--set {text!r}", expected="KEY=VALUE", got=repr(text), do="for example lr=0.1")
    return {key.strip(): parse_value(value)}


def parse_value(text: str) -> Any:
    """Read a value in TOML syntax; a bare word is a string."""
    try:
        return tomllib.loads(f"value = {text}", parse_float=toml_float)["value"]
    except (ValueError, RecursionError):
        return text  # --set partition=iid; what is no value at all is refused with the setting


@contextmanager
def told() -> Iterator[Console]:
    """Give a console; print the project's own errors, and those of files, as one message, and end with exit code 1."""
    console = plain_console()
    try:
        yield console
    except (FedAppsError, OSError) as error:
        console.print(styled("bold red", type(error).__name__, f": {error}"), soft_wrap=True)
        raise typer.Exit(1) from error
    except KeyboardInterrupt:
        console.print(styled("yellow", "stopped", "; go on with --resume"))
        raise typer.Exit(130) from None


def plain_console() -> Console:
    """Make a console that takes every text as it is: paths, values and clients' errors may hold brackets.

    What is not read at a terminal has no width, unless COLUMNS says so: nothing is wrapped or cut in a file or a pipe.
    """
    width = None if sys.stdout.isatty() or os.environ.get("COLUMNS") else UNBOUNDED
    return Console(markup=False, emoji=False, highlight=False, width=width)


def show_table(console: Console, rows: Sequence[Cells], title: str | None = None) -> None:
    """Print a table with every column whole, in several parts where the terminal is too narrow for one."""
    for table in narrow_tables(rows, title, console.width):
        console.print(table)


def styled(style: str, word: str, rest: str) -> Text:
    """Set off the first word of a message."""
    return Text.assemble((word, style), rest)
