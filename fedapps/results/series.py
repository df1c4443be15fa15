"""The numbers behind the figures: curves of one run, and means over seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedapps.results.report import LOSS, Run, measures_of
from fedapps.results.summary import TRAIN
from fedapps.results.views import PERSONAL, TEST_VIEWS, VALIDATION_VIEWS, Measure


@dataclass(frozen=True)
class Series:
    """A measure of one group of runs; all arrays have one entry an evaluated round."""

    rounds: np.ndarray
    mean: np.ndarray  # mean over the runs that have the round
    std: np.ndarray  # sample standard deviation over them; 0 for one run
    payload: np.ndarray  # mean of the bytes of train phases so far, down and up
    seconds: np.ndarray  # mean of the seconds of train phases so far


def series_of(runs: Sequence[Run], measure: Measure) -> Series | None:
    """Average a measure of runs over seeds.

    Args:
        runs: Runs that differ in the seed only.
        measure: What is averaged.

    Returns:
        The series; None if no run has it.
    """
    points: dict[int, list[tuple[float, float, float]]] = {}
    for run in runs:
        for number, value in run.measured(measure).items():
            points.setdefault(number, []).append(
                (value, payload_until(run, number), run.training_total("seconds", number))
            )
    if not points:
        return None
    rounds = sorted(points)
    means = np.array([np.mean(points[number], axis=0) for number in rounds])  # (rounds, 3)
    return Series(
        rounds=np.array(rounds),
        mean=means[:, 0],
        std=np.array([_std([value for value, _, _ in points[number]]) for number in rounds]),
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
    """Give the metrics of a run over rounds, for a record.

    Returns:
        ``rounds``, ``payload`` (bytes of training until then, both ways), and, under their names in ``metrics.jsonl``, what
        tables show and the loss, on test and validation data, and the worst tenth of personal models; None where a round
        has none.
    """
    metrics = dict.fromkeys([*(measure.metric for measure in measures_of([run])), LOSS])
    keys = [run.key(metric, view) for metric in metrics for view in (*TEST_VIEWS, *VALIDATION_VIEWS)]
    keys += [run.key(f"{metric}-worst-decile", PERSONAL) for metric in metrics]
    curves = {key: curve for key in keys if key and (curve := run.curve(key))}
    rounds = sorted({number for curve in curves.values() for number in curve})
    return {
        "rounds": [*rounds],
        "payload": [payload_until(run, number) for number in rounds],
        **{key: [curve.get(number) for number in rounds] for key, curve in curves.items()},
    }


def train_loss(run: Run) -> dict[int, float]:
    """Give the training loss over rounds.

    Returns:
        Round -> loss, for the rounds that have one.
    """
    rows = [row for row in run.rows if row["phase"] == TRAIN and "train-loss" in row]
    return {row["round"]: float(row["train-loss"]) for row in rows}
