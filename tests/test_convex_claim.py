"""FedPM with one full step a round is Newton's method on the clients' common objective, whatever the split."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fedapps.curvature.logistic import LogisticRegression
from fedapps.curvature.newton import minimise
from fedapps.methods import resolve_settings
from fedapps.results.run_folder import RunFolder
from fedapps.simulation.inprocess import run_inprocess
from fedapps.tasks.from_settings import load_task_of

CLIENTS = 80
CONFIG = {
    "task": "a9a", "partition": "iid", "local-steps": 1, "lr": 1.0, "evaluate-every": 0, "num-server-rounds": 8,
    "task-options": "regularisation = 1e-3", "data-dir": str(Path(__file__).parent / "data"),
}  # fmt: skip


class Common:
    """The mean of the clients' objectives, in float64."""

    def __init__(self, parts: list[LogisticRegression]) -> None:
        self.parts = parts

    def loss(self, theta: np.ndarray) -> float:
        return float(np.mean([part.loss(theta) for part in self.parts]))

    def gradient(self, theta: np.ndarray) -> np.ndarray:
        return np.mean([part.gradient(theta) for part in self.parts], axis=0)

    def hessian(self, theta: np.ndarray) -> np.ndarray:
        return np.mean([part.hessian(theta) for part in self.parts], axis=0)


@pytest.fixture(scope="module")
def optimum() -> np.ndarray:
    task = load_task_of(resolve_settings({**CONFIG, "method": "fedpm"}))
    parts = [task.objective(task.client_data(i, CLIENTS).train) for i in range(CLIENTS)]  # type: ignore[attr-defined]
    return minimise(Common(parts), np.zeros(123), tol=1e-12)


@pytest.mark.parametrize(("method", "least", "greatest"), [("fedpm", 0.0, 1e-10), ("localnewton", 1e-1, 1.0)])
@pytest.mark.slow
def test_fedpm_reaches_the_optimum_of_a9a_by_round_8_and_localnewton_stalls(
    tmp_path: Path, optimum: np.ndarray, method: str, least: float, greatest: float
) -> None:
    run_inprocess({**CONFIG, "method": method, "run-dir": str(tmp_path / "run")}, CLIENTS)
    theta = RunFolder.open(tmp_path / "run").read_model()["weights"]
    assert least <= np.linalg.norm(theta - optimum) <= greatest
