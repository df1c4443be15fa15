"""Tests of ``fedapps/tasks/language/models.py``."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
import socket
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from fedapps.errors import TaskError
from fedapps.tasks.base import FirstModel
from fedapps.tasks.language.models import find_source, identify, load_causal_lm, load_tokenizer, save_plain
from fedapps.zeroth_order.perturbed import Perturbed

transformers = pytest.importorskip("transformers")

FAMILIES = ["llama", "opt", "gpt2"]


@pytest.fixture
def tiny(own_module: str) -> ModuleType:
    return importlib.import_module("fedapps_language")


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*args: Any, **kwargs: Any) -> Any:
        raise OSError("a test touched the network")

    monkeypatch.setattr(socket, "getaddrinfo", refused)
    monkeypatch.setattr(socket.socket, "connect", refused)


def logits(model: Any) -> torch.Tensor:
    ids = torch.arange(24).reshape(2, 12)
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=mask, use_cache=False).logits


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_is_loaded_quietly_and_plainly(
    tmp_path: Path, tiny: ModuleType, family: str, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = str(tiny.tiny_folder(tmp_path / "model", family))
    capfd.readouterr()
    model, tokenizer = load_causal_lm(folder, torch.float32), load_tokenizer(folder)
    assert capfd.readouterr() == ("", "")
    assert not model.training
    assert not any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert torch.equal(logits(model), logits(reference))
    for word in (" great", " terrible", " Yes", " No", " Maybe"):
        [token] = tokenizer.encode(word, add_special_tokens=False)
        assert tokenizer.decode([token]) == word
    half = load_causal_lm(folder, torch.bfloat16)
    assert {parameter.dtype for parameter in half.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("family", FAMILIES)
def test_attention_is_deterministic_and_takes_displaced_parameters(
    tmp_path: Path, tiny: ModuleType, family: str
) -> None:
    model = load_causal_lm(str(tiny.tiny_folder(tmp_path, family)), torch.float32)
    assert torch.equal(logits(model), logits(model))
    parameters = dict(model.named_parameters())
    moved = {name: p.detach() + 0.01 * torch.randn(p.shape) for name, p in parameters.items()}

    def displace(name: str, rows: Any = None) -> torch.Tensor:
        return moved[name] if rows is None else moved[name][torch.from_numpy(rows)]

    with Perturbed(parameters, displace) as mode:
        lent = logits(model)
    assert mode.used == set(parameters)
    for name, parameter in parameters.items():
        parameter.data = moved[name]
    assert torch.equal(lent, logits(model))


def test_a_gguf_file_gives_the_numbers_of_transformers_and_can_be_saved(tmp_path: Path, tiny: ModuleType) -> None:
    pytest.importorskip("gguf")
    path = tiny.tiny_gguf(tmp_path / "tiny.gguf")
    model, tokenizer = load_causal_lm(str(path), torch.float32), load_tokenizer(str(path))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32)
    assert torch.equal(logits(model), logits(theirs))
    source = load_causal_lm(str(tiny.tiny_folder(tmp_path / "source")), torch.float32)
    assert torch.equal(logits(model), logits(source))  # float32 tensors come through a GGUF file as they were
    save_plain(model, tokenizer, tmp_path / "plain")
    plain = load_causal_lm(str(tmp_path / "plain"), torch.float32)
    assert torch.equal(logits(plain), logits(model))
    assert load_tokenizer(str(tmp_path / "plain")).encode("It was great .") == tokenizer.encode("It was great .")
    assert "local_files_only" not in (tmp_path / "plain" / "tokenizer_config.json").read_text()
    assert "quantization_config" not in json.loads((tmp_path / "plain" / "config.json").read_text())


def test_a_folder_stands_for_the_same_model_every_time(tmp_path: Path, tiny: ModuleType) -> None:
    files = [
        {path.name: path.read_bytes() for path in tiny.tiny_folder(tmp_path / name).iterdir()} for name in ("a", "b")
    ]
    assert files[0] == files[1]


@pytest.mark.parametrize(
    ("source", "match"),
    [
        (
            "/no/such/folder",
            "got no such path, seen from '.*'; name an absolute path; a model of the hub is 'owner/name'",
        ),
        ("some/folder/of/mine", "no such path"),
        ("./opt", "no such path"),
        ("weights.gguf", "no such path"),
        ("", "no such path"),
        ("empty", "expected a model folder with config.json, got a folder without it"),
        ("text.txt", "expected a model folder or a .gguf file, got another file"),
        ("smollm2", "expected the model in '.*smollm2', got no such model folder; run: fedapps models get smollm2"),
    ],
)
def test_a_source_that_is_not_there_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, match: str
) -> None:
    monkeypatch.setenv("FEDAPPS_MODELS", str(tmp_path / "models"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.txt").touch()
    for load in (find_source, load_tokenizer, lambda s: load_causal_lm(s, torch.float32)):
        with pytest.raises(TaskError, match=f"model '{source}': .*{match}"):
            load(source)


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_what_is_no_whole_causal_language_model_is_refused(tmp_path: Path, tiny: ModuleType) -> None:
    folder = tiny.tiny_folder(tmp_path / "model")
    change_config(folder, architectures=["LlamaForSequenceClassification"])
    with pytest.raises(TaskError, match=r"causal language model, got a model of type 'llama' \(LlamaForSeq"):
        load_causal_lm(str(folder), torch.float32)
    change_config(folder, architectures=["LlamaForCausalLM"], num_hidden_layers=3)
    with pytest.raises(TaskError, match=r"got no weights for 'model\.layers\.2\..*missing\); use a checkpoint"):
        load_causal_lm(str(folder), torch.float32)
    change_config(folder, model_type="vit", architectures=None)
    with pytest.raises(TaskError, match="expected a causal language model, got a model of type 'vit'"):
        load_causal_lm(str(folder), torch.float32)
    (folder / "config.json").write_text("{}")
    with pytest.raises(TaskError, match="expected a causal language model, got ValueError"):
        load_causal_lm(str(folder), torch.float32)


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path, tiny: ModuleType) -> None:
    folder = tiny.tiny_folder(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    with pytest.raises(TaskError, match=r"expected a tokenizer, got .*; use a folder that save_pretrained wrote"):
        load_tokenizer(str(folder))


class Hub:
    """Stands in for a class of transformers: the cache is empty, and the hub answers as told."""

    def __init__(self, answer: object) -> None:
        self.answer = answer
        self.calls: list[dict[str, Any]] = []

    def from_pretrained(self, place: str, **where: Any) -> object:
        self.calls.append({"place": place, **where})
        if where["local_files_only"]:
            raise OSError("not in the cache")
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


class Loaded:
    """What the hub gives for a tokenizer."""

    def __init__(self) -> None:
        self.init_kwargs: dict[str, Any] = {}


def test_the_hub_is_asked_after_the_cache_and_for_the_revision(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub(Loaded())
    monkeypatch.setattr("transformers.AutoTokenizer", hub)
    assert load_tokenizer("facebook/opt-125m@27dcfa7") is hub.answer
    asked = {"place": "facebook/opt-125m", "revision": "27dcfa7"}
    assert hub.calls == [{**asked, "local_files_only": True}, {**asked, "local_files_only": False}]


@pytest.mark.parametrize(
    ("error", "match"),
    [
        (OSError("We couldn't connect to 'https://huggingface.co'\nmore"), "huggingface.co'; connect to the network"),
        (OSError("x is not a valid model identifier"), "check id, revision and access rights on the hub"),
        (ImportError("needs sentencepiece"), "install what it names, or fedapps"),
    ],
    ids=["no network", "no such model", "a package is missing"],
)
def test_what_the_hub_refuses_is_told_with_advice(
    monkeypatch: pytest.MonkeyPatch, error: Exception, match: str
) -> None:
    monkeypatch.setattr("transformers.AutoTokenizer", Hub(error))
    with pytest.raises(TaskError, match=f"model 'facebook/opt-125m': expected a tokenizer, got .*{match}"):
        load_tokenizer("facebook/opt-125m")


@pytest.mark.parametrize("package", ["transformers", "gguf"])
def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else found(name))
    (tmp_path / "a.gguf").touch()
    with pytest.raises(
        TaskError, match=rf"expected the package '{package}', got no such package; install fedapps\[llm"
    ):
        load_tokenizer(str(tmp_path / "a.gguf"))


def test_the_identity_of_a_model_is_its_source_and_revision(
    tmp_path: Path, tiny: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDAPPS_MODELS", str(tmp_path))
    folder = str(tiny.tiny_folder(tmp_path / "smollm2"))
    assert identify(folder) == FirstModel(folder, None, published=False)
    named, plain = (load_causal_lm(source, torch.float32) for source in ("smollm2", folder))
    assert torch.equal(logits(named), logits(plain))
    checksum = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
    assert identify("smollm2") == FirstModel("smollm2", checksum, published=True)
    path = tmp_path / "tiny.gguf"
    path.write_bytes(b"GGUF")
    assert identify(str(path)) == FirstModel(str(path), hashlib.sha256(b"GGUF").hexdigest(), published=True)


def test_the_revision_of_a_hub_model_is_the_commit_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert identify("facebook/opt-125m@v1") == FirstModel("facebook/opt-125m", "v1", published=True)
    cached = tmp_path / "models--facebook--opt-125m"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("27dcfa74d334bc871f3234de431e71c6eeba5dd6")
    (cached / "snapshots" / "27dcfa74d334bc871f3234de431e71c6eeba5dd6").mkdir(parents=True)
    (cached / "snapshots" / "27dcfa74d334bc871f3234de431e71c6eeba5dd6" / "config.json").write_text("{}")
    expected = FirstModel("facebook/opt-125m", "27dcfa74d334bc871f3234de431e71c6eeba5dd6", published=True)
    assert identify("facebook/opt-125m") == expected


def test_importing_the_list_of_models_imports_no_torch() -> None:
    code = "import sys, fedapps.cli_models; sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
