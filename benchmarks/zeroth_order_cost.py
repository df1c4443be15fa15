"""What a scalar-only client costs on OPT-125M (random weights): probe, round, memory, catching up, and where the time goes.

float32, batch 8 x 32, P = 1, forward difference, prompt classification: only the label words' logits at the answer
position are computed. Four statements are measured:

1. a probe / its two forward passes (the same code without displacement);
2. a client's round (apply one record of the journal, probe) / the round of DeComFL's published HiSo code, if
   ``--decomfl`` names its folder;
3. peak memory of a process that runs rounds, against parameters + ``H`` + the largest tensor + activations;
4. catching up 100 rounds / applying the published update 100 times (3 are timed).

Everything that is compared is measured in turn within one process, repetition by repetition; ratios are taken within a
repetition, and their median is the figure. Shares of the memory's bandwidth refer to a triad (``a = b + s c``) measured
in the same repetitions.

Usage: ``python benchmarks/zeroth_order_cost.py [--decomfl DIR] [--threads 2] [--repetitions 7] [--smoke] [--out DIR]``;
with ``--catch-up`` statement 4 alone, into a file of its own. On as many threads as there are cores set
``OMP_WAIT_POLICY=PASSIVE``: torch's idle threads otherwise spin where the kernels' threads are to work.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from zeroth_order_client import LABEL_WORDS, MU, OPT_125M, SMALL, Client, loss, make_batch, make_model

from fedapps.results.environment import describe_environment
from fedapps.zeroth_order.dispatch import kernel_name, perturb
from fedapps.zeroth_order.probing import Prober
from fedapps.zeroth_order.quiet import trainable_parameters
from fedapps.zeroth_order.scheme import Probe, Scheme

ROOT = Path(__file__).resolve().parent.parent
TARGETS = {"probe": 1.3, "round": 0.4, "memory": 1.0, "catch-up": 20.0}
"""At most, at most, at most, at least."""

KINDS = ("Batch", "Paramwise")
"""Variants of the published code; the second is the faster one."""

CLOCKS = {"wall": time.perf_counter, "processor": time.process_time}

PROBES = 3
"""Probes a repetition; they take less time than what is measured beside them."""


class Triad:
    """`a = b + s c` over arrays that fit in no cache.

    Args:
        elements: Of each array.
    """

    def __init__(self, elements: int) -> None:
        self._arrays = [torch.ones(elements) for _ in range(3)]
        self.bytes = 3 * 4 * elements

    def __call__(self) -> None:
        """Run once."""
        a, b, c = self._arrays
        torch.add(b, c, alpha=0.5, out=a)


class Clock:
    """Seconds of named calls, one list a name.

    Args:
        now: Wall-clock time, or processor time of all threads (less disturbed by whatever else runs, at one thread).
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now
        self.seconds: dict[str, list[float]] = defaultdict(list)

    def time(self, name: str, call: Callable[[], object], times: int = 1) -> float:
        """Time a call, as the mean of some times in a row."""
        started = self.now()
        for _ in range(times):
            call()
        self.seconds[name].append((self.now() - started) / times)
        return self.seconds[name][-1]

    def ratio(self, name: str, other: str, factor: float = 1.0) -> dict[str, Any]:
        """Summarise `factor * name / other` of every repetition."""
        pairs = zip(self.seconds[name], self.seconds[other], strict=True)
        return summary([factor * mine / theirs for mine, theirs in pairs])


def summary(values: list[float]) -> dict[str, Any]:
    """Give median, quartiles and number."""
    quartiles = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    return {"median": statistics.median(values), "quartiles": [quartiles[0], quartiles[2]], "repetitions": len(values)}


def measure_ours(config: dict[str, Any], repetitions: int, clock: Clock, theirs: dict[str, Any]) -> dict[str, Any]:
    """Measure statements 1 and 2, and the split of a round."""
    client, triad = Client(config, now=clock.now), Triad(1 << (16 if config is SMALL else 26))
    for call in (client.forward, client.round, triad):
        call()
    split: dict[str, list[float]] = defaultdict(list)
    for _ in range(repetitions):
        for _ in range(PROBES):
            clock.time("triad", triad)
            clock.time("two forwards", client.forward, 2)
            client.prober.seconds, client.prober.elements = 0.0, 0
            clock.time("probe", client.probe)
            directions, displaced = client.prober.seconds, client.prober.elements
            clock.time("two forwards after", client.forward, 2)
            split["directions"].append(directions)
            split["forwards"].append(clock.seconds["probe"][-1] - directions)
            split["updates"].append(clock.time("apply one record", lambda: client.catch_up(1)))
        clock.time("round", client.round)
        for name, other in theirs.items():
            for what in ("client job", "steps only", "forward"):
                clock.time(f"{name}, {what}", getattr(other, what.replace(" ", "_")))
    for name in ("two forwards", "two forwards after"):
        clock.seconds[name] = [2 * seconds for seconds in clock.seconds[name]]
    around = zip(clock.seconds["two forwards"], clock.seconds.pop("two forwards after"), strict=True)
    clock.seconds["two forwards"] = [(before + after) / 2 for before, after in around]
    bandwidth = triad.bytes / statistics.median(clock.seconds["triad"])
    d = client.elements
    traffic = {"forwards": 2 * 4 * displaced, "directions": (4 + 4 + 4) * displaced, "updates": (4 + 4 + 4 + 4) * d}
    return {
        "elements": d, "elements-displaced": displaced, "triad-GB/s": bandwidth / 1e9,
        "split": {
            part: {
                "seconds": summary(split[part]), "bytes": traffic[part],
                "seconds-at-bandwidth": traffic[part] / bandwidth,
                "share-of-bandwidth": traffic[part] / bandwidth / statistics.median(split[part]),
            }
            for part in traffic
        },
    }  # fmt: skip


