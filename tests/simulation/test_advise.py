"""Advice on FedCLUP's settings: the same choice as a run makes, and words that fit it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedapps.errors import SettingsError
from fedapps.methods import resolve_settings
from fedapps.personalization.choose_lambda import LambdaReport, Reason
from fedapps.simulation.advise import Advice, advise
from fedapps.tasks.from_settings import load_task_of

from . import runs

pytestmark = pytest.mark.usefixtures("own_module")

LINEAR = {
    "task": "synthetic-linear", "partition": "auto", "partition-column": "auto", "batch-size": 0, "lr": 0.4,
    "task-options": "clients = 5\nexamples = 40\ndimension = 3\nheterogeneity = 2.0", "weighting": "examples",
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "clients"),
    [(LINEAR, 5), ({"task-options": 'sizes = "20,30,8"', "local-epochs": 3}, 3)],
    ids=["convex", "torch"],
)
def test_the_advice_is_what_an_adaptive_run_chooses(tmp_path: Path, config: dict[str, Any], clients: int) -> None:
    adaptive = {**config, "method": "fedclup", "fedclup.adaptive": True, "num-server-rounds": 4, "evaluate-every": 0}
    run = runs.short_run(tmp_path / "run", adaptive, clients)
    chosen = run.rows("train")[-1]["lambda"]
    advice = advise({**runs.SITES, **config}, clients)
    assert advice.report.lam == pytest.approx(chosen, rel=1e-6)
    assert (advice.mu is None) == (clients == 3)


def test_curvature_steps_and_rounds_are_those_of_the_clients_data() -> None:
    """Mu and L are the extreme eigenvalues over all clients; the bound is the worst case of the theory, worked out here."""
    advice = advise({**LINEAR, "fraction-train": 0.4}, 5)
    task = load_task_of(resolve_settings({**LINEAR, "method": "fedclup"}))
    inputs = [task.client_data(i, 5).train.inputs for i in range(5)]
    eigenvalues = np.linalg.eigvalsh(np.stack([X.T @ X / len(X) for X in inputs]))
    mu, L, lam = eigenvalues.min(), eigenvalues.max(), advice.report.lam
    assert (advice.mu, advice.L) == pytest.approx((mu, L), rel=1e-9)
    assert advice.gamma == pytest.approx(0.4 * (1 / lam + 1 / L), rel=1e-9)
    assert advice.num_local_steps == int(np.ceil((L + lam) / (mu + lam)))
    rate = 1 - 0.4 * (1 / lam + 1 / L) * lam * mu / (lam + mu)
    assert advice.num_rounds == pytest.approx(np.log(1e-6) / np.log(rate), rel=1e-9)
    text = "\n".join(advice.lines())
    assert "differ by more than their own data leaves uncertain" in text
    assert "by the rule" in text


def test_clients_that_are_alike_are_told_to_share() -> None:
    config = {**LINEAR, "task-options": LINEAR["task-options"].replace("2.0", "0.0")}
    advice = advise(config, 5)
    assert advice.report.lam == 1e3
    assert "cannot be told apart" in advice.lines()[0]


@pytest.mark.parametrize(
    ("reason", "R2", "match"),
    [
        (Reason.RULE, 0.1, "gain from each other"),
        (Reason.RULE, 9.0, "personal models, lightly tied"),
        (Reason.FAR, 0.1, "take more local steps"),
        (Reason.ALONE, 0.0, "nobody to share with"),
    ],
)
def test_the_words_follow_the_side_of_the_minimax_rate(reason: Reason, R2: float, match: str) -> None:
    """s2 d / n = 2 * 10 / 20 = 1."""
    report = LambdaReport(0.3, reason, 0.3, R2, 0.01, 1.0, 0.5, 2.0, 20.0, 10, 4)
    assert match in Advice(report, 1.0, 0.5, 4, 4).lines()[0]
    assert "no bound" in Advice(report, 1.0, 0.0, 4, 4).lines()[-1]
    assert "need not be convex" in Advice(report, 1.0, None, 4, 4).lines()[-1]


def test_a_wrong_setting_is_told() -> None:
    with pytest.raises(SettingsError, match=r"did you mean 'fedclup\.lambda-min'"):
        advise({**LINEAR, "fedclup.lambda-minn": 1.0}, 5)
