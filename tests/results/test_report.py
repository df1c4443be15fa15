from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path

import pytest

from fedapps.errors import CheckpointError
from fedapps.results.report import Run, compare_table, group_runs, load_run, run_table
from fedapps.results.run_folder import RunFolder

MakeRun = Callable[..., Run]

FAST = [0.1, 0.8, 0.96, 0.97]
SLOW = [0.1, 0.4, 0.6, 0.7]


def test_a_run_is_read_with_settings_rows_and_summary(make_run: MakeRun) -> None:
    run = make_run(FAST, method="fedpm", seed=5)
    assert (run.method, run.task, run.round_limit) == ("fedpm", "digits", 3)
    assert run.summary["status"] == "completed"
    assert run.curve("test-accuracy") == dict(enumerate(FAST))
    assert run.accuracy_metric == "test-accuracy"


def test_a_run_that_goes_on_or_was_killed_is_unfinished(make_run: MakeRun) -> None:
    run = make_run(FAST, status=None, limit=10)
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write('{"round": 4, "phase": "tra')
    (row,) = run_table([load_run(run.path)], target=0.99)
    assert (row.status, row.rounds, row.round_limit) == ("unfinished", 3, 10)
    assert row.cells()["rounds"] == "3/10"
    assert row.cells()["rounds to 0.99"] == "10+"
    assert row.payload_up == 9000


def test_a_run_that_failed_before_its_first_row_has_a_row(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, method="fedpm", task="digits", seed=0)
    folder.write_settings({"method": "fedpm", "task": "digits", "num-server-rounds": 4})
    run = load_run(folder.path)
    (row,) = run_table([run], target=0.5)
    assert row.cells()["final accuracy"] == row.cells()["best accuracy"] == "-"
    assert row.cells()["rounds to 0.5"] == "4+"
    (compared,) = compare_table([run], target=0.5)
    assert compared.cells()["final accuracy"] == "-"
    assert compared.cells()["runs"] == "0 of 1"


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="folder with settings"):
        load_run(tmp_path)


@pytest.mark.parametrize(
    ("metrics", "chosen"),
    [
        ({"test-accuracy": 0.5, "validation-accuracy": 0.6, "client-test-accuracy": 0.7}, "test-accuracy"),
        ({"validation-accuracy": 0.6, "client-test-accuracy": 0.7}, "validation-accuracy"),
        ({"client-test-accuracy": 0.7}, "client-test-accuracy"),
        ({"test-loss": 0.7}, None),
    ],
)
def test_accuracy_is_read_on_the_first_data_there_is(metrics: dict[str, float], chosen: str | None) -> None:
    rows = [{"round": 1, "phase": "evaluate", "seconds": 0.0, **metrics}]
    run = Run(Path("/run"), {}, rows, {"rounds": 1, "final": metrics})
    assert run.accuracy_metric == chosen
    assert run.accuracy_at("final") == (metrics[chosen] if chosen else None)
    assert run.rounds_to(0.5) == (1 if chosen else None)
    assert run.accuracy_at("best") is None


def test_the_row_of_a_run_holds_target_bytes_and_seconds(make_run: MakeRun) -> None:
    (row,) = run_table([make_run(FAST, seed=7)], target=0.95)
    assert row.data() == {
        "method": "fedpm",
        "task": "digits",
        "seed": 7,
        "status": "completed",
        "rounds": 3,
        "round-limit": 3,
        "accuracy-metric": "test-accuracy",
        "final-accuracy": 0.97,
        "best-accuracy": 0.97,
        "target": 0.95,
        "rounds-to-target": 2,
        "payload-down": 3000,
        "payload-up": 9000,
        "seconds": 8.0,
    }
    assert row.cells() == {
        "method": "fedpm",
        "task": "digits",
        "seed": "7",
        "status": "completed",
        "rounds": "3/3",
        "final accuracy": "0.9700",
        "best accuracy": "0.9700",
        "rounds to 0.95": "2",
        "down": "3.00 kB",
        "up": "9.00 kB",
        "time": "8.00 s",
    }
    assert not any("rounds to" in column for column in run_table([make_run(FAST)])[0].cells())


