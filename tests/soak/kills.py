"""Kill runs, resume them, and compare what they leave with runs that nobody killed; ``make soak`` calls it.

Every method is killed (SIGKILL) 20 times at file operations and 20 times at random moments. A run is resumed after each kill,
and often killed again, until it completes. The first file kills are at the last operations of a run: those of its last
checkpoint, its model and its summary. What a chain leaves must be bitwise equal: model, journal, what clients keep, and every
row but for its seconds and bytes.

Usage: ``python tests/soak/kills.py [--kills 20] [--seed 0] [METHOD...]``
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import logging
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # Before torch and BLAS are imported.

from fedapps.errors import CheckpointError
from fedapps.results.run_folder import RunFolder
from fedapps.simulation.inprocess import run_inprocess

METHODS = ("fedpm", "fedadam", "hiso", "fedclup", "pfedme")
CLIENTS = 4
LAST_OPERATIONS = 12
"""Operations at a run's end of which the first file kills take one each: more than its last checkpoint and its end make."""

CONFIG = {
    "task": "fedapps_testing:Sites", "task-options": 'sizes = "6,7,8,9"', "partition": "column",
    "partition-column": "site", "lr": 0.05, "batch-size": 4, "num-server-rounds": 5, "fraction-train": 0.67,
    "client-test-fraction": 0.34, "client-validation-fraction": 0.2, "client-evaluation": "every",
    "validation-fraction": 0.0, "node-wait": 0.0,
}  # fmt: skip
CHANGES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate"}


@dataclass
class Attempt:
    """How one process of a chain ended."""

    killed: bool
    operations: int
    seconds: float


def attempt(method: str, folder: Path, *, at_operation: int = 0, after: float = 0.0) -> Attempt:
    """Run or resume in a process of its own; kill it before an operation on a file, after seconds, or not at all."""
    config = CONFIG | {"method": method, "run-dir": str(folder), "resume": can_resume(folder)}
    if not config["resume"]:
        shutil.rmtree(folder, ignore_errors=True)
    counted = folder.with_suffix(".operations")
    started = time.monotonic()
    pid = os.fork()
    if pid == 0:
        run_in_child(config, folder, counted, at_operation)
    if after:
        time.sleep(after)
        os.kill(pid, signal.SIGKILL)  # It is not waited for yet: the id is still its own.
    _, status = os.waitpid(pid, 0)
    seconds = time.monotonic() - started
    if not os.WIFSIGNALED(status) and os.WEXITSTATUS(status):
        raise SystemExit(f"{method} in {folder}: a run that was not killed failed; see {folder.with_suffix('.log')}")
    killed = os.WIFSIGNALED(status)
    return Attempt(killed, 0 if killed else int(counted.read_text().splitlines()[0]), seconds)


def can_resume(folder: Path) -> bool:
    """Tell whether there is a checkpoint; a run that was killed before its first one starts again."""
    try:
        RunFolder.open(folder).load_checkpoint(arrays=False)
    except CheckpointError:
        return False
    return True


def has_ended(folder: Path) -> bool:
    """Tell whether a run has written its last word."""
    return (folder / "summary.json").exists() and (RunFolder.open(folder).read_summary() or {})["status"] == "completed"


