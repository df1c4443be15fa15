"""The local problem of convex tasks and of torch models: against formulas worked out here, and against each other."""

from __future__ import annotations

import subprocess
import sys
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from fedapps.client_apps.problem import NO_PULL, LocalProblem, Pull, layout_of, local_problem
from fedapps.client_apps.work import ClientWork, Node
from fedapps.curvature import newton
from fedapps.curvature.blocks import WireDtype
from fedapps.curvature.newton import Objective
from fedapps.errors import CurvatureError, TaskError
from fedapps.methods import resolve_settings
from fedapps.personalization.pfedme import PFedMeConfig
from fedapps.personalization.quadratic import Quadratic, least_squares
from fedapps.tasks import Data, TaskConfig
from fedapps.tasks.base import ClientData, Task
from fedapps.tasks.convex_task import ConvexTask
from fedapps.tasks.torch_task import TorchTask

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(12, 3))
Y = X @ np.array([1.0, -1.0, 2.0]) + 0.1 * RANDOM.normal(size=12)
A, B = X.T @ X / 12, X.T @ Y / 12


class Point(ConvexTask):
    """f(x) = (x - 3)^2 / 2, whatever the data."""

    def load(self) -> tuple[Data, Data]:
        data = Data(np.ones((4, 1)), np.ones(4))
        return data, data

    def objective(self, data: Data) -> Objective:
        return Quadratic(np.eye(1), np.array([3.0]))


