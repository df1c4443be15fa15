"""FedSophia's client and rounds against NumPy: the estimate of the curvature, what is kept, and who is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Message, RecordDict

from fedapps.client_apps import store as client_store
from fedapps.client_apps.fedsophia import train
from fedapps.client_apps.problem import Batch, State, Tensors, local_problem
from fedapps.client_apps.work import ClientWork, Node
from fedapps.compute import generator
from fedapps.curvature.logistic import LogisticRegression
from fedapps.curvature.newton import Labelled, Objective
from fedapps.errors import TaskError
from fedapps.methods import resolve_settings
from fedapps.personalization.quadratic import Quadratic, least_squares
from fedapps.tasks import Data, TaskConfig
from fedapps.tasks.base import ClientData, Task
from fedapps.tasks.convex_task import ConvexTask
from fedapps.tasks.from_settings import load_task_of
from fedapps.tasks.torch_task import TorchTask

from ..simulation.runs import client_states, short_run

LAM = 1e-3
"""The default of ``regularisation``."""

B1, B2, TAU, RHO, EPS, DECAY = 0.8, 0.6, 3, 0.5, 1e-2, 0.05
OWN: dict[str, Any] = {
    "fedsophia.beta-1": B1, "fedsophia.beta-2": B2, "fedsophia.refresh": TAU, "fedsophia.rho": RHO, "fedsophia.eps": EPS,
    "fedsophia.weight-decay": DECAY,
}  # fmt: skip


def sigmoid(margin: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-margin))


def work_of(
    task: Task, data: Data, folder: Path, arrays: dict[str, np.ndarray] | None = None, **config: Any
) -> ClientWork:
    settings = resolve_settings({"method": "fedsophia", **config}, task.kind)
    return ClientWork(
        settings=settings, task=task, node=Node(0, 1, folder), data=ClientData(data, data.take([]), data.take([])),
        arrays=arrays or task.initial_arrays(0), server_round=1, lr=settings.lr, last_folded=0, experiment="e", run_dir="",
    )  # fmt: skip


# The estimate ----------------------------------------------------------------------------------------------


def check_mean(draws: np.ndarray, expected: np.ndarray) -> None:
    """The mean of so many draws is within five of its standard deviations of what is expected; the seed is fixed."""
    deviation = draws.std(axis=0, ddof=1) / np.sqrt(len(draws))
    assert (np.abs(draws.mean(axis=0) - expected) <= 5 * deviation + 1e-15).all()
    assert deviation.max() < 0.05 * np.abs(expected).max()  # else this says little


def logistic() -> tuple[Labelled, np.ndarray]:
    """Each example's gradient at label y is -y s(-y m) x, and y has the probability s(y m); summed over both labels."""
    random = np.random.default_rng(0)
    X, theta = random.normal(size=(6, 3)), random.normal(size=3)
    expected = np.zeros(3)
    for x in X:
        for y in (-1, 1):
            g = -y * sigmoid(-y * (x @ theta)) * x
            expected += sigmoid(y * (x @ theta)) * g**2 / len(X)
    return LogisticRegression(X, np.ones(6), 0.3), np.stack([theta, expected])


def regression() -> tuple[Labelled, np.ndarray]:
    """The residuals at targets drawn from N(x'theta, 1) have the mean square 1."""
    X = np.random.default_rng(1).normal(size=(6, 3))
    return least_squares(X, np.ones(6), 0.3), np.stack([np.ones(3), np.mean(X**2, axis=0)])


@pytest.mark.parametrize("case", [logistic, regression])
def test_the_estimate_has_the_expectation_of_each_examples_squared_gradient(
    case: Callable[[], tuple[Labelled, np.ndarray]],
) -> None:
    """It is the diagonal of the Hessian without the penalty, and the sampled gradient itself has the mean zero."""
    objective, (theta, expected) = case()
    random = np.random.default_rng(2)
    draws = np.stack([objective.sampled_gradient(theta, random) for _ in range(20_000)])
    check_mean(6 * draws**2, expected)
    assert (np.abs(draws.mean(axis=0)) < 5 * draws.std(axis=0) / np.sqrt(len(draws))).all()
    np.testing.assert_allclose(np.diagonal(objective.hessian(theta)) - 0.3, expected, rtol=1e-12)


