"""Causal language models and their tokenizers, from wherever they lie.

A *source* is a hub id (``facebook/opt-125m``, or ``facebook/opt-125m@<revision>``), a local folder, a ``.gguf`` file, or a
name of `fedapps.tasks.language.published` once ``fedapps models get`` has fetched it. Local sources never touch the
network, and a model of the hub that is in the local cache is taken from there.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import io
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from fedapps.errors import TaskError
from fedapps.tasks.base import FirstModel
from fedapps.tasks.language.published import models_folder, published

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

T = TypeVar("T")


@dataclass(frozen=True)
class Source:
    """Where a model lies."""

    place: str  # a folder, or an id of the hub
    gguf: str | None = None  # name of the GGUF file in the folder, or None
    revision: str | None = None  # revision asked for on the hub, or None
    local: bool = True  # whether the place is a folder


def find_source(source: str) -> Source:
    """Tell where a model lies; a name of a published model goes before a folder of that name, which is ``./name``.

    Raises:
        TaskError: There is no such folder or file, or the model was not fetched yet.
    """
    known = published(source)
    if known is not None:
        folder = models_folder() / source
        if not (folder / "config.json").is_file():
            raise _error(
                source, f"the model in '{folder}'", "no such model folder", f"run: fedapps models get {source}"
            )
        return Source(str(folder))
    path = Path(source).expanduser()
    if source and path.is_dir():
        if not (path / "config.json").is_file():
            do = "name the folder that save_pretrained wrote, or the .gguf file itself"
            raise _error(source, "a model folder with config.json", "a folder without it", do)
        return Source(str(path))
    if path.is_file():
        if path.suffix != ".gguf":
            raise _error(source, "a model folder or a .gguf file", "another file", "name the folder that holds it")
        return Source(str(path.parent), gguf=path.name)
    place, _, revision = source.partition("@")
    if not place or place.startswith(("/", ".", "~")) or source.endswith((".gguf", "/")) or place.count("/") > 1:
        # Flower runs an app in a folder of its own.
        do = "name an absolute path; a model of the hub is 'owner/name' or 'owner/name@revision'"
        raise _error(source, "a model folder or a .gguf file", f"no such path, seen from '{Path.cwd()}'", do)
    return Source(place, revision=revision or None, local=False)


def load_tokenizer(source: str) -> PreTrainedTokenizerBase:
    """Load a model's tokenizer as published: it may have no padding token.

    Raises:
        TaskError: A package, the source or its tokenizer is missing; the message says what to do.
    """
    found = _checked(source)

    def load(place: str, **where: Any) -> PreTrainedTokenizerBase:
        from transformers import AutoTokenizer

        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(place, **where)
        if not tokenizer.encode("a", add_special_tokens=False):
            raise ValueError("one that encodes 'a' as nothing, as transformers makes up where there are no files of it")
        tokenizer.init_kwargs.pop("local_files_only", None)  # Saved with it otherwise.
        return tokenizer

    return _load(source, found, "a tokenizer", load)


def load_causal_lm(source: str, dtype: torch.dtype) -> PreTrainedModel:
    """Load a causal language model on the CPU with parameters of a floating type; a GGUF file is dequantised to it.

    It is in evaluation mode, every parameter trainable, without gradient checkpointing. Attention is torch's
    `scaled_dot_product_attention` where the model has it: it is deterministic, and its dropout can be switched off.

    Raises:
        TaskError: A package or the source is missing, it is no causal language model, or it lacks weights.
    """
    found = _checked(source)

    def load(place: str, **where: Any) -> Any:
        from transformers import AutoConfig, AutoModelForCausalLM

        if found.gguf is None:  # A GGUF file holds nothing else, and reading its header takes seconds.
            _check_causal(source, AutoConfig.from_pretrained(place, **where))
        loaded: Any = AutoModelForCausalLM.from_pretrained(place, dtype=dtype, output_loading_info=True, **where)
        model, report = loaded
        missing = sorted(report["missing_keys"])
        if missing:
            got, do = f"no weights for '{missing[0]}' ({len(missing)} missing)", "use a checkpoint of the whole model"
            raise _error(source, "weights for every parameter, so that all ends start alike", got, do)
        return _plain(model) if found.gguf else model

    model: PreTrainedModel = _load(source, found, "a causal language model", load).eval()
    return model


def identify(source: str) -> FirstModel:
    """Say which model this is, as a journal states its base.

    The revision is the hub's commit, the checksum of a GGUF file, or None for a folder, which others cannot get.

    Raises:
        TaskError: There is no such source.
    """
    found, known = find_source(source), published(source)
    if known is not None:
        return FirstModel(source, known.sha256, published=True)
    if found.gguf is not None:
        return FirstModel(source, _sha256(Path(found.place) / found.gguf), published=True)
    if found.local:
        return FirstModel(source)
    cached = _cached(found)  # Its name is the commit.
    return FirstModel(found.place, cached.name if cached else found.revision, published=True)


def at_hand(source: str) -> bool:
    """Tell whether a model and its tokenizer can be loaded without the network, from a local source or the cache."""
    try:
        found = _checked(source)
        cached = None if found.local else _cached(found)
    except (TaskError, ValueError):  # The hub's client refuses what can be no id.
        return False
    return found.local or (cached is not None and _is_whole(cached))


def _is_whole(folder: Path) -> bool:
    if not any((folder / name).exists() for name in ("tokenizer.json", "tokenizer_config.json", "vocab.json")):
        return False
    for weights in ("model.safetensors", "pytorch_model.bin"):
        index = folder / f"{weights}.index.json"
        if (folder / weights).exists():
            return True
        if index.exists():
            shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            return all((folder / shard).exists() for shard in shards)
    return False


def _cached(found: Source) -> Path | None:
    """Look up the folder of a model of the hub in the local cache."""
    from huggingface_hub import try_to_load_from_cache

    path = try_to_load_from_cache(found.place, "config.json", revision=found.revision)
    return Path(path).parent if isinstance(path, str) else None


def save_plain(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write a model as a folder that `load_causal_lm` and transformers read; an OSError if, for example, the disk is full.

    Raises:
        OSError: It cannot be written, for example because the disk is full.
    """
    with _quiet(), _disk_errors():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        for weights in folder.glob("*.safetensors"):  # made for their owner only, whatever the umask
            weights.chmod((folder / "config.json").stat().st_mode & 0o777)