class PointModule(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return 0.5 * (self.weights - 3) ** 2


class TorchPoint(TorchTask):
    """The same as a torch module."""

    def load(self) -> tuple[Data, Data]:
        data = Data(np.ones((4, 1)), np.ones(4))
        return data, data

    def build_model(self) -> torch.nn.Module:
        return PointModule()

    def criterion(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return outputs.mean()


class Lines(TorchTask):
    """Linear regression without a bias, loss |Xv - y|^2 / (2n), in float64; tensor ``0.weight`` (1, 3)."""

    model: ClassVar[Any] = lambda self: torch.nn.Sequential(torch.nn.Linear(3, 1, bias=False)).double()

    def load(self) -> tuple[Data, Data]:
        data = Data(X, Y)
        return data, data

    def build_model(self) -> torch.nn.Module:
        return self.model()

    def tensors(self, data: Data, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tensor(data.inputs), torch.tensor(data.targets)

    def criterion(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return 0.5 * (outputs[:, 0] - targets).square().mean()


class ConvexLines(ConvexTask):
    """The same as a convex task, whose one vector is the weight."""

    def load(self) -> tuple[Data, Data]:
        data = Data(X, Y)
        return data, data

    def objective(self, data: Data) -> Objective:
        return least_squares(np.asarray(data.inputs), data.targets)


def work_of(task: Task, arrays: dict[str, np.ndarray], data: Data | None = None, **settings: Any) -> ClientWork:
    run_config = {"method": "fedclup", "batch-size": 0, **{k.replace("_", "-"): v for k, v in settings.items()}}
    data = data or task.load()[0]
    return ClientWork(
        settings=resolve_settings(run_config, str(task.kind)), task=task, node=Node(0, 1, None),
        data=ClientData(data, data.take([]), data.take([])), arrays=arrays, server_round=1, lr=0.1, last_folded=0,
        experiment="test", run_dir="",
    )  # fmt: skip


POINTS = [Point, TorchPoint]


def point(cls: type[Task], start: float, **settings: Any) -> tuple[LocalProblem, dict[str, np.ndarray]]:
    arrays = {"weights": np.array([start])}
    arrays["weights"].flags.writeable = False  # As a received message's.
    return local_problem(work_of(cls(TaskConfig()), arrays, **settings)), arrays


@pytest.mark.parametrize("cls", POINTS, ids=["convex", "torch"])
def test_the_minimiser_is_between_the_own_optimum_and_the_anchor(cls: type[Task]) -> None:
    """Anchor and model are two things, the norm is squared.

    f = (x - 3)^2/2, anchor 1, lambda 2: (3 + 2)/(1 + 2) = 5/3; the anchor stays bitwise what it was.
    """
    problem, arrays = point(cls, 1.0, local_steps=60)
    before = arrays["weights"].tobytes()
    trained = problem.descend(arrays, Pull(arrays, 2.0, 0.2))
    assert trained.arrays["weights"] == pytest.approx([5 / 3], rel=1e-12)
    assert arrays["weights"].tobytes() == before


@pytest.mark.parametrize("cls", POINTS, ids=["convex", "torch"])
def test_the_first_step_from_the_anchor_is_a_plain_one(cls: type[Task]) -> None:
    """No NaN at the anchor: from x = w the pull has gradient 0: 1 - 0.2 (1 - 3) = 1.4."""
    problem, arrays = point(cls, 1.0, local_steps=1)
    for lam in (0.0, 2.0):
        assert problem.descend(arrays, Pull(arrays, lam, 0.2)).arrays["weights"] == pytest.approx([1.4], rel=1e-14)


@pytest.mark.parametrize("cls", POINTS, ids=["convex", "torch"])
def test_a_warm_start_is_pulled_to_the_anchor_not_to_itself(cls: type[Task]) -> None:
    """From 2 with anchor 0 and lambda 2: 2 - 0.1 ((2 - 3) + 2 * 2) = 1.7."""
    problem, _ = point(cls, 1.0, local_steps=1)
    start, anchor = {"weights": np.array([2.0])}, {"weights": np.array([0.0])}
    assert problem.descend(start, Pull(anchor, 2.0, 0.1)).arrays["weights"] == pytest.approx([1.7], rel=1e-14)


@pytest.mark.parametrize("cls", POINTS, ids=["convex", "torch"])
def test_pfedme_moves_the_copy_after_each_batch(cls: type[Task]) -> None:
    """Which of pFedMe's models is which.

    Two batches, K = 1, lambda 2, eta 0.25 (rate 1/2), inner step 0.1, from w = 1, theta = 2.

    theta = 2 - 0.1 (-1 + 2) = 1.9, copy = (1 + 1.9)/2 = 1.45; theta = 1.9 - 0.1 (-1.1 + 0.9) = 1.92, copy = 1.685.
    """
    problem, received = point(cls, 1.0, local_steps=2)
    config = PFedMeConfig(lam=2.0, eta=0.25, personal_lr=0.1, num_inner_steps=1)
    local, theta = problem.move_with_copy(received, {"weights": np.array([2.0])}, config)
    assert theta.arrays["weights"] == pytest.approx([1.92], rel=1e-12)
    assert local.arrays["weights"] == pytest.approx([1.685], rel=1e-12)


class ShiftedLines(Lines):
    """Lines whose augmentation adds a number of its own to the targets of every batch that it is given."""

    def augment(self, batch: Data, random: np.random.Generator) -> Data:
        return Data(batch.inputs, batch.targets + random.normal())


def test_pfedmes_inner_steps_see_one_augmentation_of_their_batch() -> None:
    """Two batches of 12 with three inner steps each: worked out here with the first two numbers of the client's stream."""
    task, lam, step, eta, K = ShiftedLines(TaskConfig()), 0.5, 0.1, 0.4, 3
    arrays = {"0.weight": np.zeros((1, 3))}
    work = work_of(task, arrays, local_steps=2)
    random = work.augmentation()
    local, theta, losses = np.zeros(3), np.full(3, 0.2), []
    for _ in range(2):
        y = Y + random.normal()
        for _ in range(K):
            losses.append(0.5 * np.mean((X @ theta - y) ** 2))
            theta = theta - step * (X.T @ (X @ theta - y) / 12 + lam * (theta - local))
        local = local - eta * lam * (local - theta)
    config = PFedMeConfig(lam=lam, eta=eta, personal_lr=step, num_inner_steps=K)
    copy, personal = local_problem(work).move_with_copy(arrays, {"0.weight": np.full((1, 3), 0.2)}, config)
    np.testing.assert_allclose(personal.arrays["0.weight"][0], theta, rtol=1e-12)
    np.testing.assert_allclose(copy.arrays["0.weight"][0], local, rtol=1e-12)
    assert personal.loss == pytest.approx(np.mean(losses), rel=1e-12)


@pytest.mark.parametrize("cls", POINTS, ids=["convex", "torch"])
@pytest.mark.parametrize("accuracy", [0.09, 0.3, 100.0])
def test_pfedmes_inner_steps_end_at_their_accuracy(cls: type[Task], accuracy: float) -> None:
    """The loss is (x - 3)^2/2, as everywhere here; of at most 50 inner steps on each of two batches few are taken."""
    problem, received = point(cls, 1.0, local_steps=2)
    lam, eta, step, K = 2.0, 0.25, 0.1, 50
    config = PFedMeConfig(lam=lam, eta=eta, personal_lr=step, num_inner_steps=K, inner_accuracy=accuracy)
    copy, theta, taken = 1.0, 2.0, 0
    for _ in range(2):
        for _ in range(K):
            gradient = (theta - 3.0) + lam * (theta - copy)
            if gradient**2 <= accuracy:
                break
            theta -= step * gradient
            taken += 1
        copy -= eta * lam * (copy - theta)
    assert taken < 20
    local, personal = problem.move_with_copy(received, {"weights": np.array([2.0])}, config)
    assert personal.arrays["weights"] == pytest.approx([theta], rel=1e-12)
    assert local.arrays["weights"] == pytest.approx([copy], rel=1e-12)


@pytest.mark.parametrize("cls", POINTS, ids=["convex", "torch"])
def test_the_greatest_curvature_is_that_of_the_loss_without_the_pull(cls: type[Task]) -> None:
    problem, arrays = point(cls, 1.0)
    assert problem.largest_curvature(arrays, ("weights",)) == pytest.approx(1.0, rel=1e-9)


@pytest.mark.parametrize("cls", POINTS, ids=["convex", "torch"])
def test_the_rough_curvature_is_that_of_the_loss_without_the_pull(cls: type[Task]) -> None:
    problem, arrays = point(cls, 1.0)
    assert problem.rough_curvature(arrays, ("weights",)) == pytest.approx(1.0, rel=1e-6)


def test_torchs_rough_curvature_is_of_the_rounds_first_batch_in_single_precision_too() -> None:
    class Single(Lines):
        model: ClassVar[Any] = lambda self: torch.nn.Sequential(torch.nn.Linear(3, 1, bias=False))

        def tensors(self, data: Data, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
            return torch.tensor(data.inputs, dtype=torch.float32), torch.tensor(data.targets, dtype=torch.float32)

    for task, dtype in ((Lines(TaskConfig()), np.float64), (Single(TaskConfig()), np.float32)):
        arrays = {"0.weight": np.zeros((1, 3), dtype)}
        work = work_of(task, arrays, batch_size=5)
        x = X[next(work.batches())]
        estimate = local_problem(work).rough_curvature(arrays, ("0.weight",))
        L = np.linalg.eigvalsh(x.T @ x / 5)[-1]
        assert 0.9 * L < estimate < 1.001 * L


def test_a_convex_training_that_diverged_is_named() -> None:
    problem, arrays = point(Point, 1.0, local_steps=200)
    with (
        np.errstate(over="ignore"),
        pytest.raises(TaskError, match=r"client 0, round 1, after the local steps: .*finite"),
    ):
        problem.descend(arrays, Pull(arrays, 0.0, 1e4))


def test_torchs_curvature_approaches_the_greatest_eigenvalue() -> None:
    task = Lines(TaskConfig())
    arrays = {"0.weight": np.zeros((1, 3))}
    estimate = local_problem(work_of(task, arrays)).largest_curvature(arrays, ("0.weight",))
    assert estimate == pytest.approx(np.linalg.eigvalsh(A)[-1], rel=0.02)


@pytest.mark.slow
def test_a_fit_to_halves_measures_distance_noise_and_variance() -> None:
    """Enough full-batch steps solve every problem: q = |v_1 - v_2|^2 / 4, s2 d / n = (v_1 - v_2)' A (v_1 - v_2) / 4.

    For two halves (K - 1)/K sum |v_k - mean|^2 = 1/2 * 2 * |v_1 - v_2|^2 / 4.
    """
    task = Lines(TaskConfig())
    arrays = {"0.weight": np.zeros((1, 3))}
    problem = local_problem(work_of(task, arrays, local_steps=3000))
    trained, fit = problem.fit(arrays, Pull(arrays, 0.01, 0.3))
    ridge = 0.01 * np.eye(3)
    v = np.linalg.solve(A + ridge, B)
    halves = [np.linalg.solve(X[k::2].T @ X[k::2] / 6 + ridge, X[k::2].T @ Y[k::2] / 6) for k in (0, 1)]
    np.testing.assert_allclose(trained.arrays["0.weight"][0], v, rtol=1e-6)
    gap = halves[0] - halves[1]
    assert fit.distance2 == pytest.approx(v @ v, rel=1e-6)
    assert fit.noise == pytest.approx(gap @ gap / 4, rel=1e-6)
    assert fit.variance == pytest.approx(12 / 3 * gap @ A @ gap / 4, rel=1e-6)
    assert fit.num_examples == 12


def test_a_client_of_one_example_can_be_fitted() -> None:
    task = Lines(TaskConfig())
    arrays = {"0.weight": np.zeros((1, 3))}
    work = work_of(task, arrays, Data(X[:1], Y[:1]), local_steps=5)
    _, fit = local_problem(work).fit(arrays, Pull(arrays, 0.01, 0.1))
    assert fit.num_examples == 1
    assert fit.noise == pytest.approx(fit.distance2 / 4, rel=1e-12)


def test_what_is_not_personal_takes_plain_steps_of_the_learning_rate() -> None:
    """Personal bias with step 0.2 and lambda 3 from 1 to anchor 0; shared weight with the work's lr = 0.1 and no pull."""

    class WithBias(Lines):
        model: ClassVar[Any] = lambda self: torch.nn.Sequential(torch.nn.Linear(3, 1)).double()

    task = WithBias(TaskConfig())
    start = {"0.weight": np.full((1, 3), 0.5), "0.bias": np.ones(1)}
    problem = local_problem(work_of(task, start, local_steps=1))
    trained = problem.descend(start, Pull({"0.bias": np.zeros(1)}, 3.0, 0.2))
    residuals = X @ np.full(3, 0.5) + 1 - Y
    np.testing.assert_allclose(trained.arrays["0.weight"][0], 0.5 - 0.1 * X.T @ residuals / 12, rtol=1e-12)
    np.testing.assert_allclose(trained.arrays["0.bias"], 1 - 0.2 * (residuals.mean() + 3.0), rtol=1e-12)


def test_a_model_without_second_derivatives_has_its_curvature_from_gradients() -> None:
    """(v - 3)^4 / 4 at 1 has the curvature 3 (1 - 3)^2; in half precision, where differences are lost, the way out is named."""

    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
            if torch.is_grad_enabled():  # As it is when a graph of the backward pass is asked for.
                raise RuntimeError("no second derivative")
            return g.clone()

    class OnceModule(PointModule):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return Once.apply(super().forward(inputs))

    class OnceTask(TorchPoint):
        def build_model(self) -> torch.nn.Module:
            return OnceModule()

        def criterion(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return (outputs**2).mean()

    arrays = {"weights": np.ones(1)}
    problem = local_problem(work_of(OnceTask(TaskConfig()), arrays))
    assert problem.largest_curvature(arrays, ("weights",)) == pytest.approx(12.0, rel=1e-6)
    assert problem.rough_curvature(arrays, ("weights",)) == pytest.approx(12.0, rel=2e-3)

    class HalfTask(OnceTask):
        def build_model(self) -> torch.nn.Module:
            return OnceModule().half()

    half = {"weights": np.ones(1, np.float16)}
    with pytest.raises(TaskError, match=r"client 0, curvature of the loss: .*gamma-rule=average or a number for"):
        local_problem(work_of(HalfTask(TaskConfig()), half)).largest_curvature(half, ("weights",))


def test_batches_of_a_subset_come_from_it_alone_as_many_as_of_the_whole() -> None:
    task = Lines(TaskConfig())
    work = work_of(task, {}, batch_size=5, local_epochs=2)
    whole, part = list(work.batches()), list(work.batches(np.array([1, 3, 5, 7])))
    assert len(whole) == len(part) == 6
    assert set(np.concatenate(part)) == {1, 3, 5, 7}
    assert set(np.concatenate(whole[:3])) == set(range(12))


# One model, both problems ---------------------------------------------------------------------------------

W, ANCHOR = np.array([0.3, -0.2, 0.1]), np.array([1.0, 0.5, -0.5])


def both(**settings: Any) -> list[tuple[LocalProblem, str, Any]]:
    """Give both problems of the same regression, the name of their tensor, and what makes it of a vector."""
    convex, torch_task = ConvexLines(TaskConfig()), Lines(TaskConfig())
    return [
        (local_problem(work_of(convex, {"weights": W}, **settings)), "weights", lambda v: {"weights": v}),
        (local_problem(work_of(torch_task, {"0.weight": W[None]}, **settings)), "0.weight", lambda v: {"0.weight": v[None]}),
    ]  # fmt: skip


@pytest.mark.parametrize("lam", [None, 0.0, 0.7])
def test_both_take_the_same_gradient_steps_on_the_same_batches(lam: float | None) -> None:
    """Two epochs of 5, 5 and 2 examples, worked out here with the client's batches."""
    expected = W.copy()
    for batch in work_of(ConvexLines(TaskConfig()), {}, batch_size=5, local_epochs=2).batches():
        x, y = X[batch], Y[batch]
        expected -= 0.1 * (x.T @ (x @ expected - y) / len(batch) + (lam or 0.0) * (expected - ANCHOR))
    for problem, name, arrays in both(batch_size=5, local_epochs=2):
        pull = NO_PULL if lam is None else Pull(arrays(ANCHOR), lam, 0.1)
        trained = problem.descend(arrays(W), pull)
        np.testing.assert_allclose(trained.arrays[name].ravel(), expected, rtol=1e-12)
        assert trained.buffers == {}


def test_both_step_on_the_batches_that_they_are_given() -> None:
    batches = [np.array([3, 1]), np.array([0, 2, 11])]
    expected = W.copy()
    for batch in batches:
        expected -= 0.1 * X[batch].T @ (X[batch] @ expected - Y[batch]) / len(batch)
    for problem, name, arrays in both():
        np.testing.assert_allclose(
            problem.descend(arrays(W), batches=batches).arrays[name].ravel(), expected, rtol=1e-12
        )


def test_both_take_the_same_preconditioned_steps_and_send_the_same_blocks() -> None:
    """The second moment of a linear layer's input is the Hessian of its square loss: FOOF steps are Newton's here."""
    options = {"fedpm.estimate": "last-batch", "fedpm.refresh": 1, "fedpm.damping": 0.2}
    expected, P = W.copy(), A + 0.2 * np.eye(3)
    for _ in range(2):
        expected = expected - 0.1 * np.linalg.solve(P, A @ expected - B)
    for problem, name, arrays in both(method="fedpm", local_steps=2, **options):
        trained = problem.descend_preconditioned(arrays(W))
        np.testing.assert_allclose(trained.arrays[name].ravel(), expected, rtol=1e-10)
        (block,) = trained.blocks(WireDtype.FLOAT32)
        np.testing.assert_allclose(block.curvature, P[np.triu_indices(3)], rtol=1e-12)
        np.testing.assert_allclose(block.product, (P @ (expected - W))[None], rtol=1e-9)
        assert trained.layout.preconditioned == problem.names == (name,)


def test_both_move_pfedmes_copy_alike() -> None:
    config = PFedMeConfig(lam=0.5, eta=0.4, personal_lr=0.1, num_inner_steps=2)
    found = []
    for problem, name, arrays in both(batch_size=5, local_epochs=1):
        local, theta = problem.move_with_copy(arrays(ANCHOR), arrays(W), config)
        found.append(np.concatenate([local.arrays[name].ravel(), theta.arrays[name].ravel()]))
    np.testing.assert_allclose(found[0], found[1], rtol=1e-12)


def test_only_a_convex_loss_has_a_least_curvature() -> None:
    (convex, _, vector), (network, _, tensor) = both()
    assert convex.least_curvature(vector(W)) == pytest.approx(np.linalg.eigvalsh(A)[0], rel=1e-12)
    assert network.least_curvature(tensor(W)) is None


def test_what_would_be_preconditioned_is_known_without_data() -> None:
    settings = resolve_settings({"method": "fedpm"}, "torch")
    for task, names in [(ConvexLines, ("weights",)), (Lines, ("0.weight",)), (TorchPoint, ())]:
        assert layout_of(task(TaskConfig()), settings).preconditioned == names


def test_a_convex_problem_imports_no_torch() -> None:
    code = "import sys, fedapps.client_apps.convex_problem, fedapps.client_apps.fedpm; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("ask", "way_out"),
    [
        (lambda problem, start: problem.descend_preconditioned(start), "first-order method"),
        (lambda problem, start: problem.fit(start, Pull(start, 0.1, 0.1)), "fedclup.adaptive=false"),
        (lambda problem, start: problem.largest_curvature(start, ("weights",)), "fedclup.gamma-rule=average"),
        (lambda problem, start: problem.least_curvature(start), "fedclup.gamma-rule=average"),
    ],
    ids=["steps", "fit", "greatest curvature", "least curvature"],
)
def test_a_hessian_that_is_too_large_is_not_attempted(ask: Any, way_out: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three weights, of which at most two may have a full Hessian: 72 bytes."""
    start = {"weights": np.zeros(3)}
    problem = local_problem(work_of(ConvexLines(TaskConfig()), start, method="localnewton"))
    ask(problem, start)
    monkeypatch.setattr(newton, "MOST_DENSE_BYTES", 71)
    with pytest.raises(CurvatureError, match=f"expected at most 2 weights .*, got 3 weights.*{way_out}"):
        ask(problem, start)
