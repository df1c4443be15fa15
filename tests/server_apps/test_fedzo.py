"""FedZO in the in-process engine."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from .scalar_runs import payloads, tiny
from .test_run import empty

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("own_module")]


def test_fedzo_averages_models_after_steps_along_own_directions(tmp_path: Path) -> None:
    config = {"method": "fedzo", "num-server-rounds": 15, "lr": 0.1, "evaluate-every": 15, "fedzo.num-probes": 5}
    run = tiny(tmp_path / "run", config)
    losses = [row["test-loss"] for row in run.rows("evaluate")]
    assert losses[-1] < 0.8 * losses[0]
    size = sum(value.nbytes for value in run.model.values())
    assert set(payloads(run, "up", "arrays")) == set(payloads(run, "down", "arrays")) == {size}
    assert not run.folder.journal_path.exists()
    one = {"method": "fedzo", "num-server-rounds": 1, "fedzo.num-probes": 1, "local-steps": 1, "lr": 0.1,
           "task-options": 'sizes = "6,9"'}  # fmt: skip
    alone = [tiny(tmp_path / f"only-{p}", one, 2, faults={(1, 1 - p): empty}).model for p in (0, 1)]
    first = tiny(tmp_path / "none", {**one, "lr": 1e-30}, 2).model
    moves = [np.concatenate([(m[name] - first[name]).ravel() for name in first]) for m in alone]
    cosine = abs(moves[0] @ moves[1]) / np.linalg.norm(moves[0]) / np.linalg.norm(moves[1])
    assert cosine < 0.6  # Each client draws its own direction.


def test_fedzo_refuses_a_convex_task_before_anything_is_written(tmp_path: Path) -> None:
    from fedapps.errors import SettingsError

    with pytest.raises(SettingsError, match="method 'fedzo': expected a torch task"):
        tiny(tmp_path / "run", {"method": "fedzo", "task": "a9a"})
    assert not (tmp_path / "run").exists()
