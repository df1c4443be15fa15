"""How a metric is spread over clients."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np


def client_statistics(metrics: Mapping[int, Mapping[str, float]], num_examples: Mapping[int, int]) -> dict[str, float]:
    """Describe the clients' metrics for a row of ``metrics.jsonl``.

    Args:
        metrics: Partition -> metric -> value.
        num_examples: Partition -> number of examples behind it.

    Returns:
        For each metric that a client has: ``client-<metric>``, the mean over clients; ``...-weighted``, the mean weighted by
        examples; ``...-std``, the standard deviation over clients; ``...-worst-decile``, the mean of the worst tenth (at
        least one client; the greatest values of a metric whose name ends in ``loss`` or ``error``, else the least).
    """
    statistics: dict[str, float] = {}
    for name in sorted({name for values in metrics.values() for name in values}):
        partitions = sorted(p for p in metrics if name in metrics[p])
        values = np.array([metrics[p][name] for p in partitions], dtype=np.float64)
        weights = np.array([num_examples[p] for p in partitions], dtype=np.float64)
        worst_first = np.sort(values)[::-1] if name.endswith(("loss", "error")) else np.sort(values)
        statistics |= {
            f"client-{name}": float(values.mean()),
            f"client-{name}-weighted": float(np.average(values, weights=weights)),
            f"client-{name}-std": float(values.std()),
            f"client-{name}-worst-decile": float(worst_first[: max(1, len(values) // 10)].mean()),
        }
    return statistics
