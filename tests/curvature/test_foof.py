"""FOOF steps on torch models, and rounds of them mixed by the server's functions."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedapps.curvature import layers
from fedapps.curvature.blocks import Block, WireDtype
from fedapps.curvature.foof import Estimate, FoofPreconditioner
from fedapps.curvature.gram import covariance
from fedapps.curvature.layers import input_rows, register_layer
from fedapps.curvature.layout import from_matrix, to_matrix
from fedapps.curvature.mixing import add_block, add_mean, finish_mean, mix_block, start_block, start_mean
from fedapps.curvature.packing import unpack_upper
from fedapps.errors import CurvatureError

Batch = tuple[torch.Tensor, torch.Tensor]
Arrays = dict[str, np.ndarray]


def square_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """``1/2`` summed over outputs, mean over rows: ``A`` is then the exact Hessian of each output's weights."""
    return 0.5 * (outputs - targets).square().flatten(1).sum(1).mean()


def train(model: nn.Module, batches: Sequence[Batch], *, lr: float = 1.0, **settings: Any) -> FoofPreconditioner:
    """Take one step a batch."""
    with FoofPreconditioner(model, **settings) as foof:
        for x, y in batches:
            model.zero_grad()
            square_loss(model(x), y).backward()
            foof.step(lr)
    return foof


def arrays_of(model: nn.Module) -> Arrays:
    return {name: p.detach().float().numpy().copy() for name, p in model.named_parameters()}


def mix(sent: Arrays, replies: Sequence[tuple[float, Sequence[Block]]]) -> Arrays:
    """What the server does with the blocks of a round."""
    sums = {block.spec: start_block(*block.product.shape) for block in replies[0][1]}
    for weight, blocks in replies:
        for block in blocks:
            add_block(sums[block.spec], weight, block.curvature, block.product, where="test")
    new: Arrays = {}
    for spec, total in sums.items():
        new |= from_matrix(mix_block(to_matrix(sent, spec), total, where=spec.layer).W, spec, sent)
    return new


def make_data(n: int, width: int, out: int, seed: int, dtype: torch.dtype = torch.float32) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, width, generator=generator, dtype=torch.float64) + seed
    truth = torch.randn(out, width, generator=torch.Generator().manual_seed(99), dtype=torch.float64)
    y = x @ truth.T + 3.0 + 0.1 * torch.randn(n, out, generator=generator, dtype=torch.float64)
    return x.to(dtype), y.to(dtype)


# Closed forms ---------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
def test_mixing_local_solutions_gives_pooled_least_squares(bias: bool) -> None:
    """A04: 20 and 60 rows, 3 inputs, damping 0, full step from anywhere.

    The gradient is ``G = (W A - B)`` with ``A = X'X/n``, ``B = Y'X/n``, so the local step ends at ``B A^-1``, local least
    squares; mixing gives ``(sum n_i B_i)(sum n_i A_i)^-1``, pooled least squares, since the sums are those over all rows.
    """
    torch.manual_seed(0)
    model = nn.Linear(3, 2, bias=bias)
    sent = arrays_of(model)
    data = [make_data(20, 3, 2, seed=0), make_data(60, 3, 2, seed=1)]
    replies = []
    for x, y in data:
        client = copy.deepcopy(model)
        foof = train(client, [(x, y)], damping=0.0)
        local = np.linalg.lstsq(input_rows(client, x)[0].double().numpy(), y.double().numpy(), rcond=None)[0].T
        np.testing.assert_allclose(to_matrix(arrays_of(client), foof.layout.blocks[0]), local, atol=1e-5)
        replies.append((len(x), foof.blocks()))
        spec = foof.layout.blocks[0]
    rows = torch.cat([input_rows(model, x)[0] for x, _ in data]).double().numpy()
    targets = torch.cat([y for _, y in data]).double().numpy()
    pooled = np.linalg.lstsq(rows, targets, rcond=None)[0].T
    np.testing.assert_allclose(to_matrix(mix(sent, replies), spec), pooled, atol=1e-5)


