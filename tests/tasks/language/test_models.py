"""Tests of ``fedapps/tasks/language/models.py``."""

from __future__ import annotations

import errno
import hashlib
import http.server
import importlib
import importlib.util
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from fedapps.cli import cli
from fedapps.errors import TaskError
from fedapps.tasks.base import FirstModel
from fedapps.tasks.language.models import (
    Source,
    at_hand,
    find_source,
    identify,
    load_causal_lm,
    load_tokenizer,
    save_plain,
)
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
        ("some/folder/of/mine@v1", "no such path"),
        ("@v1", "no such path"),
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
    with pytest.raises(TaskError, match=r"causal language model, got .*type 'vit'"):
        load_causal_lm(str(folder), torch.float32)
    (folder / "config.json").write_text("{}")
    with pytest.raises(TaskError, match="causal language model, got ValueError"):
        load_causal_lm(str(folder), torch.float32)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path, tiny: ModuleType, family: str) -> None:
    folder = tiny.tiny_folder(tmp_path, family)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    with pytest.raises(TaskError, match=r"tokenizer, got .*save_pretrained"):
        load_tokenizer(str(folder))


class Hub:
    """Stands in for a class of transformers: the hub answers as told."""

    def __init__(self, answer: object) -> None:
        self.answer = answer
        self.calls: list[dict[str, Any]] = []

    def from_pretrained(self, place: str, **where: Any) -> object:
        self.calls.append({"place": place, **where})
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


class Loaded:
    """What the hub gives for a tokenizer."""

    def __init__(self) -> None:
        self.init_kwargs: dict[str, Any] = {}

    def encode(self, text: str, **_: Any) -> list[int]:
        return [1]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub's cache, empty."""
    folder = tmp_path / "cache"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder))
    return folder


COMMIT = "27dcfa74d334bc871f3234de431e71c6eeba5dd6"


