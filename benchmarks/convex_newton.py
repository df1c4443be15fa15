"""Distance to the optimum over rounds, for L2-regularised logistic regression: FedPM against LocalNewton and FedAvg.

The setting of the strongly convex test of arXiv 2511.09100: one local step on all of a client's data (``K = 1``), full
step from zero, regularisation 1e-3, uniform weights, all clients in every round; a9a on 80 clients, w8a on 142, split at
random. FedAvg takes one gradient step with the best of a grid of step sizes.

Every round is one run of the application in the in-process engine, gone on with by resume, so what is measured is what a user
gets. Needs the files a9a and w8a in ``$FEDAPPS_DATA/libsvm``; a9a alone is in the repository.

Usage: ``python benchmarks/convex_newton.py [--rounds 10] [--tasks a9a,w8a] [--out benchmarks/results]``
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from fedapps.curvature.newton import minimise
from fedapps.methods import resolve_settings
from fedapps.results.environment import describe_environment
from fedapps.results.plots import plot_distance
from fedapps.results.run_folder import RunFolder
from fedapps.simulation.inprocess import run_inprocess
from fedapps.tasks.convex_task import ConvexTask
from fedapps.tasks.from_settings import load_task_of

CLIENTS = {"a9a": 80, "w8a": 142}
FEDAVG_GRID = (1.0, 2.0, 4.0, 8.0)
ROOT = Path(__file__).resolve().parent.parent


class MeanObjective:
    """``sum p_i f_i`` with uniform weights: what the clients minimise together."""

    def __init__(self, task: ConvexTask, num_clients: int) -> None:
        self._parts = [task.objective(task.client_data(i, num_clients).train) for i in range(num_clients)]

    def loss(self, theta: np.ndarray) -> float:
        """Compute the mean of the clients' losses."""
        return float(np.mean([part.loss(theta) for part in self._parts]))

    def gradient(self, theta: np.ndarray) -> np.ndarray:
        """Compute the mean of the clients' gradients."""
        return np.mean([part.gradient(theta) for part in self._parts], axis=0)

    def hessian(self, theta: np.ndarray) -> np.ndarray:
        """Compute the mean of the clients' Hessians."""
        return np.mean([part.hessian(theta) for part in self._parts], axis=0)


def settings_of(method: str, task: str, lr: float, data_dir: str) -> dict[str, Any]:
    """The settings of one run."""
    return {
        "method": method, "task": task, "partition": "iid", "local-steps": 1, "batch-size": 0, "lr": lr,
        "weighting": "uniform", "validation-fraction": 0.0, "evaluate-every": 0, "data-dir": data_dir,
        "task-options": "regularisation = 1e-3",
    }  # fmt: skip


def distances(settings: dict[str, Any], num_clients: int, rounds: int, optimum: np.ndarray) -> list[float]:
    """Run round by round and measure ``|theta - theta*|``, the start included."""
    found = [float(np.linalg.norm(optimum))]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run"
        for server_round in range(1, rounds + 1):
            config = {**settings, "num-server-rounds": server_round, "run-dir": str(path), "resume": server_round > 1}
            run_inprocess(config, num_clients)
            theta = RunFolder.open(path).read_model()["weights"]
            found.append(float(np.linalg.norm(theta - optimum)))
    return found


def main() -> None:
    """Measure, print, and write JSON and figure."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--tasks", default="a9a,w8a")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    arguments = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.ERROR)
    data_dir = os.environ.get("FEDAPPS_DATA", str(ROOT / "tests" / "data"))
    results: dict[str, Any] = {}
    checksums: dict[str, str] = {}
    for name in arguments.tasks.split(","):
        settings = resolve_settings(settings_of("fedpm", name, 1.0, data_dir))
        task = load_task_of(settings)
        if not isinstance(task, ConvexTask):
            raise SystemExit(f"{name} is not a convex task")
        objective = MeanObjective(task, CLIENTS[name])
        start = task.initial_arrays(0)["weights"]
        optimum = minimise(objective, start, tol=1e-12)
        checksums |= {f"{name}/{part}": value for part, value in task.checksums().items()}
        runs = {
            method: distances(settings_of(method, name, 1.0, data_dir), CLIENTS[name], arguments.rounds, optimum)
            for method in ("fedpm", "localnewton")
        }
        tried = {
            lr: distances(settings_of("fedavg", name, lr, data_dir), CLIENTS[name], arguments.rounds, optimum)
            for lr in FEDAVG_GRID
        }
        best = min(tried, key=lambda lr: tried[lr][-1])
        runs["fedavg"] = tried[best]
        results[name] = {"clients": CLIENTS[name], "fedavg-lr": best, "distance": runs}
        print(f"\n{name}, {CLIENTS[name]} clients: |theta - theta*| (FedAvg: lr {best:g}, best of {FEDAVG_GRID})")
        for server_round in range(arguments.rounds + 1):
            row = "  ".join(f"{method} {values[server_round]:.3e}" for method, values in runs.items())
            print(f"round {server_round:>2}  {row}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    record = {
        "settings": settings_of("fedpm", "<task>", 1.0, "<data>"),
        "results": results,
        "environment": describe_environment(device="cpu", data_checksums=checksums),
    }
    (arguments.out / "convex_newton.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    panels = {f"{name} ({result['clients']} clients)": result["distance"] for name, result in results.items()}
    plot_distance(panels, arguments.out / "convex_newton.png")


if __name__ == "__main__":
    main()
