"""The commands for journals of scalar-only runs: ``fedapps replay``, ``fedapps journal show`` and ``journal verify``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fedapps.cli.common import told
from fedapps.results import replay as replaying
from fedapps.results import replay_language as language
from fedapps.tasks import TASKS
from fedapps.zeroth_order import journal as journals
from fedapps.zeroth_order.journal import Journal

JournalArgument = Annotated[Path, typer.Argument(help="journal.jsonl of a run.", metavar="JOURNAL")]
_BASE = "Model before round 1: a .safetensors file, or for language models a hub id, a folder or a .gguf file.  "
ReplayBaseOption = Annotated[
    str,
    typer.Option(
        help=f"{_BASE}[default: the language model that the journal names if it is here, else initial.safetensors beside "
        "the journal]"
    ),
]
VerifyBaseOption = Annotated[
    str,
    typer.Option(
        help=f"{_BASE}[default: initial.safetensors beside the journal, else the language model that it names]"
    ),
]

group = typer.Typer(no_args_is_help=True, help="Look into the journal of a scalar-only run.")


def replay(
    journal: JournalArgument,
    out: Annotated[Path, typer.Option(help="Folder for the model.")],
    base: ReplayBaseOption = "",
    round_: Annotated[int | None, typer.Option("--round", min=0, help="The round; default: the last.")] = None,
) -> None:
    """Rebuild the model of any round from the base model and the journal of a scalar-only run.

    With a language model as the base the result is a folder for transformers, or peft; else it is model.safetensors.
    """
    with told() as console:
        found = _base_of(journal, base)
        if not base and isinstance(found, Path):
            found = _language_model_of(journal, console) or found
        replayed: replaying.Replayed | language.ReplayedModel
        if isinstance(found, Path):
            replayed = replaying.replay(journal, found, round_)
            path = replaying.write_replayed(replayed, out)
        else:
            replayed = language.replay_model(journal, found, round_)
            path = language.write_model(replayed, out)
        console.print(f"round        {replayed.round}")
        console.print(f"fingerprint  {replayed.fingerprint}", soft_wrap=True)
        console.print(f"model        {path}", soft_wrap=True)


@group.command()
def show(journal: JournalArgument) -> None:
    """Describe a journal: what the run fixed, then a line a round."""
    with told() as console:
        for line in journals.show(journals.Journal.read(journal)):
            console.print(line, soft_wrap=True)


@group.command()
def verify(journal: JournalArgument, base: VerifyBaseOption = "") -> None:
    """Replay a journal, and compare base model and every fingerprint in it."""
    with told() as console:
        found = _base_of(journal, base)
        rounds = replaying.verify(journal, found) if isinstance(found, Path) else language.verify_model(journal, found)
        confirmed = f" and the fingerprints of rounds {', '.join(map(str, rounds))}" if rounds else ""
        console.print(f"confirmed: the base model{confirmed}", soft_wrap=True)


def _base_of(journal: Path, base: str) -> Path | str:
    """Choose a file of tensors, or the source of a language model."""
    initial = journal.parent / "initial.safetensors"
    if base.endswith(".safetensors"):
        return Path(base)
    if base:
        return base
    named = Journal.read(journal).header.base
    return language.source_of(named) if named.revision is not None and not initial.exists() else initial


def _language_model_of(journal: Path, console: Console) -> str | None:
    """Give the language model that a journal names; say what its absence means."""
    named = Journal.read(journal).header.base
    if named.id in {row.name for row in TASKS} or (":" in named.id and "/" not in named.id):
        return None  # A task's own small model, which no other library loads.
    source = language.source_at_hand(named)
    if source is None:
        console.print(
            f"note         '{named.id}', which the journal names as its base, cannot be loaded here: the result is a bare "
            "file of tensors; for a folder that transformers or peft loads give its source with --base",
            soft_wrap=True,
        )
    return source