def measure_catch_up(config: dict[str, Any], rounds: int, repetitions: int, clock: Clock, folder: Path | None) -> None:
    """Measure statement 4, for HiSo and for DeComFL."""
    for method in ("hiso", "decomfl"):
        client = Client(config, method)
        client.catch_up(1)
        others = published(config, folder, method, client=False)
        for other in others.values():
            other.catch_up()
        for _ in range(repetitions):
            clock.time(f"{method}: {rounds} rounds", lambda client=client: client.catch_up(rounds))  # type: ignore[misc]
            for name, other in others.items():
                clock.time(f"{method}: one round of {name}", other.catch_up, 3)


def published(config: dict[str, Any], folder: Path | None, method: str, *, client: bool) -> dict[str, Any]:
    """Make both variants of the published code, if there is any."""
    if folder is None:
        return {}
    from decomfl_published import Published

    batch = make_batch(config)
    answers = torch.tensor(LABEL_WORDS)[batch.labels]
    return {
        f"published {kind}": Published(
            make_model(config), batch.input_ids, answers, LABEL_WORDS, method, kind, client=client
        )
        for kind in KINDS
    }


# --- memory: one process a measurement --------------------------------------------------------------------------------


def resident(field: str) -> int:
    """Read `VmRSS` or `VmHWM`, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return 1024 * int(line.split()[1])
    raise SystemExit(f"no {field} in /proc/self/status")


def child(config: dict[str, Any], what: str) -> None:
    """Print what a process holds before and at most while it runs forward passes or rounds."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if what == "forward":
        model, batch = make_model(config), make_batch(config)
        prober = Prober(model, Scheme(7), {})
        perturb(torch.ones(1), {}, Scheme(7, "decomfl"), probe=Probe(0, 0, MU))  # loads the compiled kernels
        calls = [lambda: prober.loss(loss, batch)]
    else:
        client = Client(config)
        calls = [client.round]
    held = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew: making a model needs more than holding it
    for _ in range(3):
        calls[0]()
    print(json.dumps({"held": held, "peak": resident("VmHWM")}))


def measure_memory(config: dict[str, Any], threads: int) -> dict[str, Any]:
    """Measure statement 3."""
    found = {}
    for what in ("forward", "round"):
        command = [sys.executable, __file__, "--child", what, *(["--smoke"] if config is SMALL else [])]
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        found[what] = json.loads(done.stdout.splitlines()[-1])
    parameters = trainable_parameters(make_model(config)).values()
    sizes = [p.numel() * p.element_size() for p in parameters]
    bound = found["forward"]["peak"] + sum(sizes) + max(sizes)
    return {
        "parameters": sum(sizes), "H": sum(sizes), "largest-tensor": max(sizes),
        "peak-of-forward": found["forward"]["peak"],
        "activations-and-libraries": found["forward"]["peak"] - sum(sizes),
        "peak-of-round": found["round"]["peak"],
        "beyond-parameters-H-activations": found["round"]["peak"] - found["forward"]["peak"] - sum(sizes),
        "bound": bound, "ratio": found["round"]["peak"] / bound,
    }  # fmt: skip


# --- report -----------------------------------------------------------------------------------------------------------


def ratios(clock: Clock, rounds: int, others: list[str]) -> dict[str, Any]:
    """Give the ratios of statements 1, 2 and 4."""
    found = {"probe / two forwards": clock.ratio("probe", "two forwards")}
    for name in others:
        for what in ("client job", "steps only"):
            found[f"round / {name}, {what}"] = clock.ratio("round", f"{name}, {what}")
    return found | catch_up_ratios(clock, rounds, others)


def catch_up_ratios(clock: Clock, rounds: int, others: list[str]) -> dict[str, Any]:
    """Give the ratios of statement 4."""
    return {
        f"{method}: {rounds} rounds of {name} / ours": clock.ratio(
            f"{method}: one round of {name}", f"{method}: {rounds} rounds", rounds
        )
        for name in others
        for method in ("hiso", "decomfl")
    }


