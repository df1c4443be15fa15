"""The language tasks with tiny models: options, data, loss, what travels, runs."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedapps.client_apps import replicas
from fedapps.errors import TaskError
from fedapps.methods import METHODS, resolve_settings
from fedapps.results.replay import replay
from fedapps.tasks import TASKS, PartitionConfig, TaskConfig, load_task
from fedapps.tasks.base import Data
from fedapps.tasks.language import task as task_module
from fedapps.tasks.language.encoding import PADDING, lengths
from fedapps.zeroth_order.directions import direction
from fedapps.zeroth_order.probing import Prober
from fedapps.zeroth_order.quiet import trainable_parameters
from fedapps.zeroth_order.scheme import Scheme

from ...simulation import runs
from .conftest import ROWS

CLASSES = {"sst2": 2, "qqp": 2, "rte": 2, "cb": 3, "boolq": 2, "wic": 2}
FAMILIES = ["llama", "opt", "gpt2"]


@pytest.fixture
def make(folder_of: Callable[[str], Path]) -> Callable[..., Any]:
    def make(name: str = "sst2", family: str = "llama", seed: int = 0, **options: Any) -> Any:
        given = {key.replace("_", "-"): value for key, value in options.items()}
        given = {"model": str(folder_of(family)), "max-length": 96, **given}
        return load_task(
            name, TaskConfig(data_dir=ROWS, options=given, seed=seed, partition=PartitionConfig(alpha=0.5))
        )

    return make


# Data ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CLASSES)
def test_examples_become_prompts_and_class_numbers(make: Callable[..., Any], name: str) -> None:
    task = make(name)
    train, test = task.load()
    assert set(train.targets) == set(range(CLASSES[name]))
    assert (train.inputs.dtype, train.targets.dtype, train.inputs.ndim) == (np.int32, np.int64, 2)
    rows = [[i for i in row if i != PADDING] for row in test.inputs.tolist()]
    assert all(task.tokenizer.decode(row).endswith(task.prompt.ending) for row in rows)
    assert task.evaluate(task.initial_arrays(0), test).keys() == {"loss", "accuracy"}


def test_every_language_task_is_registered_and_imports_no_torch_before_it_is_loaded() -> None:
    names = {row.name for row in TASKS if row.target.startswith("fedapps.tasks.language.")}
    assert names == {*CLASSES, "squad"}
    code = (
        "import sys, fedapps, fedapps.tasks, fedapps.tasks.language, fedapps.tasks.language.readers\n"
        "assert not {'torch', 'transformers', 'peft', 'datasets'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_clients_split_the_classes_and_every_example_is_used_once(make: Callable[..., Any]) -> None:
    task = make()
    parts = [task.client_data(i, 3).train for i in range(3)]
    train, _ = task.load()
    pooled = sorted(row.tobytes() for part in parts for row in part.inputs)
    assert pooled == sorted(row.tobytes() for row in train.inputs)
    shares = [float(part.targets.mean()) for part in parts]
    assert max(shares) - min(shares) > 0.3  # Dirichlet with alpha 0.5: unequal shares of the classes


def test_a_subset_is_drawn_by_the_seed_and_the_test_examples_by_none(make: Callable[..., Any]) -> None:
    whole, other, test = make().load()[0], make(train_examples=5, seed=1).load()[0], make(eval_examples=2).load()[1]
    few = make(train_examples=5).load()[0]
    assert (len(few), len(other), len(test)) == (5, 5, 2)

    def rows(data: Data) -> set[str]:
        return {str([i for i in row if i != PADDING]) for row in data.inputs.tolist()}

    assert rows(few) < rows(whole)
    assert rows(few) != rows(other)
    assert rows(test) == rows(make(eval_examples=2, seed=1).load()[1])
    assert make().checksums() != make(train_examples=5).checksums()


def test_a_batch_is_no_longer_than_its_longest_row(make: Callable[..., Any]) -> None:
    task = make()
    train, _ = task.load()
    short = np.argsort(lengths(train.inputs))[:2]
    ids, targets = task.tensors(train.take(short))
    assert ids.shape == (2, lengths(train.inputs[short]).max())
    assert ids.shape[1] < train.inputs.shape[1]
    assert (ids.dtype, targets.dtype) == (torch.int64, torch.int64)


def test_an_evaluation_takes_rows_of_like_length_together(make: Callable[..., Any], monkeypatch: Any) -> None:
    monkeypatch.setattr(task_module, "EVALUATION_TOKENS", 40)
    task = make()
    train, _ = task.load()
    batches = list(task.evaluation_batches(train))
    assert sorted(np.concatenate(batches)) == list(range(len(train)))
    sizes = [lengths(train.inputs[batch]) for batch in batches]
    assert all(len(size) * size.max() <= 40 or len(size) == 1 for size in sizes)
    assert len(batches) < len(train)
    flat = np.concatenate(sizes)
    assert (np.diff(flat) <= 0).all()
    model = task.module(task.initial_arrays(0))
    one_by_one = [task.evaluate_module(model, train.take(np.array([i]))) for i in range(len(train))]
    for name, value in task.evaluate_module(model, train).items():
        assert value == pytest.approx(np.mean([each[name] for each in one_by_one]), abs=1e-5)


# Loss ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_the_loss_is_the_cross_entropy_among_the_label_words(make: Callable[..., Any], family: str) -> None:
    """Against the model's own logits of each row alone, in float64."""
    task = make("cb", family)
    train, _ = task.load()
    model = task.module(task.initial_arrays(0)).eval()
    with torch.no_grad():
        loss = task.loss(model, *task.tensors(train))
        expected = []
        for row, target in zip(train.inputs.tolist(), train.targets, strict=True):
            ids = torch.tensor([[i for i in row if i != PADDING]])
            logits = model(ids).logits[0, -1, list(task.label_ids)].double()
            expected.append(-logits.log_softmax(0)[int(target)])
    torch.testing.assert_close(loss.double(), torch.stack(expected).mean(), atol=1e-5, rtol=1e-5)
    assert loss.dtype == torch.float32


