"""The loss of a torch model as a function of a vector: against differences, closed forms and a loop over examples."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedapps.client_apps.torch_objective import Hessian, TorchObjective
from fedapps.curvature.flat import flatten
from fedapps.errors import CurvatureError, TaskError
from fedapps.tasks.base import Data, TaskConfig
from fedapps.tasks.torch_task import TorchTask


class Softmax(TorchTask):
    """Three classes, linear in the parameters."""

    def load(self) -> tuple[Data, Data]:
        random = np.random.default_rng(0)
        data = Data(random.normal(size=(300, 4)).astype(np.float32), random.integers(0, 3, 300))
        return data, data.take(np.arange(2))

    def build_model(self) -> torch.nn.Module:
        return torch.nn.Linear(4, 3)


class Network(Softmax):
    """The same with a hidden layer, batch normalisation and dropout."""

    def build_model(self) -> torch.nn.Module:
        return torch.nn.Sequential(
            torch.nn.Linear(4, 3),
            torch.nn.BatchNorm1d(3),
            torch.nn.Tanh(),
            torch.nn.Dropout(0.5),
            torch.nn.Linear(3, 3),
        )


class Tied(torch.nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


class TiedTask(Softmax):
    def build_model(self) -> torch.nn.Module:
        return Tied()


class OwnLoss(Softmax):
    """A loss that the outputs alone do not give."""

    def loss(self, model: torch.nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return super().loss(model, inputs, targets) + 0.1 * sum(p.square().sum() for p in model.parameters())

    def metrics(self, model: torch.nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
        return {}


class Huge(Softmax):
    def build_model(self) -> torch.nn.Module:
        return torch.nn.Linear(4, 5000)


def objective(cls: type[TorchTask], kind: Hessian = Hessian.AUTO) -> tuple[TorchObjective, np.ndarray, Data]:
    task = cls(TaskConfig())
    arrays, data = task.initial_arrays(1), task.load()[0]
    names = task.trainable_names()
    model = task.module(arrays).double()
    # In float64, so that differences tell digits; the examples' tensors follow.
    task.tensors = lambda batch, device="cpu": (torch.tensor(batch.inputs).double(), torch.tensor(batch.targets))  # type: ignore[method-assign]
    found = TorchObjective(task, model, names, data, device="cpu", kind=kind, where="client 0")
    return found, flatten(arrays, names), data


@pytest.mark.parametrize("cls", [Softmax, Network, TiedTask, OwnLoss])
def test_gradient_and_exact_hessian_are_the_differences_of_the_loss(cls: type[TorchTask]) -> None:
    f, theta, _ = objective(cls)
    d, h = len(theta), 1e-5
    steps = h * np.eye(d)
    np.testing.assert_allclose(
        f.gradient(theta), [(f.loss(theta + e) - f.loss(theta - e)) / (2 * h) for e in steps], atol=1e-9
    )
    differences = np.stack([(f.gradient(theta + e) - f.gradient(theta - e)) / (2 * h) for e in steps])
    assert f.kind is Hessian.EXACT
    np.testing.assert_allclose(f.hessian(theta), differences, atol=1e-8)


def test_of_softmax_regression_both_matrices_are_the_closed_form() -> None:
    for kind in Hessian:
        f, theta, data = objective(Softmax, kind)
        W, b = theta[:12].reshape(3, 4), theta[12:]
        z = data.inputs.astype(np.float64) @ W.T + b
        p = np.exp(z) / np.exp(z).sum(axis=1, keepdims=True)
        rows = []
        for x, q in zip(data.inputs.astype(np.float64), p, strict=True):
            J = np.concatenate([np.kron(np.eye(3), x[None]), np.eye(3)], axis=1)
            rows.append(J.T @ (np.diag(q) - np.outer(q, q)) @ J)
        np.testing.assert_allclose(f.hessian(theta), np.mean(rows, axis=0), atol=1e-12)


@pytest.mark.parametrize("cls", [Network, TiedTask])
def test_the_gauss_newton_matrix_is_that_of_a_loop_over_examples(
    cls: type[TorchTask], monkeypatch: pytest.MonkeyPatch
) -> None:
    f, theta, data = objective(cls, Hessian.GAUSS_NEWTON)
    # Outputs of one example by differences, so that nothing of the code under test is used.
    model, names = f._model.eval(), list(f._like)
    x = torch.tensor(data.inputs).double()

    def outputs(vector: np.ndarray) -> np.ndarray:
        start = 0
        for name in names:
            p = model.get_parameter(name)
            with torch.no_grad():
                p.copy_(torch.tensor(vector[start : start + p.numel()]).view(p.shape))
            start += p.numel()
        return model(x).detach().numpy()

    before = flatten({n: model.get_parameter(n).detach().numpy() for n in names}, names)
    h = 1e-5
    J = np.stack([(outputs(theta + e) - outputs(theta - e)) / (2 * h) for e in h * np.eye(len(theta))], axis=2)
    z = outputs(theta)
    outputs(before)
    p = np.exp(z) / np.exp(z).sum(axis=1, keepdims=True)
    expected = np.mean([j.T @ (np.diag(q) - np.outer(q, q)) @ j for j, q in zip(J, p, strict=True)], axis=0)
    np.testing.assert_allclose(f.hessian(theta), expected, atol=1e-8)
    R = f.square_root(theta)
    assert R.shape == (len(data) * z.shape[1], len(theta))
    np.testing.assert_allclose(R.T @ R, f.hessian(theta), atol=1e-12)
    monkeypatch.setattr("fedapps.client_apps.torch_objective.CHUNK_BYTES", 1)
    np.testing.assert_allclose(f.hessian(theta), expected, atol=1e-8)


def test_the_models_modes_random_state_and_buffers_stay_as_they_were() -> None:
    f, theta, _ = objective(Network)
    model = f._model.train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(3)
    state = torch.get_rng_state()
    f.loss(theta + 1)
    f.gradient(theta + 1)
    f.hessian(theta + 1)
    f.square_root(theta + 1)
    assert model.training
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_above_the_limit_the_gauss_newton_matrix_stands_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedapps.client_apps.torch_objective.MOST_EXACT", 10)
    assert objective(Network)[0].kind is Hessian.GAUSS_NEWTON
    f, theta, _ = objective(OwnLoss)
    with pytest.raises(TaskError, match=r"client 0, Gauss-Newton.*criterion\(\).*a loss\(\) of its own"):
        f.hessian(theta)


def test_a_matrix_that_cannot_be_held_is_refused_before_anything_is_computed() -> None:
    f, theta, _ = objective(Huge)
    with pytest.raises(CurvatureError, match=r"at most 16384 weights.*25000 weights.*FOOF"):
        f.hessian(theta)


def test_a_root_that_cannot_be_held_is_refused_when_it_comes_to_that(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedapps.client_apps.torch_objective.MOST_DENSE_BYTES", 50_000)
    f, theta, _ = objective(Softmax)
    with pytest.raises(CurvatureError, match=r"root of the Gauss-Newton.*times 15 weights.*with 300 examples"):
        f.square_root(theta)
