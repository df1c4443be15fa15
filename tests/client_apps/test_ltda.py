"""LTDA's client and rounds against NumPy, on a logistic regression, convex and torch, and on networks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import RecordDict

from fedapps.client_apps.ltda import train
from fedapps.client_apps.problem import Batch, State, Tensors, local_problem
from fedapps.client_apps.work import ClientWork, Node
from fedapps.curvature import newton
from fedapps.curvature.newton import Objective
from fedapps.errors import CurvatureError, TaskError
from fedapps.messages import unpack_arrays
from fedapps.methods import resolve_settings
from fedapps.personalization.quadratic import Quadratic
from fedapps.tasks import Data, TaskConfig
from fedapps.tasks.base import ClientData, Task
from fedapps.tasks.convex_task import ConvexTask
from fedapps.tasks.torch_task import TorchTask

from ..simulation.runs import short_run

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(12, 3)) + np.array([0.5, 0.0, -0.5])
Y = np.where(RANDOM.random(12) < 0.5, 1, -1)
LAM = 1e-3
"""The default of ``regularisation``."""


def sigmoid(margin: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-margin))


def gradient(theta: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return -x.T @ (y * sigmoid(-y * (x @ theta))) / len(y) + LAM * theta


def hessian(theta: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    s = sigmoid(x @ theta)
    return (x * (s * (1 - s))[:, None]).T @ x / len(y) + LAM * np.eye(len(theta))


def ltda_step(theta: np.ndarray, x: np.ndarray, y: np.ndarray, lr: float, damping: float) -> np.ndarray:
    h_1 = hessian(theta, x, y)[0]
    return theta - lr * gradient(theta, x, y) / np.maximum(np.abs(h_1**2 / h_1[0]), damping)


class Convex(ConvexTask):
    """Logistic regression."""

    def load(self) -> tuple[Data, Data]:
        data = Data(X, Y)
        return data, data


class Torch(TorchTask):
    """The same as a torch module, its tensor split into two."""

    def load(self) -> tuple[Data, Data]:
        data = Data(X, Y)
        return data, data

    def build_model(self) -> torch.nn.Module:
        model = torch.nn.Module()
        model.first = torch.nn.Parameter(torch.zeros(1, 1, dtype=torch.float64))
        model.others = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
        return model

    def tensors(self, data: Data, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tensor(data.inputs), torch.tensor(data.targets)

    def loss(self, model: Any, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        theta = torch.cat([model.first[0], model.others])
        return torch.nn.functional.softplus(-targets * (inputs @ theta)).mean() + 0.5 * LAM * theta @ theta

    def metrics(self, model: Any, inputs: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.loss(model, inputs, targets)}


def arrays_of(cls: type[Task], theta: np.ndarray) -> dict[str, np.ndarray]:
    return {"weights": theta} if cls.kind == "convex" else {"first": theta[None, :1], "others": theta[1:]}


def work_of(task: Task, arrays: dict[str, np.ndarray], data: Data | None = None, **config: Any) -> ClientWork:
    settings = resolve_settings({"method": "ltda", "batch-size": 5, "local-epochs": 2, **config}, task.kind)
    data = data or Data(X, Y)
    return ClientWork(
        settings=settings, task=task, node=Node(0, 1, None), data=ClientData(data, data.take([]), data.take([])),
        arrays=arrays, server_round=1, lr=settings.lr, last_folded=0, experiment="", run_dir="",
    )  # fmt: skip


def result(content: RecordDict) -> np.ndarray:
    return np.concatenate([value.ravel() for value in unpack_arrays(content, "arrays", "client").values()])


@pytest.mark.parametrize("cls", [Convex, Torch])
def test_a_round_is_the_formula_on_every_batch(cls: type[Task]) -> None:
    """Two epochs of 5, 5 and 2 examples; the damping acts on some coordinates only."""
    start = np.array([0.3, -0.2, 0.1])
    work = work_of(cls(TaskConfig()), arrays_of(cls, start), **{"lr": 0.2, "ltda.damping": 0.05})
    expected = start
    for batch in work.batches():
        expected = ltda_step(expected, X[batch], Y[batch], 0.2, 0.05)
    content = train(work)
    np.testing.assert_allclose(result(content), expected, rtol=1e-11)
    assert content["metrics"]["plain-steps"] == 0
    assert start.tolist() == [0.3, -0.2, 0.1]


@pytest.mark.parametrize("cls", [Convex, Torch])
def test_where_the_first_feature_is_absent_steps_are_plain_and_counted(cls: type[Task]) -> None:
    """Its h_11 is the regularisation alone, 1e-3, below an eps of 1e-2."""
    x = X * [0, 1, 1]
    work = work_of(
        cls(TaskConfig()), arrays_of(cls, np.zeros(3)), Data(x, Y), **{"lr": 0.2, "ltda.eps": 1e-2, "ltda.damping": 9.0}
    )
    expected = np.zeros(3)
    for batch in work.batches():
        expected = expected - 0.2 * gradient(expected, x[batch], Y[batch])
    content = train(work)
    np.testing.assert_allclose(result(content), expected, rtol=1e-11)
    assert content["metrics"]["plain-steps"] == 6


@pytest.mark.slow
def test_rounds_are_the_mean_of_the_clients_steps(tmp_path: Path) -> None:
    """Three rounds of three clients with two full-batch steps each."""
    config = {
        "method": "ltda", "task": "synthetic-logistic", "task-options": "clients = 3\nexamples = 20\ndimension = 4",
        "partition-column": "client", "batch-size": 0, "local-steps": 2, "num-server-rounds": 3, "lr": 0.1,
        "ltda.damping": 0.05,
    }  # fmt: skip
    run = short_run(tmp_path / "run", config)
    from fedapps.tasks.from_settings import load_task_of

    task = load_task_of(resolve_settings({**config, "partition": "column"}))
    clients = [task.client_data(p, 3).train for p in range(3)]
    theta = np.zeros(4)
    for _ in range(3):
        moved = []
        for data in clients:
            local = theta
            for _ in range(2):
                local = ltda_step(local, np.asarray(data.inputs), data.targets, 0.1, 0.05)
            moved.append(local)
        theta = np.mean(moved, axis=0)
    np.testing.assert_allclose(run.model["weights"], theta, rtol=1e-10)
    assert [row["plain-steps"] for row in run.rows("train")] == [0.0, 0.0, 0.0]
    assert not any(row.get("notes") for row in run.rows("train"))


@pytest.mark.usefixtures("own_module")
def test_the_round_notes_who_took_plain_steps(tmp_path: Path) -> None:
    """An eps that no entry reaches."""
    run = short_run(tmp_path / "run", {"method": "ltda", "ltda.eps": 1e9, "num-server-rounds": 1})
    [row] = run.rows("train")
    assert row["plain-steps"] == 2  # six examples in batches of four
    assert any(note.startswith("clients 0, 1, 2: plain steps") for note in row["notes"])


# The row ---------------------------------------------------------------------------------------------------


class Network(TorchTask):
    """Two classes; a hidden layer whose second derivatives matter."""

    def load(self) -> tuple[Data, Data]:
        data = Data(X.astype(np.float32), np.int64(Y > 0))
        return data, data

    def build_model(self) -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))


class Noisy(Network):
    """The same with batch normalisation and dropout."""

    def build_model(self) -> torch.nn.Module:
        return torch.nn.Sequential(
            torch.nn.Linear(3, 4),
            torch.nn.BatchNorm1d(4),
            torch.nn.Tanh(),
            torch.nn.Dropout(0.5),
            torch.nn.Linear(4, 2),
        )


def test_the_row_of_a_network_is_that_of_its_hessian() -> None:
    """All of it by torch.func, over the parameters end to end."""
    task = Network(TaskConfig())
    arrays = task.initial_arrays(0)
    work = work_of(task, arrays, task.load()[0], **{"batch-size": 0, "local-epochs": 1})
    rows: list[Tensors] = []

    def look(theta: Tensors, state: State, batch: Batch) -> tuple[Tensors, State]:
        rows.append(batch.hessian_row())
        return theta, state

    local_problem(work).descend_by(arrays, look)
    model = task.module(arrays)
    x, y = task.tensors(task.load()[0])

    def loss(flat: torch.Tensor) -> torch.Tensor:
        parts = torch.split(flat, [value.size for value in arrays.values()])
        named = {n: part.view(arrays[n].shape) for n, part in zip(arrays, parts, strict=True)}
        return task.criterion(torch.func.functional_call(model, named, (x,)), y)

    flat = torch.cat([torch.tensor(value).ravel() for value in arrays.values()])
    H = torch.func.hessian(loss)(flat)
    np.testing.assert_allclose(torch.cat([h.ravel() for h in rows[0].values()]), H[0], rtol=2e-4, atol=1e-6)


def test_looking_at_the_hessian_changes_no_bit() -> None:
    """Neither gradients, nor running statistics, nor what dropout draws in later steps."""
    task = Noisy(TaskConfig())
    arrays = task.initial_arrays(0)
    results = []
    for looks in (0, 2):

        def rule(theta: Tensors, state: State, batch: Batch, looks: int = looks) -> tuple[Tensors, State]:
            before = {name: g.clone() for name, g in batch.gradient.items()}
            for _ in range(looks):
                batch.hessian_row()
            assert all(torch.equal(g, before[name]) for name, g in batch.gradient.items())
            return {name: value - 0.1 * batch.gradient[name] for name, value in theta.items()}, state

        stepped = local_problem(work_of(task, arrays, task.load()[0])).descend_by(arrays, rule)
        results.append([v.tobytes() for v in {**stepped.arrays, **stepped.buffers}.values()] + [torch.get_rng_state()])
    *first, state = results[0]
    *second, other = results[1]
    assert first == second
    assert torch.equal(state, other)


def test_what_has_no_second_derivative_is_named() -> None:
    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
            if torch.is_grad_enabled():
                raise RuntimeError("no second derivative")
            return g.clone()

    class OnceNetwork(Network):
        def loss(self, model: torch.nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return Once.apply(super().loss(model, inputs, targets))

        def metrics(
            self, model: torch.nn.Module, inputs: torch.Tensor, targets: torch.Tensor
        ) -> dict[str, torch.Tensor]:
            return {}

    task = OnceNetwork(TaskConfig())
    with pytest.raises(TaskError, match=r"client 0, first row of the Hessian: .*twice, got no second.*fedsophia"):
        train(work_of(task, task.initial_arrays(0), task.load()[0]))


@pytest.mark.parametrize(
    "attention", [torch.nn.functional.scaled_dot_product_attention], ids=["scaled_dot_product_attention"]
)
def test_fused_attention_has_a_row(attention: Any) -> None:
    class Attending(Network):
        def loss(self, model: torch.nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            z = model[0](inputs)[None, None]
            return self.criterion(model[2](attention(z, z, z))[0, 0], targets)

        def metrics(
            self, model: torch.nn.Module, inputs: torch.Tensor, targets: torch.Tensor
        ) -> dict[str, torch.Tensor]:
            return {}

    task = Attending(TaskConfig())
    content = train(work_of(task, task.initial_arrays(0), task.load()[0]))
    assert content["metrics"]["plain-steps"] == 0


def test_an_objective_with_a_whole_hessian_only_must_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """H = diag(2, 1, 1), b = 0 and theta = 1: d = (2, 0, 0), so that the others are divided by the damping."""

    class Plain:
        def __init__(self, inner: Quadratic) -> None:
            self.loss, self.gradient, self.hessian = inner.loss, inner.gradient, inner.hessian

    class Own(Convex):
        def objective(self, data: Data) -> Objective:
            return Plain(Quadratic(np.diag([2.0, 1.0, 1.0]), np.zeros(3)))

    work = work_of(Own(TaskConfig()), {"weights": np.ones(3)}, **{"lr": 0.5, "ltda.damping": 1.0, "local-steps": 1})
    assert result(train(work)).tolist() == [0.5, 0.5, 0.5]
    monkeypatch.setattr(newton, "MOST_DENSE_BYTES", 71)
    with pytest.raises(CurvatureError, match=r"client 0: expected at most 2 weights .*first-order method"):
        train(work)
