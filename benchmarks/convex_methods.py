"""Distance to the optimum over rounds and bytes, for L2-regularised logistic regression: every method that trains convex tasks.

The setting of the strongly convex test of arXiv 2511.09100: regularisation 1e-3, uniform weights, all clients in every round,
all of a client's data in every step, from zero; a9a on 80 clients, w8a on 142, split at random. Methods whose mathematics is
one step a round take one local step, the others three. Each is tuned on a stated grid by its distance after
``--tuning-rounds``; a run that diverges is infinitely far away. FedNL and FedPM, whose full step needs no tuning, take
``lr = 1``. Ditto's global model and GlobalTrain are FedAvg's; LocalTrain has none.

The distance is a metric of the tasks below, measured on the server after every round of an ordinary run in the in-process
engine. Needs the files a9a and w8a in ``$FEDAPPS_DATA/libsvm``.

Usage: ``python benchmarks/convex_methods.py [--tasks a9a,w8a] [--rounds 80] [--tuning-rounds 15] [--methods fedpm,...]``
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from typing_extensions import override

from fedapps.curvature.newton import minimise
from fedapps.errors import FedAppsError
from fedapps.results.environment import describe_environment
from fedapps.results.plots import plot_distance
from fedapps.results.run_folder import RunFolder
from fedapps.simulation.inprocess import run_inprocess
from fedapps.tasks import TaskConfig
from fedapps.tasks.base import Data
from fedapps.tasks.convex_task import WEIGHTS
from fedapps.tasks.libsvm import A9aTask, W8aTask

CLIENTS = {"a9a": 80, "w8a": 142}
GRID = (0.3, 1.0, 3.0, 10.0)
ROOT = Path(__file__).resolve().parent.parent
SHARED: Mapping[str, Any] = {
    "partition": "iid", "batch-size": 0, "weighting": "uniform", "validation-fraction": 0.0, "evaluate-every": 1,
    "client-evaluation": "none", "client-test-fraction": 0.0, "client-validation-fraction": 0.0,
    "task-options": "regularisation = 1e-3",
}  # fmt: skip


class MeanObjective:
    """``sum p_i f_i`` with uniform weights: what the clients minimise together."""

    def __init__(self, task: Any, num_clients: int) -> None:
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


_optima: dict[str, np.ndarray] = {}


def optimum(task: Any, num_clients: int) -> np.ndarray:
    """The minimiser of the mean objective, which is the same in every run of a task."""
    if task.name not in _optima:
        start = task.initial_arrays(0)[WEIGHTS]
        _optima[task.name] = minimise(MeanObjective(task, num_clients), start, tol=1e-12)
    return _optima[task.name]


class _Measured:
    """A task whose evaluation says how far the model is from the optimum, whatever the data."""

    num_clients: int

    @override
    def load(self) -> tuple[Data, Data]:
        train, _ = super().load()  # type: ignore[misc]
        return train, train.take(np.arange(1))

    @override
    def evaluate(self, arrays: Mapping[str, Any], data: Data, device: str = "cpu") -> dict[str, float]:
        best = optimum(self, self.num_clients)
        return {**super().evaluate(arrays, data), "distance": float(np.linalg.norm(arrays[WEIGHTS] - best))}  # type: ignore[misc]


class A9a(_Measured, A9aTask):
    """a9a on 80 clients."""

    num_clients = CLIENTS["a9a"]


class W8a(_Measured, W8aTask):
    """w8a on 142 clients."""

    num_clients = CLIENTS["w8a"]


@dataclass(frozen=True)
class Entry:
    """A line of the figure.

    Attributes:
        method: Value of the setting.
        settings: What is fixed.
        grid: Key -> values that are tried.
        steps: Local steps.
    """

    method: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    grid: Mapping[str, Sequence[Any]] = field(default_factory=lambda: {"lr": GRID})
    steps: int = 3

    def points(self) -> Iterator[dict[str, Any]]:
        """Every point of the grid."""
        for values in product(*self.grid.values()):
            yield dict(zip(self.grid, values, strict=True))


def newton(method: str, **settings: Any) -> Entry:
    """A method of one full step a round."""
    own = {f"{method}.{key.replace('_', '-')}": value for key, value in settings.items()}
    return Entry(method, {"lr": 1.0, **own}, {}, steps=1)


def entries(d: int) -> dict[str, Entry]:
    """Every line, by its label; ``d`` is the number of weights."""
    sketched = {
        f"FedNS, k = {name}": Entry("fedns", {"fedns.size": k}, {"lr": (0.3, 0.5, 1.0)}, 1)
        for name, k in (("d/4", d // 4), ("d", d), ("4d", 4 * d))
    }
    return {
        "PSGD": Entry("psgd", steps=1),
        "FedAvg": Entry("fedavg"),
        "FedAvgM": Entry("fedavgm"),
        "FedProx": Entry("fedprox"),
        "SCAFFOLD": Entry("scaffold"),
        "FedAdam": Entry("fedadam"),
        "FedYogi": Entry("fedyogi"),
        "FedAdagrad": Entry("fedadagrad"),
        "LocalNewton": newton("localnewton"),
        "FedPM": newton("fedpm"),
        "FedNL, identity, latest": newton("fednl", compressor="identity", hessian="latest", option=1),
        "FedNL, Rank-1, option 1": newton("fednl", compressor="rank-r", rank=1, option=1),
        "FedNL, Rank-1, option 2": newton("fednl", compressor="rank-r", rank=1, option=2),
        "FedNL, Top-d, option 2": newton("fednl", compressor="top-k", option=2),
        "FedNew": Entry("fednew", {"lr": 1.0}, {"fednew.rho": (0.003, 0.01, 0.03, 0.1, 0.3)}, 1),
        **sketched,
        "LTDA": Entry("ltda", {}, {"lr": GRID, "ltda.damping": (0.1, 1.0)}),
        "FedSophia": Entry("fedsophia", {}, {"lr": (0.1, 0.3, 1.0, 3.0)}),
        "FedCLUP": Entry("fedclup"),
        "pFedMe": Entry("pfedme"),
    }


def run(task: str, entry: Entry, point: Mapping[str, Any], rounds: int, data_dir: str) -> tuple[list[float], list[int]]:
    """Run, and give the distance and the payload so far of rounds 0, 1, ...; of a run that diverges as far as it came."""
    config = {
        **SHARED, **entry.settings, **point, "method": entry.method, "local-steps": entry.steps, "data-dir": data_dir,
        "task": f"convex_methods:{task.capitalize()}", "num-server-rounds": rounds,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run"
        try:
            run_inprocess({**config, "run-dir": str(path)}, CLIENTS[task])
        except FedAppsError as error:
            print(f"   {entry.method} {dict(point)}: {str(error)[:150]}")
        rows = RunFolder.open(path).read_metrics()
    distances = {row["round"]: row["test-distance"] for row in rows if row["phase"] == "evaluate"}
    sent = {row["round"]: row["payload-up"] + row["payload-down"] for row in rows if row["phase"] == "train"}
    last = max(distances)
    return [distances[r] for r in range(last + 1)], np.cumsum([sent.get(r, 0) for r in range(last + 1)]).tolist()


def tuned(task: str, entry: Entry, rounds: int, data_dir: str) -> tuple[dict[str, Any], dict[str, float]]:
    """The best point of the grid, and what every point gave."""
    found: dict[str, float] = {}
    best: tuple[float, dict[str, Any]] = (math.inf, {})
    points = list(entry.points())
    for point in points if len(points) > 1 else []:
        distances, _ = run(task, entry, point, rounds, data_dir)
        value = distances[-1] if len(distances) == rounds + 1 and math.isfinite(distances[-1]) else math.inf
        found[json.dumps(point)] = value
        best = min(best, (value, point), key=lambda pair: pair[0])
    return (best[1] if len(points) > 1 else points[0]), found


def rounds_to(distances: Sequence[float], target: float) -> int | None:
    """The first round at which the distance is at most a target."""
    return next((r for r, distance in enumerate(distances) if distance <= target), None)


def table(name: str, lines: Mapping[str, Mapping[str, Any]], rounds: int) -> str:
    """The table of a task, in Markdown."""
    head = ["method", "tuned", "round 5", "round 20", f"round {rounds}", "rounds to 1e-8", "MB a round", "MB to 1e-4"]
    out = [f"## {name}, {CLIENTS[name]} clients", "", f"| {' | '.join(head)} |", "|" + " --- |" * len(head)]
    for label, line in lines.items():
        distances, sent = line["distance"], line["bytes"]
        near, close = rounds_to(distances, 1e-8), rounds_to(distances, 1e-4)
        cells = [
            label,
            ", ".join(f"{key} {value:g}" for key, value in line["point"].items()) or "-",
            *(f"{distances[r]:.1e}" if r < len(distances) else "-" for r in (5, 20, rounds)),
            "-" if near is None else str(near),
            f"{(sent[-1] - sent[1]) / max(len(sent) - 2, 1) / 1e6:.3g}",
            "-" if close is None else f"{sent[close] / 1e6:.3g}",
        ]
        out.append(f"| {' | '.join(cells)} |")
    return "\n".join(out) + "\n"


def main() -> None:
    """Measure, print, and write JSON, table and figure."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=80)
    parser.add_argument("--tuning-rounds", type=int, default=15)
    parser.add_argument("--tasks", default="a9a,w8a")
    parser.add_argument("--methods", default="", help="labels' methods, such as fedpm,fednl; empty = all")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    arguments = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    data_dir = os.environ.get("FEDAPPS_DATA", str(ROOT / "tests" / "data"))
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name in arguments.tasks.split(","):
        task = {"a9a": A9a, "w8a": W8a}[name](TaskConfig(data_dir=Path(data_dir)))
        wanted = arguments.methods.split(",") if arguments.methods else None
        lines: dict[str, Any] = {}
        for label, entry in entries(len(task.initial_arrays(0)[WEIGHTS])).items():
            if wanted and entry.method not in wanted:
                continue
            point, tried = tuned(name, entry, arguments.tuning_rounds, data_dir)
            distances, sent = run(name, entry, point, arguments.rounds, data_dir)
            lines[label] = {
                "method": entry.method, "settings": dict(entry.settings), "local-steps": entry.steps, "point": point,
                "tried": tried, "distance": distances, "bytes": sent,
            }  # fmt: skip
            print(f"{name} {label} {point}: {distances[-1]:.2e}", flush=True)
        record = {
            "shared": dict(SHARED), "clients": CLIENTS[name], "rounds": arguments.rounds,
            "tuning-rounds": arguments.tuning_rounds, "lines": lines,
            "environment": describe_environment(device="cpu", data_checksums=task.checksums()),
        }  # fmt: skip
        stem = arguments.out / f"convex_methods_{name}"
        stem.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        stem.with_suffix(".md").write_text(table(name, lines, arguments.rounds), encoding="utf-8")
        print(table(name, lines, arguments.rounds))
        panel = f"{name} ({CLIENTS[name]} clients)"
        plot_distance(
            {panel: {label: line["distance"] for label, line in lines.items()}},
            stem.with_suffix(".png"),
            sent={panel: {label: line["bytes"] for label, line in lines.items()}},
        )


if __name__ == "__main__":
    # Under its own name, as the runs import it.
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    import convex_methods

    convex_methods.main()
