"""How many rounds HiSo needs for the accuracy that DeComFL has at its end, from comparisons of the two.

A comparison is the ``compare.json`` of ``fedapps compare``; the commands stand at the head of ``configs/tiny_lm_lora.toml`` and
in ``docs/methods/hiso.md``. The goal is DeComFL's test accuracy after its last round, seed by seed; a method has reached it at
its first evaluation that is as good, and the ratio is DeComFL's rounds over HiSo's.

Usage: ``python benchmarks/hiso_rounds.py COMPARE_JSON... [--out benchmarks/results]``
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from fedapps.results.units import human_bytes

ROOT = Path(__file__).resolve().parent.parent
ACCURACY = "test-accuracy"
BEST = "best-global-server-test-accuracy-mean"

Curve = dict[str, Any]
"""An entry of ``curves`` in ``compare.json``: rounds, payload and accuracies of one run."""


def rounds_to(curve: Curve, goal: float) -> int | None:
    """Find the first evaluation that is as good as a goal.

    Args:
        curve: A run.
        goal: The test accuracy.

    Returns:
        Its round; None if there is none.
    """
    reached = (
        r for r, value in zip(curve["rounds"], curve[ACCURACY], strict=True) if value is not None and value >= goal
    )
    return next(reached, None)


def chosen_curves(record: dict[str, Any]) -> list[Curve]:
    """Give the curves of the chosen settings; a record without the others says nothing of it."""
    return [curve for curve in record["curves"] if curve.get("chosen", True)]


def rows_of(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Compare the methods of a comparison seed by seed.

    Args:
        record: A ``compare.json``.

    Returns:
        A row a seed: the goal, rounds to it by method, DeComFL's over HiSo's.
    """
    curves = {(curve["method"], curve["seed"]): curve for curve in chosen_curves(record)}
    rows = []
    for seed in record["seeds"]:
        goal = curves["decomfl", seed][ACCURACY][-1]
        rounds = {method: rounds_to(curves[method, seed], goal) for method in record["methods"]}
        needed = rounds["hiso"]
        rows.append(
            {"seed": seed, "goal": goal, "rounds": rounds, "ratio": rounds["decomfl"] / needed if needed else None}
        )
    return rows


def describe(record: dict[str, Any]) -> list[str]:
    """Write a comparison as Markdown.

    Args:
        record: A ``compare.json``.

    Returns:
        Lines.
    """
    settings, methods = record["settings"], record["methods"]
    chosen = "; ".join(
        f"{method} " + ", ".join(f"{key.rpartition('.')[2]} {value:g}" for key, value in point.items())
        for method, point in record["chosen"].items()
    )
    lines = [
        f"## {settings['task']}, {record['clients']} clients, {settings['num-server-rounds']} rounds",
        "",
        f"Chosen by validation accuracy on seed {record['seeds'][0]}: {chosen}.",
        "",
        "| method | test accuracy at the end, by seed | best by validation, mean | payload down | up |",
        "| --- | --- | --- | --- | --- |",
    ]
    table = {row["method"]: row for row in record["table"]}
    for method in methods:
        ends = [curve[ACCURACY][-1] for curve in chosen_curves(record) if curve["method"] == method]
        row = table[method]
        down, up = human_bytes(row["payload-down-mean"]), human_bytes(row["payload-up-mean"])
        shown = ", ".join(f"{end:.3f}" for end in ends)
        best = row.get(BEST, row.get("best-accuracy-mean"))  # Older records have the second.
        lines.append(f"| {method} | {shown} | {best:.3f} | {down} | {up} |")
    lines += [
        "",
        "| seed | DeComFL's accuracy at the end | rounds to it: " + " | ".join(methods) + " | DeComFL / HiSo |",
        "| --- | --- |" + " --- |" * len(methods) + " --- |",
    ]
    for row in rows_of(record):
        reached = " | ".join(
            "never" if row["rounds"][method] is None else str(row["rounds"][method]) for method in methods
        )
        ratio = "-" if row["ratio"] is None else f"{row['ratio']:.2f}"
        lines.append(f"| {row['seed']} | {row['goal']:.3f} | {reached} | {ratio} |")
    return [*lines, ""]


def main() -> None:
    """Print and write ``hiso_rounds.md``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("comparisons", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    arguments = parser.parse_args()
    records = [json.loads(path.read_text(encoding="utf-8")) for path in arguments.comparisons]
    text = "\n".join(line for record in records for line in describe(record))
    print(text)
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "hiso_rounds.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
