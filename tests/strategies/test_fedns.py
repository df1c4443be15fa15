"""FedNS's rounds against NumPy: the step, Newton as its limit, what travels, and who is refused."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Message, RecordDict

from fedapps.compute import generator
from fedapps.curvature import newton
from fedapps.curvature.logistic import LogisticRegression
from fedapps.curvature.sketches import Sketch, sketch
from fedapps.errors import FedAppsError, SettingsError, TaskError
from fedapps.messages import pack_arrays, unpack_arrays
from fedapps.methods import resolve_settings
from fedapps.results.run_folder import RunFolder
from fedapps.settings import RoundSettings
from fedapps.strategies import FedNS
from fedapps.tasks.from_settings import load_task_of
from fedapps.tasks.torch_task import TorchTask

from ..simulation.runs import Left, short_run

LAM, DAMPING, D = 1e-3, 0.05, 4
SIZES = (20, 20, 20)
ROUNDS: dict[str, Any] = {
    "method": "fedns", "task": "synthetic-logistic", "task-options": f"clients = 3\nexamples = 20\ndimension = {D}",
    "partition-column": "client", "batch-size": 0, "num-server-rounds": 5, "lr": 0.7, "fedns.damping": DAMPING,
}  # fmt: skip

pytestmark = pytest.mark.usefixtures("own_module")


def sigmoid(margin: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-margin))


def clients() -> list[tuple[np.ndarray, np.ndarray]]:
    task = load_task_of(resolve_settings({**ROUNDS, "partition": "column"}))
    data = [task.client_data(i, 3).train for i in range(3)]
    return [(np.asarray(part.inputs), part.targets) for part in data]


def gradient(theta: np.ndarray, X: np.ndarray, y: np.ndarray) -> np.ndarray:
    return X.T @ (sigmoid(X @ theta) - (y > 0)) / len(y) + LAM * theta


def root(theta: np.ndarray, X: np.ndarray) -> np.ndarray:
    s = sigmoid(X @ theta)
    return X * np.sqrt(s * (1 - s) / len(X))[:, None]


def refused(reply: Message) -> Message:
    reply.content = RecordDict()
    return reply


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "size", "shared"),
    [("gaussian", 6, False), ("count-sketch", 3, True), ("srht", 0, False), ("srht", 3, True)],
)
def test_rounds_are_the_formula(tmp_path: Path, kind: str, size: int, shared: bool) -> None:
    """With sampled clients and a lost reply; weights are renormalised over the replies that arrived."""
    config = {**ROUNDS, "fedns.sketch": kind, "fedns.size": size, "fedns.shared": shared, "fraction-train": 0.67}
    run = short_run(tmp_path / "run", config, faults={(2, 0): refused, (2, 1): refused})
    data, theta = clients(), np.zeros(D)
    for row in run.rows("train"):
        P, g, folded = np.zeros((D, D)), np.zeros(D), [i for i in row["sampled"] if str(i) not in row["refused"]]
        for i in folded:
            X, y = data[i]
            whose = () if shared else (i,)
            Y = sketch(root(theta, X), size or D, Sketch(kind), generator(0, row["round"], *whose, 6))
            P += Y.T @ Y / len(folded)
            g += gradient(theta, X, y) / len(folded)
        theta = theta - 0.7 * np.linalg.solve(P + (LAM + DAMPING) * np.eye(D), g)
    assert any(row["refused"] for row in run.rows("train"))
    np.testing.assert_allclose(run.model["weights"], theta, rtol=1e-10)
    noted = [note for row in run.rows("train") for note in row.get("notes", []) if "rows for 4 weights" in note]
    assert len(noted) == (0 < size < D)


def test_with_a_whole_orthogonal_sketch_it_is_newtons_method(tmp_path: Path) -> None:
    """32 rows of 20, padded to 32; the penalty counts once, and clients count by their number of examples."""
    config = {
        **ROUNDS,
        "fedns.size": 32,
        "fedns.damping": 0.0,
        "lr": 1.0,
        "weighting": "examples",
        "num-server-rounds": 6,
    }
    run = short_run(tmp_path / "run", config)
    data, theta = clients(), np.zeros(D)
    X, y = (np.concatenate([part[j] for part in data]) for j in (0, 1))
    pooled = LogisticRegression(X, y, LAM)
    for _ in range(6):
        theta = theta - np.linalg.solve(pooled.hessian(theta), pooled.gradient(theta))
    np.testing.assert_allclose(run.model["weights"], theta, rtol=1e-9)
    assert np.linalg.norm(pooled.gradient(theta)) < 1e-6


class Softmax(TorchTask):
    """Three classes, linear in the parameters, two tensors, in float64; three clients."""

    def load(self) -> Any:
        from fedapps.tasks import Data

        random = np.random.default_rng(0)
        data = Data(random.normal(size=(24, 2)), random.integers(0, 3, 24), {"site": np.arange(24) % 3})
        return data, data.take([])

    def build_model(self) -> torch.nn.Module:
        return torch.nn.Linear(2, 3).double()

    def tensors(self, data: Any, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tensor(data.inputs), torch.tensor(data.targets)


def test_a_torch_model_takes_newton_steps_of_the_whole_gauss_newton_matrix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linear in its parameters it has its Hessian as that matrix: 32 rows of 8 x 3, padded to 32, are Newton's method."""
    import fedapps_testing  # type: ignore[import-not-found]

    monkeypatch.setattr(fedapps_testing, "Softmax", Softmax, raising=False)
    config = {"method": "fedns", "task": "fedapps_testing:Softmax", "lr": 1.0, "fedns.size": 32, "fedns.damping": 0.2,
              "num-server-rounds": 2}  # fmt: skip
    run = short_run(tmp_path / "run", config)
    task = load_task_of(resolve_settings({**config, "partition": "column", "partition-column": "site"}))
    start = task.initial_arrays(0)
    X = np.c_[task.load()[0].inputs, np.ones(24)]
    labels = np.eye(3)[task.load()[0].targets]
    W = np.c_[start["weight"], start["bias"]]  # (3, 3)
    for _ in range(2):
        z = X @ W.T
        p = np.exp(z) / np.exp(z).sum(axis=1, keepdims=True)
        H = np.zeros((9, 9))
        for x, q in zip(X, p, strict=True):
            H += np.kron(np.diag(q) - np.outer(q, q), np.outer(x, x)) / 24
        g = ((p - labels).T @ X / 24).ravel()
        W = W - np.linalg.solve(H + 0.2 * np.eye(9), g).reshape(3, 3)
    np.testing.assert_allclose(np.c_[run.model["weight"], run.model["bias"]], W, rtol=1e-8)