def put_in_cache(cache: Path, place: str, folder: Path, names: str = "*", revision: str = "main") -> Path:
    """Lay files of a folder into the cache as the hub's own client does, without notes on files that do not exist."""
    entry = cache / f"models--{place.replace('/', '--')}"
    ref, snapshot = entry / "refs" / revision, entry / "snapshots" / COMMIT
    for made in (ref.parent, snapshot, entry / "blobs"):
        made.mkdir(parents=True, exist_ok=True)
    ref.write_text(COMMIT)
    for path in folder.glob(names):
        blob = entry / "blobs" / hashlib.sha256(path.read_bytes()).hexdigest()
        shutil.copy(path, blob)
        (snapshot / path.name).symlink_to(blob)
    return snapshot


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Paths that a hub on this machine, which has no model at all, was asked for."""
    paths: list[str] = []

    class Empty(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            paths.append(self.path)
            self.send_response(404)
            self.send_header("X-Error-Code", "EntryNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_GET = do_HEAD  # noqa: N815

        def log_message(self, *_: Any) -> None:
            pass

    def info(*_: Any, **__: Any) -> Any:
        paths.append("/tiny/model")
        return SimpleNamespace(sha=COMMIT)

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Empty) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        address = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
        template = address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr("huggingface_hub.hf_api.HfApi.repo_info", info)  # Of an object that keeps another address.
        yield paths
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("source", ["tiny/model", "tiny/model@refs/pr/3", f"tiny/model@{COMMIT}"])
def test_what_is_in_the_cache_is_taken_without_a_look_at_the_network(
    tmp_path: Path, tiny: ModuleType, cache: Path, asked: list[str], source: str, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tiny.tiny_folder(tmp_path / "folder", "opt")
    put_in_cache(cache, "tiny/model", folder, revision="refs/pr/3" if "pr" in source else "main")
    capfd.readouterr()
    model, tokenizer = load_causal_lm(source, torch.float32), load_tokenizer(source)
    assert capfd.readouterr() == ("", "")
    assert asked == []
    assert torch.equal(logits(model), logits(load_causal_lm(str(folder), torch.float32)))
    assert tokenizer.encode("It was great .") == load_tokenizer(str(folder)).encode("It was great .")
    assert identify(source) == FirstModel("tiny/model", COMMIT, published=True)
    save_plain(model, tokenizer, tmp_path / "saved")
    for name in ("config.json", "tokenizer_config.json"):
        assert str(cache) not in (tmp_path / "saved" / name).read_text()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tokenizer_that_is_not_in_the_cache_is_fetched(
    tmp_path: Path, tiny: ModuleType, cache: Path, asked: list[str], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny.tiny_folder(tmp_path / "folder", family)
    snapshot = put_in_cache(cache, "tiny/model", folder, "[!t]*")
    assert {path.name for path in snapshot.iterdir()} == {"config.json", "generation_config.json", "model.safetensors"}
    load_causal_lm("tiny/model", torch.float32)
    assert asked == []
    with pytest.raises(TaskError, match=r"model 'tiny/model': .*tokenizer, got"):
        load_tokenizer("tiny/model")
    assert any(path.startswith(f"/tiny/model/resolve/{COMMIT}/tokenizer") for path in asked)
    own = transformers.AutoTokenizer.from_pretrained

    def download(place: str, **where: Any) -> Any:
        if place == "tiny/model":
            put_in_cache(cache, place, folder, "t*")
        return own(str(snapshot), **where)

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", download)
    tokenizer = load_tokenizer("tiny/model")
    assert tokenizer.encode("It was great .") == load_tokenizer(str(folder)).encode("It was great .")


def test_a_model_of_the_wrong_kind_in_the_cache_is_refused_without_a_look_at_the_network(
    tmp_path: Path, tiny: ModuleType, cache: Path, asked: list[str]
) -> None:
    folder = tiny.tiny_folder(tmp_path / "folder")
    change_config(folder, architectures=["LlamaForSequenceClassification"])
    put_in_cache(cache, "tiny/model", folder)
    with pytest.raises(TaskError, match=r"causal language model, got .*type 'llama'"):
        load_causal_lm("tiny/model", torch.float32)
    assert asked == []


def test_a_model_is_at_hand_where_it_loads_without_the_network(
    tmp_path: Path, tiny: ModuleType, cache: Path, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDAPPS_MODELS", str(tmp_path / "models"))
    folder = tiny.tiny_folder(tmp_path / "tiny")
    put_in_cache(cache, "tiny/model", folder)
    put_in_cache(cache, "tiny/no-tokenizer", folder, "[!t]*")
    put_in_cache(cache, "tiny/no-weights", folder, "[!m]*")
    shards = put_in_cache(cache, "tiny/shards", folder, "[!m]*")
    (shards / "model.safetensors.index.json").write_text('{"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}')
    (shards / "1.safetensors").touch()
    here = {str(folder), "tiny/model", "tiny/model@main", f"tiny/model@{COMMIT}"}
    elsewhere = {
        "/none", "smollm2", "no/model", "tiny/model@v2", "my.module:Task", "digits-mlp", "tiny/no-tokenizer",
        "tiny/no-weights", "tiny/shards",
    }  # fmt: skip
    assert {source for source in here | elsewhere if at_hand(source)} == here
    (shards / "2.safetensors").touch()
    assert at_hand("tiny/shards")
    assert asked == []


@pytest.mark.usefixtures("cache")
def test_the_hub_is_asked_for_the_revision(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub(Loaded())
    monkeypatch.setattr("transformers.AutoTokenizer", hub)
    assert load_tokenizer("facebook/opt-125m@27dcfa7") is hub.answer
    assert load_tokenizer("facebook/opt-125m@refs/pr/3") is hub.answer
    assert load_tokenizer("gpt2") is hub.answer
    assert hub.calls == [
        {"place": "facebook/opt-125m", "revision": "27dcfa7"},
        {"place": "facebook/opt-125m", "revision": "refs/pr/3"},
        {"place": "gpt2"},
    ]


@pytest.mark.parametrize(
    ("error", "match"),
    [
        (ValueError("no backend"), "check id, revision and access rights on the hub, and the network"),
        (OSError("We couldn't connect to 'https://huggingface.co'\nmore"), "huggingface.co'; connect to the network"),
        (OSError("x is not a valid model identifier"), "check id, revision and access rights on the hub"),
        (ImportError("needs sentencepiece"), "install what it names, or fedapps"),
    ],
    ids=["no tokenizer", "no network", "no such model", "a package is missing"],
)
@pytest.mark.usefixtures("cache")
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


def test_the_revision_of_a_hub_model_is_the_commit_in_the_cache(tmp_path: Path, cache: Path) -> None:
    assert identify("facebook/opt-125m@v1") == FirstModel("facebook/opt-125m", "v1", published=True)
    (tmp_path / "config.json").write_text("{}")
    put_in_cache(cache, "facebook/opt-125m", tmp_path, "config.json")
    assert identify("facebook/opt-125m") == FirstModel("facebook/opt-125m", COMMIT, published=True)


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_a_saved_model_is_as_readable_as_the_umask_says(tmp_path: Path, tiny: ModuleType, umask: int) -> None:
    """It is meant to be published, but the weights would be made for their owner only."""
    folder = str(tiny.tiny_folder(tmp_path / "model"))
    before = os.umask(umask)
    try:
        save_plain(load_causal_lm(folder, torch.float32), load_tokenizer(folder), tmp_path / "saved")
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "saved").iterdir()}
    assert "model.safetensors" in modes
    assert set(modes.values()) == {0o666 & ~umask}


def test_a_disk_that_cannot_take_the_weights_is_an_oserror(tmp_path: Path, tiny: ModuleType) -> None:
    folder = str(tiny.tiny_folder(tmp_path / "model"))
    model, tokenizer = load_causal_lm(folder, torch.float32), load_tokenizer(folder)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large") as caught:
            save_plain(model, tokenizer, tmp_path / "saved")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.errno == errno.EFBIG


def test_a_relative_models_folder_is_found_from_the_folder_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models" / "smollm2").mkdir(parents=True)
    (tmp_path / "models" / "smollm2" / "config.json").write_text("{}")
    (tmp_path / "app").mkdir()
    found: list[Source] = []

    def start(*_: Any) -> None:
        monkeypatch.chdir(tmp_path / "app")
        found.append(find_source("smollm2"))
        raise TaskError("seen")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDAPPS_MODELS", "models")
    monkeypatch.setattr("fedapps.cli.run.start", start)
    result = CliRunner().invoke(cli, ["run", "--method", "hiso", "--task", "sst2"])
    assert found == [Source(str(tmp_path / "models" / "smollm2"))], result.output


@pytest.mark.slow
def test_importing_the_list_of_models_imports_no_torch() -> None:
    code = "import sys, fedapps.cli.models; sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
