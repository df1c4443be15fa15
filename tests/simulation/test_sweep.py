"""Comparisons: whose setting a key is, which point of the grid is chosen, and what is written about personal models."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from fedapps.errors import SettingsError
from fedapps.methods import get_method, resolve_settings
from fedapps.results.run_folder import RunFolder
from fedapps.results.summary import RunStatus, client_statistics, summarise
from fedapps.settings import flatten
from fedapps.simulation import sweep
from fedapps.simulation.start import Ended, Engine, Start
from fedapps.simulation.sweep import Comparison, Trial, compare, config_of

METHODS = ["fedclup", "ditto", "localtrain"]
CONFIG: dict[str, Any] = {
    "task": "digits", "local-steps": 20, "num-server-rounds": 2, "ditto.local-steps": 10, "fedclup.adaptive": True,
    "data-dir": "",
}  # fmt: skip
GRID: dict[str, list[Any]] = {"lr": [0.1, 0.2, 0.4], "ditto.lambda": [0.1, 1.0]}


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("fedclup", {"local-steps": 20, "fedclup.adaptive": True}),
        ("ditto", {"local-steps": 10}),
        ("localtrain", {"local-steps": 20}),
    ],
)
def test_a_key_under_the_name_of_a_method_is_for_that_method_alone(method: str, expected: dict[str, Any]) -> None:
    common = {"task": "digits", "num-server-rounds": 2, "data-dir": "", "method": method}
    assert config_of(CONFIG, method, METHODS) == {**common, **expected}
    backwards = dict(reversed(CONFIG.items()))
    assert config_of(backwards, method, METHODS) == {**common, **expected}


class Engines:
    """Stands in for the runs: what they would measure follows from the settings."""

    def __init__(self) -> None:
        self.configs: list[dict[str, Any]] = []

    def start(self, config: dict[str, Any], how: Start, root: Path, path: list[str]) -> Ended:
        self.configs.append(config)
        folder = RunFolder.create(root, method=config["method"], task="digits", seed=config["seed"])
        settings = resolve_settings(config)
        folder.write_settings(flatten(settings, get_method(settings.method).group))
        (folder.path / "environment.json").write_text("{}")
        # Validation likes lr 0.2 and lambda 1, test data the greatest lr and the least lambda.
        lr, lam = config["lr"], config.get("ditto.lambda", 1.0)
        validation, test = (0.9 if lr == 0.2 else 0.5) + 0.01 * lam, lr - 0.1 * lam
        for number in (1, 2):
            metrics = {
                p: {"personal-validation-accuracy": validation, "personal-test-accuracy": test + 0.1 * p}
                for p in (0, 1)
            }
            for p, values in metrics.items():
                folder.append_clients({"round": number, "partition": p, "num-examples": 5, **values})
            folder.append_metrics({
                "round": number, "phase": "train", "seconds": 1.0, "payload-down": 10, "payload-up": 20
            })  # fmt: skip
            statistics = client_statistics(metrics, {0: 5, 1: 5})
            folder.append_metrics({"round": number, "phase": "client-evaluate", "seconds": 1.0, **statistics})
        folder.write_summary(summarise(folder.read_metrics(), status="completed"))
        return Ended(RunStatus.COMPLETED, "", folder.path)


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Engines:
    made = Engines()

    def in_this_process(jobs_of: list[sweep.Job], how: Start, root: Path, jobs: int) -> Any:
        return [(job, made.start(job.config, how, root, [])) for job in jobs_of]

    monkeypatch.setattr(sweep, "_in_processes", in_this_process)
    return made


def run(tmp_path: Path, config: dict[str, Any] = CONFIG, **changes: Any) -> Comparison:
    arguments: dict[str, Any] = {
        "methods": METHODS, "seeds": [0, 1], "grid": GRID, "how": Start(engine=Engine.INPROCESS, num_clients=2),
        "root": tmp_path, "jobs": 1, "target": None, "on_trial": lambda trial, done, total: None,
    }  # fmt: skip
    return compare(config, **{**arguments, **changes})


def test_every_method_tries_the_points_of_its_keys_and_validation_data_chooses(
    tmp_path: Path, engines: Engines
) -> None:
    told: list[tuple[int, int]] = []
    result = run(tmp_path, on_trial=lambda trial, done, total: told.append((done, total)))
    points = {m: [t.point for t in result.trials if t.method == m and t.tuning] for m in METHODS}
    learning_rates = [{"lr": 0.1}, {"lr": 0.2}, {"lr": 0.4}]
    assert points["fedclup"] == points["localtrain"] == learning_rates
    assert points["ditto"] == [{**point, "ditto.lambda": lam} for point in learning_rates for lam in (0.1, 1.0)]
    assert {m: trial.point for m, trial in result.chosen.items()} == {
        "fedclup": {"lr": 0.2}, "ditto": {"lr": 0.2, "ditto.lambda": 1.0}, "localtrain": {"lr": 0.2},
    }  # fmt: skip
    others = [t for t in result.trials if not t.tuning]
    assert [(t.method, t.seed, t.point) for t in others] == [(m, 1, result.chosen[m].point) for m in METHODS]
    assert told == [(number, 15) for number in range(1, 16)]
    assert result.notes == ["ditto: the chosen ditto.lambda 1 is at the edge of the grid; widen it"]
    assert [config["local-steps"] for config in engines.configs if config["method"] == "ditto"] == [10] * 7


def test_of_equal_points_the_one_that_got_there_first_is_chosen() -> None:
    def trial(lr: float, score: float | None, at: int, status: str = "completed") -> Trial:
        return Trial("fedavg", 0, lr, {"lr": lr}, True, status, "", score, at, "")

    order = [{"lr": lr} for lr in (0.1, 0.2, 0.4, 0.8)]
    trials = [trial(0.1, 0.9, 7), trial(0.4, 0.9, 5), trial(0.2, 0.9, 5), trial(0.8, 0.99, 2, "failed")]
    assert sweep._choose(trials, order) is trials[2]
    assert sweep._choose(trials[3:], order) is trials[3], "a failed run rather than none"


def test_personal_models_have_a_table_their_clients_and_gains(tmp_path: Path, engines: Engines) -> None:
    result = run(tmp_path)
    record = json.loads((result.folder / "compare.json").read_text())
    assert record["settings"] == {key: value for key, value in CONFIG.items() if key != "data-dir"}
    assert record["grid"] == GRID
    assert record["chosen"]["ditto"] == {"lr": 0.2, "ditto.lambda": 1.0}
    # The test accuracies of both clients are 0.1 and 0.2, whatever the method, at the chosen point.
    assert [row["personal-mean"] for row in record["personal"]] == pytest.approx([0.15] * 3)
    assert record["gains"]["localtrain"]["ditto"] == pytest.approx({"0": 0.0, "1": 0.0})
    curve = record["curves"][0]
    assert (curve["method"], curve["rounds"], curve["payload"]) == ("fedclup", [1, 2], [30, 60])
    assert curve["client-personal-test-accuracy"] == pytest.approx([0.15, 0.15])
    with (result.folder / "clients.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 3 * 2 * 2
    text = (result.folder / "table.md").read_text()
    assert "Personal models on the clients' own test data:\n\n| method | metric |" in text
    assert "Chosen on validation data: fedclup lr 0.2; ditto lr 0.2, ditto.lambda 1; localtrain lr 0.2.\n" in text
    assert "Set for one method alone: ditto.local-steps = 10, fedclup.adaptive = True.\n" in text
    for name in ("compare.png", "gains.png"):
        assert (result.folder / name).stat().st_size > 10_000


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"grid": {"lrr": [0.1]}}, "setting 'lrr'.*did you mean 'lr'"),
        ({"grid": {"ditto.lamda": [0.1]}}, "ditto.lamda.*did you mean 'ditto.lambda'"),
        ({"grid": {"pfedme.lambda": [0.123]}}, "pfedme.lambda"),
        ({"grid": {"localtrain.lr": [0.1, -0.1]}}, "setting 'lr': expected a finite number > 0"),
    ],
)
def test_a_wrong_grid_is_told_before_anything_runs(
    tmp_path: Path, engines: Engines, changes: dict[str, Any], match: str
) -> None:
    with pytest.raises(SettingsError, match=match):
        run(tmp_path, **changes)
    assert engines.configs == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_comparison_goes_on_with_the_runs_that_it_has(tmp_path: Path, engines: Engines) -> None:
    """Nothing is run twice, neither for more seeds and values nor for fewer; what had failed is made again."""
    small = run(tmp_path, seeds=[0], grid={"lr": [0.1]})
    assert [config["method"] for config in engines.configs] == METHODS
    summary = small.folder / small.trials[0].folder / "summary.json"
    summary.write_text(json.dumps(json.loads(summary.read_text()) | {"status": "failed"}))
    engines.configs.clear()
    whole = run(tmp_path, resume=small.folder)
    assert whole.folder == small.folder
    # Ditto's own lambda is the 0.1 of the grid.
    assert len(engines.configs) == 15 - 2
    assert engines.configs[0]["method"] == "fedclup"
    engines.configs.clear()
    again = run(tmp_path, {**CONFIG, "data-dir": "another/place"}, resume=small.folder)
    assert engines.configs == []
    assert again.trials == whole.trials
    smaller = run(tmp_path, resume=small.folder, seeds=[0], grid={"lr": [0.2, 0.4], "ditto.lambda": [0.1, 1.0]})
    assert engines.configs == []
    assert {m: trial.lr for m, trial in smaller.chosen.items()} == dict.fromkeys(METHODS, 0.2)


def test_a_comparison_does_not_go_on_with_another_number_of_clients(tmp_path: Path, engines: Engines) -> None:
    small = run(tmp_path, seeds=[0])
    engines.configs.clear()
    with pytest.raises(SettingsError, match="expected 2 clients, as before, got 3"):
        run(tmp_path, resume=small.folder, how=Start(engine=Engine.INPROCESS, num_clients=3))
    assert engines.configs == []


def test_all_methods_advance_alike(tmp_path: Path, engines: Engines) -> None:
    run(tmp_path, seeds=[0])
    order = [(config["method"], config["lr"]) for config in engines.configs]
    assert order[:4] == [("fedclup", 0.1), ("ditto", 0.1), ("localtrain", 0.1), ("ditto", 0.1)]
