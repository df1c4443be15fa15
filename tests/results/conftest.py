"""Run folders made of numbers, in the form that a run writes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedapps.results.report import Run, load_run
from fedapps.results.run_folder import RunFolder
from fedapps.results.summary import summarise

MakeRun = Callable[..., Run]


def rows_of(accuracies: list[float], *, down: int, up: int, seconds: float) -> list[dict[str, Any]]:
    """Rows of a run whose test accuracy in round r is ``accuracies[r]``; validation is 0.01 below, loss 1 - accuracy."""
    rows: list[dict[str, Any]] = []
    for number, accuracy in enumerate(accuracies):
        if number > 0:
            bytes_ = {"payload-down": down, "payload-up": up, "wire-down": down + 9, "wire-up": up + 7}
            train = {"lr": 0.1, "train-loss": (1 - accuracy) / 2, "sampled": [0, 1], "folded": [0, 1], "refused": {}}
            rows.append({"round": number, "phase": "train", "seconds": seconds, **train, **bytes_})
        metrics = {
            "validation-loss": 1.1 - accuracy,
            "validation-accuracy": accuracy - 0.01,
            "test-loss": 1 - accuracy,
            "test-accuracy": accuracy,
        }
        rows.append({"round": number, "phase": "evaluate", "seconds": 0.5, **metrics})
    return rows


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    def make(
        accuracies: list[float],
        *,
        method: str = "fedpm",
        task: str = "digits",
        seed: int = 0,
        status: str | None = "completed",
        limit: int | None = None,
        down: int = 1000,
        up: int = 3000,
        seconds: float = 2.0,
        **settings: int | float | bool | str,
    ) -> Run:
        folder = RunFolder.create(tmp_path / "runs", method=method, task=task, seed=seed)
        rounds = len(accuracies) - 1 if limit is None else limit
        folder.write_settings(
            {"method": method, "task": task, "seed": seed, "num-server-rounds": rounds, "lr": 0.1, **settings}
        )
        rows = rows_of(accuracies, down=down, up=up, seconds=seconds)
        for row in rows:
            folder.append_metrics(row)
        if status is not None:
            folder.write_summary(summarise(rows, status=status))
        return load_run(folder.path)

    return make
