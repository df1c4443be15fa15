"""Forward passes over padded rows, for the families with learned, offset and rotary positions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fedapps.curvature.foof import FoofPreconditioner
from fedapps.curvature.layers import model_layout
from fedapps.errors import TaskError
from fedapps.tasks.language import forward
from fedapps.tasks.language.encoding import PADDING
from fedapps.tasks.language.forward import (
    answer_losses,
    check_logits,
    continuations,
    hidden_states,
    label_logits,
    pad_in_front,
    without_answers,
)
from fedapps.tasks.language.models import load_causal_lm
from fedapps.zeroth_order.perturbed import Perturbed
from fedapps.zeroth_order.quiet import trainable_parameters

FAMILIES = ["llama", "opt", "gpt2"]
LABELS = torch.tensor([40, 7, 90])


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest, folder_of: Callable[[str], Path]) -> Any:
    model = load_causal_lm(str(folder_of(request.param)), torch.float32)
    with torch.no_grad():  # Random weights are so small that places hardly matter: make them matter.
        for parameter in model.parameters():
            parameter.mul_(4)
    return model


def row(length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(2, 200, (length,), generator=torch.Generator().manual_seed(seed))


def padded(rows: list[torch.Tensor], side: str) -> torch.Tensor:
    most = max(map(len, rows)) + 2  # Padding beside the longest row, too.
    fill = [torch.full((most - len(row),), PADDING) for row in rows]
    parts = zip(rows, fill, strict=True) if side == "right" else zip(fill, rows, strict=True)
    return torch.stack([torch.cat(part) for part in parts])


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_logits_of_a_row_do_not_depend_on_what_is_beside_it(
    model: Any, side: str, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Padding moves no answer's logits: against the model itself on the row alone, without mask and positions."""
    rows = [row(3), row(9, 1), row(5, 2), row(2, 3)]
    if not packed:
        monkeypatch.setattr(forward, "PACKING", frozenset())
    with torch.no_grad():
        alone = torch.stack([model(r[None]).logits[0, -1, LABELS] for r in rows])
        lines: list[int] = []
        model.base_model.register_forward_pre_hook(
            lambda *call: lines.append(len(call[2]["input_ids"])), with_kwargs=True
        )
        together = label_logits(model, padded(rows, side), LABELS)
    assert alone.std() > 0.01
    assert lines[-1] == (3 if packed else 4)
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)


def test_without_mask_and_positions_padding_would_matter(model: Any) -> None:
    rows = [row(3), row(9, 1)]
    ids = padded(rows, "left")
    with torch.no_grad():
        right = hidden_states(model, ids)[0, -1]
        wrong = model.base_model(ids.clamp(min=0), use_cache=False).last_hidden_state[0, -1]
    assert (wrong - right).abs().max() > 1e-3


@pytest.mark.parametrize("side", ["left", "right"])
def test_losses_are_those_of_the_answers_tokens(model: Any, side: str) -> None:
    rows, counts = [row(6), row(9, 1), row(3, 2)], [1, 4, 2]
    with torch.no_grad():
        losses = answer_losses(model, padded(rows, side), torch.tensor(counts))
        for loss, ids, count in zip(losses, rows, counts, strict=True):
            logits = model(ids[None]).logits[0].double().log_softmax(1)
            expected = -logits[torch.arange(len(ids) - 1), ids[1:]][-count:].mean()
            torch.testing.assert_close(loss.double(), expected, atol=1e-5, rtol=1e-5)
    assert losses.dtype == torch.float32


@pytest.mark.parametrize("side", ["left", "right"])
def test_continuations_are_the_likeliest_tokens_up_to_the_first_stop(model: Any, side: str) -> None:
    rows, most = [row(3), row(9, 1)], 6

    def greedy(ids: torch.Tensor) -> list[int]:
        for _ in range(most):
            ids = torch.cat([ids, model(ids[None]).logits[0, -1].argmax()[None]])
        return ids[-most:].tolist()

    with torch.no_grad():
        expected = [greedy(r) for r in rows]
        stops = [expected[0][2], expected[1][3]]
        found = continuations(model, padded(rows, side), stops, most).tolist()

    def end(ids: list[int]) -> int:
        return next((at for at, token in enumerate(ids) if token in stops), most)

    width = max(min(end(ids) + 1, most) for ids in expected)
    assert max(map(end, expected)) < most
    for ids, whole in zip(found, expected, strict=True):
        stop = end(whole)
        assert ids == whole[: stop + 1] + [stops[0]] * (width - stop - 1)


def test_a_models_own_generation_settings_do_not_count(model: Any) -> None:
    ids = padded([row(5)], "right")
    plain = continuations(model, ids, stops=[0], most=5)
    model.generation_config.update(do_sample=True, temperature=50.0, repetition_penalty=9.0)
    own = model.generation_config
    assert torch.equal(continuations(model, ids, stops=[0], most=5), plain)
    assert model.generation_config is own


