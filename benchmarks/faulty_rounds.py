"""Memory and accuracy of long runs in which three of ten replies fail, by every method of the registry.

In every round each client's reply is lost (20 %), replaced by an exception (5 %) or has NaN in its first number (5 %), by a
draw from seed, round and client alone. Each run is a process of its own, in the in-process engine; after every round its
resident memory is read (what is resident then, not the peak). A reply that is lost costs no waiting: clients run when their
reply is pulled, so a time-out of a millisecond loses no other. FedPM and FedAvg train ``digits`` and run without faults too;
the other methods train ``digits-mlp``. Each round asks three of six clients, Dirichlet 0.1, for three local steps (scalar
methods: for their own number); all else is at its default.

Usage: ``python benchmarks/faulty_rounds.py [--seeds 0,1,2] [--rounds 300] [--only fedpm,hiso] [--out benchmarks/results]``;
runs that ``faulty_rounds.json`` in the folder has already are not run again.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
from flwr.app import ConfigRecord, Error, Message
from typing_extensions import override

from fedapps.messages.blocks import PRODUCTS
from fedapps.messages.scalars import SCALARS
from fedapps.messages.schema import ARRAYS, pack_arrays, unpack_arrays
from fedapps.methods import METHODS
from fedapps.results.environment import describe_environment
from fedapps.results.run_folder import RunFolder
from fedapps.simulation.inprocess import CLIENT_RAISED, Fault, run_inprocess
from fedapps.zeroth_order.wire import pack_scalars, unpack_scalars

ROOT = Path(__file__).resolve().parent.parent
CLIENTS, FRACTION = 6, 0.5
LOST, RAISED, NAN = 0.20, 0.05, 0.05
ACCURACY = ("fedpm", "fedavg")
"""Methods whose accuracy is compared with that of runs without faults."""

EVERY = 30
"""Rounds between two entries of the memory that the record keeps; the first is what the last is compared with."""

ALLOWED_GROWTH, ALLOWED_POINTS = 1.05, 2.0


def lost(_reply: Message) -> None:
    """Lose a reply."""


def raised(reply: Message) -> Message:
    """Turn a reply into what Flower sends for an exception of the client."""
    error = Message(Error(CLIENT_RAISED, "RuntimeError: sensor offline"), reply_to=reply)
    error.metadata.__dict__["_reply_to_message_id"] = reply.metadata.reply_to_message_id
    return error


def nan(reply: Message) -> Message:
    """Put NaN into the first number that a client trained."""
    for record in (ARRAYS, PRODUCTS):
        arrays = unpack_arrays(reply.content, record, "client") if record in reply.content else {}
        for name, value in arrays.items():
            if np.issubdtype(value.dtype, np.floating):
                spoiled = value.copy()
                spoiled.flat[0] = np.nan
                reply.content[record] = pack_arrays({**arrays, name: spoiled})
                return reply
    scalars = reply.content.get(SCALARS)
    if isinstance(scalars, ConfigRecord) and "values" in scalars:
        values = [value for row in unpack_scalars(cast(bytes, scalars["values"]), 1) for value in row]
        scalars["values"] = pack_scalars([np.nan, *values[1:]])
    return reply


def draw_faults(seed: int, rounds: int, note: Callable[[int, int], None]) -> dict[tuple[int, int], Fault]:
    """Draw the fault of every round and client; ``note(round, client)`` is called for each that is injected."""
    drawn: dict[tuple[int, int], Fault] = {}
    for server_round in range(1, rounds + 1):
        for client in range(CLIENTS):
            u = np.random.default_rng([seed, server_round, client]).random()
            fault = lost if u < LOST else raised if u < LOST + RAISED else nan if u < LOST + RAISED + NAN else None
            if fault is not None:
                drawn[server_round, client] = partial(_inject, fault, partial(note, server_round, client))
    return drawn


def _inject(fault: Fault, note: Callable[[], None], reply: Message) -> Message | None:
    before = str(reply.content)
    changed = fault(reply)
    if changed is not reply or str(changed.content) != before:  # LocalTrain's clients send no number.
        note()
    return changed


class Memory(logging.Handler):
    """Reads the resident memory whenever Flower's log says that a round is over.

    Attributes:
        after: Round -> bytes resident after it.
    """

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.after: dict[int, int] = {}

    @override
    def emit(self, record: logging.LogRecord) -> None:
        if str(record.msg).startswith("round %d/%d:") and isinstance(record.args, tuple):
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            self.after[int(str(record.args[0]))] = pages * os.sysconf("SC_PAGE_SIZE")


def run_case(method: str, seed: int, rounds: int, faulty: bool) -> dict[str, Any]:
    """Run once in this process."""
    logger, memory = logging.getLogger("flwr"), Memory()
    logger.handlers = [memory]
    injected: set[tuple[int, int]] = set()
    faults = draw_faults(seed, rounds, lambda *where: injected.add(where)) if faulty else None
    config: dict[str, Any] = {
        "method": method, "task": "digits" if method in ACCURACY else "digits-mlp", "partition": "dirichlet", "alpha": 0.1,
        "seed": seed, "num-server-rounds": rounds, "evaluate-every": rounds, "round-timeout": 1e-3, "fraction-train": FRACTION,
        "max-consecutive-failed-rounds": rounds,
    }  # fmt: skip
    if next(row for row in METHODS if row.name == method).family != "zeroth order":
        config["local-steps"] = 3
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run"
        run_inprocess({**config, "run-dir": str(path)}, CLIENTS, faults=faults)
        rows = RunFolder.open(path).read_metrics()
    train = [row for row in rows if row["phase"] == "train"]
    refused = {(row["round"], int(client)) for row in train for client in row["refused"]}
    return {
        "task": config["task"],
        "accepted": sum(row["accepted"] for row in train),
        "injected": len(injected),
        "recorded": len(refused & injected),
        "honest-refused": len(refused - injected),
        "resident-bytes": {str(r): n for r, n in memory.after.items() if r % EVERY == 0},
        "test-accuracy": next(row["test-accuracy"] for row in reversed(rows) if row["phase"] == "evaluate"),
    }


def growth(run: dict[str, Any]) -> float:
    """Give the memory after the last round over that after round `EVERY`."""
    memory = list(run["resident-bytes"].values())
    return float(memory[-1] / memory[0])


def tables(runs: dict[str, dict[str, Any]], seeds: list[int]) -> str:
    """Write both tables."""
    lines = [
        f"| method | task | MB after round {EVERY} | after the last | grown by MB | ratio | rounds accepted | "
        "faults injected | recorded | honest replies refused |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in METHODS:
        run = runs.get(f"{row.name}, {seeds[0]}, faults")
        if run is None:
            continue
        memory = [n / 1e6 for n in run["resident-bytes"].values()]
        lines.append(
            f"| {row.name} | {run['task']} | {memory[0]:.1f} | {memory[-1]:.1f} | {memory[-1] - memory[0]:+.1f} | "
            f"{growth(run):.3f} | {run['accepted']} | {run['injected']} | {run['recorded']} | {run['honest-refused']} |"
        )
    lines += ["", "| method | seed | accuracy without faults | with | points |", "|---|---|---|---|---|"]
    for method in ACCURACY:
        differences = []
        for seed in seeds:
            clean, faulty = (runs.get(f"{method}, {seed}, {how}") for how in ("none", "faults"))
            if clean is None or faulty is None:
                continue
            before, after = clean["test-accuracy"], faulty["test-accuracy"]
            differences.append(100 * (after - before))
            lines.append(f"| {method} | {seed} | {before:.3f} | {after:.3f} | {differences[-1]:+.1f} |")
        if len(differences) > 1:
            lines.append(f"| {method} | mean | | | {statistics.mean(differences):+.1f} |")
    return "\n".join(lines)


def cases(only: list[str], seeds: list[int]) -> list[tuple[str, int, str]]:
    """List method, seed and ``faults`` or ``none`` of every run: FedPM with all seeds, the others with the first."""
    found = [(method, seeds[0], how) for method in ACCURACY if method in only for how in ("faults", "none")]
    found += [(row.name, seeds[0], "faults") for row in METHODS if row.name in only and row.name not in ACCURACY]
    return found + [("fedpm", seed, how) for seed in seeds[1:] for how in ("none", "faults") if "fedpm" in only]


def main() -> None:
    """Run every case in a process of its own, print, and write JSON and the tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--only", default=",".join(row.name for row in METHODS), help="methods to run")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    arguments = parser.parse_args()
    if arguments.case:
        method, seed, how = arguments.case.split(",")
        print(json.dumps(run_case(method, int(seed), arguments.rounds, how == "faults")))
        return
    path, seeds = arguments.out / "faulty_rounds.json", [int(seed) for seed in arguments.seeds.split(",")]
    runs: dict[str, dict[str, Any]] = json.loads(path.read_text())["runs"] if path.exists() else {}
    for method, seed, how in cases(arguments.only.split(","), seeds):
        name = f"{method}, {seed}, {how}"
        if name not in runs:
            command = [sys.executable, __file__, "--case", f"{method},{seed},{how}", "--rounds", str(arguments.rounds)]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            runs[name] = json.loads(done.stdout.splitlines()[-1])
        print(f"{name}: growth {growth(runs[name]):.3f}, accuracy {runs[name]['test-accuracy']:.3f}", flush=True)
        record = {
            "rounds": arguments.rounds, "clients": CLIENTS, "fraction-train": FRACTION, "seeds": seeds,
            "shares": {"lost": LOST, "raised": RAISED, "nan": NAN},
            "allowed": {"growth": ALLOWED_GROWTH, "points": ALLOWED_POINTS}, "runs": runs,
            "environment": describe_environment(device="cpu", data_checksums={}),
        }  # fmt: skip
        path.write_text(json.dumps(record, indent=1) + "\n")
    (arguments.out / "faulty_rounds.md").write_text(
        f"{arguments.rounds} rounds, each by {FRACTION:.0%} of {CLIENTS} clients; of the replies {LOST:.0%} are lost, "
        f"{RAISED:.0%} are exceptions, {NAN:.0%} hold NaN. Memory is what is resident after a round.\n"
        "Command: `python benchmarks/faulty_rounds.py`.\n\n" + tables(runs, seeds) + "\n"
    )
    print(tables(runs, seeds))


if __name__ == "__main__":
    main()
