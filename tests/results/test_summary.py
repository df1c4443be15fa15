from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from fedapps.results.summary import RunStatus, add_metrics, client_statistics, evaluations_by_round, summarise


def evaluation(server_round: int, validation: float, test: float, **more: Any) -> dict[str, Any]:
    return {
        "round": server_round,
        "phase": "evaluate",
        "seconds": 0.25,
        "validation-accuracy": validation,
        "validation-loss": 1 - validation,
        "test-accuracy": test,
        **more,
    }


def train(server_round: int, seconds: float = 2.0) -> dict[str, Any]:
    bytes_ = {"payload-down": 10, "payload-up": 30, "wire-down": 100, "wire-up": 300}
    return {"round": server_round, "phase": "train", "seconds": seconds, "sampled": [0], "lr": 0.1, **bytes_}


ROWS = [
    evaluation(0, 0.1, 0.1),
    train(1),
    evaluation(1, 0.8, 0.6),
    train(2, 3.0),
    evaluation(2, 0.7, 0.9),
    {
        "round": 2,
        "phase": "client-evaluate",
        "seconds": 1.0,
        "client-test-accuracy": 0.5,
        "payload-down": 7,
        "who": [0, 1],
    },
]


def test_final_is_the_last_round_and_best_is_chosen_on_validation_data() -> None:
    summary = summarise(ROWS, status="completed")
    assert summary["status"] == "completed"
    assert "reason" not in summary
    assert summary["rounds"] == 2
    assert summary["final"] == {
        "round": 2,
        "validation-accuracy": 0.7,
        "validation-loss": 1 - 0.7,
        "test-accuracy": 0.9,
        "client-test-accuracy": 0.5,
    }
    assert summary["best"]["round"] == 1, "round 2 is better on test data, which must not count"
    assert summary["best"]["test-accuracy"] == 0.6


def test_totals_add_bytes_and_seconds_by_phase() -> None:
    totals = summarise(ROWS, status=RunStatus.FAILED, reason="client 1: boom")["totals"]
    assert totals == {
        "payload-down": 27,
        "payload-up": 60,
        "wire-down": 200,
        "wire-up": 600,
        "seconds": 6.75,
        "seconds-by-phase": {"evaluate": 0.75, "train": 5.0, "client-evaluate": 1.0},
    }


def test_a_reason_is_kept_and_an_unknown_status_refused() -> None:
    summary = summarise([], status="failed", reason="quorum")
    assert summary["reason"] == "quorum"
    assert summary["final"] == {}
    assert summary["rounds"] == 0
    with pytest.raises(ValueError, match="'done' is not a valid RunStatus"):
        summarise([], status="done")


@pytest.mark.parametrize(
    ("values", "primary", "best_round"),
    [
        ([0.1, 0.8, 0.8, 0.3], "accuracy", 1),
        ([0.1, math.nan, 0.2, math.inf], "accuracy", 2),
        ([0.1, 0.8, 0.9, 0.3], "loss", 2),
        ([math.nan, math.nan, math.nan, math.nan], "accuracy", None),
    ],
    ids=["the first of equals", "not finite is never best", "the least loss", "nothing finite"],
)
def test_the_best_round(values: list[float], primary: str, best_round: int | None) -> None:
    rows = [evaluation(number, value, 0.5) for number, value in enumerate(values)]
    summary = summarise(rows, status="completed", primary=primary)
    assert summary.get("best", {}).get("round") == best_round
    assert summary["judged-by"] == primary


def test_without_validation_data_no_round_is_called_best() -> None:
    rows = [
        {"round": number, "phase": "evaluate", "seconds": 0.0, "test-accuracy": 0.1 * number} for number in range(3)
    ]
    summary = summarise(rows, status="completed")
    assert "best" not in summary
    assert summary["final"] == {"round": 2, "test-accuracy": 0.2}


def test_evaluations_are_merged_by_round_in_order() -> None:
    merged = evaluations_by_round([ROWS[4], ROWS[5], ROWS[0], train(3)])
    assert list(merged) == [0, 2]
    assert merged[2]["client-test-accuracy"] == 0.5
    assert "who" not in merged[2]


def test_mean_weighted_mean_deviation_and_worst_decile() -> None:
    values = {p: {"test-accuracy": p / 20, "test-loss": float(p)} for p in range(20)}
    counts = {p: p + 1 for p in range(20)}
    found = client_statistics(values, counts)
    accuracies = np.arange(20) / 20
    assert found["client-test-accuracy"] == pytest.approx(accuracies.mean())
    assert found["client-test-accuracy-weighted"] == pytest.approx((accuracies * np.arange(1, 21)).sum() / 210)
    assert found["client-test-accuracy-std"] == pytest.approx(accuracies.std(ddof=1))
    # A tenth of 20 clients are two: the least accurate, and those of the greatest loss.
    assert found["client-test-accuracy-worst-decile"] == pytest.approx((0 + 1 / 20) / 2)
    assert found["client-test-loss-worst-decile"] == pytest.approx(18.5)


def test_a_metric_counts_only_the_clients_that_have_it() -> None:
    found = client_statistics({0: {"a": 1.0}, 3: {"a": 3.0, "b": 5.0}}, {0: 1, 3: 3})
    assert found["client-a"] == 2.0
    assert found["client-a-weighted"] == 2.5
    assert found["client-b"] == 5.0
    assert client_statistics({}, {}) == {}


def test_a_metric_that_is_nowhere_finite_is_left_out_and_a_mean_says_over_how_many_clients_it_is() -> None:
    """A client whose split holds one class has no AUC."""
    found = client_statistics(
        {p: {"auc": math.nan if p == 1 else 0.5 + p, "none": math.nan} for p in range(3)}, {0: 1, 1: 9, 2: 3}
    )
    assert found["client-auc"] == pytest.approx((0.5 + 2.5) / 2)
    assert found["client-auc-weighted"] == pytest.approx((0.5 + 3 * 2.5) / 4)
    assert found["client-auc-clients"] == 2
    assert not any("none" in name for name in found)


@pytest.mark.parametrize("name", ["round", "lr", "accepted", "payload-up", "folded", "sampled", "phase", "notes"])
def test_a_clients_metric_takes_no_column_of_the_run(name: str) -> None:
    row = {"round": 3, "phase": "train", "folded": [0], "lr": 0.1}
    assert add_metrics(row, {name: 99.0, "train-loss": 0.5}) == {**row, f"metric-{name}": 99.0, "train-loss": 0.5}
