"""Tables about personal models, and the clients' gains, from numbers written here."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import pytest

from fedapps.errors import FedAppsError
from fedapps.results.checkpoint import Checkpoint
from fedapps.results.personal import client_gains, client_table, personal_metric, personal_table
from fedapps.results.plots import plot_gains
from fedapps.results.report import Run, load_run
from fedapps.results.run_folder import RunFolder
from fedapps.results.summary import best_evaluation, client_statistics, summarise, validation_key
from fedapps.results.tables import to_csv, to_markdown


def make(
    root: Path,
    method: str,
    seed: int,
    values: list[float],
    metric: str = "accuracy",
    shared: float | None = 0.5,
    clients: int | None = None,
    **settings: Any,
) -> Run:
    """A run of two evaluated rounds; the first was worthless."""
    folder = RunFolder.create(root, method=method, task="digits", seed=seed)
    own = {key.replace("_", "-"): value for key, value in settings.items()}
    folder.write_settings({"method": method, "task": "digits", "seed": seed, "num-server-rounds": 2, **own})
    if clients is not None:
        folder.save_checkpoint(Checkpoint(2, "e", method, "digits", clients, {}, {}, {}, {}))
    for number, scale in ((1, 0.0), (2, 1.0)):
        metrics: dict[int, dict[str, float]] = {}
        for partition, value in enumerate(values):
            metrics[partition] = {f"personal-test-{metric}": scale * value}
            if shared is not None:
                metrics[partition][f"global-test-{metric}"] = scale * shared
            row: dict[str, Any] = {"round": number, "partition": partition, "num-examples": 10 * (partition + 1)}
            folder.append_clients({**row, **metrics[partition]})
        statistics = client_statistics(metrics, {p: 10 * (p + 1) for p in metrics})
        folder.append_metrics({"round": number, "phase": "client-evaluate", "seconds": 1.0, **statistics})
    folder.write_summary(summarise(folder.read_metrics(), status="completed"))
    return load_run(folder.path)


def test_the_table_has_mean_weighted_mean_spread_and_worst_tenth_over_seeds(tmp_path: Path) -> None:
    """Clients 0.9 and 0.6 of 10 and 20 examples: 0.75, 0.7, 0.3 / sqrt(2), 0.6; the other seed 0.1 lower."""
    runs = [make(tmp_path, "fedclup", 0, [0.9, 0.6]), make(tmp_path, "fedclup", 1, [0.8, 0.5])]
    (row,) = personal_table(runs)
    assert row.cells() == {
        "method": "fedclup", "metric": "accuracy", "clients": "2", "personal, mean": "0.7000 ± 0.0707",
        "by examples": "0.6500 ± 0.0707", "std over clients": "0.2121 ± 0.0000", "worst tenth": "0.5500 ± 0.0707",
        "global, mean": "0.5000 ± 0.0000",
    }  # fmt: skip
    assert "0.7000 ± 0.0707" in to_markdown([row.cells()])
    assert float(next(csv.DictReader(io.StringIO(to_csv([row.data()]))))["personal-mean"]) == pytest.approx(0.7)


def test_gains_are_client_by_client_against_the_same_seed(tmp_path: Path) -> None:
    runs = [
        make(tmp_path, "fedclup", 0, [0.9, 0.6]), make(tmp_path, "fedclup", 1, [0.8, 0.5]),
        make(tmp_path, "localtrain", 0, [0.5, 0.5], shared=None), make(tmp_path, "localtrain", 1, [0.7, 0.7], shared=None),
        make(tmp_path, "globaltrain", 0, [0.8, 0.8]),
    ]  # fmt: skip
    gains = client_gains(runs)
    assert gains["localtrain"]["fedclup"] == pytest.approx({0: (0.4 + 0.1) / 2, 1: (0.1 - 0.2) / 2})
    assert gains["globaltrain"]["fedclup"] == pytest.approx({0: 0.1, 1: -0.2})
    plot_gains(gains, tmp_path / "gains.png", quantity="accuracy")
    assert (tmp_path / "gains.png").stat().st_size > 5000


DATA: dict[str, Any] = {
    "task": "digits", "task_options": "", "partition": "classes", "alpha": 0.1, "classes_per_client": 2,
    "partition_column": "", "partition_min_size": 1, "validation_fraction": 0.0, "client_validation_fraction": 0.1,
    "client_test_fraction": 0.2, "clients": 20,
}  # fmt: skip


@pytest.mark.parametrize(
    "other",
    [
        {"task": "mnist"}, {"task_options": "examples = 5"}, {"partition": "iid"}, {"alpha": 1.0}, {"classes_per_client": 5},
        {"partition_column": "site"}, {"partition_min_size": 3}, {"validation_fraction": 0.1},
        {"client_validation_fraction": 0.0}, {"client_test_fraction": 0.3}, {"clients": 10}, {"seed": 1},
    ],
    ids=str,
)  # fmt: skip
def test_a_reference_on_other_data_is_none(tmp_path: Path, other: dict[str, Any]) -> None:
    """The method gains over its own reference, whatever comes last, and nothing over that of other data alone."""

    def local(value: float, **settings: Any) -> Run:
        return make(tmp_path, "localtrain", values=[value, value], shared=None, **{"seed": 0, **DATA, **settings})

    method = make(tmp_path, "fedclup", 0, [0.9, 0.6], **DATA, lr=0.3)
    own, foreign = local(0.5, lr=0.1), local(0.8, **other)
    assert client_gains([method, own, foreign])["localtrain"]["fedclup"] == pytest.approx({0: 0.4, 1: 0.1})
    assert client_gains([method, foreign]) == {}


def test_methods_on_two_splits_have_a_reference_each(tmp_path: Path) -> None:
    runs = [
        make(tmp_path, method, 0, values, shared=None, **{**DATA, "classes_per_client": k})
        for k, method, values in (
            (2, "ditto", [0.9, 0.9]), (2, "localtrain", [0.8, 0.7]), (5, "ditto", [0.6, 0.6]), (5, "localtrain", [0.2, 0.7]),
        )
    ]  # fmt: skip
    gains = client_gains(runs)["localtrain"]
    assert gains["ditto (classes-per-client=2)"] == pytest.approx({0: 0.1, 1: 0.2})
    assert gains["ditto (classes-per-client=5)"] == pytest.approx({0: 0.4, 1: -0.1})


def test_without_a_checkpoint_the_evaluated_clients_are_counted(tmp_path: Path) -> None:
    method = make(tmp_path, "ditto", 0, [0.9, 0.6], clients=2)
    two, three = (make(tmp_path, "localtrain", 0, [0.5] * n, shared=None) for n in (2, 3))
    assert client_gains([method, two, three])["localtrain"]["ditto"] == pytest.approx({0: 0.4, 1: 0.1})


def test_a_smaller_error_is_a_gain(tmp_path: Path) -> None:
    runs = [
        make(tmp_path, m, 0, values, "statistical-error")
        for m, values in {"ditto": [0.1, 0.3], "localtrain": [0.2, 0.2]}.items()
    ]
    assert personal_metric(runs) == "statistical-error"
    assert client_gains(runs)["localtrain"]["ditto"] == pytest.approx({0: 0.1, 1: -0.1})
    assert personal_table(runs)[0].worst.mean == pytest.approx(0.3)  # Of an error the greatest is worst.


def test_the_clients_of_the_last_evaluation_have_a_row_each(tmp_path: Path) -> None:
    rows = client_table([make(tmp_path, "localtrain", 3, [0.9, 0.6], shared=None)])
    assert [row.data() for row in rows] == [
        {"method": "localtrain", "seed": 3, "partition": p, "num-examples": n, "metric": "accuracy", "personal": v,
         "global": None} for p, n, v in ((0, 10, 0.9), (1, 20, 0.6))
    ]  # fmt: skip
    assert rows[0].cells()["global"] == "-"


def test_without_personal_models_there_is_nothing_to_report(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, method="fedavg", task="digits", seed=0)
    folder.write_settings({"method": "fedavg", "task": "digits"})
    run = load_run(folder.path)
    assert personal_table([run]) == client_table([run]) == []
    assert client_gains([run]) == {}
    with pytest.raises(FedAppsError, match="rows with metrics"):
        plot_gains({}, tmp_path / "gains.png", quantity="accuracy")


def test_the_best_round_of_personal_models_is_chosen_on_the_clients_validation_data() -> None:
    rounds = [
        {"round": 1, "validation-accuracy": 0.9, "client-personal-validation-accuracy": 0.3},
        {"round": 2, "validation-accuracy": 0.1, "client-personal-validation-accuracy": 0.4},
    ]
    assert validation_key(rounds, "accuracy") == "client-personal-validation-accuracy"
    assert best_evaluation(rounds, validation_key(rounds, "accuracy")) == rounds[1]
    assert validation_key([{"validation-accuracy": 0.9}], "accuracy") == "validation-accuracy"


def test_a_resume_cuts_the_clients_rows_too(tmp_path: Path) -> None:
    run = make(tmp_path, "fedclup", 0, [0.9, 0.6])
    folder = RunFolder.open(run.path)
    folder.truncate_after(1)
    assert {row["round"] for row in folder.read_clients()} == {1}
