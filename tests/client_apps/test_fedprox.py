"""FedProx's client on a problem solved by hand: a parabola with its minimum at 3, pulled to an anchor at 1."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import RecordDict
from torch import nn

from fedapps.client_apps.fedavg import train as train_fedavg
from fedapps.client_apps.fedprox import train
from fedapps.client_apps.work import ClientWork, Node
from fedapps.errors import SettingsError
from fedapps.messages import unpack_arrays
from fedapps.methods import resolve_settings
from fedapps.tasks.base import ClientData, Data, Task, TaskConfig
from fedapps.tasks.convex_task import ConvexTask
from fedapps.tasks.torch_task import TorchTask

MINIMUM, ANCHOR = 3.0, 1.0


def some_data() -> tuple[Data, Data]:
    data = Data(np.ones((4, 1), np.float32), np.ones(4, np.int64))
    return data, data.take(np.arange(2))


class TorchParabola(TorchTask):
    """The loss ``(x - 3)^2 / 2`` for the one parameter ``weights``, whatever the data."""

    def load(self) -> tuple[Data, Data]:
        return some_data()

    def build_model(self) -> nn.Module:
        model = nn.Module()
        model.weights = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        return model

    def loss(self, model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return ((model.weights - MINIMUM) ** 2).sum() / 2

    def metrics(self, model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.loss(model, inputs, targets)}


class Parabola:
    """The same in NumPy."""

    def loss(self, theta: np.ndarray) -> float:
        return float(((theta - MINIMUM) ** 2).sum() / 2)

    def gradient(self, theta: np.ndarray) -> np.ndarray:
        return theta - MINIMUM


class ConvexParabola(ConvexTask):
    """The same as a convex task."""

    def load(self) -> tuple[Data, Data]:
        return some_data()

    def objective(self, data: Data) -> Any:
        return Parabola()


TASKS = pytest.mark.parametrize("task", [TorchParabola, ConvexParabola])


def round_of(task: type[Task], **config: Any) -> ClientWork:
    built = task(TaskConfig())
    settings = resolve_settings({"method": "fedprox", "batch-size": 0, "lr": 0.1, **config}, built.kind)
    data = some_data()[0]
    return ClientWork(
        settings=settings, task=built, node=Node(0, 1, None), data=ClientData(data, data.take([]), data.take([])),
        arrays={"weights": np.array([ANCHOR])}, server_round=1, lr=settings.lr, last_folded=0, experiment="", run_dir="",
    )  # fmt: skip


def weights(content: RecordDict) -> float:
    return float(unpack_arrays(content, "arrays", "client")["weights"][0])


@TASKS
@pytest.mark.parametrize(
    ("mu", "minimiser"), [(2.0, (MINIMUM + 2.0 * ANCHOR) / 3.0), (0.5, (MINIMUM + 0.5 * ANCHOR) / 1.5)]
)
def test_many_steps_end_at_the_minimiser_of_the_pulled_objective(task: type[Task], mu: float, minimiser: float) -> None:
    """With an anchor that moved along, or none, they would end at 3; with the norm not squared, elsewhere."""
    work = round_of(task, **{"fedprox.mu": mu, "local-steps": 300})
    assert weights(train(work)) == pytest.approx(minimiser, abs=1e-9)
    assert work.arrays["weights"].tolist() == [ANCHOR]


@TASKS
def test_the_second_step_by_hand(task: type[Task]) -> None:
    """By hand: x1 = 1 - 0.1 (1 - 3) = 1.2;  x2 = 1.2 - 0.1 ((1.2 - 3) + 2 (1.2 - 1)) = 1.34."""
    content = train(round_of(task, **{"fedprox.mu": 2.0, "local-steps": 2}))
    assert weights(content) == pytest.approx(1.34, abs=1e-12)


@TASKS
def test_the_first_step_is_a_plain_gradient_step(task: type[Task]) -> None:
    """At the anchor the proximal gradient is zero, and finite."""
    proximal = train(round_of(task, **{"fedprox.mu": 2.0, "local-steps": 1}))
    plain = train_fedavg(round_of(task, method="fedavg", **{"local-steps": 1}))
    assert weights(proximal) == weights(plain) == pytest.approx(1.2)


@TASKS
def test_without_pull_it_is_fedavgs_client_bitwise(task: type[Task]) -> None:
    contents = (
        train(round_of(task, **{"fedprox.mu": 0.0, "local-steps": 7})),
        train_fedavg(round_of(task, method="fedavg", **{"local-steps": 7})),
    )
    assert weights(contents[0]) == weights(contents[1])
    assert contents[0]["metrics"] == contents[1]["metrics"]


def test_the_reported_loss_is_without_the_pull() -> None:
    """Mean of the data loss before each of two steps: at 1 and at 1.2."""
    content = train(round_of(TorchParabola, **{"fedprox.mu": 2.0, "local-steps": 2}))
    assert content["metrics"]["train-loss"] == pytest.approx((2.0**2 / 2 + 1.8**2 / 2) / 2)


@TASKS
def test_momentum_and_weight_decay_enter_every_plain_step(task: type[Task]) -> None:
    beta, gamma, mu, lr = 0.5, 0.2, 0.3, 0.1
    config = {"local-momentum": beta, "weight-decay": gamma, "fedprox.mu": mu, "lr": lr, "local-epochs": 4}
    w, m = ANCHOR, 0.0
    for _ in range(4):
        m = beta * m + (w - MINIMUM) + mu * (w - ANCHOR) + gamma * w
        w -= lr * m
    assert weights(train(round_of(task, **config))) == pytest.approx(w, rel=1e-12)


@pytest.mark.parametrize("key", ["local-momentum", "weight-decay"])
def test_a_method_without_plain_steps_refuses_their_settings(key: str) -> None:
    with pytest.raises(
        SettingsError, match=rf"'{key}': expected 0: clients of 'hiso' take no plain.*fedavg, .*scaffold"
    ):
        resolve_settings({"method": "hiso", key: 0.5}, "torch")