class Network(TorchTask):
    """Three classes behind a hidden layer, in float64."""

    def load(self) -> tuple[Data, Data]:
        random = np.random.default_rng(0)
        data = Data(random.normal(size=(5, 2)), random.integers(0, 3, 5))
        return data, data

    def build_model(self) -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Tanh(), torch.nn.Linear(2, 3)).double()

    def tensors(self, data: Data, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tensor(data.inputs), torch.tensor(data.targets)


@pytest.mark.slow
def test_a_networks_estimate_has_the_expectation_of_each_examples_squared_gradient(tmp_path: Path) -> None:
    """Over every class of every example, each differentiated by itself."""
    task = Network(TaskConfig())
    data, arrays = task.load()[0], task.initial_arrays(1)
    model = task.module(arrays)
    inputs = torch.tensor(data.inputs)
    expected = {name: np.zeros(value.shape) for name, value in arrays.items()}
    for x in inputs:
        for y, probability in enumerate(model(x[None])[0].softmax(dim=0).tolist()):
            model.zero_grad()
            task.criterion(model(x[None]), torch.tensor([y])).backward()
            for name, p in model.named_parameters():
                assert p.grad is not None
                expected[name] += probability * p.grad.numpy() ** 2 / len(inputs)
    draws: list[np.ndarray] = []

    def look(theta: Tensors, state: State, batch: Batch) -> tuple[Tensors, State]:
        assert batch.num_examples == 5
        sampled = (batch.sampled_gradient().values() for _ in range(4000))
        draws.extend(np.concatenate([5 * g.numpy().ravel() ** 2 for g in gradients]) for gradients in sampled)
        return theta, state

    work = work_of(task, data, tmp_path, arrays, **{"batch-size": 0, "local-epochs": 1})
    local_problem(work).descend_by(arrays, look)
    check_mean(np.stack(draws), np.concatenate([value.ravel() for value in expected.values()]))


class Noisy(Network):
    """The same with batch normalisation and dropout."""

    def build_model(self) -> torch.nn.Module:
        return torch.nn.Sequential(
            torch.nn.Linear(2, 4),
            torch.nn.BatchNorm1d(4),
            torch.nn.Tanh(),
            torch.nn.Dropout(0.5),
            torch.nn.Linear(4, 3),
        ).double()


def test_drawing_labels_changes_no_bit(tmp_path: Path) -> None:
    """Neither gradients, nor running statistics, nor what dropout draws in later steps."""
    task = Noisy(TaskConfig())
    arrays, data = task.initial_arrays(0), task.load()[0]
    results = []
    for draws in (0, 2):

        def rule(theta: Tensors, state: State, batch: Batch, draws: int = draws) -> tuple[Tensors, State]:
            before = {name: g.clone() for name, g in batch.gradient.items()}
            for _ in range(draws):
                batch.sampled_gradient()
            assert all(torch.equal(g, before[name]) for name, g in batch.gradient.items())
            return {name: value - 0.1 * batch.gradient[name] for name, value in theta.items()}, state

        work = work_of(task, data, tmp_path, arrays, **{"batch-size": 2, "local-epochs": 2})
        stepped = local_problem(work).descend_by(arrays, rule)
        results.append([v.tobytes() for v in {**stepped.arrays, **stepped.buffers}.values()] + [torch.get_rng_state()])
    *first, state = results[0]
    *second, other = results[1]
    assert first == second
    assert torch.equal(state, other)


# Rounds ----------------------------------------------------------------------------------------------------


class Softmax(Network):
    """Three classes, linear in the parameters; "drawn" is always the class after the likeliest."""

    def build_model(self) -> torch.nn.Module:
        return torch.nn.Linear(2, 3, bias=False).double()

    def sample_targets(self, outputs: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        return (outputs.argmax(dim=1) + 1) % 3


def test_a_networks_round_is_the_formula(tmp_path: Path) -> None:
    """Two epochs of 2, 2 and 1 examples, so that the third batch has its own B; refreshed at steps 0 and 3."""
    task = Softmax(TaskConfig())
    data, arrays = task.load()[0], task.initial_arrays(3)
    X, Y = np.asarray(data.inputs), data.targets
    work = work_of(task, data, tmp_path, arrays, **OWN, **{"batch-size": 2, "local-epochs": 2, "lr": 0.3})
    W, m, v = arrays["weight"], np.zeros((3, 2)), np.zeros((3, 2))
    for k, batch in enumerate(work.batches()):
        x, n = X[batch], len(batch)
        z = x @ W.T
        p = np.exp(z) / np.exp(z).sum(axis=1, keepdims=True)
        g, ghat = ((p - np.eye(3)[y]).T @ x / n for y in (Y[batch], (z.argmax(axis=1) + 1) % 3))
        m = B1 * m + (1 - B1) * g
        if k % TAU == 0:
            v = B2 * v + (1 - B2) * n * ghat**2
        W = W - 0.3 * DECAY * W - 0.3 * np.clip(m / np.maximum(v, EPS), -RHO, RHO)
    content = train(work)
    np.testing.assert_allclose(content["arrays"]["weight"].numpy(), W, rtol=1e-12)
    assert "store-lost" not in content["metrics"]
    stored = work.store.load(1)
    assert stored is not None
    np.testing.assert_allclose(stored["m/weight"], m, rtol=1e-12)
    np.testing.assert_allclose(stored["v/weight"], v, rtol=1e-12)
    assert int(stored["steps"]) == 6


ROUNDS: dict[str, Any] = {
    "method": "fedsophia", "task": "synthetic-logistic", "task-options": "clients = 3\nexamples = 20\ndimension = 4",
    "partition-column": "client", "batch-size": 0, "local-steps": 2, "num-server-rounds": 6, "lr": 0.3, **OWN,
    "fraction-train": 0.67,
}  # fmt: skip


def reference(rows: list[dict[str, Any]], forgets: tuple[int, int] = (0, 0)) -> tuple[np.ndarray, list[dict[str, Any]]]:
    """The model and what every client keeps, from who was sampled and refused; one client may forget all in one round."""
    task = load_task_of(resolve_settings({**ROUNDS, "partition": "column"}))
    theta = np.zeros(4)
    kept = [{"m": np.zeros(4), "v": np.zeros(4), "steps": 0} for _ in range(3)]
    for row in rows:
        models = []
        for i in row["sampled"]:
            data = task.client_data(i, 3).train
            X, y = np.asarray(data.inputs), data.targets
            if (row["round"], i) == forgets:
                kept[i] = {"m": np.zeros(4), "v": np.zeros(4), "steps": 0}
            local, m, v, steps = theta, *kept[i].values()
            random = generator(0, row["round"], i, 5)  # the labels' stream: seed, round, client
            for _ in range(2):
                s = sigmoid(X @ local)
                m = B1 * m + (1 - B1) * (X.T @ (s - (y > 0)) / len(y) + LAM * local)
                if steps % TAU == 0:
                    ghat = X.T @ (s - (random.random(len(y)) < s)) / len(y)
                    v = B2 * v + (1 - B2) * len(y) * ghat**2
                local = (1 - 0.3 * DECAY) * local - 0.3 * np.clip(m / np.maximum(v, EPS), -RHO, RHO)
                steps += 1
            if str(i) not in row["refused"]:
                models.append(local)
                kept[i] = {"m": m, "v": v, "steps": steps}
        theta = np.mean(models, axis=0)
    return theta, kept


def refused(reply: Message) -> Message:
    """For the client it is as if the reply were lost; but nobody waits."""
    reply.content = RecordDict()
    return reply


@pytest.mark.slow
@pytest.mark.parametrize("fraction", [0.67, 1.0])
def test_rounds_go_on_from_the_averages_of_the_last_folded_reply(tmp_path: Path, fraction: float) -> None:
    """With sampled clients, replies that are lost, two steps a round and a refresh every third."""
    faults = {(2, 0): refused, (2, 2): refused, (4, 1): refused, (5, 2): refused}
    run = short_run(tmp_path / "run", {**ROUNDS, "fraction-train": fraction}, faults=faults)
    rows = run.rows("train")
    assert sum(len(row["refused"]) for row in rows) >= 2
    theta, kept = reference(rows)
    np.testing.assert_allclose(run.model["weights"], theta, rtol=1e-11)
    for i, state in client_states(run.folder.path).items():
        np.testing.assert_allclose(state["m/weights"], kept[i]["m"], rtol=1e-11)
        np.testing.assert_allclose(state["v/weights"], kept[i]["v"], rtol=1e-11)
        assert int(state["steps"]) == kept[i]["steps"]


@pytest.mark.slow
def test_a_client_that_lost_its_store_starts_again_from_zero_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = client_store.ClientStore.load

    def forgetful(self: Any, last_folded: int) -> Any:
        return None if last_folded == 3 and self.folder.name == "client-1" else load(self, last_folded)

    monkeypatch.setattr(client_store.ClientStore, "load", forgetful)
    run = short_run(tmp_path / "run", {**ROUNDS, "fraction-train": 1.0})
    rows = run.rows("train")
    assert [any("client 1 has lost" in note for note in row.get("notes", [])) for row in rows] == [
        number == 4 for number in range(1, 7)
    ]
    np.testing.assert_allclose(run.model["weights"], reference(rows, (4, 1))[0], rtol=1e-11)


@pytest.mark.slow
@pytest.mark.parametrize("task", ["synthetic-logistic", "synthetic-linear"])
def test_a_convex_resume_changes_no_bit(tmp_path: Path, task: str) -> None:
    config = {**ROUNDS, "task": task}
    straight = short_run(tmp_path / "straight", config)
    short_run(tmp_path / "halves", {**config, "num-server-rounds": 3})
    halves = short_run(tmp_path / "halves", {**config, "resume": True})
    assert straight.model["weights"].tobytes() == halves.model["weights"].tobytes()
    for one, other in zip(*(client_states(run.folder.path).values() for run in (straight, halves)), strict=True):
        assert {name: value.tobytes() for name, value in one.items()} == {n: v.tobytes() for n, v in other.items()}


# Who is refused --------------------------------------------------------------------------------------------


class Unlabelled(ConvexTask):
    """A quadratic of no examples."""

    def load(self) -> tuple[Data, Data]:
        data = Data(np.ones((4, 1)), np.ones(4))
        return data, data

    def objective(self, data: Data) -> Objective:
        return Quadratic(np.eye(1), np.array([3.0]))


class OwnLoss(Network):
    def loss(self, model: torch.nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return 2 * super().loss(model, inputs, targets)

    def metrics(self, model: torch.nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
        return {}


class OwnCriterion(Network):
    def criterion(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return 2 * super().criterion(outputs, targets)


@pytest.mark.parametrize(
    ("cls", "match"),
    [
        (Unlabelled, r"objective with sampled_gradient.*got Quadratic.*ltda"),
        (OwnLoss, r"outputs\(\) and criterion\(\).*got a loss\(\) of its own"),
        (OwnCriterion, r"sample_targets\(\).*got a criterion\(\) of its own alone"),
    ],
)
def test_what_says_nothing_of_the_labels_distribution_is_refused(cls: type[Task], match: str, tmp_path: Path) -> None:
    task = cls(TaskConfig())
    with pytest.raises(TaskError, match=match):
        train(work_of(task, task.load()[0], tmp_path))


@pytest.mark.usefixtures("own_module")
def test_it_is_refused_before_training(tmp_path: Path) -> None:
    config = {"method": "fedsophia", "task": "fedapps_testing:FailingSites", "node-wait": 0.0}
    with pytest.raises(TaskError, match=r"got a loss\(\) of its own.*ltda, fedpm or fedavg"):
        short_run(tmp_path / "run", config)
    assert not list((tmp_path / "run").glob("clients/*"))


def test_classes_are_drawn_with_their_probabilities_at_every_place() -> None:
    """Three classes at two places: shares within five deviations of 10,000 draws."""
    task = Network(TaskConfig())
    probabilities = np.array([[0.2, 0.9], [0.7, 0.05], [0.1, 0.05]])
    outputs = torch.tensor(probabilities).log().expand(10_000, 3, 2)
    drawn = task.sample_targets(outputs, torch.Generator().manual_seed(0))
    assert drawn.shape == (10_000, 2)
    shares = np.stack([(drawn.numpy() == y).mean(axis=0) for y in range(3)])
    assert (np.abs(shares - probabilities) < 5 * np.sqrt(probabilities * (1 - probabilities)) / 100).all()
