"""The numbers behind the figures: curves of one run, and means over seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedapps.results.report import Run
from fedapps.results.summary import TRAIN

RECORDED = (
    "test-accuracy", "validation-accuracy", "client-personal-test-accuracy", "client-personal-validation-accuracy",
    "client-personal-test-accuracy-worst-decile", "client-global-test-accuracy", "test-f1",
)  # fmt: skip
"""Metrics whose curves a record holds."""


@dataclass(frozen=True)
class Series:
    """Accuracy of one group of runs; all arrays have one entry an evaluated round."""

    rounds: np.ndarray
    mean: np.ndarray  # mean accuracy of the runs that have the round
    std: np.ndarray  # sample standard deviation over them; 0 for one run
    payload: np.ndarray  # mean of the bytes of train phases so far, down and up
    seconds: np.ndarray  # mean of the seconds of train phases so far


def accuracy_series(runs: Sequence[Run]) -> Series | None:
    """Average the accuracy of runs over seeds.

    Args:
        runs: Runs that differ in the seed only.

    Returns:
        The series; None if no run has an accuracy.
    """
    points: dict[int, list[tuple[float, float, float]]] = {}
    for run in runs:
        curve = run.curve(run.accuracy_metric) if run.accuracy_metric else {}
        for number, accuracy in curve.items():
            points.setdefault(number, []).append(
                (accuracy, payload_until(run, number), run.training_total("seconds", number))
            )
    if not points:
        return None
    rounds = sorted(points)
    means = np.array([np.mean(points[number], axis=0) for number in rounds])  # (rounds, 3)
    return Series(
        rounds=np.array(rounds),
        mean=means[:, 0],
        std=np.array([_std([accuracy for accuracy, _, _ in points[number]]) for number in rounds]),
        payload=means[:, 1],
        seconds=means[:, 2],
    )


def _std(values: Sequence[float]) -> float:
    return float(np.std(values, ddof=1)) if len(values) > 1 else 0.0


def payload_until(run: Run, server_round: int) -> float:
    """Add up the payload of the training rounds of a run, both ways.

    Args:
        run: The run.
        server_round: The last round to count.

    Returns:
        Bytes.
    """
    return run.training_total("payload-down", server_round) + run.training_total("payload-up", server_round)


def curves_of(run: Run) -> dict[str, list[float | None]]:
    """Give the accuracies of a run over rounds, for a record.

    Returns:
        ``rounds``, ``payload`` (bytes of training until then, both ways), and each of `RECORDED` that the run has, with None
        where a round has none.
    """
    curves = {metric: curve for metric in RECORDED if (curve := run.curve(metric))}
    rounds = sorted({number for curve in curves.values() for number in curve})
    return {
        "rounds": [*rounds],
        "payload": [payload_until(run, number) for number in rounds],
        **{metric: [curve.get(number) for number in rounds] for metric, curve in curves.items()},
    }


def train_loss(run: Run) -> dict[int, float]:
    """Give the training loss over rounds.

    Returns:
        Round -> loss, for the rounds that have one.
    """
    rows = [row for row in run.rows if row["phase"] == TRAIN and "train-loss" in row]
    return {row["round"]: float(row["train-loss"]) for row in rows}
