"""The numbers behind the figures: curves of one run, and means over seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedapps.results.report import Run
from fedapps.results.summary import TRAIN


@dataclass(frozen=True)
class Series:
    """Accuracy of one group of runs; all arrays have one entry an evaluated round.

    Attributes:
        rounds: Rounds.
        mean: Mean accuracy of the runs that have the round.
        std: Sample standard deviation over them; 0 for one run.
        payload: Mean of the bytes sent so far, down and up.
        seconds: Mean of the seconds of train phases so far.
    """

    rounds: np.ndarray
    mean: np.ndarray
    std: np.ndarray
    payload: np.ndarray
    seconds: np.ndarray


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
            points.setdefault(number, []).append((accuracy, payload_until(run, number), seconds_until(run, number)))
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
    """Add up the payload of a run, both ways.

    Args:
        run: The run.
        server_round: The last round to count.

    Returns:
        Bytes.
    """
    rows = [row for row in run.rows if row["round"] <= server_round]
    return float(sum(row.get("payload-down", 0) + row.get("payload-up", 0) for row in rows))


def seconds_until(run: Run, server_round: int) -> float:
    """Add up the time of the train phases of a run: evaluation is the observer's cost, not the method's.

    Args:
        run: The run.
        server_round: The last round to count.

    Returns:
        Seconds.
    """
    rows = [row for row in run.rows if row["phase"] == TRAIN and row["round"] <= server_round]
    return float(sum(row.get("seconds", 0.0) for row in rows))


def train_loss(run: Run) -> dict[int, float]:
    """Give the training loss over rounds.

    Args:
        run: The run.

    Returns:
        Round -> loss, for the rounds that have one.
    """
    rows = [row for row in run.rows if row["phase"] == TRAIN and "train-loss" in row]
    return {row["round"]: float(row["train-loss"]) for row in rows}