def test_what_is_measured_is_the_tasks_own_criterion(make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    task = make()
    train, _ = task.load()
    arrays = task.initial_arrays(0)
    plain = task.evaluate(arrays, train)
    own = type(task).criterion
    monkeypatch.setattr(type(task), "criterion", lambda *given: 3 * own(*given))
    assert task.evaluate(arrays, train)["loss"] == pytest.approx(3 * plain["loss"], rel=1e-5)


def test_gradients_reach_the_whole_model(make: Callable[..., Any]) -> None:
    task = make("sst2", "opt")
    model = task.module(task.initial_arrays(0))
    task.loss(model, *task.tensors(task.load()[0])).backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())


# What travels ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_the_whole_model_travels_and_a_tied_weight_once(make: Callable[..., Any], family: str) -> None:
    task = make("sst2", family)
    model = task.build_model()
    arrays = task.initial_arrays(0)
    assert list(arrays) == [name for name, _ in model.named_parameters()]
    assert sum(a.size for a in arrays.values()) == sum(p.numel() for p in model.parameters())
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert tied == (family != "llama")
    moved = task.module({name: array + 1 for name, array in arrays.items()})
    assert (moved.get_output_embeddings().weight is moved.get_input_embeddings().weight) == tied


def test_with_adapters_only_they_travel(make: Callable[..., Any]) -> None:
    task = make(lora_rank=2)
    arrays = task.initial_arrays(0)
    assert all(".lora_" in name for name in arrays)
    assert arrays.keys() == trainable_parameters(task.build_model()).keys()
    again, other = task.initial_arrays(0), task.initial_arrays(1)
    runs.assert_same_model(arrays, again)
    assert any(arrays[name].tobytes() != other[name].tobytes() for name in arrays)
    whole = make().evaluate(make().initial_arrays(0), make().load()[1])
    assert task.evaluate(arrays, task.load()[1]) == pytest.approx(whole, abs=1e-6)