# What travels ----------------------------------------------------------------------------------------------


def changed(change: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]) -> Callable[[Message], Message]:
    def change_sketch(reply: Message) -> Message:
        reply.content["sketch"] = pack_arrays(change(unpack_arrays(reply.content, "sketch", "")))
        return reply

    return change_sketch


def without(reply: Message) -> Message:
    del reply.content["sketch"]
    return reply


LIES: dict[str, tuple[Callable[[Message], Message], str]] = {
    "none": (without, "record 'sketch': expected the sketch of each of the 4"),
    "a tensor less": (changed(lambda Y: dict(list(Y.items())[1:])), "record 'sketch': expected the sketch of each of the 4"),
    "a row less": (changed(lambda Y: {n: v[1:] for n, v in Y.items()}), r"expected shape (6, "),
    "another dtype": (changed(lambda Y: {n: v.astype(np.float64) for n, v in Y.items()}), "dtype float32"),
    "not finite": (changed(lambda Y: {n: v * np.float32(np.nan) for n, v in Y.items()}), "expected finite numbers"),
    "large": (changed(lambda Y: {n: v * np.float32(1e6) for n, v in Y.items()}), "norm of its sketch"),
}  # fmt: skip


@pytest.mark.parametrize(("lie", "reason"), LIES.values(), ids=LIES.keys())
def test_a_malformed_sketch_is_refused_and_changes_nothing(tmp_path: Path, lie: Any, reason: str) -> None:
    config = {"method": "fedns", "fedns.size": 6, "lr": 0.1}
    run = short_run(tmp_path / "run", config, faults={(2, 1): lie})
    assert reason in run.rows("train")[1]["refused"]["1"]
    same = short_run(tmp_path / "same", config, faults={(2, 1): refused})
    assert all(value.tobytes() == same.model[name].tobytes() for name, value in run.model.items())


def test_names_and_not_positions_match_tensors(tmp_path: Path) -> None:
    config = {"method": "fedns", "lr": 0.1}
    backwards = changed(lambda Y: dict(reversed(Y.items())))
    run = short_run(tmp_path / "run", config, faults={(r, p): backwards for r in (1, 2) for p in range(3)})
    same = short_run(tmp_path / "same", config)
    assert all(value.tobytes() == same.model[name].tobytes() for name, value in run.model.items())


def test_the_traffic_is_what_the_row_says(tmp_path: Path) -> None:
    """The gradient, and k rows of as many numbers, in float32."""
    run = short_run(tmp_path / "run", {"method": "fedns", "fedns.size": 6, "lr": 0.1})
    d = sum(value.size for value in run.model.values())
    up = [row["payload"] for row in run.folder.read_ledger() if row["kind"] == "train" and row["direction"] == "up"]
    assert {(payload["arrays"], payload["sketch"]) for payload in up} == {(4 * d, 6 * 4 * d)}


# Who is refused --------------------------------------------------------------------------------------------


def check_refused_before_training(tmp_path: Path, match: str, config: dict[str, Any]) -> None:
    with pytest.raises(FedAppsError, match=match):
        short_run(tmp_path / "run", {"method": "fedns", "node-wait": 0.0, "lr": 0.1, **config})
    assert not Left(RunFolder.open(tmp_path / "run")).rows("train")


def test_a_model_that_is_too_large_is_refused_before_round_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """37 weights: 8 * 37^2 bytes are one too many."""
    short_run(tmp_path / "fits", {"method": "fedns", "lr": 0.1, "num-server-rounds": 1})
    monkeypatch.setattr(newton, "MOST_DENSE_BYTES", 8 * 37**2 - 1)
    check_refused_before_training(tmp_path, r"at most 36 weights.*got 37 weights.*fedpm, localnewton", {})


def test_a_loss_of_ones_own_has_no_gauss_newton_matrix(tmp_path: Path) -> None:
    match = r"square root of the Hessian: .*got a loss\(\) of its own.*ltda, fedpm or fedavg"
    check_refused_before_training(tmp_path, match, {"task": "fedapps_testing:FailingSites"})


def test_a_convex_objective_without_a_square_root_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    task = load_task_of(resolve_settings({**ROUNDS, "partition": "column"}))
    task.check_square_root()
    monkeypatch.setattr(type(task), "objective", lambda self, data: Decimal(len(data)))
    with pytest.raises(TaskError, match=r"expected an objective with square_root\(theta\).*got Decimal"):
        task.check_square_root()


@pytest.mark.parametrize("defence", ["median", "trimmed-mean"])
def test_a_median_of_sketches_is_refused(defence: Any) -> None:
    with pytest.raises(SettingsError, match=r"'defence' of method 'fedns'.*clip or multi-krum"):
        FedNS(RoundSettings(defence=defence))