@lru_cache(maxsize=8)
def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _checked(source: str) -> Source:
    _need("transformers", source)
    found = find_source(source)
    if found.gguf is not None:
        _need("gguf", source)
        _need("accelerate", source)
    return found


def _need(package: str, source: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise _error(source, f"the package '{package}'", "no such package", "install fedapps[llm]")


def _load(source: str, found: Source, what: str, load: Callable[..., T]) -> T:
    """Load quietly from a folder or the cache, else from the network."""
    try:
        if found.local:
            gguf = {} if found.gguf is None else {"gguf_file": found.gguf}
            with _quiet():
                return load(found.place, local_files_only=True, **gguf)
        cached = _cached(found)
        if cached is not None:
            try:
                # By its folder: by its id, transformers asks the hub for files that may not exist, whatever it is told.
                with _quiet():
                    return load(str(cached), local_files_only=True)
            except TaskError:
                raise
            except (OSError, ValueError):
                pass
        # Not in the cache, or not all of it: a download, which shows its progress.
        return load(found.place, **({} if found.revision is None else {"revision": found.revision}))
    except TaskError:
        raise
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        got = f"{type(error).__name__}: {_first_line(error)}"
        raise _error(source, what, got, _advice(found, error)) from error


def _advice(found: Source, error: Exception) -> str:
    if isinstance(error, ImportError):
        return "install what it names, or fedapps[llm]"
    if found.local:
        return "use a folder that save_pretrained wrote with model and tokenizer, or a whole .gguf file"
    if "connect" in str(error).lower():
        return "connect to the network, name a local folder by its absolute path, or run: fedapps models list"
    return "check id, revision and access rights on the hub, and the network"


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0]


def _check_causal(source: str, config: Any) -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

    names = {name for value in CAUSAL.values() for name in ((value,) if isinstance(value, str) else value)}
    given = list(getattr(config, "architectures", None) or [])
    causal = config.model_type in CAUSAL and (not given or not names.isdisjoint(given))
    if not causal:
        got = f"a model of type '{config.model_type}'" + (f" ({', '.join(given)})" if given else "")
        raise _error(source, "a causal language model", got, "choose one such as facebook/opt-125m, gpt2 or smollm2")


def _plain(model: Any) -> PreTrainedModel:
    """Turn a model that was dequantised into an ordinary one, which can be saved; the tensors are the same."""
    given = model.config.to_dict()
    given.pop("quantization_config", None)
    config = type(model.config)(**given)
    config.architectures = [type(model).__name__]
    plain: PreTrainedModel = type(model).from_pretrained(
        None, config=config, state_dict=model.state_dict(), dtype=model.dtype
    )
    plain.generation_config = model.generation_config
    return plain


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence progress bars and advice of transformers; its own switches do not reach the bar of GGUF files."""
    # Imported first: handlers of loggers keep the stream that they find.
    from transformers.utils import logging as logs

    logging: Any = logs  # Half of it has types.
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.set_verbosity(verbosity)


@contextlib.contextmanager
def _disk_errors() -> Iterator[None]:
    """Raise what safetensors says of the disk as the OSError that it is."""
    from safetensors import SafetensorError

    try:
        yield
    except SafetensorError as error:
        number = re.search(r"\(os error (\d+)\)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), str(error)) from error


def _error(source: str, expected: str, got: str, do: str) -> TaskError:
    return TaskError(f"model '{source}'", expected=expected, got=got, do=do)
