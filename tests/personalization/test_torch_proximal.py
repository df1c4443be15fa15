"""The proximal term on torch modules: equal to NumPy's, never aliased, only on personal parts; curvature."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from fedapps.errors import FedAppsError, SettingsError, TaskError
from fedapps.personalization.proximal import Proximal, descend
from fedapps.personalization.quadratic import least_squares
from fedapps.personalization.torch_proximal import (
    add_proximal_gradient,
    largest_curvature,
    proximal_penalty,
    take_anchor,
)


class Point(torch.nn.Module):
    """One number."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.x = torch.nn.Parameter(torch.tensor([value], dtype=torch.float64))


def two_layers() -> torch.nn.Module:
    torch.manual_seed(0)
    model = torch.nn.Sequential()
    model.add_module("body", torch.nn.Linear(3, 4))
    model.add_module("head", torch.nn.Linear(4, 2))
    return model.double()


def step(model: Point, anchor: dict[str, torch.Tensor], lam: float, lr: float) -> None:
    """One step on f = (x - 3)^2 / 2 with the pull."""
    model.zero_grad()
    ((model.x - 3) ** 2 / 2).sum().backward()
    add_proximal_gradient(model, anchor, lam)
    torch.optim.SGD(model.parameters(), lr=lr).step()


def test_descent_reaches_the_minimiser_of_field_log_a20() -> None:
    """Anchor 1 and lambda 2: 5/3; the first step is plain SGD's, and the anchor is bitwise unchanged."""
    model = Point(1.0)
    anchor = take_anchor(model)
    before = anchor["x"].numpy().tobytes()
    step(model, anchor, 2.0, 0.1)
    assert model.x.item() == pytest.approx(1.0 - 0.1 * (1.0 - 3.0), abs=1e-15)
    assert torch.isfinite(model.x.grad).all()
    for _ in range(200):
        step(model, anchor, 2.0, 0.3)
    assert model.x.item() == pytest.approx(5 / 3, abs=1e-12)
    assert anchor["x"].numpy().tobytes() == before
    assert proximal_penalty(model, anchor, 2.0) == pytest.approx((5 / 3 - 1) ** 2)


def test_steps_equal_those_of_numpy() -> None:
    random = np.random.default_rng(0)
    X, y, w, start = random.standard_normal((9, 3)), *(random.standard_normal(k) for k in (9, 3, 3))
    expected = descend([Proximal(least_squares(X, y), w, 0.7)] * 5, start, 0.1)
    model = torch.nn.Linear(3, 1, bias=False).double()
    model.weight.data = torch.tensor(w)[None]
    anchor = take_anchor(model)
    model.weight.data = torch.tensor(start)[None]
    for _ in range(5):
        model.zero_grad()
        ((model(torch.tensor(X))[:, 0] - torch.tensor(y)) ** 2).mean().div(2).backward()
        add_proximal_gradient(model, anchor, 0.7)
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    np.testing.assert_allclose(model.weight.detach().numpy()[0], expected, rtol=1e-13)


def test_an_anchor_that_is_the_model_is_refused() -> None:
    model = Point(1.0)
    with pytest.raises(FedAppsError, match="the model's own tensor, which makes the proximal term always zero"):
        add_proximal_gradient(model, {"x": model.x.detach()}, 1.0)
    with pytest.raises(FedAppsError, match="own tensor"):
        add_proximal_gradient(model, {"x": model.x.data}, 1.0)


def test_anchor_is_detached_and_does_not_follow_the_model() -> None:
    model = Point(1.0)
    anchor = take_anchor(model)
    with torch.no_grad():
        model.x.add_(4.0)
    assert anchor["x"].item() == 1.0
    assert not anchor["x"].requires_grad


def test_only_personal_parts_are_pulled() -> None:
    model = two_layers()
    anchor = take_anchor(model, ["head.weight", "head.bias"])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    model(torch.ones(2, 3, dtype=torch.float64)).sum().backward()
    before = {name: p.grad.clone() for name, p in model.named_parameters()}
    add_proximal_gradient(model, anchor, 0.5)
    for name, parameter in model.named_parameters():
        pull = 0.5 if name.startswith("head") else 0.0
        torch.testing.assert_close(parameter.grad, before[name] + pull)
    assert proximal_penalty(model, anchor, 0.5) == pytest.approx(0.25 * 10)


def test_parameter_without_gradient_gets_the_pull() -> None:
    model = Point(1.0)
    anchor = {"x": torch.tensor([0.0], dtype=torch.float64)}
    add_proximal_gradient(model, anchor, 3.0)
    assert model.x.grad.item() == 3.0


def test_frozen_parameters_have_no_anchor() -> None:
    model = two_layers()
    model.body.weight.requires_grad_(False)
    assert list(take_anchor(model)) == ["body.bias", "head.weight", "head.bias"]
    with pytest.raises(TaskError, match=r"parameter 'body\.weight'.*body\.bias, head\.weight"):
        take_anchor(model, ["body.weight"])


def test_anchors_of_another_architecture_are_refused() -> None:
    model = Point(1.0)
    with pytest.raises(TaskError, match=r"anchor of parameter 'x'.*\(1,\), got \(2,\)"):
        add_proximal_gradient(model, {"x": torch.zeros(2, dtype=torch.float64)}, 1.0)
    with pytest.raises(TaskError, match="no parameter of that name"):
        add_proximal_gradient(model, {"y": torch.zeros(1, dtype=torch.float64)}, 1.0)