def environment(threads: int, folder: Path | None) -> dict[str, Any]:
    """Say what it ran on."""
    versions = {}
    for package in ("numba", "llvmlite", "transformers"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "missing"
    commit = None
    if folder is not None:
        from decomfl_published import FUNCTIONS, commit_of

        commit = {"repository": "github.com/ZidongLiu/DeComFL", "commit": commit_of(folder), "functions": FUNCTIONS}
    return {
        **describe_environment(device="cpu", data_checksums={}), "threads": threads, "kernels": kernel_name(),
        "further-packages": versions, "machine": platform.machine(), "cpu-features": cpu_features(),
        "load-average": os.getloadavg(), "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY"), "published": commit,
    }  # fmt: skip


def cpu_features() -> list[str]:
    """List the vector extensions that the kernels can use."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return []
    flags = next((line for line in text.splitlines() if line.startswith(("flags", "Features"))), "")
    return sorted(flag for flag in flags.split() if flag.startswith(("avx", "sse", "fma", "asimd", "sve")))


def show_ratios(record: dict[str, Any]) -> None:
    """Print medians and quartiles."""
    for name, values in record["ratios"].items():
        print(f"{name:58} {values['median']:7.2f}  ({values['quartiles'][0]:.2f} to {values['quartiles'][1]:.2f})")


def show(record: dict[str, Any]) -> None:
    """Print the tables."""
    show_ratios(record)
    memory = record["memory"]
    print(f"{'peak memory / bound':58} {memory['ratio']:7.2f}  ({memory['peak-of-round'] / 1e6:.0f} MB of "
          f"{memory['bound'] / 1e6:.0f})")  # fmt: skip
    print(f"triad {record['client']['triad-GB/s']:.1f} GB/s")
    for part, values in record["client"]["split"].items():
        print(f"{part:12} {1e3 * values['seconds']['median']:8.1f} ms, at bandwidth "
              f"{1e3 * values['seconds-at-bandwidth']:6.1f} ms ({values['share-of-bandwidth']:.0%})")  # fmt: skip
    for name, values in record["seconds"].items():
        print(f"{name:58} {1e3 * values['median']:9.1f} ms")


def main() -> None:
    """Measure, print, and write JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--decomfl", type=Path, help="a checkout of github.com/ZidongLiu/DeComFL")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--smoke", action="store_true", help="a tiny model, to see that it runs")
    parser.add_argument("--catch-up", action="store_true", help="statement 4 alone")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--child", choices=("forward", "round"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    config = SMALL if arguments.smoke else OPT_125M
    if arguments.child:
        child(config, arguments.child)
        return
    torch.set_num_threads(arguments.threads)
    if arguments.decomfl is None:
        print("--decomfl names no folder: rounds and catching up are timed, not compared with the published code")
    else:
        from decomfl_published import load

        load(arguments.decomfl.resolve())
    repetitions, rounds = (2, 5) if arguments.smoke else (arguments.repetitions, 100)
    model = "OPT-125M, random weights" if config is OPT_125M else "tiny OPT, random weights"
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.catch_up:
        clock = Clock(CLOCKS[arguments.clock])
        measure_catch_up(config, rounds, repetitions, clock, arguments.decomfl)
        names = [f"published {kind}" for kind in KINDS] if arguments.decomfl else []
        record = {
            "model": model, "clock": arguments.clock, "targets": {"catch-up": TARGETS["catch-up"]},
            "ratios": catch_up_ratios(clock, rounds, names),
            "seconds": {name: summary(seconds) for name, seconds in clock.seconds.items()},
            "environment": environment(arguments.threads, arguments.decomfl),
        }  # fmt: skip
        show_ratios(record)
        write(arguments.out / "zeroth_order_catch_up.json", record)
        return
    memory = measure_memory(config, arguments.threads)
    clock = Clock(CLOCKS[arguments.clock])
    others = published(config, arguments.decomfl, "hiso", client=True)
    client = measure_ours(config, repetitions, clock, others)
    names = list(others)
    others.clear()
    measure_catch_up(config, rounds, max(1, repetitions // 2), clock, arguments.decomfl)
    record = {
        "model": model,
        "batch": [8, 32], "clock": arguments.clock, "targets": TARGETS,
        "ratios": ratios(clock, rounds, names), "memory": memory, "client": client,
        "seconds": {name: summary(seconds) for name, seconds in clock.seconds.items()},
        "environment": environment(arguments.threads, arguments.decomfl),
    }  # fmt: skip
    show(record)
    write(arguments.out / "zeroth_order_cost.json", record)


def write(path: Path, record: dict[str, Any]) -> None:
    """Write a record."""
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
