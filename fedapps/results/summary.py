"""The summary of a run, from its rows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any

import numpy as np

from fedapps.results.storage import Row

START_UP = "start-up"
TRAIN = "train"
EVALUATE = "evaluate"
CLIENT_EVALUATE = "client-evaluate"

BYTE_KEYS = ("payload-down", "payload-up", "wire-down", "wire-up")
"""Keys of a train row: content of the messages, and what the Fleet API moves; bytes."""

LOWER_IS_BETTER = ("loss", "error")
"""What the name of a metric ends with that is better the smaller it is; of all others greater is better."""

REPORTED = "clients-reported"
"""Number of clients that measured, in a row of their evaluation."""

_NOT_METRICS = {"round", "phase", "seconds", REPORTED, *BYTE_KEYS}


COLUMNS = frozenset(
    {
        "round", "phase", "seconds", REPORTED, *BYTE_KEYS, "sampled", "folded", "refused", "accepted", "lr", "notes",
        "preconditioned", "averaged", "averaged-since", "maximum", "partition", "num-examples",
    }
)  # fmt: skip
"""Columns of the run's own in its rows, whether or not a row has them."""


class RunStatus(StrEnum):
    """How a run stands.

    Attributes:
        COMPLETED: All rounds done, the final model finite.
        FAILED: Ended by an error or by the failure policy.
        STOPPED: Ended on request.
        UNFINISHED: Without ``summary.json``: it goes on, or was killed.
    """

    COMPLETED = "completed"
    FAILED = "failed"
    STOPPED = "stopped"
    UNFINISHED = "unfinished"


def summarise(
    rows: Sequence[Row], *, status: RunStatus | str, reason: str | None = None, primary: str = "accuracy"
) -> dict[str, Any]:
    """Sum up a run.

    Args:
        rows: Rows of ``metrics.jsonl``.
        status: How the run ended.
        reason: Why, unless it was completed.
        primary: The metric that chooses the best round, on validation data (`validation_key`), by `smaller_is_better`.

    Returns:
        ``status``, ``reason`` (if given), ``judged-by`` (`primary`), ``rounds``; ``final``: round and metrics of the
        last evaluation, on the server and on clients; ``best``: the same at the best ``validation-<primary>`` (of
        personal models, if they were evaluated on validation data), the earliest of equals, never chosen on test data
        and absent where nothing was evaluated on validation data; ``totals``: bytes, ``seconds`` and
        ``seconds-by-phase``. Totals cover the rounds on file, a first part before a resume included.
    """
    summary: dict[str, Any] = {"status": RunStatus(status).value}
    if reason is not None:
        summary["reason"] = reason
    summary["judged-by"] = primary
    summary["rounds"] = max((row["round"] for row in rows if row["phase"] == TRAIN), default=0)
    evaluations = evaluations_by_round(rows)
    summary["final"] = evaluations[max(evaluations)] if evaluations else {}
    best = best_evaluation(evaluations.values(), validation_key(evaluations.values(), primary))
    if best is not None:
        summary["best"] = best
    summary["totals"] = _totals(rows)
    return summary


def smaller_is_better(metric: str) -> bool:
    """Tell whether of two values of a metric the smaller is better, by `LOWER_IS_BETTER`."""
    return metric.endswith(LOWER_IS_BETTER)


def evaluations_by_round(rows: Iterable[Row]) -> dict[int, dict[str, Any]]:
    """Collect the metrics of each evaluated round.

    Args:
        rows: Rows of ``metrics.jsonl``.

    Returns:
        Round -> ``round`` and the metrics of its evaluations, in the order of the rounds.
    """
    merged: dict[int, dict[str, Any]] = {}
    for row in rows:
        if row["phase"] in (EVALUATE, CLIENT_EVALUATE):
            metrics = {k: v for k, v in row.items() if k not in _NOT_METRICS and isinstance(v, int | float)}
            merged.setdefault(row["round"], {"round": row["round"]}).update(metrics)
    return dict(sorted(merged.items()))


