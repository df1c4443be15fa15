"""What enters a block: which batches, which rows of them, and when it is taken anew."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedapps.curvature.foof import Estimate, FoofPreconditioner
from fedapps.curvature.layers import count_only
from fedapps.curvature.packing import unpack_upper

from .foof_rounds import (
    Batch,
    covariance64,
    curvature,
    make_data,
    square_loss,
    train,
)


@pytest.fixture
def batches() -> list[Batch]:
    """Three batches of different sizes."""
    return [make_data(n, 3, 2, seed) for seed, n in enumerate([4, 9, 2])]


def test_last_batch_is_the_paper(batches: list[Batch]) -> None:
    foof = train(nn.Linear(3, 2), batches, lr=0.01, damping=0.5)
    np.testing.assert_allclose(curvature(foof, 0.5), covariance64(batches[2][0]), atol=1e-5)


def test_average_starts_at_the_first_batch(batches: list[Batch]) -> None:
    foof = train(nn.Linear(3, 2), batches, lr=0.01, damping=0.5, estimate=Estimate.AVERAGE, decay=0.9)
    first, second, third = (covariance64(x) for x, _ in batches)
    expected = 0.9 * (0.9 * first + 0.1 * second) + 0.1 * third
    np.testing.assert_allclose(curvature(foof, 0.5), expected, atol=1e-5)


def test_passes_before_a_step_are_pooled_by_rows(batches: list[Batch]) -> None:
    """Gradient accumulation: one step after three backward passes."""
    layer = nn.Linear(3, 2)
    with FoofPreconditioner(layer, damping=0.5) as foof:
        for x, y in batches:
            square_loss(layer(x), y).backward()
        foof.step(0.01)
    np.testing.assert_allclose(curvature(foof, 0.5), covariance64(*(x for x, _ in batches)), atol=1e-5)


def test_module_used_twice_adds_the_rows_of_both_uses() -> None:
    layer, x = nn.Linear(3, 3), torch.randn(5, 3)
    with FoofPreconditioner(layer, damping=0.5) as foof:
        hidden = layer(x)
        layer(torch.cat([hidden, hidden])).square().sum().backward()
        foof.step(0.01)
    np.testing.assert_allclose(curvature(foof, 0.5), covariance64(x, hidden.detach(), hidden.detach()), atol=1e-5)


def test_evaluation_adds_nothing(batches: list[Batch]) -> None:
    """Hooks collect in training alone: three passes under no_grad, one in evaluation mode, and one after the round."""
    layer = nn.Linear(3, 2)
    x, y = batches[0]
    with FoofPreconditioner(layer, damping=0.5) as foof:
        square_loss(layer(x), y).backward()
        with torch.no_grad():
            for _ in range(3):
                layer(100 * x)
        layer.eval()
        layer(100 * x)
        layer.train()
        foof.step(0.01)
    layer(100 * x)
    np.testing.assert_allclose(curvature(foof, 0.5), covariance64(x), atol=1e-5)


def test_keyword_input_is_seen() -> None:
    layer, x = nn.Linear(3, 2), torch.randn(5, 3)
    with FoofPreconditioner(layer, damping=0.5) as foof:
        layer(input=x).sum().backward()
        foof.step(0.01)
    np.testing.assert_allclose(curvature(foof, 0.5), covariance64(x), atol=1e-5)


def test_autocast_does_not_coarsen_the_block() -> None:
    """bfloat16 has 8 bits: a product taken in it would be off by some 1e-2 at entries of this size."""
    layer, x = nn.Linear(3, 2), 3 + torch.randn(50, 3)
    with FoofPreconditioner(layer, damping=0.5) as foof:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            layer(x).float().square().mean().backward()
        foof.step(0.01)
    np.testing.assert_allclose(curvature(foof, 0.5), covariance64(x), rtol=1e-5)


# Refresh, full pass, and a sample of the rows -------------------------------------------------


def test_a_block_is_kept_for_the_steps_of_a_refresh() -> None:
    """Five steps at refresh 2: blocks of the batches 0, 2 and 4; the past counts ``0.7^2`` after two steps."""
    batches = [make_data(6, 3, 2, seed) for seed in range(5)]
    foof = train(nn.Linear(3, 2), batches, lr=0.01, damping=0.5, refresh=2, estimate=Estimate.AVERAGE, decay=0.7)
    first, third, fifth = (covariance64(batches[i][0]) for i in (0, 2, 4))
    np.testing.assert_allclose(curvature(foof, 0.5), 0.49 * (0.49 * first + 0.51 * third) + 0.51 * fifth, atol=1e-5)
    foof = train(nn.Linear(3, 2), batches[:4], lr=0.01, damping=0.5, refresh=2)
    np.testing.assert_allclose(curvature(foof, 0.5), third, atol=1e-5)


def test_a_layer_with_few_rows_is_estimated_at_every_step_of_the_first_refresh() -> None:
    """Three rows, width 4, at refresh 3: blocks of the batches 0, 1, 2, then 3 and not 4; each counts 0.3 at its step."""
    batches = [make_data(3, 3, 2, seed) for seed in range(5)]
    foof = train(nn.Linear(3, 2), batches, lr=0.01, damping=0.5, refresh=3, estimate=Estimate.AVERAGE, decay=0.7)
    expected = covariance64(batches[0][0])
    for x, _ in batches[1:4]:
        expected = 0.7 * expected + 0.3 * covariance64(x)
    np.testing.assert_allclose(curvature(foof, 0.5), expected, atol=1e-5)


def test_rows_that_are_sampled_count_as_few() -> None:
    """Nine rows, width 4, of which 3 enter a block: it is estimated at every step of the first refresh."""
    batches = [make_data(9, 3, 2, seed) for seed in range(3)]
    settings: dict[str, Any] = {"lr": 0.01, "damping": 0.5, "estimate": Estimate.LAST_BATCH, "max_rows": 3}
    often = train(nn.Linear(3, 2), batches, refresh=1, **settings)
    seldom = train(nn.Linear(3, 2), batches, refresh=10, **settings)
    np.testing.assert_array_equal(curvature(seldom, 0.5), curvature(often, 0.5))


def test_a_small_second_batch_does_not_throw_a_wide_layer() -> None:
    """Two rows after eight, width 21: along a row that is new, the step is that of its own block, not that of the damping."""
    first, second = make_data(8, 20, 1, 0), make_data(2, 20, 1, 1)
    moves = []
    for refresh in (1, 10):
        torch.manual_seed(0)
        layer = nn.Linear(20, 1)
        with FoofPreconditioner(layer, damping=0.01, refresh=refresh, estimate=Estimate.AVERAGE) as foof:
            for x, y in (first, second):
                before = layer.weight.detach().clone()
                layer.zero_grad()
                square_loss(layer(x), y).backward()
                foof.step(0.1)
        moves.append(float((layer.weight.detach() - before).norm()))
    assert moves[0] == moves[1]


def test_a_layer_that_joins_between_refreshes_is_estimated_at_once() -> None:
    model = nn.ModuleDict({"a": nn.Linear(3, 2), "b": nn.Linear(3, 2)})
    x = torch.randn(6, 3)
    with FoofPreconditioner(model, damping=0.5, refresh=10) as foof:
        for names in (["a"], ["a", "b"]):
            model.zero_grad()
            sum(model[name](x).square().sum() for name in names).backward()
            foof.step(0.01)
    assert foof.without_input == ()
    np.testing.assert_allclose(unpack_upper(foof.blocks()[1].curvature) - 0.5 * np.eye(4), covariance64(x), atol=1e-5)


def test_full_pass_is_used_in_every_step_and_leaves_no_trace(batches: list[Batch]) -> None:
    """Pooled by rows over the passes; buffers and torch's generator are as before, and dropout draws what it would."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, 2))
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    seen: list[torch.Tensor] = []
    model[2].register_forward_pre_hook(lambda _m, args: seen.append(args[0].detach().clone()))
    state = torch.random.get_rng_state()
    with FoofPreconditioner(model, damping=0.5, estimate=Estimate.FULL_PASS) as foof:
        with foof.full_pass():
            for x, _ in batches:
                model(x)
        assert torch.equal(torch.random.get_rng_state(), state)
        assert all(torch.equal(buffer, buffers[name]) for name, buffer in model.named_buffers())
        shown = covariance64(*seen)
        for x, y in batches:
            model.zero_grad()
            square_loss(model(x), y).backward()
            foof.step(0.01)
            np.testing.assert_allclose(curvature(foof, 0.5), shown, atol=1e-5)


