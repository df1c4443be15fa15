"""The training loop of torch clients: random changes of training batches, and models in half precision."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

from fedapps.client_apps.problem import Pull
from fedapps.client_apps.torch_problem import TorchProblem, _PlainSteps
from fedapps.client_apps.work import ClientWork, Node
from fedapps.methods import resolve_settings
from fedapps.tasks.base import ClientData, Data, TaskConfig
from fedapps.tasks.torch_task import TorchTask


class Noisy(TorchTask):
    """Adds noise to training examples, and notes what the loss got."""

    def __init__(self, config: TaskConfig) -> None:
        super().__init__(config)
        self.seen: list[np.ndarray] = []

    def load(self) -> tuple[Data, Data]:
        data = Data(np.zeros((5, 3), np.float32), np.arange(5) % 2)
        return data, data.take(np.arange(2))

    def build_model(self) -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Dropout(0.5))

    def augment(self, batch: Data, random: np.random.Generator) -> Data:
        return Data(np.asarray(batch.inputs) + random.random((len(batch), 3)), batch.targets)

    def tensors(self, data: Data, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
        self.seen.append(np.asarray(data.inputs))
        return super().tensors(data, device)


def batches_seen(seed: int = 0, server_round: int = 1, partition: int = 0) -> list[np.ndarray]:
    """What three epochs of two batches were trained on."""
    task = Noisy(TaskConfig())
    config: dict[str, Any] = {"method": "fedavg", "seed": seed, "batch-size": 3, "local-epochs": 3}
    data = task.load()[0]
    work = ClientWork(
        settings=resolve_settings(config, "torch"), task=task, node=Node(partition, 4, None),
        data=ClientData(data, data.take([]), data.take([])), arrays=task.initial_arrays(0), server_round=server_round,
        lr=0.1, last_folded=0, experiment="", run_dir="",
    )  # fmt: skip
    TorchProblem(work, task).descend(work.arrays)
    return task.seen


def test_every_batch_is_changed_anew() -> None:
    seen = batches_seen()
    assert [len(batch) for batch in seen] == [3, 2] * 3
    rows = np.concatenate(seen)
    assert (rows > 0).all()
    assert len(np.unique(rows)) == rows.size


def test_changes_depend_on_seed_round_and_partition_and_on_no_global_generator() -> None:
    first = np.concatenate(batches_seen())
    np.random.seed(3)  # noqa: NPY002 - the global state is what must not matter
    torch.manual_seed(3)
    assert np.array_equal(np.concatenate(batches_seen()), first)
    for other in (batches_seen(seed=1), batches_seen(server_round=2), batches_seen(partition=1)):
        assert not np.isin(np.concatenate(other), first).any()


def test_evaluation_changes_nothing() -> None:
    task = Noisy(TaskConfig())
    task.evaluate(task.initial_arrays(0), task.load()[0])
    assert all((batch == 0).all() for batch in task.seen)


class HalfPoint(TorchTask):
    """The loss ``(w - 3)^2 / 2`` of one bfloat16 parameter, which travels as its bit pattern."""

    def load(self) -> tuple[Data, Data]:
        data = Data(np.zeros((2, 1), np.float32), np.zeros(2, np.int64))
        return data, data

    def build_model(self) -> torch.nn.Module:
        model = torch.nn.Module()
        model.w = torch.nn.Parameter(torch.full((1,), 2.0, dtype=torch.bfloat16))
        return model

    def loss(self, model: torch.nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return ((model.w - 3) ** 2).sum() / 2

    def metrics(self, model: torch.nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.loss(model, inputs, targets)}


def test_a_bfloat16_model_is_pulled_to_the_numbers_not_to_their_patterns() -> None:
    """From 2 to the anchor 1 with lambda 2: 2 - 0.125 ((2 - 3) + 2 (2 - 1)) = 1.875, exact in 8 bits."""
    task = HalfPoint(TaskConfig())
    data, start = task.load()[0], task.initial_arrays(0)
    work = ClientWork(
        settings=resolve_settings({"method": "fedprox", "batch-size": 0, "local-steps": 1}, "torch"), task=task,
        node=Node(0, 1, None), data=ClientData(data, data, data), arrays=start, server_round=1, lr=0.125, last_folded=0,
        experiment="", run_dir="",
    )  # fmt: skip
    anchor = {"w": torch.ones(1, dtype=torch.bfloat16).view(torch.uint16).numpy()}
    trained = TorchProblem(work, task).descend(start, Pull(anchor, 2.0, 0.125))
    assert torch.from_numpy(trained.arrays["w"]).view(torch.bfloat16).tolist() == [1.875]


@pytest.mark.slow
def test_a_plain_step_does_not_load_torchs_compiler() -> None:
    """As `torch.optim.SGD` would: two seconds in each process of a client."""
    code = (
        "import sys, torch; from fedapps.client_apps.torch_problem import _PlainSteps\n"
        "p = torch.nn.Parameter(torch.ones(2)); p.grad = torch.ones(2)\n"
        "steps = _PlainSteps([([p], 0.5)], momentum=0.5); steps.take(); steps.take()\n"
        "sys.exit(p.tolist() != [-0.25, -0.25] or 'torch._dynamo' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("sparse", [False, True])
def test_plain_steps_are_those_of_torchs_sgd(sparse: bool) -> None:
    def trained(own: bool) -> list[np.ndarray]:
        torch.manual_seed(1)
        rows, head = torch.nn.Embedding(5, 3, sparse=sparse), torch.nn.Linear(3, 1)
        unused = torch.nn.Parameter(torch.ones(2))
        momentum, decay = (0.0, 0.0) if sparse else (0.9, 0.1)
        groups = [(list(rows.parameters()), 0.1), ([*head.parameters(), unused], 0.3)]
        steps: Any = _PlainSteps(groups, momentum=momentum, weight_decay=decay)
        if not own:
            named = [{"params": parameters, "lr": lr} for parameters, lr in groups]
            steps = torch.optim.SGD(named, momentum=momentum, weight_decay=decay)
        for k in range(4):
            for p in (*rows.parameters(), *head.parameters()):
                p.grad = None
            head(rows(torch.tensor([k, 2]))).square().sum().backward()
            steps.take() if own else steps.step()
        return [p.detach().numpy() for p in (rows.weight, *head.parameters(), unused)]

    for ours, theirs in zip(trained(True), trained(False), strict=True):
        np.testing.assert_array_equal(ours, theirs)
