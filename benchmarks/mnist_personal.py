"""Table and figure of two comparisons of personalised methods on MNIST, clients of 2 and of 5 classes each.

The comparisons themselves are made by ``fedapps compare``, by the commands at the head of ``configs/mnist_2_classes.toml`` and
``configs/mnist_5_classes.toml``.

Usage: ``python benchmarks/mnist_personal.py FOLDER_OF_2_CLASSES FOLDER_OF_5_CLASSES [--out benchmarks/results]``
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedapps.results.personal import REFERENCES, client_gains, personal_table
from fedapps.results.plots import Over, plot_comparisons, plot_gains
from fedapps.results.report import Run, compare_table, load_run
from fedapps.results.tables import CompareRow, to_markdown
from fedapps.results.units import human_bytes
from fedapps.results.views import PERSONAL

ROOT = Path(__file__).resolve().parent.parent
HEAD = """Every method computes 20 gradients of a batch of 16 examples a client and round: pFedMe 5 on each of 4 batches,
Ditto 10 for each of its two models. FedCLUP's first round, of local fits, costs three times as many, and power iterations
for `L`, once.

"""


def chosen_runs(folder: Path, record: dict[str, Any]) -> list[Run]:
    """Load the runs with the chosen settings, of all seeds, in the order of the methods."""
    trials = [t for t in record["trials"] if t["point"] == record["chosen"][t["method"]]]
    return [load_run(folder / trial["folder"]) for trial in trials]


def best_personal(row: CompareRow) -> float:
    """Give the personal models' accuracy at the round that is best on the clients' validation data."""
    return next(spread.mean for measure, spread in row.best.items() if measure.view is PERSONAL)


def describe(classes: int, record: dict[str, Any], runs: Sequence[Run]) -> str:
    """Write what a reader needs to know about one comparison."""
    seeds, rounds = record["seeds"], record["settings"]["num-server-rounds"]
    chosen = "; ".join(
        f"{method} " + ", ".join(f"{key} {value:g}" for key, value in point.items())
        for method, point in record["chosen"].items()
    )
    table = compare_table(runs)
    best = ", ".join(f"{row.label} {best_personal(row):.4f}" for row in table)
    sent = ", ".join(
        f"{row.label} {human_bytes(row.payload_down.mean)} down and {human_bytes(row.payload_up.mean)} up"
        for row in table
    )
    return "\n".join(
        [
            f"## {classes} classes a client",
            "",
            f"20 clients, {rounds} rounds, {len(seeds)} seed(s): accuracy on the clients' own test data after the last round.",
            "",
            to_markdown([row.cells() for row in personal_table(runs)]),
            f"Chosen on the clients' validation data, on seed {seeds[0]}: {chosen}.",
            f"The same mean at the round that is best on that data: {best}.",
            f"Payload of training: {sent}.",
            *_gains(runs),
            "",
        ]
    )


def _gains(runs: Sequence[Run]) -> list[str]:
    gains = client_gains(runs)
    lines = []
    for reference in REFERENCES:
        for method, values in gains.get(reference, {}).items():
            better = sum(value > 0 for value in values.values())
            worse = sum(value < 0 for value in values.values())
            mean = sum(values.values()) / len(values)
            lines.append(f"{method} over {reference}: {mean:+.4f} on average, {better} clients better, {worse} worse.")
    return ["", *(f"- {line}" for line in lines)] if lines else []


def main() -> None:
    """Write ``mnist_personal.md``, ``mnist_personal.png``, and for each comparison its record and its clients' gains."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", type=Path, nargs=2)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    parts, panels = [], {}
    for folder in arguments.folders:
        record = json.loads((folder / "compare.json").read_text(encoding="utf-8"))
        runs = chosen_runs(folder, record)
        classes = record["settings"]["classes-per-client"]
        parts.append(describe(classes, record, runs))
        panels[f"MNIST, {classes} classes a client"] = runs
        name = f"mnist_{classes}_classes"
        shutil.copy(folder / "compare.json", arguments.out / f"{name}.json")
        if gains := client_gains(runs):
            plot_gains(gains, arguments.out / f"{name}_gains.png", quantity="accuracy")
    (arguments.out / "mnist_personal.md").write_text(HEAD + "\n".join(parts), encoding="utf-8")
    # Not over seconds: the runs shared their machine.
    plot_comparisons(panels, arguments.out / "mnist_personal.png", over=(Over.ROUNDS, Over.BYTES), views=(PERSONAL,))


if __name__ == "__main__":
    main()
