"""FOOF steps on torch models against closed forms, alone and mixed by the server; hooks, devices, errors."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedapps.curvature import layers
from fedapps.curvature.blocks import Block
from fedapps.curvature.foof import Estimate, FoofPreconditioner
from fedapps.curvature.gram import covariance
from fedapps.curvature.layers import input_rows, register_layer
from fedapps.curvature.layout import from_matrix, to_matrix
from fedapps.curvature.packing import unpack_upper
from fedapps.errors import CurvatureError

from .foof_rounds import (
    Batch,
    arrays_of,
    cnn,
    make_data,
    mix,
    num_hooks,
    square_loss,
    train,
)

# Closed forms ---------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
def test_mixing_local_solutions_gives_pooled_least_squares(bias: bool) -> None:
    """With and without a bias: 20 and 60 rows, 3 inputs, damping 0, full step from anywhere.

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


# Devices --------------------------------------------------------------------------------------


@pytest.mark.gpu
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


def test_no_hook_outlives_the_round() -> None:
    """Hooks do not pile up: 20 rounds do not increase the hook count, and the model can be copied."""
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