@pytest.mark.parametrize(
    ("loss", "exact_lr"),
    [(square_loss, 1.0), (nn.functional.mse_loss, 2.0)],
    ids=["half, summed over outputs", "mean over outputs, of which there are 4"],
)
def test_block_is_the_exact_curvature_of_a_linear_layer(loss: Callable[..., torch.Tensor], exact_lr: float) -> None:
    """The Hessian of ``c sum_o |X w_o - y_o|^2 / n`` is ``2 c A`` for every output, none between outputs.

    With ``c = 1/2`` this is ``A``; with the mean over 4 outputs ``c = 1/4``, hence ``A / 2`` and an exact step at lr 2.
    """
    x, y = make_data(30, 3, 4, seed=0, dtype=torch.float64)
    layer = nn.Linear(3, 4, dtype=torch.float64)

    def value(flat: torch.Tensor) -> torch.Tensor:
        W = flat.reshape(4, 4)  # bias as last column
        return loss(x @ W[:, :3].T + W[:, 3], y)

    hessian = torch.autograd.functional.hessian(value, torch.randn(16, dtype=torch.float64))
    A = covariance(input_rows(layer, x)[0])
    torch.testing.assert_close(hessian, torch.kron(torch.eye(4, dtype=torch.float64), A) / exact_lr)
    with FoofPreconditioner(layer, damping=0.0) as foof:
        loss(layer(x), y).backward()
        foof.step(exact_lr)
    layer.zero_grad()
    loss(layer(x), y).backward()
    assert layer.weight.grad.abs().max() < 1e-11
    assert layer.bias.grad.abs().max() < 1e-11


class Transposed(nn.Module):
    """A linear layer that stores its weight as (in, out)."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, out))
        self.bias = nn.Parameter(torch.randn(out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight + self.bias


@pytest.fixture
def transposed_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "_LAYER_TYPES", dict(layers._LAYER_TYPES))
    register_layer(Transposed, transposed=True)(lambda module, x: x.flatten(0, -2))


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(3, 4), (9, 3)),
    "linear without bias": (lambda: nn.Linear(3, 4, bias=False), (9, 3)),
    "linear over a sequence": (lambda: nn.Linear(3, 4), (3, 5, 3)),
    "convolution": (lambda: nn.Conv2d(2, 4, (2, 3), stride=2, padding=1), (3, 2, 5, 6)),
    "convolution without bias": (lambda: nn.Conv2d(2, 4, 2, bias=False), (3, 2, 5, 6)),
    "transposed": (lambda: Transposed(3, 4), (9, 3)),
    "one-dimensional convolution": (lambda: nn.Conv1d(2, 4, 3, dilation=2), (3, 2, 9)),
    "three-dimensional convolution": (lambda: nn.Conv3d(1, 4, 2, padding=1, bias=False), (2, 1, 3, 4, 3)),
}


@pytest.mark.usefixtures("transposed_registered")
@pytest.mark.parametrize(("build", "shape"), LAYERS.values(), ids=LAYERS)
def test_step_and_what_travels_equal_the_formulas(build: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    """Two steps by ``W - lr G inv(A + damping I)``, written out in float64; ``P`` is the second's, ``M`` the round's."""
    torch.manual_seed(0)
    layer = build().double()
    batches = [torch.randn(shape, dtype=torch.float64) for _ in range(2)]
    targets = [torch.randn_like(layer(x)) for x in batches]
    spec = layers.model_layout(layer).blocks[0]
    reference = copy.deepcopy(layer)
    start = to_matrix({n: p.detach().numpy().copy() for n, p in reference.named_parameters()}, spec)
    for x, y in zip(batches, targets, strict=True):
        reference.zero_grad()
        square_loss(reference(x), y).backward()
        G = to_matrix({n: p.grad.numpy() for n, p in reference.named_parameters()}, spec)
        rows = input_rows(reference, x)[0].numpy()
        P = sum(np.outer(a, a) for a in rows) / len(rows) + 0.3 * np.eye(spec.width)
        held = {n: p.detach().numpy() for n, p in reference.named_parameters()}
        W = to_matrix(held, spec) - 0.7 * G @ np.linalg.inv(P)
        for name, value in from_matrix(W, spec, held).items():
            reference.get_parameter(name).data = torch.from_numpy(value)
    foof = train(layer, list(zip(batches, targets, strict=True)), lr=0.7, damping=0.3)
    (block,) = foof.blocks()
    for name, parameter in layer.named_parameters():
        torch.testing.assert_close(parameter, reference.get_parameter(name))
    assert block.spec == spec
    np.testing.assert_allclose(unpack_upper(block.curvature), P, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(block.product, (W - start) @ P, rtol=1e-9, atol=1e-12)


def test_mixing_one_step_is_the_step_with_the_pooled_block() -> None:
    """K = 1: ``W - eta [sum p_i G_i] [sum p_i A_i + damping I]^-1`` for 7, 12 and 40 rows (arXiv 2511.09100, eq. 6)."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2, bias=False)).double()
    sent = {name: p.detach().numpy().copy() for name, p in model.named_parameters()}
    data = [make_data(n, 3, 2, seed, torch.float64) for seed, n in enumerate([7, 12, 40])]
    replies = []
    for batch in data:
        client = copy.deepcopy(model)
        replies.append((len(batch[0]), train(client, [batch], lr=0.6, damping=0.2).blocks()))
    pooled = copy.deepcopy(model)
    train(pooled, [(torch.cat([x for x, _ in data]), torch.cat([y for _, y in data]))], lr=0.6, damping=0.2)
    mixed = mix(sent, replies)
    for name, parameter in pooled.named_parameters():
        np.testing.assert_allclose(mixed[name], parameter.detach().numpy(), rtol=1e-9, atol=1e-12)


