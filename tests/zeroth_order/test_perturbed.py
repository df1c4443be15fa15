from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="probes need torch")

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own abbreviation)
from torch import nn

from fedapps.zeroth_order.errors import ProbeError
from fedapps.zeroth_order.perturbed import Perturbed


class Doubled:
    """Lends twice the parameter, and notes what was asked for."""

    def __init__(self, **parameters: torch.Tensor) -> None:
        self.parameters = parameters
        self.asked: list[tuple[str, list[int] | None]] = []

    def __call__(self, name: str, rows: Any = None) -> torch.Tensor:
        self.asked.append((name, None if rows is None else rows.tolist()))
        whole = 2 * self.parameters[name].detach()
        return whole if rows is None else whole[torch.from_numpy(rows)]

    def run(self, work: Callable[[], Any]) -> Any:
        with Perturbed(self.parameters, self), torch.no_grad():
            return work()


W = nn.Parameter(torch.arange(12.0).reshape(4, 3))
B = nn.Parameter(torch.ones(4))
X = torch.randn(2, 3, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "use",
    [
        lambda w: F.linear(X, w),
        lambda w: X @ w.t(),
        lambda w: X @ w.T,
        lambda w: w + 1,
        lambda w: 1 - w,
        lambda w: w.data * 3,
        lambda w: w.detach().clone(),
        lambda w: w.view(-1)[2:5],
        lambda w: w[1],
        lambda w: w[1:, 2],
        lambda w: torch.cat([w, w]),
        lambda w: torch.stack((w, w * 2)),
        lambda w: torch.einsum("ij,kj->ik", X, w),
        lambda w: F.layer_norm(X, (3,), weight=w[0]),
        lambda w: torch.where(w > 10, w, torch.zeros(())),
        lambda w: w.sum(),
        lambda w: torch.tensor(w.tolist()),
        lambda w: torch.from_numpy(w.numpy()),
    ],
    ids=lambda use: "",
)
def test_every_use_sees_the_displaced_tensor(use: Callable[[torch.Tensor], torch.Tensor]) -> None:
    before = W.detach().clone()
    found = Doubled(w=W).run(lambda: use(W))
    assert torch.equal(found, use(2 * W.detach()))
    assert torch.equal(W, before)


@pytest.mark.parametrize(
    "module",
    [
        nn.Linear(3, 5),
        nn.LSTM(3, 4, num_layers=2, batch_first=True),
        nn.GRU(3, 4, batch_first=True),
        nn.MultiheadAttention(3, 1, batch_first=True),
        nn.TransformerEncoderLayer(3, 1, 6, batch_first=True),
        nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)),
        nn.Bilinear(3, 3, 2),
    ],
    ids=["linear", "lstm", "gru", "attention", "encoder", "weight norm", "bilinear"],
)
def test_modules_of_torch_are_followed(module: nn.Module) -> None:
    """Against the same module with its parameters doubled in place."""
    module.eval()
    x = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(0))
    inputs = {nn.MultiheadAttention: (x, x, x), nn.Bilinear: (x, x)}.get(type(module), (x,))
    parameters = {name.replace(".", "_"): p for name, p in module.named_parameters()}
    doubled = Doubled(**parameters)
    with torch.no_grad():
        found = doubled.run(lambda: module(*inputs))
        torch.backends.mha.set_fastpath_enabled(False)  # the mode leaves it as well
        for parameter in parameters.values():
            parameter.mul_(2)
        expected = module(*inputs)
        torch.backends.mha.set_fastpath_enabled(True)
    first, second = (out[0] if isinstance(out, tuple) else out for out in (found, expected))
    # Equal up to the rounding of products, which may be summed in another order at another address.
    torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-6)
    assert {name for name, _ in doubled.asked} == set(parameters)


def test_only_touched_rows_of_a_lookup_are_materialised() -> None:
    doubled = Doubled(w=W)
    ids = torch.tensor([[3, 1], [1, 3]])
    assert torch.equal(doubled.run(lambda: F.embedding(ids, W)), 2 * W.detach()[ids])
    assert torch.equal(doubled.run(lambda: F.embedding(ids, weight=W, padding_idx=1)), 2 * W.detach()[ids])
    assert torch.equal(doubled.run(lambda: W[torch.tensor([-1, 0])]), 2 * W.detach()[[3, 0]])
    assert torch.equal(doubled.run(lambda: torch.index_select(W, 0, torch.tensor([2, 2]))), 2 * W.detach()[[2, 2]])
    assert doubled.asked == [("w", [1, 3]), ("w", [1, 3]), ("w", [0, 3]), ("w", [2])]
    columns = doubled.run(lambda: torch.index_select(W, 1, torch.tensor([2])))
    mask = torch.tensor([True, False, True, False])
    assert torch.equal(columns, 2 * W.detach()[:, [2]])
    assert torch.equal(doubled.run(lambda: W[mask]), 2 * W.detach()[mask])


