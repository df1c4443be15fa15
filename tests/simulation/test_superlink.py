"""A run on a SuperLink that is followed from elsewhere: its folder comes here, and kills do not change what it computes."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from fedapps.errors import LaunchError
from fedapps.results.run_folder import RunFolder
from fedapps.results.storage import load_arrays
from fedapps.results.summary import RunStatus
from fedapps.simulation import launcher
from fedapps.simulation.start import Start, start

from . import runs
from .deployment import kill, loopback_deployment, start_again

pytestmark = pytest.mark.engine

WARDS = """
import numpy as np
from . import table
from fedapps.tasks import Data
from fedapps.tasks.convex_task import ConvexTask

class Wards(ConvexTask):
    def load(self):
        X, y, ward = table()
        data = Data(X, y, {"ward": ward})
        return data, data.take(np.arange(6))
"""
DATA = """
import numpy as np

def table():
    random = np.random.default_rng(0)
    return random.normal(size=(24, 3)), np.where(random.normal(size=24) > 0, 1, -1), np.arange(24) % 2
"""


def test_a_run_survives_the_kill_of_superlink_supernode_and_server_app(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FedCLUP on a task that is shipped: after each kill the copy is resumed, and ends with the bits of a straight run."""
    work = tmp_path / "work"
    (work / "wards_data").mkdir(parents=True)
    (work / "wards_data" / "__init__.py").write_text(DATA)
    (work / "wards_data" / "tasks.py").write_text(WARDS)
    config = {
        **runs.SITES, "method": "fedclup", "task": "wards_data.tasks:Wards", "partition": "column", "partition-column": "ward",
        "client-test-fraction": 0.25, "num-server-rounds": 2,
    }  # fmt: skip
    monkeypatch.syspath_prepend(str(work))
    straight = runs.short_run(tmp_path / "straight", {**config, "client-evaluation": "last"}, 2)
    monkeypatch.setattr(launcher, "_PATIENCE_SECONDS", 1.0)
    # As on two machines: where the command's folder lies is nothing to the server app.
    monkeypatch.setattr(RunFolder, "followed", lambda self: nullcontext())
    variables = {"FEDAPPS_RUNS": str(tmp_path / "server")}
    rules = {"allow-tasks": "wards_data.tasks:Wards"}
    with loopback_deployment(2, tmp_path, environment=variables, rules=rules) as place:
        monkeypatch.setenv("FLWR_HOME", place.environment["FLWR_HOME"])
        how = Start(superlink=place.connection, python_path=[work])

        def power_cut(row: dict[str, Any]) -> None:
            if row["phase"] == "train":
                for service in (place.superlink, *place.nodes):
                    kill(service)
                    start_again(service)

        with pytest.raises(LaunchError, match=rf"fedapps run --resume {tmp_path}/runs/.* --superlink {how.superlink}"):
            start(config, how, tmp_path / "runs", power_cut)
        [here] = map(RunFolder, (tmp_path / "runs").iterdir())
        [there] = map(RunFolder, (tmp_path / "server").iterdir())
        assert here.read_settings()["run-dir"] == str(there.path)
        resumed = {**here.read_settings(), "run-dir": str(here.path), "resume": True}
        seen: list[tuple[int, str]] = []

        def end_the_server_app(row: dict[str, Any]) -> None:
            seen.append((row["round"], row["phase"]))
            if row["phase"] == "train":
                kill(place.superlink, "flwr-serverapp")
                raise KeyboardInterrupt  # A SuperLink needs a minute to notice.

        with pytest.raises(KeyboardInterrupt):
            start(resumed, how, None, end_the_server_app)
        ended = start(resumed, how, None, lambda row: seen.append((row["round"], row["phase"])))

    assert ended.status is RunStatus.COMPLETED, ended.reason
    assert (ended.folder, ended.note) == (here.path, "")
    assert seen[-3:] == [(2, "train"), (2, "evaluate"), (2, "client-evaluate")]
    assert (1, "train") not in seen
    runs.assert_same_model(straight.model, here.read_model())
    assert here.read_clients()[-2:] == straight.folder.read_clients()[-2:]
    for name in (
        "settings.toml",
        "metrics.jsonl",
        "ledger.jsonl",
        "clients.jsonl",
        "summary.json",
        "model.safetensors",
    ):
        assert (here.path / name).read_bytes() == (there.path / name).read_bytes(), name
    # A start greets once, and what clients measure is asked for in the last round only.
    sent = Counter((row["round"], row["kind"]) for row in here.read_ledger() if row["direction"] == "down")
    assert sent == dict.fromkeys([(1, "query"), (1, "train"), (2, "query"), (2, "train"), (2, "evaluate")], 2)
    assert here.load_checkpoint().server_round == 2
    for client, state in runs.client_states(tmp_path / "straight").items():
        [kept] = (tmp_path / f"state-{client}").glob(f"*/client-{client}/round-2.safetensors")
        runs.assert_same_model(state, load_arrays(kept))
    log = (here.path / "flower.log").read_text()
    assert "wards_data/__init__.py, wards_data/tasks.py" in log
    assert "round 2/2" in log
    assert "\x1e" not in log
