"""LoRA adapters: only they train, and they start as nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fedapps.errors import TaskError
from fedapps.tasks.language.adapters import add_adapters
from fedapps.tasks.language.models import load_causal_lm
from fedapps.zeroth_order.quiet import trainable_parameters

IDS = torch.arange(10).reshape(2, 5)


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    return load_causal_lm(str(folder), dtype)


@pytest.mark.parametrize(
    ("family", "layers"),
    [("llama", ["q_proj", "v_proj"]), ("opt", ["q_proj", "v_proj"]), ("gpt2", ["c_attn"])],
)
@pytest.mark.slow
def test_adapters_start_as_nothing_and_are_all_that_trains(
    folder_of: Callable[[str], Path], family: str, layers: list[str], recwarn: pytest.WarningsRecorder
) -> None:
    model = load(folder_of(family))
    before = model(IDS).logits
    frozen = dict(model.named_parameters())
    add_adapters(model, rank=3, alpha=6.0, targets=())
    assert not [warning for warning in recwarn if "fan_in_fan_out" in str(warning.message)]
    torch.testing.assert_close(model(IDS).logits, before)
    trainable = trainable_parameters(model)
    assert len(trainable) == 2 * 2 * len(layers)  # A and B, two layers of the model
    assert {name.split(".lora_")[0].rsplit(".", 1)[-1] for name in trainable} == set(layers)
    assert all(3 in parameter.shape for parameter in trainable.values())
    kept = {id(p) for p in model.parameters() if not p.requires_grad}
    assert kept == {id(parameter) for parameter in frozen.values()}


def test_the_layer_gains_alpha_over_rank_times_b_times_a(folder_of: Callable[[str], Path]) -> None:
    model = load(folder_of("opt"))
    layer = model.model.decoder.layers[0].self_attn.k_proj
    x = torch.randn(4, 32)
    plain = layer(x)
    add_adapters(model, rank=2, alpha=5.0, targets=("k_proj",))
    adapters = trainable_parameters(model)
    with torch.no_grad():
        for parameter in adapters.values():
            parameter.normal_()
    A, B = (adapters[f"model.decoder.layers.0.self_attn.k_proj.lora_{m}.default.weight"] for m in "AB")
    found = model.model.decoder.layers[0].self_attn.k_proj(x)
    torch.testing.assert_close(found, plain + 5.0 / 2 * x @ A.T @ B.T)


def test_adapters_of_a_half_precision_model_are_float32(folder_of: Callable[[str], Path]) -> None:
    model = load(folder_of("llama"), torch.bfloat16)
    add_adapters(model, rank=2, alpha=4.0, targets=())
    assert {p.dtype for p in trainable_parameters(model).values()} == {torch.float32}
    assert {p.dtype for p in model.parameters() if not p.requires_grad} == {torch.bfloat16}
    assert model(IDS).logits.dtype == torch.bfloat16


def test_layers_that_are_not_there_are_named(folder_of: Callable[[str], Path]) -> None:
    with pytest.raises(TaskError, match=r"'lora-targets': expected endings .*got w_q, w_v \("):
        add_adapters(load(folder_of("llama")), rank=2, alpha=4.0, targets=("w_q", "w_v"))


def test_without_peft_the_extra_is_named(folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(folder_of("llama"))
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(TaskError, match=r"'lora-rank': expected the package peft.*install fedapps\[llm\]"):
        add_adapters(model, rank=2, alpha=4.0, targets=())
