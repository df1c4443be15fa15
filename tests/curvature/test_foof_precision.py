"""Singular blocks, and models in half precision."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

from fedapps.curvature.foof import FoofPreconditioner
from fedapps.curvature.packing import unpack_upper
from fedapps.errors import CurvatureError

from .foof_rounds import (
    arrays_of,
    make_data,
    mix,
    num_hooks,
    train,
)


@pytest.mark.parametrize("damping", [1e-3, 0.0], ids="damping {}".format)
def test_one_example_with_a_dead_input_gives_a_finite_step(damping: float) -> None:
    """``A = a a'`` has rank one: ``G = e a'`` is divided to ``e a' / (a'a + damping)``.

    With damping 0 the smallest damping of the ladder is added, reported, and part of the ``P`` that travels; the step is
    that of the pseudo-inverse, to some per cent.
    """
    torch.manual_seed(0)
    layer = nn.Linear(3, 2)
    x, y = torch.tensor([[1.0, 0.0, 2.0]]), torch.tensor([[1.0, -1.0]])
    a = np.array([1.0, 0.0, 2.0, 1.0])
    before = layer.weight.detach().double().numpy().copy()
    error = (layer(x) - y).detach().double().numpy()[0]
    foof = train(layer, [(x, y)], damping=damping, where="client 3")
    expected = before - np.outer(error, a[:3]) / (a @ a + damping)
    np.testing.assert_allclose(layer.weight.detach().numpy(), expected, atol=2e-2 if damping == 0 else 2e-3)
    added = foof.added_damping.get("", 0.0)
    assert (added > 0) == (damping == 0)
    P = unpack_upper(foof.blocks()[0].curvature)
    np.testing.assert_allclose(P, np.outer(a, a) + (damping + added) * np.eye(4), rtol=1e-6, atol=1e-9)
    assert np.isfinite(foof.blocks()[0].product).all()


def test_inputs_that_are_all_zero_need_a_damping() -> None:
    """With damping 0 an error that names layer and client; else a gradient step divided by the damping."""
    model = nn.Sequential(nn.Linear(3, 2, bias=False))
    x, y = torch.zeros(4, 3), torch.ones(4, 2)
    with pytest.raises(CurvatureError, match=r"layer '0', client 3: .* zero everywhere.*damping"):
        train(model, [(x, y)], damping=0.0, where="client 3")
    assert num_hooks(model) == 0
    foof = train(model, [(x, y)], damping=0.1)
    np.testing.assert_allclose(unpack_upper(foof.blocks()[0].curvature), 0.1 * np.eye(3), rtol=1e-6)


def test_dead_layer_on_every_client_comes_out_as_the_weighted_mean() -> None:
    """``A_i = 0`` everywhere, and the ``W_i`` differ, by weight decay here: weights 1 and 3."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2, bias=False)
    sent, replies, ends = arrays_of(model), [], []
    for weight, decay in [(1.0, 0.1), (3.0, 0.4)]:
        client = copy.deepcopy(model)
        with FoofPreconditioner(client, damping=0.1) as foof:
            (client(torch.zeros(4, 3)).sum() + decay / 2 * client.weight.square().sum()).backward()
            foof.step(0.05)
        replies.append((weight, foof.blocks()))
        ends.append(arrays_of(client)["weight"])
    assert np.abs(ends[0] - ends[1]).max() > 0.05
    np.testing.assert_allclose(mix(sent, replies)["weight"], 0.25 * ends[0] + 0.75 * ends[1], atol=1e-6)


def test_bfloat16_model_is_solved_in_single_precision() -> None:
    """The same data and start in float32 end within one spacing of bfloat16 (2^-8 relative, values below 2)."""
    torch.manual_seed(0)
    half = nn.Linear(3, 2).to(torch.bfloat16)
    single = copy.deepcopy(half).float()
    sent = arrays_of(half)
    x, y = (t.to(torch.bfloat16) for t in make_data(30, 3, 2, seed=0))
    foof = train(half, [(x, y)], lr=0.1, damping=0.1)
    expected = train(single, [(x.float(), y.float())], lr=0.1, damping=0.1)
    assert half.weight.dtype == torch.bfloat16
    (block,), (reference,) = foof.blocks(), expected.blocks()
    assert block.curvature.dtype == block.product.dtype == np.float32
    np.testing.assert_allclose(block.curvature, reference.curvature, rtol=1e-6)
    torch.testing.assert_close(half.weight.float(), single.weight, atol=2.0**-6, rtol=0)
    np.testing.assert_allclose(mix(sent, [(1.0, [block])])["weight"], half.weight.detach().float(), atol=1e-5)


def test_half_precision_parameters_are_rounded_once() -> None:
    """Below 1 the spacing of bfloat16 is 2^-8: a step just above 2^-9 leads from 1 to 1 - 2^-8.

    Rounded to bfloat16 first, the step would be 2^-9 exactly, a tie that goes back to 1.
    """
    model = nn.LayerNorm(1, dtype=torch.bfloat16)
    model.weight.grad = torch.ones(1, dtype=torch.bfloat16)
    with FoofPreconditioner(model, damping=0.1) as foof:
        foof.step(2.0**-9 * (1 + 2.0**-12))
    assert float(model.weight) == 1 - 2.0**-8
