from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path

import pytest

from fedapps.errors import CheckpointError
from fedapps.results.report import (
    Run,
    compare_sections,
    compare_table,
    group_runs,
    load_run,
    measures_of,
    remarks,
    run_table,
)
from fedapps.results.run_folder import RunFolder
from fedapps.results.views import GLOBAL_ON_CLIENTS, GLOBAL_ON_SERVER, PERSONAL, VALIDATION_VIEWS, Measure, View

MakeRun = Callable[..., Run]

ACCURACY = Measure("accuracy", GLOBAL_ON_SERVER)
TITLE = "accuracy, global model, server's test data"
ROUNDS_TO = "rounds to {}, global model, server's test data"

FAST = [0.1, 0.8, 0.96, 0.97]
SLOW = [0.1, 0.4, 0.6, 0.7]


def test_a_run_is_read_with_settings_rows_and_summary(make_run: MakeRun) -> None:
    run = make_run(FAST, method="fedpm", seed=5)
    assert (run.method, run.task, run.round_limit) == ("fedpm", "digits", 3)
    assert run.summary["status"] == "completed"
    assert run.curve("test-accuracy") == dict(enumerate(FAST))
    assert measures_of([run]) == [ACCURACY]


def test_a_run_that_goes_on_or_was_killed_is_unfinished(make_run: MakeRun) -> None:
    run = make_run(FAST, status=None, limit=10)
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write('{"round": 4, "phase": "tra')
    (row,) = run_table([load_run(run.path)], target=0.99)
    assert (row.status, row.rounds, row.round_limit) == ("unfinished", 3, 10)
    assert row.cells()["rounds"] == "3/10"
    assert row.cells()[ROUNDS_TO.format(0.99)] == "10+"
    assert row.payload_up == 9000


def test_a_run_that_failed_before_its_first_row_has_a_row(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, method="fedpm", task="digits", seed=0)
    folder.write_settings({"method": "fedpm", "task": "digits", "num-server-rounds": 4})
    run = load_run(folder.path)
    (row,) = run_table([run], target=0.5)
    assert (row.status, row.final, row.best) == ("unfinished", {}, {})
    assert row.cells()["rounds"] == "0/4"
    (compared,) = compare_table([run], target=0.5)
    assert compared.final_cells() == {"method": "fedpm", "runs": "0 of 1"}


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="folder with settings"):
        load_run(tmp_path)


@pytest.mark.parametrize(
    ("metrics", "views"),
    [
        ({"test-accuracy": 0.5, "validation-accuracy": 1, "client-test-accuracy": 0.7}, [GLOBAL_ON_SERVER, GLOBAL_ON_CLIENTS]),
        ({"validation-accuracy": 0.6, "client-test-accuracy": 0.7}, [GLOBAL_ON_CLIENTS]),
        ({"client-global-test-accuracy": 0.7, "client-personal-test-accuracy": 0.8}, [GLOBAL_ON_CLIENTS, PERSONAL]),
        ({"validation-accuracy": 0.6, "client-personal-validation-accuracy": 0.7}, [VALIDATION_VIEWS[0], VALIDATION_VIEWS[2]]),
        ({"test-loss": 0.7}, [GLOBAL_ON_SERVER]),
    ],
)  # fmt: skip
def test_every_model_and_data_is_a_measure_of_its_own(metrics: dict[str, float], views: list[View]) -> None:
    """Validation data is reported only where nothing was tested, and the loss where there is nothing else."""
    rows = [{"round": 1, "phase": "evaluate", "seconds": 0.0, **metrics}]
    run = Run(Path("/run"), {}, rows, {"rounds": 1, "final": metrics, "judged-by": "accuracy"})
    measures = measures_of([run])
    assert [measure.view for measure in measures] == views
    for measure in measures:
        key = run.key(measure.metric, measure.view)
        assert key is not None
        assert run.measured(measure) == {1: metrics[key]}
        assert run.value(measure, "final") == metrics[key]
        assert run.value(measure, "best") is None


def test_a_method_without_the_model_has_an_empty_cell(make_run: MakeRun) -> None:
    """LocalTrain's server measures the initial model, round after round: no number of the method."""
    fedavg, local = make_run(FAST, method="fedavg"), make_run(SLOW, method="localtrain")
    mine = {"round": 3, "phase": "client-evaluate", "seconds": 1.0, "client-personal-test-accuracy": 0.875}
    local = Run(local.path, local.settings, [*local.rows, mine], {**local.summary, "final": mine, "best": {}})
    table = compare_table([fedavg, local], target=0.8)
    end, best, cost = compare_sections(table).values()
    personal = "personal models, test data of the clients"
    assert end == [
        {"method": "fedavg", "runs": "1", TITLE: "0.9700", f"accuracy, {personal}": "",
         ROUNDS_TO.format(0.8): "1", f"rounds to 0.8, {personal}": ""},
        {"method": "localtrain", "runs": "1", TITLE: "", f"accuracy, {personal}": "0.8750",
         ROUNDS_TO.format(0.8): "", f"rounds to 0.8, {personal}": "3"},
    ]  # fmt: skip
    assert [row[TITLE] for row in best] == ["0.9700", ""]
    assert list(cost[0]) == ["method", "down", "up", "time, start-up", "time, train", "time, evaluate"]
    assert table[1].data()["final-global-server-test-accuracy-mean"] is None
    assert table[1].data()["rounds-to-target-global-server-test-accuracy-unreached"] is None


