"""Tests of ``fedapps/results/replay_language.py`` and its commands: runs on tiny language models, replayed."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from fedapps.cli import cli
from fedapps.client_apps import replicas
from fedapps.errors import TaskError
from fedapps.methods import resolve_settings
from fedapps.results.replay_language import replay_model, source_of, verify_model, write_model
from fedapps.results.storage import load_arrays, save_arrays
from fedapps.tasks.from_settings import load_task_of
from fedapps.tasks.torch_task import TorchTask
from fedapps.zeroth_order.errors import AstrayError, JournalError
from fedapps.zeroth_order.journal import BaseModel, Journal

from ..simulation.runs import Left, short_run

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

ROWS = Path(__file__).parents[1] / "data" / "language"


@pytest.fixture
def tiny(own_module: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(replicas, "_held", None)
    return importlib.import_module("fedapps_language")


def run(path: Path, source: Path, options: str = "", **settings: Any) -> Left:
    config = {
        "method": "hiso", "task": "sst2", "data-dir": str(ROWS), "partition": "iid", "partition-column": "",
        "weighting": "uniform", "batch-size": 2, "lr": 1e-2, "num-server-rounds": 3, "hiso.fingerprint-every": 2,
        "task-options": f"model = '{source}'\nmax-length = 32\n{options}", **settings,
    }  # fmt: skip
    return short_run(path, config, clients=2)


def call(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(cli, list(arguments), env={"COLUMNS": "200"})
    assert result.exit_code == code, result.output
    return result.output


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.arange(24).reshape(2, 12)).logits


@pytest.mark.parametrize(("family", "dtype"), [("llama", "float32"), ("opt", "float32"), ("gpt2", "bfloat16")])
@pytest.mark.slow
def test_a_run_replays_to_a_folder_of_transformers_with_the_same_bits(
    tmp_path: Path, tiny: ModuleType, family: str, dtype: str
) -> None:
    base = tiny.tiny_folder(tmp_path / "base", family)
    left = run(tmp_path / "run", base, f"dtype = '{dtype}'", lr=0.1)
    journal = left.folder.journal_path
    header = Journal.read(journal).header
    assert (header.base.id, header.base.revision) == (str(base), None)

    output = call("replay", str(journal), "--base", str(base), "--out", str(tmp_path / "out"))
    assert "round        3" in output
    assert f"model        {tmp_path / 'out'}" in output
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    trained, first = left.model, load_arrays(left.folder.initial_path)
    found = {name: value.detach() for name, value in model.named_parameters()}
    assert list(found) == list(trained)
    for name, value in found.items():
        assert value.dtype == getattr(torch, dtype), name
        bits = value.view(torch.uint16) if dtype == "bfloat16" else value
        assert bits.numpy().tobytes() == trained[name].tobytes(), name
        assert bits.numpy().tobytes() != first[name].tobytes(), name
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.decode(tokenizer(" great")["input_ids"]) == " great"
    assert call("journal", "verify", str(journal), "--base", str(base)).startswith("confirmed: the base model and")
    assert verify_model(journal, str(base)) == [2]


@pytest.mark.slow
def test_adapters_replay_to_a_folder_of_peft_with_the_same_bits(tmp_path: Path, tiny: ModuleType) -> None:
    base = tiny.tiny_folder(tmp_path / "base")
    left = run(tmp_path / "run", base, "lora-rank = 3\nlora-alpha = 5.0\nlora-targets = '0.self_attn.q_proj,v_proj'")
    call("replay", str(left.folder.journal_path), "--base", str(base), "--out", str(tmp_path / "out"))
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "adapter_config.json", "adapter_model.safetensors",
    ]  # fmt: skip
    plain = transformers.AutoModelForCausalLM.from_pretrained(base)
    loaded = peft.PeftModel.from_pretrained(plain, tmp_path / "out")
    trained = left.model
    found = {name: value for name, value in loaded.base_model.model.named_parameters() if "lora_" in name}
    assert list(found) == list(trained)
    assert len(found) == 6  # one query layer and two value layers, two matrices each
    for name, value in found.items():
        assert value.detach().numpy().tobytes() == trained[name].tobytes(), name

    task = load_task_of(resolve_settings(left.folder.read_settings()))
    assert isinstance(task, TorchTask)
    assert torch.equal(logits(loaded), logits(task.module(trained).eval()))
    assert not torch.equal(logits(loaded), logits(transformers.AutoModelForCausalLM.from_pretrained(base)))


@pytest.mark.slow
def test_without_a_base_the_model_that_the_journal_names_is_taken(tmp_path: Path, tiny: ModuleType) -> None:
    """The same files as with its source as the base, whether all parameters were trained or adapters only."""
    base = tiny.tiny_folder(tmp_path / "base")
    for name, options in (("whole", ""), ("adapters", "lora-rank = 2")):
        left = run(tmp_path / name, base, options)
        journal = str(left.folder.journal_path)
        assert left.folder.initial_path.exists()
        call("replay", journal, "--base", str(base), "--out", str(tmp_path / f"{name} given"))
        output = call("replay", journal, "--out", str(tmp_path / f"{name} found"))
        assert "note" not in output
        given, found = (
            {path.name: path.read_bytes() for path in (tmp_path / f"{name} {how}").iterdir()}
            for how in ("given", "found")
        )
        assert given == found
        loaded = transformers.AutoModelForCausalLM.from_pretrained(
            base if name == "adapters" else tmp_path / "whole found"
        )
        if name == "adapters":
            loaded = peft.PeftModel.from_pretrained(loaded, tmp_path / "adapters found")
        task = load_task_of(resolve_settings(left.folder.read_settings()))
        assert isinstance(task, TorchTask)
        assert torch.equal(logits(loaded), logits(task.module(left.model).eval()))


@pytest.mark.slow
def test_without_the_model_that_the_journal_names_the_result_is_a_bare_file_and_says_so(
    tmp_path: Path, tiny: ModuleType
) -> None:
    base = tiny.tiny_folder(tmp_path / "base")
    left = run(tmp_path / "run", base, "lora-rank = 2")
    base.rename(tmp_path / "moved")
    output = call("replay", str(left.folder.journal_path), "--out", str(tmp_path / "out"))
    assert f"note         '{base}', which the journal names as its base, cannot be loaded here" in output
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == left.folder.model_path.read_bytes()


@pytest.mark.slow
def test_a_published_model_is_not_kept_and_is_found_by_the_journal(tmp_path: Path, tiny: ModuleType) -> None:
    pytest.importorskip("gguf")
    source = tiny.tiny_gguf(tmp_path / "tiny.gguf")
    left = run(tmp_path / "run", source)
    assert not left.folder.initial_path.exists()
    base = Journal.read(left.folder.journal_path).header.base
    assert base.id == str(source)
    assert base.revision is not None
    assert len(base.revision) == 64
    call("replay", str(left.folder.journal_path), "--out", str(tmp_path / "out"))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for name, value in model.named_parameters():
        assert value.detach().numpy().tobytes() == left.model[name].tobytes(), name


@pytest.mark.slow
def test_a_round_in_the_middle_and_the_wrong_base(tmp_path: Path, tiny: ModuleType) -> None:
    base = tiny.tiny_folder(tmp_path / "base")
    journal = run(tmp_path / "run", base).folder.journal_path
    zero = replay_model(journal, str(base), 0)
    two = replay_model(journal, str(base), 2)
    assert (zero.round, two.round) == (0, 2)
    assert two.fingerprint == Journal.read(journal).records[1].fingerprint
    assert torch.equal(logits(zero.model), logits(transformers.AutoModelForCausalLM.from_pretrained(base)))
    with pytest.raises(JournalError, match=r"round from 0 to 3.*, got 4"):
        replay_model(journal, str(base), 4)
    with pytest.raises(TaskError, match=r"model '/none': .*model folder"):
        replay_model(journal, "/none")
    with pytest.raises(JournalError, match=r"model .*, got 'model\.decoder"):
        replay_model(journal, str(tiny.tiny_folder(tmp_path / "opt", "opt")))
    write_model(two, tmp_path / "two")
    with pytest.raises(
        JournalError, match=f"the base model '{base}' with fingerprint .* the shapes fit but the weights"
    ):
        replay_model(journal, str(tmp_path / "two"))
    journal.write_text(journal.read_text().replace('"lr": 0.01', '"lr": 0.02'))
    with pytest.raises(AstrayError, match="replica at round 2"):
        verify_model(journal, str(base))


@pytest.mark.slow
def test_adapters_without_their_start_or_scale_are_named(tmp_path: Path, tiny: ModuleType) -> None:
    base = tiny.tiny_folder(tmp_path / "base")
    folder = run(tmp_path / "run", base, "lora-rank = 2").folder
    arrays = load_arrays(folder.initial_path)
    [first, *_] = arrays
    save_arrays(folder.initial_path, {**arrays, first: np.zeros((1, 1), np.float32)})
    with pytest.raises(JournalError, match=f"expected tensor '{first}', got none of its shape"):
        replay_model(folder.journal_path, str(base))
    folder.initial_path.unlink()
    with pytest.raises(JournalError, match=r"initial\.safetensors: .*adapters .*round 1, got no file"):
        replay_model(folder.journal_path, str(base))
    (folder.path / "settings.toml").unlink()
    with pytest.raises(JournalError, match=r"settings\.toml: .*scale of the adapters"):
        replay_model(folder.journal_path, str(base))


@pytest.mark.parametrize(
    ("id_", "revision", "source"),
    [
        ("facebook/opt-125m", "27dcfa74d334", "facebook/opt-125m@27dcfa74d334"),
        ("smollm2", "b" * 64, "smollm2"),
        ("folder", None, "folder"),
    ],
    ids=["hub", "checksum", "folder"],
)  # fmt: skip
def test_the_source_that_a_journal_names(id_: str, revision: str | None, source: str) -> None:
    assert source_of(BaseModel(id_, revision, "")) == source
