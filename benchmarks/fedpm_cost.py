"""What a FOOF step costs beside an SGD step, where the time goes, and how build, solve and send grow with a layer's width.

Three tables:

1. FOOF step / SGD step on the simple CNN for CIFAR-10 at batch 64, at refresh 1 and at the default of the settings. Both
   are measured in turn in one process and on one thread, in processor time, so that whatever else runs on the machine
   touches both alike.
2. Where the time of a FOOF step goes: statistics (hooks), factorisation, division, and the rest (forward, backward, other
   tensors).
3. One linear layer of width ``w`` and ``w`` outputs, ``d = w^2`` parameters, from 4 ``w`` rows: building the block,
   factorising and dividing by it, the product ``M`` once a round, packing both for the wire, and the bytes that travel.
   Beside it the orders of arXiv 2511.09100, in the width too: the estimated exponents are from the last two rows.

Usage: ``python benchmarks/fedpm_cost.py [--repetitions 15] [--smoke] [--out benchmarks/results]``
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from fedapps.curvature.foof import Estimate, FoofPreconditioner
from fedapps.curvature.gram import Gram, covariance, factorise
from fedapps.curvature.packing import pack_upper
from fedapps.messages import pack_arrays
from fedapps.methods import resolve_settings
from fedapps.results.environment import describe_environment
from fedapps.tasks.images import simple_cnn

ROOT = Path(__file__).resolve().parent.parent
STEPS = 80
"""Steps of a round that is timed: 1,000 examples (CIFAR-10's 10,000 over 10 clients), 5 epochs at batch 64."""

LR = 1e-3
PAPER = {
    "FOOF": {"build": "M d", "solve": "d sqrt(d / L)", "sent-bytes": "d"},
    "full Hessian": {"build": "M d^2", "solve": "d^3", "sent-bytes": "d^2"},
}
"""Orders of the paper's cost table: ``M`` rows, ``d`` parameters, ``L`` layers."""

EXPONENTS = {
    "FOOF": {"build": 3, "solve": 3, "sent-bytes": 2},
    "full Hessian": {"build": 5, "solve": 6, "sent-bytes": 4},
}
"""The same in the width, for ``M = 4 w`` rows, ``d = w^2`` and one layer."""


class TimedFoof(FoofPreconditioner):
    """Adds up the processor time of the stages of its steps."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seconds = dict.fromkeys(("statistics", "factorisation", "division"), 0.0)

    @contextmanager
    def _timed(self, stage: str) -> Any:
        started = time.process_time()
        yield
        self.seconds[stage] += time.process_time() - started

    def _collect(self, *args: Any) -> None:
        with self._timed("statistics"):
            super()._collect(*args)

    def _factorise(self, *args: Any) -> None:
        with self._timed("factorisation"):
            super()._factorise(*args)

    def _step_block(self, *args: Any) -> bool:
        before = self.seconds["factorisation"]
        with self._timed("division"):
            done = super()._step_block(*args)
        self.seconds["division"] -= self.seconds["factorisation"] - before
        return done


def processor_seconds(call: Callable[[], object]) -> float:
    """Time a call."""
    started = time.process_time()
    call()
    return time.process_time() - started


def gradient(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    """Put the gradient of a batch into the model."""
    model.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()


def measure_steps(batch: int, repetitions: int) -> dict[str, Any]:
    """Measure tables 1 and 2: medians over repetitions, each with one round of every kind."""
    own = resolve_settings({"method": "fedpm", "task": "digits"}).own
    torch.manual_seed(0)
    model = simple_cnn((3, 32, 32), 10)
    x, y = torch.randn(batch, 3, 32, 32), torch.randint(10, (batch,))
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)

    def sgd() -> None:
        for _ in range(STEPS):
            gradient(model, x, y)
            optimizer.step()

    def foof(refresh: int) -> dict[str, float]:
        options = {"estimate": Estimate(own.estimate), "decay": own.decay, "max_width": own.max_width}
        with TimedFoof(model, damping=own.damping, refresh=refresh, max_rows=own.max_rows, **options) as timed:
            for _ in range(STEPS):
                gradient(model, x, y)
                timed.step(LR)
        return timed.seconds

    sgd()
    ratios: dict[int, list[float]] = {1: [], own.refresh: []}
    shares: dict[int, list[dict[str, float]]] = {1: [], own.refresh: []}
    base = []
    for _ in range(repetitions):
        base.append(processor_seconds(sgd))
        for refresh, found in ratios.items():
            stages: dict[str, float] = {}
            seconds = processor_seconds(lambda refresh=refresh, stages=stages: stages.update(foof(refresh)))  # type: ignore[misc]
            found.append(seconds / base[-1])
            rest = seconds - sum(stages.values())
            shares[refresh].append({k: v / seconds for k, v in {**stages, "rest": rest}.items()})
    return {
        "model": "simple CNN, CIFAR-10", "batch": batch, "default-refresh": own.refresh,
        "sgd-step-ms": 1e3 * statistics.median(base) / STEPS,
        "ratio": {str(refresh): statistics.median(found) for refresh, found in ratios.items()},
        "ratio-quartiles": {str(refresh): statistics.quantiles(found, n=4) for refresh, found in ratios.items()},
        "shares": {
            str(refresh): {stage: statistics.median(s[stage] for s in found) for stage in found[0]}
            for refresh, found in shares.items()
        },
    }  # fmt: skip


def measure_width(width: int, repetitions: int) -> dict[str, float]:
    """Measure a row of table 3, in milliseconds."""
    torch.manual_seed(0)
    rows, G = torch.randn(4 * width, width), torch.randn(1, width, width)
    A = Gram.of_matrix(covariance(rows)[None])
    P = factorise(A, 0.1, through_rows=False, where="benchmark").matrix()[0].numpy()
    delta = G[0].numpy()

    def solve() -> None:
        factorise(A, 0.1, through_rows=False, where="benchmark").divide(G)

    calls = {
        "build": lambda: covariance(rows),
        "solve": solve,
        "product": lambda: delta.astype(np.float64) @ P.astype(np.float64),
        "send": lambda: pack_arrays({"P": pack_upper(P), "M": delta}),
    }
    for call in calls.values():
        call()
    best = {stage: min(processor_seconds(call) for _ in range(repetitions)) for stage, call in calls.items()}
    sent = pack_upper(P).nbytes + delta.nbytes
    return {"width": width, **{stage: 1e3 * seconds for stage, seconds in best.items()}, "sent-bytes": sent}


def growth(table: list[dict[str, float]], stage: str) -> float:
    """Estimate the exponent of the growth with the width from the last two rows."""
    last, before = table[-1], table[-2]
    return math.log(last[stage] / before[stage]) / math.log(last["width"] / before["width"])


def main() -> None:
    """Measure, print, and write JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--smoke", action="store_true", help="small sizes, to see that it runs")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    repetitions = 2 if arguments.smoke else arguments.repetitions
    steps = measure_steps(4 if arguments.smoke else 64, repetitions)
    print(f"SGD step {steps['sgd-step-ms']:.2f} ms, batch {steps['batch']}")
    for refresh, ratio in steps["ratio"].items():
        shares = ", ".join(f"{stage} {share:.0%}" for stage, share in steps["shares"][refresh].items())
        print(f"refresh {refresh:>3}: FOOF / SGD {ratio:.2f}  ({shares})")
    widths = (16, 32) if arguments.smoke else (64, 128, 256, 512, 1024, 2048)
    table = [measure_width(width, min(repetitions, 5)) for width in widths]
    for row in table:
        print("  ".join(f"{key} {value:8.2f}" for key, value in row.items()))
    exponents = {stage: growth(table, stage) for stage in table[0] if stage != "width"}
    for stage, exponent in exponents.items():
        orders = [f"{kind} {PAPER[kind][stage]}: w^{EXPONENTS[kind][stage]}" for kind in PAPER if stage in PAPER[kind]]
        print(f"{stage}: grows as w^{exponent:.2f}; paper: {', '.join(orders) or 'not in its table'}")
    record = {
        "steps": steps, "widths-ms": table, "exponents": exponents, "paper": PAPER, "exponents-of-the-paper": EXPONENTS,
        "time": "processor time, one thread", "environment": describe_environment(device="cpu", data_checksums={}),
    }  # fmt: skip
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "fedpm_cost.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
