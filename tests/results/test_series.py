from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from fedapps.results.report import Run
from fedapps.results.series import curves_of, payload_until, series_of, train_loss
from fedapps.results.views import GLOBAL_ON_SERVER, Measure

MakeRun = Callable[..., Run]

ACCURACY = Measure("accuracy", GLOBAL_ON_SERVER)


def test_one_run_is_its_own_mean(make_run: MakeRun) -> None:
    run = make_run([0.1, 0.5, 0.9], down=100, up=300, seconds=2.0)
    series = series_of([run], ACCURACY)
    assert series is not None
    np.testing.assert_array_equal(series.rounds, [0, 1, 2])
    np.testing.assert_array_equal(series.mean, [0.1, 0.5, 0.9])
    np.testing.assert_array_equal(series.std, [0, 0, 0])
    np.testing.assert_array_equal(series.payload, [0, 400, 800])
    np.testing.assert_array_equal(series.seconds, [0, 2, 4])


def test_seeds_are_averaged_round_by_round(make_run: MakeRun) -> None:
    """Round 2 is in the first run only: its mean is of that run alone."""
    runs = [make_run([0.2, 0.4, 0.8], up=300, seconds=2.0), make_run([0.1, 0.6], seed=1, up=500, seconds=4.0)]
    series = series_of(runs, ACCURACY)
    assert series is not None
    np.testing.assert_allclose(series.mean, [0.15, 0.5, 0.8], rtol=1e-15)
    np.testing.assert_allclose(series.std, [0.1 / np.sqrt(2), 0.2 / np.sqrt(2), 0], rtol=1e-12)
    np.testing.assert_array_equal(series.payload, [0, 1400, 2600])
    np.testing.assert_array_equal(series.seconds, [0, 3, 4])


def test_runs_without_accuracy_have_no_series(make_run: MakeRun) -> None:
    run = make_run([0.1, 0.5])
    bare = Run(run.path, run.settings, [row for row in run.rows if row["phase"] == "train"], run.summary)
    assert series_of([bare], ACCURACY) is None
    assert series_of([bare, run], ACCURACY) is not None


def test_only_training_counts(make_run: MakeRun) -> None:
    """How often one looks is no part of a method: evaluation on clients moves bytes too."""
    run = make_run([0.1, 0.5, 0.9], down=100, up=300, seconds=2.0)
    asked = {"round": 1, "phase": "client-evaluate", "seconds": 9.0, "payload-down": 7, "payload-up": 1}
    run = Run(run.path, run.settings, [*run.rows, asked], run.summary)
    assert payload_until(run, 1) == 400
    series = series_of([run], ACCURACY)
    assert series is not None
    np.testing.assert_array_equal(series.seconds, [0, 2, 4])
    assert list(train_loss(run)) == [1, 2]


def test_a_record_holds_the_curves_that_there_are(make_run: MakeRun) -> None:
    """The clients of the second run were asked in round 2 only."""
    run = make_run([0.1, 0.5, 0.9], down=100, up=300)
    asked = {"round": 2, "phase": "client-evaluate", "seconds": 9.0, "client-personal-test-accuracy": 0.8}
    run = Run(run.path, run.settings, [*run.rows, asked], run.summary)
    assert curves_of(run) == {
        "rounds": [0, 1, 2], "payload": [0, 400, 800], "test-accuracy": [0.1, 0.5, 0.9],
        "test-loss": pytest.approx([0.9, 0.5, 0.1]), "validation-loss": pytest.approx([1.0, 0.6, 0.2]),
        "validation-accuracy": pytest.approx([0.09, 0.49, 0.89]), "client-personal-test-accuracy": [None, None, 0.8],
    }  # fmt: skip