def test_a_target_that_is_met_exactly_is_reached(make_run: MakeRun) -> None:
    run = make_run(FAST)
    assert run.rounds_to(0.96) == 2
    assert run.rounds_to(0.1) == 0
    assert run.rounds_to(0.971) is None
    assert compare_table([run], target=0.1)[0].rounds_to_target.mean == 0


def test_methods_are_compared_by_mean_and_spread_over_seeds(make_run: MakeRun) -> None:
    runs = [make_run(FAST, seed=0), make_run([0.1, 0.96, 0.97, 0.99], seed=1), make_run(SLOW, method="fedavg")]
    fedpm, fedavg = compare_table(runs, target=0.95)
    assert (fedpm.label, fedpm.runs, fedpm.unreached) == ("fedpm", 2, 0)
    assert fedpm.rounds_to_target.mean == 1.5
    assert fedpm.final.mean == pytest.approx(0.98)
    assert fedpm.final.std == pytest.approx(statistics.stdev([0.97, 0.99]))
    assert fedpm.cells()["rounds to 0.95"] == "1.5 ± 0.7"
    assert fedpm.cells()["down"] == "3.00 kB", "a spread of zero is not written"
    assert fedavg.cells()["rounds to 0.95"] == "3+"
    assert fedavg.data()["final-accuracy-std"] is None


def test_a_run_that_never_gets_there_counts_as_the_round_limit_and_is_marked(make_run: MakeRun) -> None:
    runs = [make_run(FAST, seed=0, limit=20), make_run(SLOW, seed=1, limit=20, status="failed")]
    (row,) = compare_table(runs, target=0.95)
    assert row.rounds_to_target.mean == (2 + 20) / 2
    assert row.unreached == 1
    assert row.cells()["rounds to 0.95"].startswith("11+ ± ")
    assert row.cells()["runs"] == "1 of 2"
    assert row.data()["rounds-to-target-unreached"] == 1


def test_a_run_without_the_number_shows_in_its_count(make_run: MakeRun) -> None:
    runs = [make_run(FAST, seed=0), make_run([*FAST[:2], float("nan")], seed=1, limit=3)]
    (row,) = compare_table(runs)
    assert row.cells()["final accuracy"] == "0.9700 (n=1)"
    assert "rounds to" not in " ".join(row.cells())


def test_runs_are_grouped_by_everything_but_the_seed(make_run: MakeRun) -> None:
    runs = [
        make_run(FAST, seed=0, lr=0.1, device="cpu", **{"run-dir": "/a"}),
        make_run(FAST, seed=0, lr=0.3, device="cpu", **{"run-dir": "/b"}),
        make_run(FAST, seed=1, lr=0.1, device="cuda", **{"run-dir": "/c"}),
        make_run(FAST, seed=0, method="fedavg", lr=0.5),
    ]
    groups = group_runs(runs)
    assert {label: len(group) for label, group in groups.items()} == {
        "fedpm (lr=0.1)": 2,
        "fedpm (lr=0.3)": 1,
        "fedavg": 1,
    }


def test_several_tasks_are_told_apart(make_run: MakeRun) -> None:
    assert list(group_runs([make_run(FAST), make_run(SLOW, task="a9a", lr=1.0)])) == ["fedpm on digits", "fedpm on a9a"]


def test_tables_count_the_bytes_of_training_rounds_only(make_run: MakeRun) -> None:
    run = make_run(FAST, down=100, up=300)
    asked = {"round": 1, "phase": "client-evaluate", "seconds": 9.0, "payload-down": 7, "payload-up": 1}
    run = Run(run.path, run.settings, [*run.rows, asked], run.summary)
    (row,), (compared,) = run_table([run]), compare_table([run])
    assert (row.payload_down, row.payload_up) == (compared.payload_down.mean, compared.payload_up.mean) == (300, 900)