def test_full_pass_puts_buffers_back_after_an_error() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2))
    foof = FoofPreconditioner(model, damping=0.5, estimate=Estimate.FULL_PASS)

    def show() -> None:
        with foof, foof.full_pass():
            model(torch.randn(5, 3))
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        show()
    assert int(model[0].num_batches_tracked) == 0
    assert torch.is_grad_enabled()


def sampled(model: nn.Module, x: torch.Tensor, max_rows: int, seed: int) -> np.ndarray:
    with FoofPreconditioner(model, damping=0.5, max_rows=max_rows, seed=seed) as foof:
        model(x).square().mean().backward()
        foof.step(0.0)
    return np.concatenate([block.curvature for block in foof.blocks()])


def test_a_sample_of_the_rows_depends_on_its_seed_alone() -> None:
    model = nn.Sequential(nn.Conv2d(2, 4, 2, groups=2), nn.Flatten(), nn.Linear(64, 2, bias=False))
    x = torch.randn(6, 2, 5, 5)
    drawn = [sampled(model, x, 5, seed) for seed in (1, 1, 2)]
    state = torch.random.get_rng_state()
    assert drawn[0].tobytes() == drawn[1].tobytes() != drawn[2].tobytes()
    assert torch.equal(torch.random.get_rng_state(), state)
    np.testing.assert_allclose(sampled(model, x, 10**6, 1), sampled(model, x, 0, 1))