def test_client_split_in_two_equals_one() -> None:
    """K = 1: 60 rows on one client, or 20 and 40 of them on two; a third client is the same in both."""
    model = nn.Linear(3, 2, dtype=torch.float64)
    sent = {name: p.detach().numpy().copy() for name, p in model.named_parameters()}
    x, y = make_data(60, 3, 2, seed=0, dtype=torch.float64)
    other = make_data(15, 3, 2, seed=1, dtype=torch.float64)

    def reply(batch: Batch) -> tuple[float, Sequence[Block]]:
        return len(batch[0]), train(copy.deepcopy(model), [batch], damping=0.1).blocks()

    whole = mix(sent, [reply((x, y)), reply(other)])
    split = mix(sent, [reply((x[:20], y[:20])), reply((x[20:], y[20:])), reply(other)])
    for name in sent:
        np.testing.assert_allclose(split[name], whole[name], rtol=1e-10)


def cnn() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1),
        nn.BatchNorm2d(3),
        nn.ReLU(),
        nn.Conv2d(3, 4, 3, stride=2),
        nn.Flatten(),
        nn.Linear(36, 2),
    )


def test_one_client_gets_its_own_model_back() -> None:
    """Whatever it did in three steps: ``W + (W_i - W) P P^-1``, up to float32 on the wire and the blocks' condition."""
    model = cnn()
    sent = arrays_of(model)
    foof = train(model, [(torch.randn(8, 1, 8, 8), torch.randn(8, 2)) for _ in range(3)], lr=0.1, damping=0.1)
    mixed = mix(sent, [(8, foof.blocks())])
    after = arrays_of(model)
    assert (
        set(mixed)
        == set(foof.layout.preconditioned)
        == {f"{layer}.{n}" for layer in (0, 3, 5) for n in ("weight", "bias")}
    )
    for name, value in mixed.items():
        assert np.abs(after[name] - sent[name]).max() > 1e-3
        np.testing.assert_allclose(value, after[name], atol=1e-5)


# What is estimated ----------------------------------------------------------------------------


def curvature(foof: FoofPreconditioner, damping: float) -> np.ndarray:
    (block,) = foof.blocks()
    P = unpack_upper(block.curvature)
    return P - damping * np.eye(len(P))


