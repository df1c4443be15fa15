"""Parameters that have no block, and layers that saw no input."""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from fedapps.averaging import add_mean, finish_mean, start_mean
from fedapps.curvature.foof import NOT_CALLED, TRANSFORMED, FoofPreconditioner
from fedapps.curvature.packing import unpack_upper

from .foof_rounds import (
    Arrays,
    arrays_of,
    make_data,
    train,
)


class Mixed(nn.Module):
    """Parameters of every kind that has no block (free, embedding, norms), a tied head, and an idle layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.ones(4))
        self.embed = nn.Embedding(7, 4)
        self.norm = nn.LayerNorm(4)
        self.fc = nn.Linear(4, 4)
        self.group = nn.GroupNorm(2, 4)
        self.idle = nn.Linear(4, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.fc(self.norm(self.scale * self.embed(tokens)))
        return self.head(self.group(h))


def test_parameters_without_a_block_take_a_gradient_step_and_are_averaged_exactly() -> None:
    """Nothing stays at its first value.

    Gradient step in float32, then the mean with weights 10 and 30 in float64, rounded once.
    """
    model = Mixed()
    names = ["scale", "embed.weight", "norm.weight", "norm.bias", "group.weight", "group.bias"]
    ends: list[Arrays] = []
    for seed in range(2):
        client = copy.deepcopy(model)
        tokens = torch.randint(7, (6,), generator=torch.Generator().manual_seed(seed))
        with FoofPreconditioner(client, damping=0.1) as foof:
            nn.functional.cross_entropy(client(tokens), tokens.flip(0)).backward()
            grads = {name: p.grad.numpy().copy() for name, p in client.named_parameters() if p.grad is not None}
            foof.step(0.5)
        assert list(foof.layout.averaged) == names
        assert foof.layout.averaged["embed.weight"] == "shared by several layers"
        assert foof.layout.preconditioned == ("fc.weight", "fc.bias", "idle.weight", "idle.bias")
        assert foof.without_input == ("idle",)
        assert client.head.weight is client.embed.weight
        ends.append({name: arrays_of(client)[name] for name in names})
        sent = arrays_of(model)
        for name in names:
            np.testing.assert_allclose(ends[-1][name], sent[name] - np.float32(0.5) * grads[name], rtol=1e-6, atol=1e-7)
            assert np.abs(grads[name]).max() > 0
    sums = start_mean(ends[0])
    add_mean(sums, 10.0, ends[0])
    add_mean(sums, 30.0, ends[1])
    for name, value in finish_mean(sums).items():
        expected = (10 * ends[0][name].astype(np.float64) + 30 * ends[1][name].astype(np.float64)) / 40
        np.testing.assert_array_equal(value, expected.astype(np.float32))


def test_frozen_parameters_stay_bitwise() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    model[0].requires_grad_(False)
    before = model[0].weight.clone()
    train(model, [make_data(5, 3, 2, 0)], damping=0.1)
    assert torch.equal(model[0].weight, before)


def test_a_layer_without_input_has_a_multiple_of_the_identity() -> None:
    """``A = 0`` leaves ``P = damping I``, and nothing moved."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"used": nn.Linear(3, 2), "other": nn.Linear(3, 2)})
    with FoofPreconditioner(model, damping=0.25) as foof:
        model["used"](torch.randn(5, 3)).square().sum().backward()
        foof.step(0.01)
    block = foof.blocks()[1]
    assert (foof.without_input, foof.unseen) == (("other",), ())
    assert block.is_identity
    np.testing.assert_array_equal(block.curvature, np.float32([0.25]))
    np.testing.assert_array_equal(block.product, np.zeros((2, 4), np.float32))
    (_, packed, _), = block.tiles()  # fmt: skip
    np.testing.assert_array_equal(unpack_upper(packed), 0.25 * np.eye(4))


def _by_hand(model: nn.ModuleDict, x: torch.Tensor) -> torch.Tensor:
    return x @ model["other"].weight.T


def _mapped(model: nn.ModuleDict, x: torch.Tensor) -> torch.Tensor:
    return torch.vmap(model["other"])(x)


@pytest.mark.parametrize(("use", "reason"), [(_by_hand, NOT_CALLED), (_mapped, TRANSFORMED)], ids=["by hand", "vmap"])
@pytest.mark.parametrize("seen_before", [False, True])
def test_a_layer_whose_input_was_not_seen_takes_a_plain_step_and_has_no_block(
    use: Callable[[nn.ModuleDict, torch.Tensor], torch.Tensor], reason: str, seen_before: bool
) -> None:
    """Also when its input was seen at an earlier step of the round; the other layer is as without it."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"used": nn.Linear(3, 2), "other": nn.Linear(3, 2)})
    x, alone = torch.randn(5, 3), copy.deepcopy(model["used"])
    with FoofPreconditioner(model, damping=0.25) as foof, FoofPreconditioner(alone, damping=0.25) as reference:
        for by_call in [True] * seen_before + [False]:
            model.zero_grad()
            alone.zero_grad()
            before = copy.deepcopy(model["other"])
            other = model["other"](x) if by_call else use(model, x)
            (model["used"](x).square().sum() + other.square().sum()).backward()
            alone(x).square().sum().backward()
            foof.step(0.01)
            reference.step(0.01)
    torch.testing.assert_close(model["other"].weight, before.weight - 0.01 * model["other"].weight.grad)
    assert foof.unseen == ("other",)
    assert [spec.layer for spec in foof.layout.blocks] == ["used"]
    assert foof.layout.averaged == {"other.weight": reason, "other.bias": reason}
    (block,), (expected,) = foof.blocks(), reference.blocks()
    np.testing.assert_array_equal(block.curvature, expected.curvature)
    np.testing.assert_array_equal(block.product, expected.product)