def run_in_child(config: dict[str, Any], folder: Path, counted: Path, at_operation: int) -> None:
    """Run, and leave without a return."""
    log = os.open(folder.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    number = 0

    def count(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal number
        writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if event not in CHANGES and not writes:
            return
        path = os.fspath(arguments[0]) if not isinstance(arguments[0], int) else ""
        if isinstance(path, str) and (not path.startswith("/") or path.startswith(f"{folder}/")):
            number += 1
            if number == at_operation:
                os.kill(os.getpid(), signal.SIGKILL)

    code = 1
    try:
        sys.addaudithook(count)
        run_inprocess(config, CLIENTS)
        counted.write_text("\n".join([str(number), *sys.modules]))
        code = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(code)


def left_by(folder: Path) -> dict[str, Any]:
    """What a run left, as far as it must not depend on kills."""
    run = RunFolder.open(folder)
    dropped = ("seconds", "payload-down", "payload-up", "wire-down", "wire-up")
    checkpoint = run.load_checkpoint()
    kept = {
        f"client {i}": [sum_of(p) for p in folder.glob(f"clients/*/client-{i}/round-{last}.safetensors")]
        for i, last in checkpoint.last_folded.items()
    }
    return {
        "model": sum_of(run.model_path),
        "journal": sum_of(run.journal_path),
        "rows": [
            {k: v for k, v in row.items() if k not in dropped}
            for row in run.read_metrics()
            if row["phase"] != "start-up"
        ],
        "clients' rows": run.read_clients(),
        "ledger": len(run.read_ledger()) > 0,
        "status": (run.read_summary() or {})["status"],
        "state": (checkpoint.server_round, checkpoint.strategy_state, checkpoint.last_folded),
        **{name: value.tobytes() for name, value in checkpoint.strategy_arrays.items()},
        **kept,
    }


def sum_of(path: Path) -> str:
    """The SHA-256 of a file; empty without one."""
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else ""


def chains(method: str, root: Path, kills: int, random_: random.Random) -> str:
    """Kill one method, and say what came of it."""
    attempt(method, root / "straight")
    for module in (root / "straight.operations").read_text().splitlines()[1:]:
        with contextlib.suppress(Exception):
            importlib.import_module(module)  # Once, for all the processes that are forked.
    shutil.rmtree(root / "straight")
    whole = attempt(method, root / "straight")
    expected = left_by(root / "straight")
    counts = {}
    begun = time.monotonic()
    for kind in ("file", "random"):
        killed = done = 0
        while killed < kills:
            folder = root / f"{kind}-{done}"
            if kind == "file" and killed < min(LAST_OPERATIONS, kills):
                first, often = {"at_operation": whole.operations - killed}, 0.0
            else:
                first, often = {}, 0.6
            killed += finish(method, folder, first, often, draw(kind, whole, random_), random_)
            done += 1
            found = left_by(folder)
            different = [key for key in expected if found.get(key) != expected[key]]
            if different or found.keys() != expected.keys():
                raise SystemExit(f"{method}, {folder}: {', '.join(different)} differ from the run that was not killed")
            shutil.rmtree(folder)
        counts[kind] = f"{killed} at {kind} moments" if kind == "random" else f"{killed} at file operations"
        counts[kind] += f" in {done} chains"
    seconds = time.monotonic() - begun
    return f"{method}: {'; '.join(counts.values())}: all bitwise equal ({seconds:.0f} s)"


def draw(kind: str, whole: Attempt, random_: random.Random) -> Callable[[], dict[str, Any]]:
    """Draw when the next process is killed."""
    if kind == "file":
        return lambda: {"at_operation": random_.randint(1, whole.operations)}
    return lambda: {"after": random_.uniform(0.05, whole.seconds)}


def finish(
    method: str,
    folder: Path,
    first: dict[str, Any],
    often: float,
    draw_one: Callable[[], dict[str, Any]],
    random_: random.Random,
) -> int:
    """Kill and resume a run until it completes; gives how often it was killed."""
    killed = 0
    kill = first or draw_one()
    while attempt(method, folder, **kill).killed:
        killed += 1
        if has_ended(folder):  # Killed between its summary and the end of its process.
            break
        kill = draw_one() if random_.random() < often else {}
    return killed


def main() -> None:
    """Kill every method that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("methods", nargs="*", default=METHODS)
    parser.add_argument("--kills", type=int, default=20, help="kills of each kind for each method")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))
    logging.getLogger("flwr").setLevel(logging.ERROR)  # Torn checkpoints are the point.
    root = Path(tempfile.mkdtemp(prefix="fedapps-kills-"))
    for method in options.methods:
        (root / method).mkdir()
        print(chains(method, root / method, options.kills, random.Random(f"{options.seed} {method}")), flush=True)
    shutil.rmtree(root)


if __name__ == "__main__":
    main()
