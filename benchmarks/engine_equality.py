"""The same seed in every engine: are the final models bitwise equal?

Runs FedPM and FedAvg on ``digits`` (4 clients, 6 rounds) in process with 1 and 2 workers, in Flower's simulation with 1 and 2
actors, on a loopback SuperLink with 4 SuperNodes, and as 3 rounds gone on with by resume, and compares the SHA-256 of
``model.safetensors``'s tensors.

Usage: ``python benchmarks/engine_equality.py [--out benchmarks/results]``
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from fedapps.methods import get_method, resolve_settings
from fedapps.results.environment import describe_environment
from fedapps.results.run_folder import RunFolder
from fedapps.settings import flatten
from fedapps.simulation.launcher import run_on_superlink
from fedapps.simulation.processes import CONNECTION, SuperLink, SuperNode
from fedapps.simulation.start import Engine, Start, start

CLIENTS, ROUNDS = 4, 6
ROOT = Path(__file__).resolve().parent.parent


def fingerprint(folder: Path) -> str:
    """SHA-256 over names, dtypes, shapes and bytes of the final model."""
    digest = hashlib.sha256()
    for name, value in RunFolder.open(folder).read_model().items():
        digest.update(f"{name}{value.dtype.str}{value.shape}".encode())
        digest.update(value.tobytes())
    return digest.hexdigest()


def run(config: dict[str, Any], how: Start, root: Path) -> Path:
    """Run to the end, and give the folder."""
    ended = start(config, how, root)
    if ended.folder is None or ended.reason:
        raise SystemExit(f"{how}: {ended.status} {ended.reason}")
    return ended.folder


def deploy(config: dict[str, Any], root: Path) -> Path:
    """Run on a SuperLink and SuperNodes of this machine."""
    settings = resolve_settings({**config, "run-dir": str(root / "deployment")})
    with ExitStack() as stack:
        superlink = stack.enter_context(SuperLink(simulation=False))
        nodes = [
            SuperNode(
                superlink.address,
                {
                    "partition-id": i,
                    "num-partitions": CLIENTS,
                    "common-data": True,
                    "state-dir": str(root / f"state-{i}"),
                },
            )
            for i in range(CLIENTS)
        ]
        for node in nodes:
            stack.enter_context(node)
        outcome = run_on_superlink(
            flatten(settings, get_method(settings.method).group),
            connection=CONNECTION,
            environment={"FLWR_HOME": str(superlink.home)},
        )
    if outcome.status != "completed":
        raise SystemExit(outcome.log_tail)
    return root / "deployment"


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    arguments = parser.parse_args()
    results: dict[str, dict[str, str]] = {}
    for method in ("fedpm", "fedavg"):
        config = {"method": method, "task": "digits", "num-server-rounds": ROUNDS, "local-epochs": 1}
        with tempfile.TemporaryDirectory() as temporary:
            root = Path(temporary)
            inprocess = Start(engine=Engine.INPROCESS, num_clients=CLIENTS)
            folders = {
                "in-process": run(config, inprocess, root),
                "in-process, 2 workers": run(
                    config, Start(engine=Engine.INPROCESS, num_clients=CLIENTS, workers=2), root
                ),
                "simulation, 1 actor": run(config, Start(num_clients=CLIENTS, workers=1), root),
                "simulation, 2 actors": run(config, Start(num_clients=CLIENTS, workers=2), root),
                "deployment, 4 SuperNodes": deploy(config, root),
            }
            half = run({**config, "num-server-rounds": ROUNDS // 2}, inprocess, root)
            folders["3 rounds and a resume"] = run({**config, "run-dir": str(half), "resume": True}, inprocess, root)
            results[method] = {name: fingerprint(folder) for name, folder in folders.items()}
        for name, value in results[method].items():
            print(f"{method:>7}  {name:<26} {value[:16]}", flush=True)
    equal = {method: len(set(found.values())) == 1 for method, found in results.items()}
    print(f"bitwise equal: {equal}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    record = {
        "clients": CLIENTS,
        "rounds": ROUNDS,
        "equal": equal,
        "fingerprints": results,
        "environment": describe_environment(device="cpu", data_checksums={}),
    }
    (arguments.out / "engine_equality.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    sys.exit(0 if all(equal.values()) else 1)


if __name__ == "__main__":
    main()
