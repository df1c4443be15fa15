"""The commands for journals of scalar-only runs: ``fedapps replay``, ``fedapps journal show`` and ``journal verify``."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated, TypeAlias

import typer
from rich.console import Console

from fedapps.results import replay as replaying
from fedapps.zeroth_order import journal as journals

Told: TypeAlias = Callable[[Console], AbstractContextManager[None]]
"""Prints the project's own errors as one message."""

JournalArgument = Annotated[Path, typer.Argument(help="journal.jsonl of a run.", metavar="JOURNAL")]
BaseOption = Annotated[
    Path | None, typer.Option(help="Model before round 1.  [default: initial.safetensors beside the journal]")
]


def add_journal_commands(cli: typer.Typer, told: Told) -> None:
    """Add the commands to a command line.

    Args:
        cli: The command line.
        told: Wraps each command.
    """
    group = typer.Typer(no_args_is_help=True, help="Look into the journal of a scalar-only run.")
    cli.add_typer(group, name="journal")

    @cli.command()
    def replay(
        journal: JournalArgument,
        out: Annotated[Path, typer.Option(help="Folder for model.safetensors.")],
        base: BaseOption = None,
        round_: Annotated[int | None, typer.Option("--round", min=0, help="The round; default: the last.")] = None,
    ) -> None:
        """Rebuild the model of any round from the base model and the journal of a scalar-only run."""
        console = Console()
        with told(console):
            replayed = replaying.replay(journal, _base_of(journal, base), round_)
            path = replaying.write_replayed(replayed, out)
            console.print(f"round        {replayed.round}", highlight=False)
            console.print(f"fingerprint  {replayed.fingerprint}", highlight=False, soft_wrap=True)
            console.print(f"model        {path}", highlight=False, soft_wrap=True)

    @group.command()
    def show(journal: JournalArgument) -> None:
        """Describe a journal: what the run fixed, then a line a round."""
        console = Console()
        with told(console):
            for line in journals.show(journals.Journal.read(journal)):
                console.print(line, highlight=False, markup=False, soft_wrap=True)

    @group.command()
    def verify(journal: JournalArgument, base: BaseOption = None) -> None:
        """Replay a journal, and compare base model and every fingerprint in it."""
        console = Console()
        with told(console):
            rounds = replaying.verify(journal, _base_of(journal, base))
            confirmed = f" and the fingerprints of rounds {', '.join(map(str, rounds))}" if rounds else ""
            console.print(f"confirmed: the base model{confirmed}", highlight=False, soft_wrap=True)


def _base_of(journal: Path, base: Path | None) -> Path:
    return base or journal.parent / "initial.safetensors"