def validation_key(evaluations: Iterable[dict[str, Any]], primary: str) -> str:
    """Name the metric that chooses the best round.

    Args:
        evaluations: Metrics of evaluated rounds.
        primary: What runs are judged by, such as ``accuracy``.

    Returns:
        The first that was evaluated: that of the personal models on the clients' validation data, the server's, and that of
        the global model on the clients' data, weighted by examples; the server's if none was.
    """
    server = f"validation-{primary}"
    keys = [f"client-personal-validation-{primary}", server, f"client-validation-{primary}-weighted"]
    known = {name for metrics in evaluations for name in metrics}
    return next((key for key in keys if key in known), server)


def best_evaluation(evaluations: Iterable[dict[str, Any]], key: str) -> dict[str, Any] | None:
    """Choose the best evaluation by one metric.

    Args:
        evaluations: Metrics of evaluated rounds, in order.
        key: The metric.

    Returns:
        The best one, the first of equals; None if the metric is nowhere finite.
    """
    sign = -1.0 if smaller_is_better(key) else 1.0
    finite = [metrics for metrics in evaluations if math.isfinite(metrics.get(key, math.nan))]
    return max(finite, key=lambda metrics: sign * metrics[key], default=None)


def _totals(rows: Iterable[Row]) -> dict[str, Any]:
    totals: dict[str, Any] = dict.fromkeys(BYTE_KEYS, 0)
    by_phase: dict[str, float] = {}
    for row in rows:
        for key in BYTE_KEYS:
            totals[key] += row.get(key, 0)
        by_phase[row["phase"]] = by_phase.get(row["phase"], 0.0) + row.get("seconds", 0.0)
    return {**totals, "seconds": sum(by_phase.values()), "seconds-by-phase": by_phase}


def add_metrics(row: Row, metrics: Mapping[str, Any]) -> Row:
    """Add the clients' own metrics to a row, none of whose columns they may take.

    Args:
        row: The run's columns.
        metrics: Name -> value; one called like a column becomes ``metric-<name>``.

    Returns:
        The row with the metrics.
    """
    taken = COLUMNS | row.keys()
    return row | {f"metric-{name}" if name in taken else name: value for name, value in metrics.items()}


def client_statistics(
    metrics: Mapping[int, Mapping[str, float]], num_examples: Mapping[int, float]
) -> dict[str, float]:
    """Describe the clients' metrics for a row of ``metrics.jsonl``.

    Args:
        metrics: Partition -> metric -> value.
        num_examples: Partition -> number of examples behind it.

    Returns:
        For each metric that a client has: ``client-<metric>``, the mean over clients; ``...-weighted``, the mean weighted by
        examples; ``...-std``, the sample standard deviation over clients (divisor n - 1, as over seeds; not of one client);
        ``...-worst-decile``, the mean of the worst tenth (at least one client, by `smaller_is_better`). All are over the
        clients whose value is finite (a client whose split holds one class has no AUC, for instance); where those are not
        all of them, ``...-clients`` is their number, and a metric that is finite nowhere is left out.
    """
    statistics: dict[str, float] = {}
    for name in sorted({name for values in metrics.values() for name in values}):
        partitions = sorted(p for p in metrics if math.isfinite(metrics[p].get(name, math.nan)))
        if not partitions:
            continue
        values = np.array([metrics[p][name] for p in partitions], dtype=np.float64)
        weights = np.array([num_examples[p] for p in partitions], dtype=np.float64)
        worst_first = np.sort(values)[::-1] if smaller_is_better(name) else np.sort(values)
        statistics |= {
            f"client-{name}": float(values.mean()),
            f"client-{name}-weighted": float(np.average(values, weights=weights)),
            f"client-{name}-worst-decile": float(worst_first[: max(1, len(values) // 10)].mean()),
        }
        if len(values) > 1:
            statistics[f"client-{name}-std"] = float(values.std(ddof=1))
        if len(partitions) < len(metrics):
            statistics[f"client-{name}-clients"] = len(partitions)
    return statistics
