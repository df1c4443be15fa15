"""Server memory of FedPM's aggregation over the number of replies, in whatever order they arrive.

Synthetic replies of a CNN with 2.0 million parameters are folded by the strategy itself (``rounds.begin``, ``receive``,
``rounds.end``). Each case is a process of its own, whose peak resident set is read at its end. Replies are folded by
increasing partition, so all that come ahead of their turn have to wait: in memory up to ``fold-buffer-mb``, then in a
scratch file, whose size is noted.

Usage: ``python benchmarks/fedpm_memory.py [--counts 10,500] [--max-width 4096] [--fold-buffer-mb 256]
[--smoke] [--out benchmarks/results]``
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
ORDERS = ("in order", "reversed", "shuffled", "partition 0 last")
CONVOLUTIONS = ((3, 64), (64, 128), (128, 256), (256, 256))
"""Channels of the model's 3 x 3 convolutions; two linear layers follow, of 2048 and 512 inputs."""

GROWTH = 1.10
"""What the peak may grow by from the fewest to the most replies."""


def arrival(order: str, count: int) -> list[int]:
    """List the partitions in the order in which their replies arrive."""
    partitions = list(range(count))
    if order == "reversed":
        return partitions[::-1]
    if order == "shuffled":
        return [int(p) for p in np.random.default_rng(0).permutation(count)]
    return [*partitions[1:], 0] if order == "partition 0 last" else partitions


def model_arrays(scale: int) -> dict[str, np.ndarray]:
    """Make the model: names, shapes and any numbers."""
    shapes: dict[str, tuple[int, ...]] = {}
    for i, (inner, outer) in enumerate(CONVOLUTIONS):
        shapes |= {f"conv{i}.weight": (max(outer // scale, 1), max(inner // scale, 1), 3, 3)}
        shapes |= {f"conv{i}.bias": (max(outer // scale, 1),)}
    for i, (inner, outer) in enumerate(((2048, 512), (512, 10))):
        shapes |= {f"fc{i}.weight": (max(outer // scale, 1), inner // scale), f"fc{i}.bias": (max(outer // scale, 1),)}
    random = np.random.default_rng(0)
    return {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def run_case(order: str, count: int, max_width: int, buffer_mb: float, scale: int) -> dict[str, Any]:
    """Fold the replies of one round in this process, and read its peak resident set."""
    from flwr.app import ConfigRecord, MetricRecord, RecordDict

    from fedapps.curvature.layout import BlockSpec, Layout
    from fedapps.curvature.packing import scaled_identity
    from fedapps.messages.schema import pack_arrays, payload_bytes
    from fedapps.strategies import FedPM, RoundSettings

    model = model_arrays(scale)
    specs = []
    for layer in dict.fromkeys(name.split(".")[0] for name in model):
        weight = model[f"{layer}.weight"]
        width = weight[0].size + 1
        cut = max_width if 0 < max_width < width else 0
        specs.append(BlockSpec(layer, (f"{layer}.weight", f"{layer}.bias"), len(weight), width, cut=cut))
    layout = Layout(tuple(specs)).to_json()

    diagonals = {
        spec.layer: np.concatenate([scaled_identity(tile.width, 1.0) for tile in spec.tiles]).astype(np.float32)
        for spec in specs
    }

    def reply(partition: int) -> RecordDict:
        random = np.random.default_rng(partition)
        curvature = {layer: diagonal * np.float32(1 + random.random()) for layer, diagonal in diagonals.items()}
        products = {spec.layer: random.random((spec.rows, spec.width), dtype=np.float32) for spec in specs}
        return RecordDict(
            {
                "arrays": pack_arrays({}), "products": pack_arrays(products), "curvature": pack_arrays(curvature),
                "layout": ConfigRecord({"layout": layout}), "metrics": MetricRecord({"num-examples": 1 + partition}),
            }
        )  # fmt: skip

    started, scratch = time.perf_counter(), 0
    strategy = FedPM(RoundSettings(fold_buffer_mb=buffer_mb))
    strategy.rounds.begin(1, model, range(count))
    for partition in arrival(order, count):
        content = reply(partition)
        size = sum(payload_bytes(content).values())
        strategy.receive(partition, content, model)
        file = strategy.rounds._order._scratch if strategy.rounds._order else None
        scratch = max(scratch, file.seek(0, 2) if file else 0)
    if strategy.rounds.end() is None or len(strategy.rounds.report.folded) != count:
        raise SystemExit(f"replies were refused: {strategy.rounds.report.refused}")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "order": order, "replies": count, "peak-bytes": peak, "reply-bytes": size, "scratch-bytes": scratch,
        "seconds": time.perf_counter() - started, "parameters": sum(value.size for value in model.values()),
        "fold-buffer-mb": buffer_mb,
    }  # fmt: skip


def main() -> None:
    """Run every case in a process of its own, print, and write JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--counts", default="10,500")
    parser.add_argument("--max-width", type=int, default=4096)
    parser.add_argument("--fold-buffer-mb", type=float, default=256.0)
    parser.add_argument("--smoke", action="store_true", help="a tiny model and few replies")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    arguments = parser.parse_args()
    scale, counts = (32, [2, 5]) if arguments.smoke else (1, [int(n) for n in arguments.counts.split(",")])
    if arguments.case:
        order, count = arguments.case.rsplit(",", 1)
        print(json.dumps(run_case(order, int(count), arguments.max_width, arguments.fold_buffer_mb, scale)))
        return
    from fedapps.results.environment import describe_environment

    rows = []
    for order in ORDERS:
        for count in counts:
            command = [sys.executable, __file__, "--case", f"{order},{count}", "--max-width", str(arguments.max_width)]
            command += ["--fold-buffer-mb", str(arguments.fold_buffer_mb)]
            command += ["--smoke"] if arguments.smoke else []
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            rows.append(json.loads(done.stdout.splitlines()[-1]))
            print("{order:<16} {replies:>4} replies: peak {0:7.1f} MB, scratch {1:8.1f} MB, {seconds:.1f} s".format(
                rows[-1]["peak-bytes"] / 1e6, rows[-1]["scratch-bytes"] / 1e6, **rows[-1]), flush=True)  # fmt: skip
    peaks = {(row["order"], row["replies"]): row["peak-bytes"] for row in rows}
    growth = {order: peaks[order, counts[-1]] / peaks[order, counts[0]] for order in ORDERS}
    print("growth: " + ", ".join(f"{order} {factor:.3f}" for order, factor in growth.items()))
    record = {
        "rows": rows, "growth": growth, "max-width": arguments.max_width, "allowed": GROWTH,
        "environment": describe_environment(device="cpu", data_checksums={}),
    }  # fmt: skip
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "fedpm_memory.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