def covariance64(*inputs: torch.Tensor) -> np.ndarray:
    rows = np.concatenate([np.c_[x.reshape(-1, x.shape[-1]), np.ones(x.numel() // x.shape[-1])] for x in inputs])
    return rows.T @ rows / len(rows)


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
    """A07: three passes under no_grad, one in evaluation mode, and one after the round."""
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


# Groups, cuts, and few rows -------------------------------------------------------------------


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


# Devices --------------------------------------------------------------------------------------


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_blocks_on_a_gpu_are_those_of_the_cpu() -> None:
    """To rounding: the order of sums differs. Everything but what travels stays on the device."""
    settings = {"damping": 0.1, "lr": 0.1, "refresh": 2, "max_width": 20, "estimate": Estimate.AVERAGE}
    batches = [(torch.randn(8, 1, 8, 8), torch.randn(8, 2)) for _ in range(3)]
    on_cpu, on_gpu = cnn(), cnn().cuda()
    cpu = train(on_cpu, batches, **settings)
    gpu = train(on_gpu, [(x.cuda(), y.cuda()) for x, y in batches], **settings)
    for left, right in zip(cpu.blocks(), gpu.blocks(), strict=True):
        np.testing.assert_allclose(left.curvature, right.curvature, rtol=1e-2, atol=1e-3)
        np.testing.assert_allclose(left.product, right.product, rtol=1e-2, atol=1e-3)
    assert all(A.rows is None or A.rows.is_cuda for state in gpu._layers for A in state.A)


# Hooks ----------------------------------------------------------------------------------------


def num_hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) for m in model.modules())


def test_no_hook_outlives_the_round() -> None:
    """A07: 20 rounds do not increase the hook count, and the model can be copied."""
    model = cnn()
    batch = torch.randn(4, 1, 8, 8), torch.randn(4, 2)
    for _ in range(20):
        with FoofPreconditioner(model, damping=0.1) as foof:
            assert num_hooks(model) == 3
            square_loss(model(batch[0]), batch[1]).backward()
            foof.step(0.01)
        assert num_hooks(model) == 0
    twin = copy.deepcopy(model)
    torch.testing.assert_close(twin.eval()(batch[0]), model.eval()(batch[0]))


def test_no_hook_outlives_an_error() -> None:
    model = cnn()
    with pytest.raises(RuntimeError, match="out of memory"), FoofPreconditioner(model, damping=0.1):
        raise RuntimeError("out of memory")
    assert num_hooks(model) == 0


# A08: singular blocks and low precision -------------------------------------------------------


@pytest.mark.parametrize("damping", [1e-3, 0.0], ids="damping {}".format)
def test_one_example_with_a_dead_input_gives_a_finite_step(damping: float) -> None:
    """A08 (a) and (b). ``A = a a'`` has rank one: ``G = e a'`` is divided to ``e a' / (a'a + damping)``.

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
    """A08 (c): with damping 0 an error that names layer and client; else a gradient step divided by the damping."""
    model = nn.Sequential(nn.Linear(3, 2, bias=False))
    x, y = torch.zeros(4, 3), torch.ones(4, 2)
    with pytest.raises(CurvatureError, match=r"layer '0', client 3: expected .* zero everywhere; set a damping > 0"):
        train(model, [(x, y)], damping=0.0, where="client 3")
    assert num_hooks(model) == 0
    foof = train(model, [(x, y)], damping=0.1)
    np.testing.assert_allclose(unpack_upper(foof.blocks()[0].curvature), 0.1 * np.eye(3), rtol=1e-6)


def test_dead_layer_on_every_client_comes_out_as_the_weighted_mean() -> None:
    """A08 (c): ``A_i = 0`` everywhere, and the ``W_i`` differ, by weight decay here: weights 1 and 3."""
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
    """A08 (d): the same data and start in float32 end within one spacing of bfloat16 (2^-8 relative, values below 2)."""
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


# Parameters without a block -------------------------------------------------------------------


class Mixed(nn.Module):
    """Parameters of every kind that A06 lists, a tied head (A30), and an idle layer."""

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
    """A06: gradient step in float32, then the mean with weights 10 and 30 in float64, rounded once."""
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


# Errors ---------------------------------------------------------------------------------------


def test_input_that_is_not_finite_is_named() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    x = torch.randn(4, 3)
    x[1, 2] = torch.inf
    with pytest.raises(CurvatureError, match=r"layer '0', client 3: expected finite .*got NaN or infinity"):
        train(model, [(x, torch.zeros(4, 2))], damping=0.1, where="client 3")


def test_gradient_that_is_not_finite_is_named() -> None:
    model = nn.LayerNorm(3)
    with FoofPreconditioner(model, damping=0.1, where="client 3") as foof:
        (torch.nan * model(torch.randn(2, 3))).sum().backward()
        with pytest.raises(CurvatureError, match="parameter 'weight', client 3: expected finite"):
            foof.step(0.1)


@pytest.mark.parametrize(
    "settings",
    [
        {"damping": -1.0}, {"damping": float("nan")}, {"damping": 0.1, "decay": 1.0}, {"damping": 0.1, "refresh": 0},
        {"damping": 0.1, "max_rows": -1},
    ],
    ids=str,
)  # fmt: skip
def test_settings_out_of_range_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"expected damping >= 0 and decay in \[0, 1\), refresh >= 1"):
        FoofPreconditioner(nn.Linear(1, 1), **settings)


@pytest.mark.parametrize("used_by_hand", [False, True], ids=["idle", "used without a call"])
def test_layer_without_input_has_a_multiple_of_the_identity(used_by_hand: bool) -> None:
    """``A = 0`` leaves ``P = damping I``; a layer whose weight is used by hand took plain steps, which divide by ``I``."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"used": nn.Linear(3, 2), "other": nn.Linear(3, 2)})
    sent = arrays_of(model)
    x = torch.randn(5, 3)
    with FoofPreconditioner(model, damping=0.25) as foof:
        out = model["used"](x)
        if used_by_hand:
            out = out + x @ model["other"].weight.T
        out.square().sum().backward()
        foof.step(0.01)
    block = foof.blocks()[1]
    assert foof.without_input == ("other",)
    assert block.is_identity
    scale = 1.0 if used_by_hand else 0.25
    np.testing.assert_array_equal(block.curvature, np.float32([scale]))
    moved = to_matrix(arrays_of(model), block.spec) - to_matrix(sent, block.spec)
    assert (np.abs(moved).max() > 1e-3) == used_by_hand
    np.testing.assert_allclose(block.product, scale * moved, rtol=1e-6)
    (_, packed, _), = block.tiles()  # fmt: skip
    np.testing.assert_array_equal(unpack_upper(packed), scale * np.eye(4))
