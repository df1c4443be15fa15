"""Comparisons: whose setting a key is, which point of the grid is chosen, and what is written about personal models."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fedapps.errors import FedAppsError, LaunchError, SettingsError
from fedapps.methods import get_method, resolve_settings
from fedapps.results.run_folder import RunFolder
from fedapps.results.summary import RunStatus, client_statistics, summarise
from fedapps.settings import flatten
from fedapps.simulation import comparison, sweep
from fedapps.simulation.comparison import Comparison, Trial, choose, read_record
from fedapps.simulation.plan import SHARED, config_of
from fedapps.simulation.start import Ended, Engine, Start
from fedapps.simulation.sweep import compare
from fedapps.tasks.from_settings import load_task_of
from fedapps.tasks.synthetic import SyntheticLinearTask

pytestmark = pytest.mark.slow

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
    """Stands in for the runs: what they would measure follows from the settings, and every method measures all there is."""

    def __init__(self) -> None:
        self.configs: list[dict[str, Any]] = []
        self.metric = "accuracy"
        self.status = "completed"

    def start(self, config: dict[str, Any], root: Path) -> Ended:
        self.configs.append(config)
        folder = RunFolder.create(root, method=config["method"], task="digits", seed=config["seed"])
        settings = resolve_settings(config)
        folder.write_settings(flatten(settings, get_method(settings.method).group))
        (folder.path / "environment.json").write_text("{}")
        # Validation likes lr 0.2 and lambda 1, test data the greatest lr and the least lambda.
        lr, lam = config.get("lr", 0.2), config.get("ditto.lambda", 1.0)
        validation, test = (0.9 if lr == 0.2 else 0.5) + 0.01 * lam, lr - 0.1 * lam
        split = "personal-" if get_method(settings.method).family == "personalised" else ""
        for number in (1, 2):
            metrics = {
                p: {f"{split}validation-{self.metric}": validation, f"{split}test-{self.metric}": test + 0.1 * p}
                for p in (0, 1)
            }
            for p, values in metrics.items():
                folder.append_clients({"round": number, "partition": p, "num-examples": 5, **values})
            folder.append_metrics({
                "round": number, "phase": "train", "seconds": 1.0, "payload-down": 10, "payload-up": 20
            })  # fmt: skip
            server = {f"validation-{self.metric}": validation, f"test-{self.metric}": test}
            folder.append_metrics({"round": number, "phase": "evaluate", "seconds": 1.0, **server})
            statistics = client_statistics(metrics, {0: 5, 1: 5})
            folder.append_metrics({"round": number, "phase": "client-evaluate", "seconds": 1.0, **statistics})
        folder.write_summary(summarise(folder.read_metrics(), status=self.status, primary=self.metric))
        return Ended(RunStatus(self.status), "", folder.path)


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Engines:
    made = Engines()

    @contextmanager
    def in_this_process(how: Start, root: Path, jobs: int, on_rounds: Any) -> Iterator[sweep.Make]:
        yield lambda jobs_of: ((job, made.start(job.config, root)) for job in jobs_of)

    monkeypatch.setattr(sweep, "_in_processes", in_this_process)
    return made


def run(tmp_path: Path, config: dict[str, Any] = CONFIG, **changes: Any) -> Comparison:
    arguments: dict[str, Any] = {
        "methods": METHODS, "seeds": [0, 1], "grid": GRID, "how": Start(engine=Engine.INPROCESS, num_clients=2),
        "root": tmp_path, "jobs": 1, "target": None, "on_trial": lambda trial, done, total: None,
        "on_rounds": lambda done, total: None,
    }  # fmt: skip
    return compare(config, **{**arguments, **changes})


@pytest.mark.slow
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
    assert result.notes == [
        "unequal budgets of tuning, in points tried: fedclup 3, ditto 6, localtrain 3",
        "ditto: the chosen ditto.lambda 1 is the highest that was tried; widen the grid",
    ]
    end = next(iter(result.sections.values()))
    assert [(row["method"], row["chosen"], row["tried"]) for row in end] == [
        ("fedclup", "lr 0.2", "3"), ("ditto", "lr 0.2; lambda 1 (highest tried)", "6"), ("localtrain", "lr 0.2", "3"),
    ]  # fmt: skip
    assert [config["local-steps"] for config in engines.configs if config["method"] == "ditto"] == [10] * 7


def test_values_for_one_method_take_the_place_of_those_for_all(tmp_path: Path, engines: Engines) -> None:
    """Both methods try two points, so that nothing is said about unequal budgets."""
    grid = {"lr": [0.1, 0.2], "ditto.lr": [0.2, 0.3]}
    result = run(tmp_path, DIGITS, methods=["fedclup", "ditto"], grid=grid, seeds=[0])
    points = {m: [t.point for t in result.trials if t.method == m] for m in ("fedclup", "ditto")}
    assert points == {"fedclup": [{"lr": 0.1}, {"lr": 0.2}], "ditto": [{"ditto.lr": 0.2}, {"ditto.lr": 0.3}]}
    assert [t.lr for t in result.trials if t.method == "ditto"] == [0.2, 0.3]
    assert not any("budgets" in note for note in result.notes)


def test_of_equal_points_the_one_that_got_there_first_is_chosen() -> None:
    def trial(lr: float, score: float | None, at: int, status: str = "completed") -> Trial:
        return Trial("fedavg", 0, lr, {"lr": lr}, True, status, "", score, "validation-accuracy", at, "")

    order = [{"lr": lr} for lr in (0.1, 0.2, 0.4, 0.8)]
    trials = [trial(0.1, 0.9, 7), trial(0.4, 0.9, 5), trial(0.2, 0.9, 5), trial(0.8, 0.99, 2, "failed")]
    assert choose(trials, order) is trials[2]
    assert choose(trials[3:], order) is trials[3], "a failed run rather than none"


def test_personal_models_have_a_table_their_clients_and_gains(tmp_path: Path, engines: Engines) -> None:
    result = run(tmp_path)
    record = json.loads((result.folder / "compare.json").read_text())
    assert record["settings"] == {key: value for key, value in CONFIG.items() if key != "data-dir"}
    assert record["grid"] == GRID
    assert record["chosen"]["ditto"] == {"lr": 0.2, "ditto.lambda": 1.0}
    # The test accuracies of both clients are 0.1 and 0.2, whatever the method, at the chosen point.
    assert [row["personal-mean"] for row in record["personal"]] == pytest.approx([0.15] * 3)
    assert record["gains"]["localtrain"]["ditto"] == pytest.approx({"0": 0.0, "1": 0.0})
    curve = next(curve for curve in record["curves"] if curve["chosen"])
    assert (curve["method"], curve["rounds"], curve["payload"]) == ("fedclup", [1, 2], [30, 60])
    assert curve["client-personal-test-accuracy"] == pytest.approx([0.15, 0.15])
    with (result.folder / "clients.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 3 * 2 * 2
    text = (result.folder / "table.md").read_text()
    assert "Personal models on the clients' own test data:\n\n| method | metric |" in text
    by = "by client-personal-validation-accuracy of"
    assert (
        f"Chosen on validation data, seed 0: fedclup lr 0.2 ({by} 3 tried); ditto lr 0.2, ditto.lambda 1 ({by} 6 tried);"
        f" localtrain lr 0.2 ({by} 3 tried).\n" in text
    )
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
    assert read_record(small.folder)["status"] == "completed"
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


# Data ----------------------------------------------------------------------------------------------------------

MIXED = ["fedavg", "fedclup"]
DIGITS: dict[str, Any] = {"task": "digits", "num-server-rounds": 2}
SYNTHETIC: dict[str, Any] = {"task": "synthetic-logistic", "num-server-rounds": 2, "task-options": "clients = 2"}


@pytest.mark.slow
def test_a_comparison_that_tunes_holds_validation_data_out_and_says_how_much(tmp_path: Path, engines: Engines) -> None:
    """Convex tasks have none by default; without a grid nothing is held out."""
    result = run(tmp_path / "tuned", SYNTHETIC, methods=["fedavg", "fedpm"], seeds=[0], grid={"lr": [0.1, 0.2]})
    assert {config["validation-fraction"] for config in engines.configs} == {0.1}
    assert {config["client-validation-fraction"] for config in engines.configs} == {0.0}
    assert {t.score_metric for t in result.trials} == {"validation-accuracy"}
    assert {m: t.lr for m, t in result.chosen.items()} == {"fedavg": 0.2, "fedpm": 0.2}
    # 100 training examples, of two clients.
    assert "2 clients" in result.data
    assert "the server 10 for validation (10 % of the training data)" in result.data
    assert result.data in (result.folder / "table.md").read_text()
    assert read_record(result.folder)["data"]["validation-fraction"] == 0.1
    engines.configs.clear()
    run(tmp_path / "plain", SYNTHETIC, methods=["fedavg", "fedpm"], grid={})
    assert {config["validation-fraction"] for config in engines.configs} == {0.0}


@pytest.mark.parametrize(
    ("config", "methods", "match"),
    [
        ({"validation-fraction": 0.0}, ["fedavg"], "setting 'validation-fraction'.*data of the server.*none at .* = 0"),
        (
            {"validation-fraction": 0.001},
            ["fedavg"],
            "setting 'validation-fraction'.*none at validation-fraction = 0.001",
        ),
        ({"client-validation-fraction": 0.0}, ["ditto"], "setting 'client-validation-fraction'.*data of the clients"),
        ({"evaluate-every": 0}, ["fedavg"], "setting 'evaluate-every'.*no look at it"),
        ({"client-evaluation": "none"}, ["ditto"], "setting 'client-evaluation'.*no look at it"),
    ],
)
def test_a_grid_without_anything_to_choose_by_is_refused_before_the_first_run(
    tmp_path: Path, engines: Engines, config: dict[str, Any], methods: list[str], match: str
) -> None:
    with pytest.raises(SettingsError, match=match):
        run(tmp_path, {**SYNTHETIC, **config}, methods=methods, grid={"lr": [0.1, 0.2]})
    assert engines.configs == []
    assert list(tmp_path.iterdir()) == []
    run(tmp_path, {**SYNTHETIC, **config}, methods=methods, grid={"lr": [0.1]}, seeds=[0])  # Nothing is chosen here.


def test_a_task_that_does_not_measure_its_metric_is_refused_before_the_first_run(
    tmp_path: Path, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SyntheticLinearTask, "metric", "accuracy")
    config = {**SYNTHETIC, "task": "synthetic-linear"}
    with pytest.raises(SettingsError, match=r"its metric 'accuracy' among .*got loss, statistical-error"):
        run(tmp_path, config, methods=["fedavg"], grid={"lr": [0.1, 0.2]})
    assert engines.configs == []


@pytest.mark.slow
def test_all_methods_of_two_families_have_the_same_examples(tmp_path: Path, engines: Engines) -> None:
    """By their own defaults client 0 has other examples under FedAvg than under FedCLUP, and none for testing."""

    def examples(config: dict[str, Any]) -> list[bytes]:
        data = load_task_of(resolve_settings(config)).client_data(0, 2)
        return [part.inputs.tobytes() for part in (data.train, data.validation, data.test)]  # type: ignore[union-attr]

    alone = [examples({**DIGITS, "method": method}) for method in MIXED]
    assert alone[0][0] != alone[1][0]
    run(tmp_path, DIGITS, methods=MIXED, grid={"lr": [0.1, 0.2]})
    of_first_seed = [config for config in engines.configs if config["seed"] == 0]
    assert {config["method"] for config in of_first_seed} == {*MIXED, "globaltrain"}
    assert {key: {config[key] for config in of_first_seed} for key in SHARED} == {
        key: {of_first_seed[0][key]} for key in SHARED
    }
    train, validation, test = examples(of_first_seed[0])
    assert all(examples(config) == [train, validation, test] for config in of_first_seed)
    assert min(len(train), len(validation), len(test)) > 0
    assert of_first_seed[0]["client-evaluation"] == "every"


@pytest.mark.parametrize(
    ("config", "grid", "match"),
    [
        (
            {"fedclup.client-test-fraction": 0.3},
            {},
            "'fedclup.client-test-fraction'.*the same data for all.*one method",
        ),
        ({"fedavg.seed": 3}, {}, "'fedavg.seed'.*the same data for all"),
        ({}, {"alpha": [0.1, 1.0]}, "'alpha'.*the same data for all.*several values"),
        ({}, {"fedavg.validation-fraction": [0.1, 0.2]}, "'fedavg.validation-fraction'.*the same data for all"),
    ],
)
def test_other_data_for_one_method_is_refused(
    tmp_path: Path, engines: Engines, config: dict[str, Any], grid: dict[str, list[Any]], match: str
) -> None:
    with pytest.raises(SettingsError, match=match):
        run(tmp_path, {"task": "digits", **config}, methods=MIXED, grid=grid)
    assert engines.configs == []


@pytest.mark.parametrize(
    ("methods", "expected"),
    [
        (["fedavg", "ditto"], ["fedavg", "ditto", "globaltrain"]),
        (["globaltrain", "fedpm"], ["globaltrain", "fedpm"]),
        (["fedavg", "fedpm"], ["fedavg", "fedpm"]),
        (["ditto", "localtrain"], ["ditto", "localtrain"]),
    ],
)
def test_where_families_meet_globaltrain_takes_part(
    tmp_path: Path, engines: Engines, methods: list[str], expected: list[str]
) -> None:
    result = run(tmp_path, {"task": "digits"}, methods=methods, grid={}, seeds=[0])
    assert [row.label for row in result.table] == expected
    assert any("globaltrain takes part" in note for note in result.notes) == ("globaltrain" in expected)


# Choice and record ---------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("metric", "best"), [("loss", 0.1), ("accuracy", 0.2)])
def test_the_tasks_own_metric_chooses_and_of_a_loss_the_least(
    tmp_path: Path, engines: Engines, metric: str, best: float
) -> None:
    """The stand-ins measure 0.91 at lr 0.2 on validation data, else 0.51."""
    engines.metric = metric
    config = {**SYNTHETIC, "task": "synthetic-linear" if metric == "loss" else "synthetic-logistic"}
    result = run(tmp_path, config, methods=["fedavg", "ditto"], grid={"lr": [0.1, 0.2]})
    assert {t.lr for t in result.chosen.values()} == {best}
    assert result.chosen["fedavg"].score_metric == f"validation-{metric}"
    assert result.chosen["ditto"].score_metric == f"client-personal-validation-{metric}"
    assert f"{metric}, personal models, test data of 2 clients" in next(iter(result.sections.values()))[1]
    assert (result.folder / "table.md").exists()


def test_after_each_run_all_that_was_computed_is_on_disk(tmp_path: Path, engines: Engines) -> None:
    """The runs that were not chosen too, with their curves."""
    seen: list[tuple[int, str, int]] = []

    def look(trial: Trial, done: int, total: int) -> None:
        (folder,) = tmp_path.iterdir()
        record = read_record(folder)
        assert trial.folder in {t["folder"] for t in record["trials"]}
        seen.append((len(record["trials"]), record["status"], len(record["table"])))

    result = run(tmp_path, DIGITS, methods=["fedclup", "localtrain"], grid={"lr": [0.1, 0.2]}, on_trial=look)
    # After the third run the first method has its choice, after the fourth the second.
    assert seen == [(n, "unfinished", rows) for n, rows in enumerate((0, 0, 1, 2, 2, 2), start=1)]
    record = read_record(result.folder)
    assert record["status"] == "completed"
    curves = {(c["method"], c["seed"], c["point"]["lr"]): c for c in record["curves"]}
    assert {key: c["chosen"] for key, c in curves.items()} == {
        (m, seed, lr): lr == 0.2 for m in ("fedclup", "localtrain") for seed, lr in ((0, 0.1), (0, 0.2), (1, 0.2))
    }
    assert curves["fedclup", 0, 0.1]["client-personal-validation-accuracy"] == pytest.approx([0.51, 0.51])
    (unchosen,) = [t for t in record["trials"] if (t["method"], t["lr"]) == ("localtrain", 0.1)]
    assert unchosen["final"]["client-personal-test-accuracy"] == pytest.approx(0.05)
    assert unchosen["seconds"]["train"] == 2.0


def test_without_figures_the_numbers_stay(tmp_path: Path, engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise FedAppsError("figures", expected="matplotlib", got="none")

    monkeypatch.setattr(comparison, "plot_compare", fail)
    result = run(tmp_path, grid={}, seeds=[0])
    assert "no figure: figures: expected matplotlib" in result.notes[-1]
    assert len(read_record(result.folder)["trials"]) == 3


def test_where_every_point_failed_nothing_is_called_chosen(tmp_path: Path, engines: Engines) -> None:
    engines.status = "failed"
    result = run(tmp_path, DIGITS, methods=["fedclup"], grid={"lr": [0.1, 0.2]}, seeds=[0])
    assert "fedclup: nothing was chosen, no run of the grid has a score" in result.notes


def test_a_run_that_was_broken_off_goes_on_and_one_without_a_checkpoint_is_made_anew(
    tmp_path: Path, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = run(tmp_path, DIGITS, methods=["fedclup", "ditto"], grid={}, seeds=[0])
    for trial in small.trials:
        (small.folder / trial.folder / "summary.json").unlink()
    known = {small.folder / small.trials[0].folder: 2}
    monkeypatch.setattr(RunFolder, "read_num_clients", lambda folder: known.get(folder.path))
    engines.configs.clear()
    run(tmp_path, DIGITS, methods=["fedclup", "ditto"], grid={}, seeds=[0], resume=small.folder)
    first, second = engines.configs
    assert (first["method"], first["resume"], first["run-dir"]) == ("fedclup", True, str(next(iter(known))))
    assert (second["method"], second.get("resume", False)) == ("ditto", False)


def test_two_comparisons_in_one_folder_are_one_too_many(tmp_path: Path, engines: Engines) -> None:
    small = run(tmp_path, grid={}, seeds=[0])
    with RunFolder(small.folder).locked(), pytest.raises(FedAppsError, match="no process works on"):
        run(tmp_path, grid={}, seeds=[0], resume=small.folder)


# Processes -----------------------------------------------------------------------------------------------------

SITES: dict[str, Any] = {
    "task": "fedapps_testing:FragileSites", "partition": "column", "partition-column": "site", "lr": 0.1, "local-epochs": 1,
    "num-server-rounds": 2,
}  # fmt: skip


@pytest.mark.slow
def test_rounds_of_all_runs_are_counted_and_a_run_that_cannot_start_is_recorded(
    tmp_path: Path, own_module: str
) -> None:
    """FedAvg's two runs have two rounds each; the task of the second seed does not load."""
    rounds: list[tuple[int, int]] = []
    result = run(
        tmp_path, {**SITES, "task-options": 'sizes = "8,8,8"\nbroken-seed = 1'}, methods=["fedavg"], grid={}, seeds=[0, 1],
        how=Start(engine=Engine.INPROCESS, num_clients=3), on_rounds=lambda done, total: rounds.append((done, total)),
    )  # fmt: skip
    assert rounds == sorted(rounds)
    assert rounds[-1] == (4, 4)
    assert [(t.seed, t.status, bool(t.folder)) for t in result.trials] == [(0, "completed", True), (1, "failed", False)]
    assert "the sensor of this seed is broken" in result.trials[1].reason
    assert read_record(result.folder)["trials"][1]["reason"] == result.trials[1].reason


@pytest.mark.slow
def test_a_dead_worker_ends_a_comparison_with_a_word_and_what_was_computed(tmp_path: Path, own_module: str) -> None:
    config = {**SITES, "task-options": 'sizes = "8,8,8"\ndeadly-seed = 1'}
    with pytest.raises(LaunchError, match="go on with --resume"):
        run(tmp_path, config, methods=["fedavg"], grid={}, how=Start(engine=Engine.INPROCESS, num_clients=3))
    (folder,) = tmp_path.iterdir()
    record = read_record(folder)
    assert (record["status"], len(record["trials"])) == ("unfinished", 1)
