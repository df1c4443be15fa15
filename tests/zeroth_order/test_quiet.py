from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch", reason="probes need torch")

import torch
from torch import nn

from fedapps.zeroth_order import quiet as module
from fedapps.zeroth_order.directions import direction
from fedapps.zeroth_order.errors import ProbeError
from fedapps.zeroth_order.probing import Difference, Prober
from fedapps.zeroth_order.quiet import check_model, quiet, same_noise, trainable_parameters
from fedapps.zeroth_order.scheme import Scheme


class Counting(nn.Module):
    """Writes its buffers in every forward, whatever the mode."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("last", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.last = x.detach().mean(0)
        return self.layer(x)


def test_flags_and_buffers_are_as_before_even_after_an_error() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Dropout(0.5), Counting())
    model[1].eval()
    flags = [m.training for m in model.modules()]
    before = {name: (id(b), b.clone()) for name, b in model.named_buffers()}

    def interrupted() -> None:
        with quiet(model):
            assert not any(m.training for m in model.modules())
            model(torch.randn(4, 2))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [m.training for m in model.modules()] == flags
    for name, buffer in model.named_buffers():
        assert id(buffer) == before[name][0]
        assert torch.equal(buffer, before[name][1]), name


def test_a_large_buffer_that_is_written_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BUFFER_COPY_LIMIT", 4)
    model = Counting()
    with pytest.raises(ProbeError, match="buffer 'calls': expected no change, got a write"), quiet(model):
        model(torch.randn(4, 2))


def test_noise_is_a_function_of_seed_and_number_and_leaves_the_generator_alone() -> None:
    model = nn.Linear(2, 2)
    torch.manual_seed(1)
    before = torch.random.get_rng_state()

    def draw(seed: int, noise: int) -> float:
        with same_noise(model, seed, noise):
            return float(torch.rand(()))

    values = {draw(seed, noise) for seed in (0, 1, 2**64 - 1) for noise in (0, 1, 2**32 - 1)}
    assert len(values) == 9
    first = draw(0, 5)
    torch.manual_seed(2)
    assert draw(0, 5) == first
    torch.manual_seed(1)
    draw(0, 5)
    assert torch.equal(torch.random.get_rng_state(), before)


def tied_by_data() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight.data = model[0].weight.data
    return model


def with_a_view() -> nn.Module:
    model = nn.Linear(2, 2)
    model.cached = model.weight.detach()[0]
    return model


def frozen_alias() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = nn.Parameter(model[0].weight.data, requires_grad=False)
    return model


def expanded() -> nn.Module:
    model = nn.Linear(2, 3)
    model.weight.data = torch.randn(3, 1).expand(3, 2)
    return model


def scripted() -> nn.Module:
    return nn.Sequential(torch.jit.script(nn.Linear(2, 2)))


def compiled_in_place() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].compile()
    return model


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: nn.Linear(2, 2).requires_grad_(False), "model: expected a trainable parameter, got none"),
        (nn.ReLU, "model: expected a trainable parameter, got none"),
        (expanded, "parameter 'weight': expected memory for each element"),
        (tied_by_data, "expected memory of its own, got that of '[01].weight'"),
        (with_a_view, "expected memory of its own"),
        (frozen_alias, "expected memory of its own"),
        (scripted, "module '0': expected plain Python, got compiled code"),
        (compiled_in_place, "module '0': expected plain Python"),
    ],
    ids=["frozen", "empty", "expanded", "tied by data", "view", "frozen alias", "scripted", "compiled"],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.slow
def test_models_that_cannot_be_followed_are_refused(build: Any, message: str) -> None:
    with pytest.raises(ProbeError, match=message):
        check_model(build())


def test_ordinary_models_are_fine() -> None:
    tied = nn.Sequential(nn.Embedding(4, 3), nn.LSTM(3, 3), nn.Linear(3, 4, bias=False), nn.BatchNorm1d(4))
    tied[2].weight = tied[0].weight
    check_model(tied)
    assert "2.weight" not in trainable_parameters(tied)
    check_model(nn.Sequential(nn.Conv2d(1, 2, 3), nn.Conv2d(2, 2, 3)).to(memory_format=torch.channels_last))
    tied[1].requires_grad_(False)
    assert list(trainable_parameters(tied)) == ["0.weight", "3.weight", "3.bias"]


@pytest.mark.parametrize(
    "parametrise",
    [nn.utils.spectral_norm, nn.utils.parametrizations.spectral_norm, nn.utils.parametrizations.weight_norm],
    ids=["old spectral norm", "spectral norm", "weight norm"],
)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_parametrised_layer_is_probed_through_what_its_weight_is_computed_from(
    parametrise: Callable[[nn.Module], nn.Module],
) -> None:
    """A fresh model; the slope of the loss along the direction, by autograd in float64."""
    torch.manual_seed(0)
    model, x = nn.Sequential(parametrise(nn.Linear(4, 3)), nn.Tanh(), nn.Linear(3, 2)), torch.randn(8, 4)

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch).square().mean()

    result = Prober(model, Scheme(3, "decomfl")).probe(
        loss, [x], first_step=0, num_probes=1, mu=1e-3, lr=0.0, difference=Difference.CENTRAL
    )
    exact = copy.deepcopy(model).double().eval()
    loss(exact, x.double()).backward()
    slope, place = 0.0, 0
    for parameter in exact.parameters():
        z = torch.from_numpy(direction(3, 0, 0, place, place + parameter.numel())).double().view_as(parameter)
        slope, place = slope + float((parameter.grad * z).sum()), place + parameter.numel()
    assert result.unused == ()
    assert result.scalars[0][0] == pytest.approx(slope, rel=0.01)