def test_loading_takes_no_part_in_the_draw_of_the_adapters(
    make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The frozen model is loaded with the first build only: both ends must draw the same adapters, whichever that is."""
    task, load = make(lora_rank=3), task_module.load_causal_lm
    monkeypatch.setattr(task_module, "load_causal_lm", lambda *where: (torch.rand(5), load(*where))[1])
    runs.assert_same_model(task.initial_arrays(0), task.initial_arrays(0))


def test_adapted_models_share_the_frozen_memory_and_nothing_else(make: Callable[..., Any]) -> None:
    task = make(lora_rank=2)
    first, second = task.build_model(), task.build_model()
    for (name, one), two in zip(first.named_parameters(), second.parameters(), strict=True):
        assert one is not two
        assert (one.data_ptr() == two.data_ptr()) == (".lora_" not in name)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_goes_there_and_back(make: Callable[..., Any], dtype: str) -> None:
    task = make(dtype=dtype)
    arrays = task.initial_arrays(0)
    assert {array.dtype for array in arrays.values()} == {np.dtype(np.uint16 if dtype == "bfloat16" else np.float16)}
    model = task.module(arrays)
    assert {p.dtype for p in model.parameters()} == {getattr(torch, dtype)}
    for built, filled in zip(task.build_model().parameters(), model.parameters(), strict=True):
        assert torch.equal(built, filled)
    result = Prober(model, Scheme(1, "decomfl")).probe(
        lambda model, batch: task.loss(model, *batch), [task.tensors(task.load()[0])],
        first_step=0, num_probes=1, mu=1e-2, lr=0.1,
    )  # fmt: skip
    assert np.isfinite(result.scalars).all()


# Errors ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "float64"}, r"'dtype': expected one of float32, bfloat16, float16, got 'float64'"),
        ({"lora_rank": -1}, r"'lora-rank': expected a finite number >= 0, got -1"),
        ({"lora_alpha": 0.0}, r"'lora-alpha': expected a finite number > 0, got 0.0"),
        ({"max_length": 0}, r"'max-length': expected a finite number >= 1, got 0"),
        ({"train_examples": 13}, r"'train-examples': expected 0 \(all\) to 12, the examples that there are, got 13"),
        ({"eval_examples": 5}, r"'eval-examples': expected 0 \(all\) to 4"),
        ({"max_length": 300}, r"'max-length': expected at most the 256 positions of the model, got 300"),
        ({"model": "/no/such/folder"}, r"/no/such/folder"),
        ({"lora_rank": 2, "lora_targets": "w_q"}, r"'lora-targets'"),
        ({"lora_rank": 2, "lora_targets": "lm_head"}, r"leave its output embedding out of lora-targets"),
    ],
)
def test_wrong_options_are_refused(make: Callable[..., Any], options: dict[str, Any], message: str) -> None:
    def used() -> dict[str, float]:
        task = make(**options)
        return task.evaluate(task.initial_arrays(0), task.load()[1])

    with pytest.raises(TaskError, match=message):
        used()


def test_a_model_that_changes_its_logits_is_refused(
    make: Callable[..., Any], folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    shutil.copytree(folder_of("llama"), tmp_path / "model")
    config = tmp_path / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"logit_scale": 2.0}))
    with pytest.raises(TaskError, match=r"logit_scale = 2\.0"):
        make(model=str(tmp_path / "model")).build_model()


def test_label_words_are_checked_before_anything_trains(make: Callable[..., Any], monkeypatch: Any) -> None:
    class OddWords(task_module.Sst2Task):
        @property
        def prompt(self) -> Any:
            return task_module.Prompt("{sentence} It was", (" unspeakable", " great"), ("sentence",))

    task = OddWords(make().config)
    with pytest.raises(TaskError, match="label word ' unspeakable'"):
        task.load()


# Runs ------------------------------------------------------------------------------------------------------


@pytest.fixture
def short(
    folder_of: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., runs.Left]:
    monkeypatch.setattr(replicas, "_held", None)

    def short(name: str, method: str, family: str = "opt", options: str = "", **config: Any) -> runs.Left:
        text = f'model = "{folder_of(family)}"\nmax-length = 64\n{options}'
        given = {
            "task": "sst2", "method": method, "task-options": text, "data-dir": str(ROWS), "partition": "dirichlet",
            "partition-column": "", "num-server-rounds": 2, "local-steps": 2, "batch-size": 4, "lr": 0.05,
        }  # fmt: skip
        return runs.short_run(tmp_path / name, {**given, **config}, 2)

    return short


@pytest.mark.parametrize("method", ["fedavg", "fedpm", "ltda", "fedsophia", "decomfl", "hiso", "fedzo"])
@pytest.mark.slow
def test_tied_weights_stay_tied_and_travel_once(
    short: Callable[..., runs.Left], make: Callable[..., Any], method: str
) -> None:
    """Head and embedding are one tensor: it travels, moves and stays tied as one."""
    left = short("run", method)
    names = list(make("sst2", "opt").initial_arrays(0))
    assert list(left.model) == names
    assert not [name for name in names if "lm_head" in name]
    first = make("sst2", "opt").initial_arrays(0)
    embedding = "model.decoder.embed_tokens.weight"
    assert left.model[embedding].tobytes() != first[embedding].tobytes()
    model = make("sst2", "opt").module(left.model)
    assert model.lm_head.weight is model.model.decoder.embed_tokens.weight


def test_a_probe_moves_a_tied_weight_once(make: Callable[..., Any]) -> None:
    """The scalar is the difference quotient of a model whose parameters are moved by `mu z` by hand."""
    task = make("sst2", "opt")
    model = task.module(task.initial_arrays(0))
    batch = task.tensors(task.load()[0])
    prober = Prober(model, Scheme(3, "decomfl"))

    def loss(model: Any, batch: Any) -> torch.Tensor:
        return task.loss(model, *batch)

    mu = 2.0**-5
    [[g]] = prober.probe(loss, [batch], first_step=0, num_probes=1, mu=mu, lr=0.0).scalars
    moved, place = task.module(task.initial_arrays(0)).eval(), 0
    with torch.no_grad():
        base = float(loss(moved, batch))
        for parameter in moved.parameters():
            z = direction(3, 0, 0, place, place + parameter.numel())
            parameter.add_(mu * torch.from_numpy(np.asarray(z)).view_as(parameter))
            place += parameter.numel()
        assert g == pytest.approx((float(loss(moved, batch)) - base) / mu, abs=1e-4)


@pytest.mark.parametrize("method", ["fedavg", "fedadam", "hiso", "fedzo"])
@pytest.mark.slow
def test_adapters_train_and_the_model_does_not(
    short: Callable[..., runs.Left], make: Callable[..., Any], method: str
) -> None:
    left = short("run", method, options="lora-rank = 2")
    task = make("sst2", "opt", lora_rank=2)
    first = task.initial_arrays(0)
    assert left.model.keys() == first.keys()
    assert all(left.model[name].tobytes() != first[name].tobytes() for name in first if "lora_B" in name)
    model, base = task.module(left.model), make("sst2", "opt").build_model()
    frozen = [p for p in model.parameters() if not p.requires_grad]
    assert len(frozen) == len(list(base.parameters()))
    assert all(torch.equal(one, two) for one, two in zip(frozen, base.parameters(), strict=True))
    if method == "hiso":
        replayed = replay(left.folder.journal_path, left.folder.initial_path)
        assert sum(array.size for array in replayed.arrays.values()) == sum(array.size for array in first.values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.slow
def test_a_scalar_only_run_is_replayed_bit_for_bit(short: Callable[..., runs.Left], dtype: str) -> None:
    left = short("run", "hiso", "llama", f'dtype = "{dtype}"', **{"hiso.fingerprint-every": 1, "hiso.mu": 1e-2})
    replayed = replay(left.folder.journal_path, left.folder.initial_path)
    runs.assert_same_model(left.model, replayed.arrays)
    assert left.rows("train")[-1]["rebuilt"] == 0


@pytest.mark.parametrize(("method", "dtype"), [("hiso", "bfloat16"), ("hiso", "float16"), ("fedzo", "float16")])
@pytest.mark.slow
def test_the_row_of_a_round_says_what_half_precision_does_to_probes(
    short: Callable[..., runs.Left], method: str, dtype: str
) -> None:
    """A large radius moves nearly all elements; the smallest moves none, and loses every probe."""
    for mu, lost, least, most in ((1e-2, 0, 0.5, 1), (1e-20, 1, 0, 0)):
        left = short(f"mu {mu}", method, "llama", options=f'dtype = "{dtype}"', **{f"{method}.mu": mu})
        for row in left.rows("train"):
            assert row["probes-lost"] == lost
            assert least <= row["elements-moved"] <= most


@pytest.mark.parametrize("options", ["", 'dtype = "bfloat16"\nlora-rank = 2'], ids=["float32", "float32 adapters"])
@pytest.mark.slow
def test_float32_parameters_have_no_word_about_half_precision(short: Callable[..., runs.Left], options: str) -> None:
    for row in short("run", "hiso", options=options).rows("train"):
        assert "train-loss" in row
        assert not {"probes-lost", "elements-moved"} & row.keys()


@pytest.mark.parametrize("method", ["fedavg", "fedzo"])
@pytest.mark.slow
def test_patterns_of_bfloat16_are_not_averaged(short: Callable[..., runs.Left], method: str) -> None:
    with pytest.raises(TaskError, match=r"FedAvg, model tensor .*got bfloat16.*scalar-only method"):
        short("run", method, options='dtype = "bfloat16"')
    short("adapters", method, options='dtype = "bfloat16"\nlora-rank = 2')


@pytest.mark.slow
def test_the_whole_model_trains_with_a_server_optimiser(
    short: Callable[..., runs.Left], make: Callable[..., Any]
) -> None:
    left = short("run", "fedadam")
    first = make("sst2", "opt").initial_arrays(0)
    assert left.model.keys() == first.keys()
    assert all(left.model[name].tobytes() != first[name].tobytes() for name in first if "layers" in name)
    assert all(np.isfinite(value).all() for value in left.model.values())


@pytest.mark.parametrize("method", [m.name for m in METHODS if m.family != "zeroth order"])
def test_no_method_starts_on_a_language_model_with_the_learning_rate_of_a_small_network(method: str) -> None:
    assert resolve_settings({"method": method, "task": "sst2"}).lr <= 0.01


@pytest.mark.slow
def test_squad_runs(short: Callable[..., runs.Left]) -> None:
    left = short("run", "decomfl", task="squad", partition="iid", options="eval-examples = 1", **{"evaluate-every": 2})
    [last] = [row for row in left.rows("evaluate") if row["round"] == 2]
    assert last.keys() >= {"test-f1", "test-exact-match", "test-loss"}


@pytest.mark.slow
def test_fedavg_learns(short: Callable[..., runs.Left]) -> None:
    left = short("run", "fedavg", "llama", lr=0.5, **{"num-server-rounds": 6, "local-steps": 4, "alpha": 100.0})
    losses = [row["train-loss"] for row in left.rows("train")]
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize(("method", "rate"), [("decomfl", 2e-5), ("hiso", 2e-4), ("fedavg", 1e-3)])
def test_language_tasks_have_settings_of_their_own(method: str, rate: float) -> None:
    """Those for small networks would destroy a language model in one step."""
    settings = resolve_settings({"method": method, "task": "sst2"})
    assert (settings.lr, settings.batch_size, settings.validation_fraction) == (rate, 16, 0.0)
    assert resolve_settings({"method": method, "task": "squad"}).partition == "iid"
    assert resolve_settings({"method": method, "task": "digits-mlp"}).lr > 0.01


@pytest.mark.parametrize("options", ["", "lora-rank = 2"], ids=["whole", "adapters"])
@pytest.mark.slow
def test_fedclup_takes_its_server_step_from_a_model_with_fused_attention(
    short: Callable[..., runs.Left], make: Callable[..., Any], options: str
) -> None:
    """Its default needs ``L``, which fused attention gives no second derivative for: no reply is refused."""
    model = make("sst2", "llama").build_model()
    assert model.config._attn_implementation == "sdpa"  # else this tests nothing
    for row in short("run", "fedclup", family="llama", options=options).rows("train"):
        assert (row["folded"], row["refused"]) == ([0, 1], {})
