"""LocalNewton's client: the losses along a direction, of a convex and of a torch model of the same numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedapps.client_apps.localnewton import train
from fedapps.client_apps.work import ClientWork, Node
from fedapps.curvature.newton import Objective
from fedapps.methods import resolve_settings
from fedapps.personalization.quadratic import Quadratic
from fedapps.tasks import Data, TaskConfig
from fedapps.tasks.base import ClientData, Task
from fedapps.tasks.convex_task import ConvexTask
from fedapps.tasks.torch_task import TorchTask

DATA = Data(np.ones((4, 1)), np.ones(4))


class Convex(ConvexTask):
    """(x - 3)^2 / 2 - 4.5, whatever the data."""

    def load(self) -> tuple[Data, Data]:
        return DATA, DATA

    def objective(self, data: Data) -> Objective:
        return Quadratic(np.eye(1), np.array([3.0]))


class Torch(TorchTask):
    """The same."""

    def load(self) -> tuple[Data, Data]:
        return DATA, DATA

    def build_model(self) -> torch.nn.Module:
        model = torch.nn.Module()
        model.weights = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
        return model

    def loss(self, model: torch.nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (model.weights**2 / 2 - 3 * model.weights).sum()

    def metrics(self, model: torch.nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.loss(model, inputs, targets)}


@pytest.mark.parametrize("cls", [Convex, Torch])
def test_losses_along_the_direction_are_those_at_zero_and_at_the_candidates(cls: type[Task]) -> None:
    """From 1 along 2: x^2/2 - 3 x at 1, 3 and 2."""
    task = cls(TaskConfig())
    work = ClientWork(
        settings=resolve_settings({"method": "localnewton"}, str(task.kind)), task=task, node=Node(0, 1, None),
        data=ClientData(DATA, DATA.take([]), DATA.take([])), arrays={"weights": np.array([1.0])}, server_round=1, lr=1.0,
        last_folded=0, experiment="", run_dir="",
        records={"line-search": {"steps": [1.0, 0.5]}, "direction": {"weights": np.array([2.0])}},
    )  # fmt: skip
    assert train(work)["line-search"]["losses"] == [-2.5, -4.5, -4.0]
