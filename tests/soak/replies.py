"""Lie to every method, and see that no lie ends a run, hurts another client, or moves the model further than is stated.

For each method a run of four rounds is made; its last round is then run again from the same folder 2,000 times, and each time
one of five clients sends something else in place of one of its replies (`fedapps_hostile`): single flipped bits, malformed
arrays, absurd numbers, other records, metrics or errors. What is checked is in `UnderFire.faults`; beside it no round may take
longer than `LONGEST` seconds, and memory may not grow by more than `MOST_GROWTH` from the first hundred lies to the last. A lie
in the handshake, before round 1, may end the start of a run, as a node does that is not there: then by an error that names it.

Usage: ``python tests/soak/replies.py [--lies 2000] [--seed 0] [METHOD...]``
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from types import FrameType

os.environ.setdefault("OMP_NUM_THREADS", "1")  # Before torch and BLAS are imported.
sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))

from fedapps_hostile import CLIENTS, UnderFire, config_of

from fedapps.errors import RosterError
from fedapps.methods import METHODS
from fedapps.server_apps import run

LONGEST = 20
"""Seconds after which a round counts as hanging; it takes some 0.05."""

MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None
"""Where files are in memory: half of the time went into waiting for a disk."""

MOST_GROWTH = 50e6
"""Bytes: the longest lies are of a megabyte."""


def too_long(signum: int, frame: FrameType | None) -> None:
    """End a round that hangs."""
    raise TimeoutError(f"a round took more than {LONGEST} s")


def resident() -> float:
    """The most bytes that this process has held in memory."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0


def lies(method: str, number: int, seed: int) -> str:
    """Tell a method a number of lies, and say what came of them."""
    random_ = random.Random(f"{seed} {method}")
    begun, early = time.monotonic(), 0.0
    counts: Counter[str] = Counter()
    greatest = (0.0, "")
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        fire = UnderFire(config_of(method), CLIENTS, Path(folder))
        for told in range(number):
            if told == min(100, number // 2):
                early = resident()
            signal.alarm(LONGEST)
            try:
                left = fire.fire(random_)
            except RosterError as refused:
                if fire.tape.target[0] != "query" or f"partitions {fire.tape.liar}" not in str(refused):
                    raise SystemExit(f"{method}, lie {told}, {fire.kind}: {refused}") from refused
                counts["start refused"] += 1
                continue
            except Exception as problem:
                raise SystemExit(f"{method}, lie {told}, {fire.kind} in {fire.tape.target}: {problem!r}") from problem
            finally:
                signal.alarm(0)
            if broken := fire.faults(left):
                raise SystemExit(f"{method}, lie {told}, {left['kind']} in {left['where']}: {'; '.join(broken)}")
            liar = left["liar"]
            counts["refused" if str(liar) in left["row"]["refused"] else "folded"] += 1
            greatest = max(greatest, (fire.effect(left), left["kind"]))
    grown = resident() - early
    if grown > MOST_GROWTH:
        raise SystemExit(f"{method}: memory grew by {grown / 1e6:.0f} MB")
    told_of = ", ".join(f"{count} {what}" for what, count in sorted(counts.items()))
    return (
        f"{method}: {number} lies: {told_of}; no honest client refused; greatest effect {greatest[0]:.3g} times the honest "
        f"round ({greatest[1]}); memory +{grown / 1e6:.0f} MB ({time.monotonic() - begun:.0f} s)"
    )


def main() -> None:
    """Lie to every method that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("methods", nargs="*", default=[row.name for row in METHODS])
    parser.add_argument("--lies", type=int, default=2000, help="for each method")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.CRITICAL + 1)  # Refusals are the point.
    signal.signal(signal.SIGALRM, too_long)
    run.describe_environment = lambda **_: {}  # Half of the time of such a short run.
    with tempfile.TemporaryDirectory(dir=MEMORY) as state:
        os.environ["FEDAPPS_STATE"] = state
        for method in options.methods:
            print(lies(method, options.lies, options.seed), flush=True)


if __name__ == "__main__":
    main()
