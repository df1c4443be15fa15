"""What two liars among ten clients do to FedPM, FedAvg and HiSo on digits, without and with each defence.

Every round clients 3 and 7 lie: ``times -10`` sends -10 times the honest update (FedPM: of every ``M_i`` and plain tensor;
HiSo: of the scalars); ``constant 42`` sends 42 for every parameter (FedPM: with ``P_i = 10^6 I``) and for every scalar. The
bound ``max-update-ratio`` has its default, but for the row ``nothing``, where it is off. FedPM and FedAvg train ``digits``,
HiSo ``digits-mlp``, all at their defaults, on Dirichlet splits: at 1.0 every client has examples of most classes, at 0.1 of
two to five, and some classes are one client's alone. The figure is the test accuracy after the last round, or 0.1, that of
guessing, for a run that ends with an error.

Usage: ``python benchmarks/defences.py [--seeds 0,1,2] [--alphas 1.0,0.1] [--only fedpm,hiso] [--out benchmarks/results]``;
cells that ``defences.json`` in the folder has already are not run again.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, RecordDict

from fedapps.curvature.packing import scaled_identity, triangle_width
from fedapps.errors import FedAppsError
from fedapps.messages.blocks import CURVATURE, PRODUCTS
from fedapps.messages.scalars import SCALARS
from fedapps.messages.schema import ARRAYS, Arrays, pack_arrays, unpack_arrays
from fedapps.results.environment import describe_environment
from fedapps.results.run_folder import RunFolder
from fedapps.settings import RoundSettings
from fedapps.simulation.inprocess import run_inprocess
from fedapps.strategies.base import RoundStrategy
from fedapps.zeroth_order.wire import pack_scalars, unpack_scalars

ROOT = Path(__file__).resolve().parent.parent
CLIENTS, LIARS = 10, (3, 7)
RUNS: dict[str, dict[str, Any]] = {
    "fedpm": {"task": "digits", "num-server-rounds": 10},
    "fedavg": {"task": "digits", "num-server-rounds": 10},
    "hiso": {"task": "digits-mlp", "num-server-rounds": 200},
}
DEFENCES = ("clip", "median", "trimmed-mean", "multi-krum")
ATTACKS = ("times -10", "constant 42")
GUESSING = 0.1
HUGE = 1e6


def lie(attack: str, content: RecordDict, model: Arrays) -> RecordDict:
    """Give what a liar sends in place of an honest reply."""
    content = RecordDict(dict(content))
    if SCALARS in content and "values" not in content[SCALARS]:
        return content  # It only names the state of its replica.
    if SCALARS in content:
        honest = unpack_scalars(content[SCALARS]["values"], 1)
        values = [-10 * row[0] if attack == "times -10" else 42.0 for row in honest]
        content[SCALARS] = ConfigRecord(
            {**content[SCALARS], "values": pack_scalars([float(np.float32(v)) for v in values])}
        )
        return content
    arrays = unpack_arrays(content, ARRAYS, "liar")
    if attack == "times -10":
        content[ARRAYS] = pack_arrays({n: (model[n] - 10 * (v - model[n])).astype(v.dtype) for n, v in arrays.items()})
        if PRODUCTS in content:
            content[PRODUCTS] = pack_arrays({n: -10 * v for n, v in unpack_arrays(content, PRODUCTS, "liar").items()})
        return content
    content[ARRAYS] = pack_arrays({n: np.full_like(v, 42) for n, v in arrays.items()})
    if PRODUCTS in content:
        products, curvature = (unpack_arrays(content, record, "liar") for record in (PRODUCTS, CURVATURE))
        # The weights that it starts from are far below 42, so that M = (42 - W) P is 42 P.
        content[PRODUCTS] = pack_arrays({n: np.full_like(v, 42 * HUGE) for n, v in products.items()})
        content[CURVATURE] = pack_arrays(
            {n: scaled_identity(triangle_width(v.size), HUGE).astype(v.dtype) for n, v in curvature.items()}
        )
    return content


@contextmanager
def liars(attack: str) -> Iterator[None]:
    """Let two clients lie."""
    honest = RoundStrategy.receive

    def receive(self: RoundStrategy, partition: int, content: RecordDict, model: Arrays) -> None:
        honest(self, partition, lie(attack, content, model) if partition in LIARS else content, model)

    if attack:
        RoundStrategy.receive = receive  # type: ignore[method-assign]
    try:
        yield
    finally:
        RoundStrategy.receive = honest  # type: ignore[method-assign]


def accuracy(method: str, alpha: float, seed: int, attack: str, how: str) -> float:
    """Run once."""
    config = {
        **RUNS[method], "method": method, "partition": "dirichlet", "alpha": alpha, "seed": seed,
        "max-update-ratio": 0.0 if how == "nothing" else RoundSettings().max_update_ratio,
        "defence": how if how in DEFENCES else "none",
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder, liars(attack):
        path = Path(folder) / "run"
        config |= {"run-dir": str(path), "evaluate-every": RUNS[method]["num-server-rounds"]}
        try:
            run_inprocess(config, CLIENTS)
        except FedAppsError as problem:
            print(f"{method}, alpha {alpha}, seed {seed}, {attack}, {how}: {str(problem)[:200]}")
            return GUESSING
        rows = [row for row in RunFolder.open(path).read_metrics() if row["phase"] == "evaluate"]
    return float(rows[-1]["test-accuracy"])


def cells() -> list[tuple[str, str]]:
    """Give attack and defence of every row of the table."""
    attacked = [(attack, how) for attack in ATTACKS for how in ("nothing", "bound alone", *DEFENCES)]
    return [("", "bound alone"), *(("", how) for how in DEFENCES), *attacked]


def exists(method: str, how: str) -> bool:
    """Tell whether a method takes a defence: FedPM refuses medians of curvature."""
    return method != "fedpm" or how not in ("median", "trimmed-mean")


def key(method: str, alpha: float, attack: str, how: str) -> str:
    """Name a cell in the record."""
    return f"{method}, alpha {alpha:g}, {attack or 'all honest'}, {how}"


def table(figures: dict[str, list[float]], alphas: list[float]) -> str:
    """Write the table."""
    columns = [(m, a) for a in alphas for m in RUNS if key(m, a, "", "bound alone") in figures]
    lines = ["| clients | defence | " + " | ".join(f"{m}, alpha {a:g}" for m, a in columns) + " |"]
    lines.append("|---|---|" + "---|" * len(columns))
    for attack, how in cells():
        row = []
        for method, alpha in columns:
            values = figures.get(key(method, alpha, attack, how))
            if not values:
                row.append("")
                continue
            mean, clean = statistics.mean(values), statistics.mean(figures[key(method, alpha, "", "bound alone")])
            shown = f"{mean:.3f} ({min(values):.3f})"
            row.append(shown + (f" {100 * (mean - clean):+.1f}" if attack or how != "bound alone" else ""))
        lines.append(f"| {attack or 'all honest'} | {how} | " + " | ".join(row) + " |")
    return "\n".join(lines)


def main() -> None:
    """Run, print, and write JSON and the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--alphas", default="1.0,0.1")
    parser.add_argument("--only", default=",".join(RUNS), help="methods to run")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    arguments = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    path, seeds = arguments.out / "defences.json", [int(seed) for seed in arguments.seeds.split(",")]
    alphas = [float(alpha) for alpha in arguments.alphas.split(",")]
    figures: dict[str, list[float]] = json.loads(path.read_text())["test-accuracy"] if path.exists() else {}
    environment = describe_environment(device="cpu", data_checksums={})
    for alpha in alphas:
        for method in arguments.only.split(","):
            for attack, how in (cell for cell in cells() if exists(method, cell[1])):
                values = figures.setdefault(key(method, alpha, attack, how), [])
                for seed in seeds[len(values) :]:
                    values.append(accuracy(method, alpha, seed, attack, how))
                print(f"{key(method, alpha, attack, how)}: {values}", flush=True)
                record = {"seeds": seeds, "runs": RUNS, "test-accuracy": figures, "environment": environment}
                path.write_text(json.dumps(record, indent=1) + "\n")
    (arguments.out / "defences.md").write_text(
        f"Test accuracy after the last round: mean over seeds {arguments.seeds}, in brackets the least, then points against "
        "all honest clients with the bound alone, which is the default.\n"
        "Command: `python benchmarks/defences.py`.\n\n" + table(figures, alphas) + "\n"
    )
    print(table(figures, alphas))


if __name__ == "__main__":
    main()
