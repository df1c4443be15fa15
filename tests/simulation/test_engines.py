"""The same seed gives the same bits in Flower's simulation engine, on SuperLink and SuperNodes, and in process."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedapps.methods import resolve_settings
from fedapps.results.run_folder import RunFolder
from fedapps.results.summary import RunStatus
from fedapps.settings import flatten
from fedapps.simulation.launcher import run_on_superlink
from fedapps.simulation.start import Engine, Start, start

from . import runs
from .deployment import loopback_deployment

HELPERS = Path(__file__).parents[1] / "helpers"


pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("own_module")]


@pytest.mark.parametrize(("method", "actors"), [("fedpm", 1), ("fedclup", 2)])
def test_simulation_gives_the_bits_of_the_inprocess_engine(tmp_path: Path, method: str, actors: int) -> None:
    config = {**runs.SITES, "method": method, "client-test-fraction": 0.34, "client-evaluation": "last"}
    inprocess = runs.short_run(tmp_path / "inprocess", config)
    rows = []
    how = Start(engine=Engine.SIMULATION, num_clients=3, workers=actors, python_path=[HELPERS])
    ended = start(config, how, tmp_path / "runs", rows.append)
    assert ended.status is RunStatus.COMPLETED, ended.reason
    assert ended.folder is not None
    folder = RunFolder.open(ended.folder)
    runs.assert_same_model(inprocess.model, folder.read_model())
    kept = [runs.client_states(path) for path in (tmp_path / "inprocess", ended.folder)]
    assert kept[0].keys() == kept[1].keys()
    assert len(kept[0]) == (3 if method == "fedclup" else 0)
    for partition, state in kept[0].items():
        runs.assert_same_model(state, kept[1][partition])
    assert [(row["round"], row["phase"]) for row in rows] == [
        (row["round"], row["phase"]) for row in inprocess.folder.read_metrics()
    ]
    assert (ended.folder / "flower.log").read_text().count("round 2/2") == 1


def test_a_deployment_gives_the_bits_of_the_inprocess_engine(tmp_path: Path) -> None:
    """One SuperLink, two SuperNodes; the clients keep their state where their node says."""
    config = {**runs.SITES, "method": "fedapps_testing:MEMORY", "task-options": 'sizes = "6,9"'}
    inprocess = runs.short_run(tmp_path / "inprocess", config, 2)
    settings = resolve_settings({**config, "run-dir": str(tmp_path / "run")})
    rules = {"allow-tasks": "fedapps_testing:Sites", "allow-methods": "built-in,fedapps_testing:MEMORY"}
    with loopback_deployment(2, tmp_path, python_path=[HELPERS], rules=rules) as place:
        outcome = run_on_superlink(
            flatten(settings, ""), connection=place.connection, environment=place.environment, python_path=[HELPERS]
        )
    assert outcome.status == "completed", outcome.log_tail
    folder = RunFolder.open(tmp_path / "run")
    runs.assert_same_model(inprocess.model, folder.read_model())
    assert [row.get("remembered") for row in folder.read_metrics() if row["phase"] == "train"] == [0.0, 1.0]
    for partition in (0, 1):
        assert list((tmp_path / f"state-{partition}").rglob(f"client-{partition}/round-2.safetensors"))
    assert not (tmp_path / "run" / "clients").exists()
