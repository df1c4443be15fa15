"""Does the default refresh interval of FedPM's blocks cost accuracy?

Trains FedPM on ``digits`` (10 clients, Dirichlet 0.1, 10 rounds) with a new block at every local step
(``fedpm.refresh = 1``, the paper) and at the default, all other settings at their defaults, with seeds that no default was
chosen on. A run that diverges counts with its last accuracy. The default keeps the accuracy if no run failed and the two
means differ by no more than the larger of the two spreads (standard deviations over the seeds).

Usage: ``python benchmarks/fedpm_refresh.py [--seeds 3,4,5] [--runs DIR] [--smoke] [--out benchmarks/results]``; runs that
are complete in ``--runs`` are read, not repeated.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from fedapps.errors import FedAppsError
from fedapps.methods import resolve_settings
from fedapps.results.environment import describe_environment
from fedapps.results.run_folder import RunFolder
from fedapps.simulation.inprocess import run_inprocess

ROOT = Path(__file__).resolve().parent.parent
CLIENTS = 10
ROUNDS = 10
CONFIG: dict[str, Any] = {"method": "fedpm", "task": "digits", "partition": "dirichlet", "alpha": 0.1}


def train(refresh: int, seed: int, folder: Path, rounds: int) -> dict[str, Any]:
    """Train once, unless the folder holds the run already, and read what came out."""
    if not (folder / "summary.json").exists():
        config = {**CONFIG, "num-server-rounds": rounds, "seed": seed, "fedpm.refresh": refresh, "run-dir": str(folder)}
        try:
            run_inprocess(config, CLIENTS)
        except FedAppsError as problem:
            print(f"refresh {refresh}, seed {seed}: {str(problem).splitlines()[0][:200]}")
    run = RunFolder.open(folder)
    rows = [row for row in run.read_metrics() if row["phase"] == "evaluate" and row["round"]]
    refused = sum(len(row["refused"]) for row in run.read_metrics() if row["phase"] == "train")
    summary = run.read_summary() or {}
    return {
        "refresh": refresh, "seed": seed, "status": summary.get("status", "unknown"), "refused-replies": refused,
        "test-accuracy": [row["test-accuracy"] for row in rows], "test-loss": rows[-1]["test-loss"],
    }  # fmt: skip


def main() -> None:
    """Train, print, and write JSON."""
    default = resolve_settings({"method": "fedpm", "task": "digits"})
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", default="3,4,5")
    parser.add_argument("--runs", type=Path, help="keep the run folders here")
    parser.add_argument("--smoke", action="store_true", help="one round of one seed, to see that it runs")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    arguments = parser.parse_args()
    seeds = [3] if arguments.smoke else [int(seed) for seed in arguments.seeds.split(",")]
    rounds = 1 if arguments.smoke else ROUNDS
    rows, accuracy = [], {}
    with tempfile.TemporaryDirectory() as scratch:
        runs = arguments.runs or Path(scratch)
        for refresh in (1, default.own.refresh):
            rows += [train(refresh, seed, runs / f"refresh-{refresh}-seed-{seed}", rounds) for seed in seeds]
            last = [row["test-accuracy"][-1] for row in rows if row["refresh"] == refresh]
            spread = statistics.stdev(last) if len(last) > 1 else 0.0
            accuracy[refresh] = {"mean": statistics.mean(last), "spread": spread}
            each = ", ".join(f"{value:.4f}" for value in last)
            print(f"refresh {refresh:>3}: {statistics.mean(last):.4f} +- {spread:.4f}  ({each})")
    difference = accuracy[default.own.refresh]["mean"] - accuracy[1]["mean"]
    kept = abs(difference) <= max(a["spread"] for a in accuracy.values())
    kept = kept and all(row["status"] == "completed" for row in rows)
    print(f"difference {difference:+.4f}: the default {'keeps' if kept else 'does not keep'} the accuracy")
    record = {
        "settings": {**CONFIG, "num-server-rounds": rounds, "lr": default.lr, "fedpm.damping": default.own.damping},
        "clients": CLIENTS,
        "accuracy": accuracy, "difference": difference, "kept": kept, "runs": rows,
        "environment": describe_environment(device="cpu", data_checksums={}),
    }  # fmt: skip
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "fedpm_refresh.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