def test_a_sample_holds_that_many_of_the_rows_and_is_unbiased() -> None:
    """Rows are unit vectors ``e_r``: their covariance counts them. 200 draws of 5 in 20 leave a deviation of 0.03 each."""
    layer, x = nn.Linear(20, 2, bias=False), torch.eye(20)
    draws = []
    for seed in range(200):
        with FoofPreconditioner(layer, damping=0.0 + 0.5, max_rows=5, seed=seed) as foof:
            layer(x).sum().backward()
            foof.step(0.0)
        diagonal = np.diagonal(curvature(foof, 0.5))
        assert np.isclose(diagonal, 0.2, atol=1e-6).sum() == 5
        draws.append(diagonal)
    np.testing.assert_allclose(np.mean(draws, axis=0), 1 / 20, atol=4 * 0.2 * np.sqrt(0.25 * 0.75 / 200))


@pytest.mark.parametrize("max_rows", [0, 3])
@pytest.mark.parametrize("estimate", list(Estimate))
def test_padding_changes_neither_step_nor_block(estimate: Estimate, max_rows: int) -> None:
    """Rows of 3 and 2 tokens, alone and with two more pads beside them: the same to rounding."""
    torch.manual_seed(0)
    model, x, held = nn.Linear(4, 3), torch.randn(2, 3, 4), torch.tensor([[True] * 3, [True, True, False]])
    ends = []
    for pads in (0, 2):
        client = copy.deepcopy(model)
        inputs = torch.cat([x, 7 * torch.ones(2, pads, 4)], dim=1)
        mask = torch.cat([held, torch.zeros(2, pads, dtype=torch.bool)], dim=1)

        def loss(client: nn.Module = client, inputs: torch.Tensor = inputs, mask: torch.Tensor = mask) -> torch.Tensor:
            with count_only(mask):
                return client(inputs)[mask].square().sum()

        with FoofPreconditioner(client, damping=0.1, estimate=estimate, max_rows=max_rows) as foof:
            if estimate is Estimate.FULL_PASS:
                with foof.full_pass():
                    loss()
            for _ in range(2):
                client.zero_grad()
                loss().backward()
                foof.step(0.1)
        ends.append((foof.blocks()[0].curvature, client.weight.detach().numpy()))
    for padded, plain in zip(*ends, strict=True):
        np.testing.assert_allclose(padded, plain, rtol=1e-5, atol=1e-6)
