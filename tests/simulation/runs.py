"""Short runs in the in-process engine, and what they left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedapps.methods import resolve_settings
from fedapps.results.run_folder import RunFolder
from fedapps.results.storage import load_arrays
from fedapps.simulation.inprocess import Fault, run_inprocess

SITES = {
    "task": "fedapps_testing:Sites", "partition": "column", "partition-column": "site", "lr": 0.1, "local-epochs": 1,
    "batch-size": 4, "validation-fraction": 0.0, "num-server-rounds": 2, "method": "fedavg",
}  # fmt: skip
"""Settings of a task with three tiny clients."""


@dataclass(frozen=True)
class Left:
    """What a run left in its folder."""

    folder: RunFolder

    @property
    def model(self) -> dict[str, np.ndarray]:
        return self.folder.read_model()

    @property
    def summary(self) -> dict[str, Any]:
        summary = self.folder.read_summary()
        assert summary is not None
        return summary

    def rows(self, phase: str) -> list[dict[str, Any]]:
        return [row for row in self.folder.read_metrics() if row["phase"] == phase]


def short_run(
    path: Path,
    config: Mapping[str, Any],
    clients: int = 3,
    *,
    workers: int = 0,
    faults: Mapping[tuple[int, int], Fault] | None = None,
    late: Sequence[int] = (),
) -> Left:
    """Run in this process into ``path``; whatever is raised passes through."""
    settings = {**SITES, **config, "run-dir": str(path)}
    resolve_settings(settings)
    run_inprocess(settings, clients, workers=workers, faults=faults, late=late)
    return Left(RunFolder.open(path))


def client_states(folder: Path) -> dict[int, dict[str, np.ndarray]]:
    """What every client keeps of its last folded reply, by partition."""
    last = RunFolder.open(folder).load_checkpoint().last_folded
    found = {i: list(folder.glob(f"clients/*/client-{i}/round-{number}.safetensors")) for i, number in last.items()}
    return {i: load_arrays(paths[0]) for i, paths in found.items() if paths}


def assert_same_model(left: Mapping[str, np.ndarray], right: Mapping[str, np.ndarray]) -> None:
    """Two models are bitwise equal."""
    assert list(left) == list(right)
    for name, value in left.items():
        assert value.dtype == right[name].dtype, name
        assert value.shape == right[name].shape, name
        assert value.tobytes() == right[name].tobytes(), name