def test_negative_lambda_is_refused() -> None:
    model = Point(1.0)
    with pytest.raises(SettingsError, match="lambda"):
        add_proximal_gradient(model, take_anchor(model), -1.0)


def test_power_iterations_find_the_greatest_eigenvalue() -> None:
    """Half a mean square on known inputs: the Hessian is X'X/n, its greatest eigenvalue well apart."""
    X = torch.tensor(np.random.default_rng(0).standard_normal((30, 4)) * [1.0, 1.0, 1.0, 3.0])
    model = torch.nn.Linear(4, 1, bias=False).double()
    expected = float(torch.linalg.eigvalsh(X.T @ X / 30)[-1])
    found = largest_curvature(lambda: (model(X) ** 2).mean() / 2, list(model.parameters()), num_iterations=12)
    assert found == pytest.approx(expected, rel=1e-4)
    assert found <= expected * (1 + 1e-12)
    rough = largest_curvature(lambda: (model(X) ** 2).mean() / 2, list(model.parameters()), num_iterations=1)
    assert 0 < rough < found


def test_curvature_is_the_dense_hessians_for_several_tensors() -> None:
    """A two-layer network: against the eigenvalues of the dense Hessian by autograd, in absolute value."""
    model = two_layers()
    X = torch.tensor(np.random.default_rng(1).standard_normal((8, 3)))
    parameters = dict(model.named_parameters())
    sizes = [p.numel() for p in parameters.values()]

    def loss_at(flat: torch.Tensor) -> torch.Tensor:
        values = {
            name: part.reshape(p.shape) for (name, p), part in zip(parameters.items(), flat.split(sizes), strict=True)
        }
        return torch.func.functional_call(model, values, X).tanh().square().mean()

    flat = torch.cat([p.detach().reshape(-1) for p in parameters.values()])
    dense = torch.autograd.functional.hessian(loss_at, flat)
    expected = float(torch.linalg.eigvalsh(dense).abs().max())
    found = largest_curvature(lambda: model(X).tanh().square().mean(), list(parameters.values()), num_iterations=200)
    assert found == pytest.approx(expected, rel=1e-3)


def test_curvature_leaves_model_gradients_and_generator_alone() -> None:
    model = two_layers()
    state = torch.get_rng_state()
    first = largest_curvature(lambda: (model(torch.ones(1, 3).double()) ** 2).sum(), list(model.parameters()))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in model.parameters())
    assert first == largest_curvature(lambda: (model(torch.ones(1, 3).double()) ** 2).sum(), list(model.parameters()))


def test_a_linear_loss_has_no_curvature() -> None:
    model = Point(1.0)
    assert largest_curvature(lambda: 3 * model.x.sum(), [model.x]) == 0.0


def test_curvature_that_is_not_finite_is_refused() -> None:
    model = Point(float("inf"))
    with pytest.raises(TaskError, match="finite Hessian-vector products"):
        largest_curvature(lambda: (model.x**3).sum(), [model.x])


def _encoder() -> tuple[torch.nn.Module, torch.Tensor]:
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, activation="gelu", batch_first=True)
    return layer, torch.randn(3, 5, 8, dtype=torch.float64)


def _bag() -> tuple[torch.nn.Module, torch.Tensor]:
    bag = torch.nn.EmbeddingBag(7, 4, mode="sum")
    return torch.nn.Sequential(bag, torch.nn.Tanh(), torch.nn.Linear(4, 2)), torch.randint(7, (6, 3))


def _plain_bag(model: torch.nn.Sequential, ids: torch.Tensor) -> torch.Tensor:
    return model[2](model[1](model[0].weight[ids].sum(dim=1)))


@pytest.mark.parametrize("kind", ["fused attention", "embedding bag"])
def test_curvature_of_a_model_without_second_derivatives_is_that_of_its_twin_with_them(kind: str) -> None:
    """Attention by its mathematical kernel, a bag as a lookup and a sum: power iterations of the same start."""
    torch.manual_seed(0)
    model, x = _encoder() if kind == "fused attention" else _bag()
    model = model.double()
    parameters, before = list(model.parameters()), [p.detach().clone() for p in model.parameters()]

    def loss() -> torch.Tensor:
        return model(x).tanh().square().mean()

    def twin() -> torch.Tensor:
        return (model(x) if kind == "fused attention" else _plain_bag(model, x)).tanh().square().mean()

    with pytest.raises(RuntimeError, match="not implemented"):  # else this tests nothing
        torch.autograd.grad(
            sum(g.sum() for g in torch.autograd.grad(loss(), parameters, create_graph=True)), parameters
        )
    with sdpa_kernel(SDPBackend.MATH):
        expected = largest_curvature(twin, parameters)
    assert largest_curvature(loss, parameters) == pytest.approx(expected, rel=1e-4)
    assert all(torch.equal(p, fixed) for p, fixed in zip(parameters, before, strict=True))
    model.float()
    if x.is_floating_point():
        x = x.float()
    assert largest_curvature(loss, parameters) == pytest.approx(expected, rel=1e-2)
