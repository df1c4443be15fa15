"""Replaying a journal onto a language model: the result is a folder that transformers loads, or peft for adapters.

The base is a model source (`fedapps.tasks.language.models`). Adapters start at random, so theirs are the
``initial.safetensors`` of the run, and their scale is in its ``settings.toml``; both lie beside the journal.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedapps.results.replay import advance, confirm
from fedapps.results.settings_file import from_toml
from fedapps.results.storage import load_arrays
from fedapps.zeroth_order.errors import JournalError
from fedapps.zeroth_order.journal import BaseModel, Journal
from fedapps.zeroth_order.layout import fingerprint, layout_of
from fedapps.zeroth_order.replica import Replica

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ADAPTER = ".lora_A."
"""Part of the name of one of an adapter's two tensors."""

CHECKSUM_LENGTH = 64
"""Digits of a revision that is the checksum of a file, not a name on the hub."""

OF_PEFT = "base_model.model."
"""What peft puts before the names of a model that it has wrapped."""


@dataclass(frozen=True)
class ReplayedModel:
    """What a replay gave."""

    round: int  # the round whose model this is
    fingerprint: str  # of parameters and state after it
    source: str  # source of the base model
    model: PreTrainedModel

    @property
    def adapters(self) -> bool:
        """Whether only adapters were trained."""
        return hasattr(self.model, "peft_config")


def source_of(base: BaseModel) -> str:
    """Say how to load the base model that a journal names.

    Args:
        base: Of the header.

    Returns:
        A model source, with its revision if it is one of the hub.
    """
    is_of_hub = base.revision is not None and len(base.revision) != CHECKSUM_LENGTH
    return f"{base.id}@{base.revision}" if is_of_hub else base.id


def source_at_hand(base: BaseModel) -> str | None:
    """Say how to load the base model that a journal names, if that takes no network.

    Args:
        base: Of the header.

    Returns:
        A model source; None if the model is not here, or the packages for language models are not.
    """
    try:
        from fedapps.tasks.language.models import at_hand
    except ImportError:  # no torch
        return None
    source = source_of(base)
    return source if at_hand(source) else None


def replay_model(journal: Path, source: str, last: int | None = None) -> ReplayedModel:
    """Rebuild the language model of a round.

    Args:
        journal: A run's ``journal.jsonl``.
        source: Source of the base model; that of the frozen model if adapters were trained.
        last: The round; None for the last one.

    Raises:
        JournalError: A file is missing or malformed, they do not belong together, the journal has no such round, or the
            state differs from a fingerprint.
        TaskError: The model cannot be loaded.
    """
    read, model, replica = _open(journal, source)
    advance(replica, read, last, str(journal))
    return ReplayedModel(replica.round, replica.fingerprint(), source, model)


def verify_model(journal: Path, source: str) -> list[int]:
    """Replay a journal onto a language model from fingerprint to fingerprint.

    Args:
        journal: A run's ``journal.jsonl``.
        source: As in `replay_model`.

    Returns:
        The rounds whose fingerprint was confirmed; the base model's is confirmed in any case.

    Raises:
        JournalError: As `replay_model`.
        AstrayError: A fingerprint differs; the message names its round.
        TaskError: The model cannot be loaded.
    """
    read, _, replica = _open(journal, source)
    return confirm(replica, read)


def write_model(replayed: ReplayedModel, folder: Path) -> Path:
    """Write a replayed language model.

    Args:
        replayed: What `replay_model` gave.
        folder: Where to; made if missing.

    Returns:
        The folder: for transformers with its tokenizer, or for peft if adapters were trained.
    """
    from fedapps.tasks.language.models import load_tokenizer, save_plain

    if replayed.adapters:
        _write_adapters(replayed, folder)
    else:
        save_plain(replayed.model, load_tokenizer(replayed.source), folder)
    return folder


def _open(journal: Path, source: str) -> tuple[Journal, PreTrainedModel, Replica]:
    from fedapps.zeroth_order.quiet import trainable_parameters

    read = Journal.read(journal)
    model = _load(read, journal, source)
    theta = trainable_parameters(model)
    layout = layout_of(theta, read.header.layout.fixed)
    # Another layout is named before a fingerprint is computed over it.
    read.check_model(layout)
    if any(ADAPTER in name for name in theta):
        _start_adapters(journal, theta)
    read.check_model(layout, fingerprint(layout, theta))
    return read, model, Replica(read.header.scheme, theta, fixed=layout.fixed)


def _load(read: Journal, journal: Path, source: str) -> PreTrainedModel:
    import torch

    from fedapps.tasks.language.adapters import add_adapters
    from fedapps.tasks.language.models import load_causal_lm

    tensors = read.header.layout.tensors
    adapted = [tensor for tensor in tensors if ADAPTER in tensor.name]
    if not adapted:
        return load_causal_lm(source, getattr(torch, tensors[0].number_format.value))
    model = load_causal_lm(source, torch.float32).requires_grad_(False)
    layers = tuple(tensor.name.split(ADAPTER)[0] for tensor in adapted)
    add_adapters(model, adapted[0].shape[0], _alpha(journal), layers)
    return model


def _alpha(journal: Path) -> float:
    """Read the scale of the adapters, which the journal does not state."""
    from fedapps.methods import resolve_settings
    from fedapps.tasks.from_settings import load_task_of

    path = journal.parent / "settings.toml"
    if not path.is_file():
        do = "copy the settings.toml of the run there, or give --base initial.safetensors for the bare tensors"
        raise JournalError(str(path), expected="the settings with the scale of the adapters", got="none", do=do)
    task = load_task_of(resolve_settings(from_toml(path.read_text(encoding="utf-8"))))
    return float(task.options.lora_alpha)


def _start_adapters(journal: Path, theta: dict[str, Any]) -> None:
    import torch

    path = journal.parent / "initial.safetensors"
    if not path.is_file():
        do = "copy the initial.safetensors of the run there"
        raise JournalError(str(path), expected="the adapters before round 1", got="no file", do=do)
    arrays = load_arrays(path)
    with torch.no_grad():
        for name, parameter in theta.items():
            if name not in arrays or arrays[name].shape != tuple(parameter.shape):
                do = "use the file of the journal's run"
                raise JournalError(str(path), expected=f"tensor '{name}'", got="none of its shape", do=do)
            parameter.copy_(torch.from_numpy(arrays[name]))


def _write_adapters(replayed: ReplayedModel, folder: Path) -> None:
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    state = get_peft_model_state_dict(replayed.model, adapter_name="default")
    named = {f"{OF_PEFT}{name}": value.contiguous() for name, value in state.items()}
    weights = folder / "adapter_model.safetensors"
    save_file(named, weights, metadata={"format": "pt"})
    model: Any = replayed.model
    config = model.peft_config["default"]
    config.base_model_name_or_path = replayed.source
    config.task_type, config.inference_mode = "CAUSAL_LM", True
    config.save_pretrained(str(folder))
    # safetensors makes files for their owner only, whatever the umask.
    weights.chmod((folder / "adapter_config.json").stat().st_mode & 0o777)
