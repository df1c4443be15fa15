"""Blocks of groups, of cut layers and of few rows: every tile takes its own step and travels."""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from fedapps.curvature import layers
from fedapps.curvature.blocks import WireDtype
from fedapps.curvature.foof import FoofPreconditioner
from fedapps.curvature.layers import input_rows
from fedapps.curvature.layout import from_matrix, to_matrix
from fedapps.curvature.packing import unpack_upper

from .foof_rounds import (
    make_data,
    square_loss,
    train,
)


def dense_step(
    layer: nn.Module, x: torch.Tensor, y: torch.Tensor, *, lr: float, damping: float, max_width: int = 0
) -> tuple[dict[str, np.ndarray], list[np.ndarray]]:
    """One step tile by tile with ``inv``, in float64: the parameters after it, and ``P`` of every tile."""
    layer = copy.deepcopy(layer).double()
    (spec,) = layers.model_layout(layer, max_width=max_width).blocks
    square_loss(layer(x.double()), y.double()).backward()
    held = {n: p.detach().numpy() for n, p in layer.named_parameters()}
    W, G = to_matrix(held, spec), to_matrix({n: p.grad.numpy() for n, p in layer.named_parameters()}, spec)
    rows = input_rows(layer, x.double()).numpy()
    Ps = []
    for number, (tile_rows, columns) in enumerate(spec.tiles):
        a = rows[number // len(spec.columns)][:, columns]
        Ps.append(a.T @ a / len(a) + damping * np.eye(a.shape[1]))
        W[tile_rows, columns] -= lr * G[tile_rows, columns] @ np.linalg.inv(Ps[-1])
    return from_matrix(W, spec, held), Ps


TILED: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "grouped convolution": (lambda: nn.Conv2d(4, 6, 3, groups=2, padding=1), (3, 4, 6, 5), 0),
    "depthwise convolution": (lambda: nn.Conv2d(4, 8, 2, groups=4, bias=False), (3, 4, 6, 5), 0),
    "grouped one-dimensional convolution": (lambda: nn.Conv1d(4, 6, 3, groups=2), (3, 4, 9), 0),
    "cut linear layer": (lambda: nn.Linear(10, 3), (30, 10), 4),
    "cut grouped convolution": (lambda: nn.Conv2d(4, 6, 3, groups=2), (3, 4, 6, 5), 8),
    "few rows": (lambda: nn.Linear(40, 3), (4, 40), 0),
    "few rows, cut": (lambda: nn.Linear(80, 3), (4, 80), 41),
    "few rows, in groups": (lambda: nn.Conv2d(16, 8, 3, groups=2), (2, 16, 4, 4), 0),
}


@pytest.mark.parametrize(("build", "shape", "max_width"), TILED.values(), ids=TILED)
def test_every_tile_takes_its_own_step_and_travels(
    build: Callable[[], nn.Module], shape: tuple[int, ...], max_width: int
) -> None:
    torch.manual_seed(0)
    layer, x = build(), torch.randn(shape)
    y = torch.randn_like(layer(x))
    after, Ps = dense_step(layer, x, y, lr=0.7, damping=0.3, max_width=max_width)
    sent = {n: p.detach().double().numpy().copy() for n, p in layer.named_parameters()}
    foof = train(layer, [(x, y)], lr=0.7, damping=0.3, max_width=max_width)
    (block,) = foof.blocks()
    delta = to_matrix(after, block.spec) - to_matrix(sent, block.spec)
    for name, parameter in layer.named_parameters():
        np.testing.assert_allclose(parameter.detach().numpy(), after[name], atol=2e-6)
    assert len(Ps) == len(block.spec.tiles)
    for (tile, packed, product), P in zip(block.tiles(), Ps, strict=True):
        np.testing.assert_allclose(unpack_upper(packed), P, atol=2e-6)
        np.testing.assert_allclose(product, delta[tile.rows, tile.columns] @ P, atol=1e-5)


@pytest.mark.parametrize("through_rows", [True, False], ids=["through the rows", "through the matrix"])
def test_both_ways_to_divide_take_the_same_steps(through_rows: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ``P`` from 4 rows of width 41, kept in the last step, whose gradient has other rows and a weight decay."""
    monkeypatch.setattr("fedapps.curvature.foof.cheaper_through_rows", lambda *a: through_rows)
    torch.manual_seed(0)
    layer = nn.Linear(40, 3, dtype=torch.float64)
    data = [make_data(4, 40, 3, seed, torch.float64) for seed in range(4)]
    W = to_matrix(
        {n: p.detach().numpy().copy() for n, p in layer.named_parameters()}, layers.model_layout(layer).blocks[0]
    )
    rows = [np.c_[x.numpy(), np.ones(4)] for x, _ in data]
    for step, (a, (_, y)) in enumerate(zip(rows, data, strict=True)):
        if step < 3:
            P = a.T @ a / 4 + 0.2 * np.eye(41)
        W = W - 0.1 * ((W @ a.T - y.numpy().T) @ a / 4 + 0.05 * W) @ np.linalg.inv(P)
    with FoofPreconditioner(layer, damping=0.2, refresh=2) as foof:
        for x, y in data:
            layer.zero_grad()
            decay = 0.025 * (layer.weight.square().sum() + layer.bias.square().sum())
            (square_loss(layer(x), y) + decay).backward()
            foof.step(0.1)
    np.testing.assert_allclose(layer.weight.detach().numpy(), W[:, :-1], rtol=1e-9)
    np.testing.assert_allclose(unpack_upper(foof.blocks()[0].curvature), P, rtol=1e-10)


# The factor of few rows -----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", list(WireDtype))
@pytest.mark.parametrize("max_width", [0, 21], ids=["whole", "cut"])
def test_a_block_of_few_rows_travels_as_its_factor(max_width: int, dtype: WireDtype) -> None:
    """6 rows of width 41, or of 20 and 21: the factor stands for the block that travels without it."""
    torch.manual_seed(0)
    layer = nn.Linear(40, 3)
    batch = make_data(6, 40, 3, 0)
    blocks = []
    for minimum in (6, 7):
        with FoofPreconditioner(
            copy.deepcopy(layer), damping=0.2, max_width=max_width, factor_min_rows=minimum
        ) as foof:
            model = foof._model
            square_loss(model(batch[0]), batch[1]).backward()
            foof.step(0.5)
        blocks.append(foof.blocks(dtype)[0])
    factor, triangle = blocks
    assert (factor.factor_rows, triangle.factor_rows) == (6, 0)
    assert factor.curvature.size < triangle.curvature.size / 2
    for (_, P, M), (_, Q, N) in zip(factor.tiles(), triangle.tiles(), strict=True):
        scale = 2.0**-7 if dtype is WireDtype.BFLOAT16 else 1e-6
        np.testing.assert_allclose(P, Q, atol=scale * np.abs(Q).max())
        np.testing.assert_allclose(M, N, atol=10 * scale * np.abs(N).max())


def test_more_rows_than_the_width_travel_as_triangle() -> None:
    foof = train(nn.Linear(3, 2), [make_data(9, 3, 2, 0)], damping=0.2, factor_min_rows=2)
    assert foof.blocks()[0].factor_rows == 0