def test_answers_are_taken_off_and_padding_moves_to_the_front() -> None:
    ids = torch.tensor([[5, 6, 7, PADDING], [1, 2, 3, 4]])
    prompts = without_answers(ids, torch.tensor([1, 3]))
    assert prompts.tolist() == [[5, 6, PADDING, PADDING], [1, PADDING, PADDING, PADDING]]
    assert pad_in_front(prompts).tolist() == [[PADDING, PADDING, 5, 6], [PADDING, PADDING, PADDING, 1]]


def test_gradients_do_not_depend_on_packing(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = padded([row(3), row(9, 1), row(5, 2)], "right")

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        label_logits(model, ids, LABELS).square().sum().backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    packed = gradients()
    monkeypatch.setattr(forward, "PACKING", frozenset())
    for one, two in zip(packed, gradients(), strict=True):
        torch.testing.assert_close(one, two, atol=1e-4, rtol=1e-4)


def test_a_probe_displaces_only_the_rows_that_are_read(model: Any) -> None:
    """Of the input embedding the batch's rows, of the output embedding the label words'; everything else once, whole."""
    parameters = trainable_parameters(model)
    names = {id(parameter): name for name, parameter in parameters.items()}
    ids = padded([row(3), row(9, 1), row(4, 2)], "right")
    asked: list[tuple[str, int]] = []

    def displace(name: str, rows: Any = None) -> torch.Tensor:
        parameter = parameters[name].detach() + 0.01
        asked.append((name, parameter.numel() if rows is None else len(rows) * parameter[0].numel()))
        return parameter if rows is None else parameter[torch.from_numpy(rows)]

    with torch.no_grad(), Perturbed(parameters, displace):
        probed = label_logits(model, ids, LABELS)
    inner = names[id(model.get_input_embeddings().weight)]
    outer = names[id(model.get_output_embeddings().weight)]
    width = parameters[inner].shape[1]
    tokens = len(torch.unique(ids.clamp(min=0)))
    looked_up = [size for name, size in asked if name in (inner, outer)]
    assert sorted(looked_up) == sorted([tokens * width, len(LABELS) * width])
    positions = {name for name in parameters if "wpe" in name or "embed_positions" in name}
    whole = [(name, parameters[name].numel()) for name in parameters if name not in {inner, outer, *positions}]
    assert sorted((name, size) for name, size in asked if name not in {inner, outer, *positions}) == sorted(whole)
    # The same numbers as of a model that is moved for good: tied weights on both ends.
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.add_(0.01)
        torch.testing.assert_close(probed, label_logits(model, ids, LABELS))


def test_logits_are_float32_for_a_model_in_half_precision(folder_of: Callable[[str], Path]) -> None:
    model = load_causal_lm(str(folder_of("opt")), torch.bfloat16)
    ids = padded([row(3), row(9, 1), row(4, 2)], "right")
    logits = label_logits(model, ids, LABELS)
    assert logits.dtype == torch.float32
    assert not torch.equal(logits, logits.bfloat16().float())
    assert answer_losses(model, ids, torch.tensor([1, 2, 1])).dtype == torch.float32


@pytest.mark.parametrize("key", ["final_logit_softcapping", "logit_scale", "logits_scaling"])
def test_a_model_that_changes_its_logits_is_refused(folder_of: Callable[[str], Path], key: str) -> None:
    model = load_causal_lm(str(folder_of("opt")), torch.float32)
    check_logits(model)
    setattr(model.config, key, 1.0)
    check_logits(model)
    setattr(model.config, key, 30.0)
    with pytest.raises(TaskError, match=f"got {key} = 30.0 in its configuration"):
        check_logits(model)


def test_another_output_embedding_is_refused(folder_of: Callable[[str], Path]) -> None:
    model = load_causal_lm(str(folder_of("opt")), torch.float32)
    model.set_output_embeddings(torch.nn.Sequential(model.get_output_embeddings()))
    with pytest.raises(TaskError, match=r"linear layer .*, got Sequential"):
        label_logits(model, padded([row(3)], "right"), LABELS)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_padding_is_no_input_of_a_curvature_block(
    model: Any, side: str, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``A`` of every layer is the mean over the tokens alone: against the rows one by one, without any padding."""
    rows = [row(3), row(9, 1), row(5, 2), row(2, 3)]
    monkeypatch.setattr(forward, "PACKING", forward.PACKING if packed else frozenset())
    for spec in model_layout(model).blocks:
        model.get_submodule(spec.layer).train()  # The rest stays in evaluation mode, without dropout.

    def blocks_of(batches: list[torch.Tensor]) -> dict[str, Any]:
        with FoofPreconditioner(model, damping=0.0) as foof, foof.full_pass():
            for batch in batches:
                hidden_states(model, batch)
        sums = {state.spec.layer: state.A for state in foof._layers if state.A}
        return {layer: A[0].dense() for layer, A in sums.items()}

    together, apart = blocks_of([padded(rows, side)]), blocks_of([tokens[None] for tokens in rows])
    assert len(together) >= 8
    assert together.keys() == apart.keys()
    for layer, A in together.items():
        torch.testing.assert_close(A, apart[layer], rtol=1e-4, atol=1e-5 * float(apart[layer].abs().max()), msg=layer)