@pytest.mark.parametrize("metric", ["loss", "statistical-error"])
def test_of_a_loss_the_smaller_value_reaches_a_target(metric: str) -> None:
    rows = [{"round": n, "phase": "evaluate", f"test-{metric}": value} for n, value in enumerate((0.9, 0.5, 0.4))]
    run = Run(Path("/run"), {}, rows, {"rounds": 2, "final": rows[-1], "judged-by": metric})
    (measure,) = measures_of([run])
    assert measure.metric == metric
    assert [run.rounds_to(measure, target) for target in (1.0, 0.5, 0.45, 0.1)] == [0, 1, 2, None]


def test_a_mean_over_clients_says_over_how_many(make_run: MakeRun) -> None:
    run = make_run(FAST)
    folder = RunFolder.open(run.path)
    for number, clients in ((1, 5), (2, 3)):
        for partition in range(clients):
            folder.append_clients({"round": number, "partition": partition, "num-examples": 4})
        folder.append_metrics({"round": number, "phase": "client-evaluate", "client-test-accuracy": 0.5})
    (_, measure) = measures_of([load_run(run.path)])
    assert measure.title == "accuracy, global model, test data of 3 clients"
    other = Run(
        run.path, run.settings, load_run(run.path).rows, {**run.summary, "final": {"client-test-accuracy-clients": 2}}
    )
    assert measures_of([load_run(run.path), other])[1].where == "global model, test data of 2 to 3 clients"


def test_the_row_of_a_run_holds_target_bytes_and_seconds(make_run: MakeRun) -> None:
    (row,) = run_table([make_run(FAST, seed=7)], target=0.95)
    assert row.data() == {
        "method": "fedpm", "task": "digits", "seed": 7, "status": "completed", "rounds": 3, "round-limit": 3, "target": 0.95,
        "final-global-server-test-accuracy": 0.97, "best-global-server-test-accuracy": 0.97,
        "rounds-to-target-global-server-test-accuracy": 2, "payload-down": 3000, "payload-up": 9000,
        "seconds-start-up": 0.0, "seconds-train": 6.0, "seconds-evaluate": 2.0,
    }  # fmt: skip
    assert row.cells() == {
        "method": "fedpm", "task": "digits", "seed": "7", "status": "completed", "rounds": "3/3",
        f"final {TITLE}": "0.9700", f"best {TITLE}": "0.9700", ROUNDS_TO.format(0.95): "2",
        "down": "3.00 kB", "up": "9.00 kB", "time, start-up": "0.00 s", "time, train": "6.00 s", "time, evaluate": "2.00 s",
    }  # fmt: skip
    assert not any("rounds to" in column for column in run_table([make_run(FAST)])[0].cells())


def test_a_target_that_is_met_exactly_is_reached(make_run: MakeRun) -> None:
    run = make_run(FAST)
    assert run.rounds_to(ACCURACY, 0.96) == 2
    assert run.rounds_to(ACCURACY, 0.1) == 0
    assert run.rounds_to(ACCURACY, 0.971) is None
    assert compare_table([run], target=0.1)[0].rounds_to_target[ACCURACY].mean == 0


def test_methods_are_compared_by_mean_and_spread_over_seeds(make_run: MakeRun) -> None:
    runs = [make_run(FAST, seed=0), make_run([0.1, 0.96, 0.97, 0.99], seed=1), make_run(SLOW, method="fedavg")]
    fedpm, fedavg = compare_table(runs, target=0.95)
    assert (fedpm.label, fedpm.runs, fedpm.unreached) == ("fedpm", 2, {ACCURACY: 0})
    assert fedpm.rounds_to_target[ACCURACY].mean == 1.5
    assert fedpm.final[ACCURACY].mean == pytest.approx(0.98)
    assert fedpm.final[ACCURACY].std == pytest.approx(statistics.stdev([0.97, 0.99]))
    assert fedpm.final_cells()[ROUNDS_TO.format(0.95)] == "1.5 ± 0.7"
    assert fedpm.cost_cells()["down"] == "3.00 kB", "a spread of zero is not written"
    assert fedavg.final_cells()[ROUNDS_TO.format(0.95)] == "3+"
    assert fedavg.data()["final-global-server-test-accuracy-std"] is None


def test_a_run_that_never_gets_there_counts_as_the_round_limit_and_is_marked(make_run: MakeRun) -> None:
    runs = [make_run(FAST, seed=0, limit=20), make_run(SLOW, seed=1, limit=20, status="failed")]
    (row,) = compare_table(runs, target=0.95)
    assert row.rounds_to_target[ACCURACY].mean == (2 + 20) / 2
    assert row.unreached == {ACCURACY: 1}
    assert row.final_cells()[ROUNDS_TO.format(0.95)].startswith("11+ ± ")
    assert row.final_cells()["runs"] == "1 of 2"
    assert row.data()["rounds-to-target-global-server-test-accuracy-unreached"] == 1


def test_a_run_without_the_number_shows_in_its_count(make_run: MakeRun) -> None:
    runs = [make_run(FAST, seed=0), make_run([*FAST[:2], float("nan")], seed=1, limit=3)]
    (row,) = compare_table(runs)
    assert row.final_cells()[TITLE] == "0.9700 (n=1)"
    assert "rounds to" not in " ".join(row.final_cells())


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


def test_what_a_second_order_run_averaged_is_said_below_its_table(make_run: MakeRun) -> None:
    runs = [make_run(FAST, seed=seed) for seed in (0, 1)] + [make_run(SLOW, method="fedavg")]
    for run in runs[:2]:
        run.rows[1]["preconditioned"] = []
        run.rows[1]["averaged-since"] = {"it is compiled": [f"{i}.weight" for i in range(6)]}
    assert remarks(runs) == [
        "fedpm: averaged, not preconditioned, since it is compiled: 0.weight, 1.weight, 2.weight, 3.weight and 2 more",
        "fedpm: nothing was preconditioned: this is a first-order method's result",
    ]