def test_questions_about_a_tensor_materialise_nothing() -> None:
    doubled = Doubled(w=W)
    facts = doubled.run(lambda: (W.shape, W.dtype, W.device, W.dim(), W.size(0), len(W), W.numel(), W.requires_grad))
    assert facts[:2] == (torch.Size([4, 3]), torch.float32)
    assert doubled.asked == []


def test_lists_and_named_arguments_are_searched() -> None:
    doubled = Doubled(w=W, b=B)
    found = doubled.run(lambda: torch.cat(tensors=[W.flatten(), B], dim=0))
    assert torch.equal(found, torch.cat([2 * W.detach().flatten(), 2 * B.detach()]))
    doubled.run(lambda: F.linear(X, weight=W, bias=B))
    assert ("b", None) in doubled.asked


def test_untracked_tensors_are_left_alone() -> None:
    frozen = nn.Parameter(torch.ones(4, 3))
    assert torch.equal(Doubled(w=W).run(lambda: F.linear(X, frozen)), F.linear(X, frozen).detach())


@pytest.mark.parametrize(
    "write",
    [
        lambda w: w.mul_(2),
        lambda w: w.__setitem__(0, 1.0),
        lambda w: w.__iadd__(1),
        lambda w: torch.add(w, 1, out=w),
        lambda w: nn.init.zeros_(w),
        lambda w: setattr(w, "data", torch.zeros(4, 3)),
        lambda w: F.embedding(torch.tensor([0]), w, max_norm=1.0),
    ],
    ids=["in place", "item", "operator", "out", "init", "data", "max_norm"],
)
def test_writes_are_refused_and_change_nothing(write: Callable[[torch.Tensor], Any]) -> None:
    before = W.detach().clone()
    with pytest.raises(ProbeError, match=r"expected a forward pass that does not change it|expected no max_norm"):
        Doubled(w=W).run(lambda: write(W))
    assert torch.equal(W, before)


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: F.dropout(x, 0.5),
        lambda x: F.dropout(x, 0.5, True),
        lambda x: F.dropout(x, p=0.5, training=True),
        lambda x: F.dropout2d(x, 0.5),
        lambda x: F.alpha_dropout(x, 0.5, True),
        lambda x: torch.dropout(x, 0.5, True),
        lambda x: torch.dropout(x, 0.5, train=True),
        lambda x: nn.Dropout(0.5)(x),
        lambda x: F.rrelu(x.abs(), training=True),
        lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.9) - F.scaled_dot_product_attention(x, x, x) + x,
        lambda x: F.scaled_dot_product_attention(x, x, x, None, 0.9) - F.scaled_dot_product_attention(x, x, x) + x,
    ],
    ids=[
        "default", "positional", "named", "2d", "alpha", "torch", "torch named", "module", "rrelu", "attention",
        "attention positional",
    ],
)  # fmt: skip
def test_masks_are_switched_off(draw: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = torch.rand(1, 4, 6, generator=torch.Generator().manual_seed(1))
    for displace in (None, Doubled(w=W)):
        with Perturbed({"w": W}, displace):
            torch.testing.assert_close(draw(x), x)


def test_attention_of_torch_draws_no_mask() -> None:
    attention = nn.MultiheadAttention(4, 2, dropout=0.9, batch_first=True)
    x = torch.randn(1, 3, 4)
    with torch.no_grad(), Perturbed({"w": W}, None):
        attention.train()
        found = attention(x, x, x)[0]
        attention.eval()
        torch.testing.assert_close(found, attention(x, x, x)[0])


def test_what_was_used_is_noted_also_without_displacement() -> None:
    with torch.no_grad(), Perturbed({"w": W, "b": B}, None) as mode:
        F.embedding(torch.tensor([1]), W)
    assert mode.used == {"w"}
    assert np.isfinite(W.detach().numpy()).all()
