"""Projects of others: they install the package and use its strategies, under Flower's own loop and its legacy one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from fedapps.simulation.flower_cli import FlowerCli
from fedapps.simulation.processes import CONNECTION, SuperLink

EXAMPLES = Path(__file__).parents[1] / "examples"


PLAIN = {
    "shop/server_app.py": {
        "from fedapps.strategies import FedPM": "from flwr.serverapp.strategy import FedAvg",
        "FedPM()": "FedAvg()",
    },
    "shop/client_app.py": {
        "fedpm_reply(foof, model, num_examples=len(features), train_loss=float(loss.detach()))": "RecordDict({"
        "'arrays': ArrayRecord(model.state_dict()), "
        "'metrics': MetricRecord({'num-examples': len(features), 'train-loss': float(loss.detach())})})",
        "from flwr.app import": "from flwr.app import ArrayRecord,",
    },
}
"""File of the existing project -> what stands there, and in its place for Flower's own FedAvg."""


def run_project(name: str, tmp_path: Path, *, beside: dict[str, dict[str, str]] | None = None) -> dict[str, object]:
    """Run a copy of an example with ``flwr run`` on three simulated nodes, and give what its server wrote down.

    With ``beside`` a copy with these changes runs before it, whose log is ``beside.log``.
    """
    result = tmp_path / "result.json"
    with SuperLink(simulation=True, log_path=tmp_path / "superlink.log") as superlink:
        cli = FlowerCli(CONNECTION, superlink.environment)
        for log, changes in [("beside.log", beside)] * bool(beside) + [("run.log", {})]:
            project = tmp_path / log.removesuffix(".log") / name
            shutil.copytree(EXAMPLES / name, project)
            for file, places in {**changes, "pyproject.toml": {'result = ""': f'result = "{result}"'}}.items():
                text = (project / file).read_text()
                for old, new in places.items():
                    assert old in text
                    text = text.replace(old, new)
                (project / file).write_text(text)
            run_id = cli.submit(project, "num-supernodes=3 client-resources-num-cpus=1 init-args-num-cpus=1")
            with cli.follow(run_id, tmp_path / log) as stream:
                stream.wait(120)
            assert cli.info(run_id).ending == "completed", (tmp_path / log).read_text()[-3000:]
    found: dict[str, object] = json.loads(result.read_text())
    return found


@pytest.mark.engine
def test_a_project_with_its_own_strategies_and_simulation_packages_runs_fedpm_under_flowers_start(
    tmp_path: Path,
) -> None:
    found = run_project("existing_project", tmp_path, beside=PLAIN)
    assert found["before"] == "strategies"  # the project's own package, not ours
    losses = [record["train-loss"] for record in found["train"].values()]  # type: ignore[attr-defined]
    accuracies = [record["accuracy"] for record in found["evaluate"].values()]  # type: ignore[attr-defined]
    assert len(losses) == len(accuracies) == 3
    assert accuracies[-1] > 0.7
    assert found["arrays"]["1.num_batches_tracked"] == []  # type: ignore[index]
    # No query is sent to a project without a handler for it: its log is as long as with Flower's own FedAvg.
    log, plain = (tmp_path / "run.log").read_text(), (tmp_path / "beside.log").read_text()
    assert "Traceback" not in log
    assert "FedAvg strategy" in plain
    assert len(log.splitlines()) <= 1.5 * len(plain.splitlines())


@pytest.mark.engine
def test_a_legacy_project_runs_the_adapter(tmp_path: Path) -> None:
    found = run_project("legacy_project", tmp_path)
    assert found == {"round": 3, "shapes": [[12, 6], [12], [2, 12], [2]]}
    log = (tmp_path / "run.log").read_text()
    history = [line for line in log.splitlines() if "accuracy" in line]
    assert history, log[-2000:]


@pytest.mark.parametrize("name", ["existing_project", "legacy_project"])
def test_every_example_says_how_to_run_it(name: str) -> None:
    assert "flwr run ." in (EXAMPLES / name / "README.md").read_text()


def test_the_existing_project_marks_as_many_lines_as_its_readme_says() -> None:
    client = (EXAMPLES / "existing_project" / "shop" / "client_app.py").read_text()
    assert sum("# FedPM" in line for line in client.splitlines()) == 5
    assert "(five lines around the training loop)" in (EXAMPLES / "existing_project" / "README.md").read_text()
