"""Advice on FedCLUP's settings: the same choice as a run makes, and words that fit it."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from fedapps.cli import cli
from fedapps.client_apps.torch_problem import TorchProblem
from fedapps.errors import SettingsError
from fedapps.methods import resolve_settings
from fedapps.methods.personalised import FedClupSettings
from fedapps.personalization.choose_lambda import LambdaReport, Reason
from fedapps.personalization.fedclup import Stale
from fedapps.results.run_folder import RunFolder
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
@pytest.mark.slow
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


@pytest.mark.parametrize(
    ("rounds", "said"), [(12.3, "at most 13"), (12.0, "at most 12"), (np.inf, "no bound is known")]
)
def test_a_bound_of_rounds_is_never_rounded_down(rounds: float, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Advice, "num_rounds", rounds)
    (line,) = [line for line in advise(LINEAR, 5).lines() if "of the distance: " in line]
    assert line.endswith(f": {said}")


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
    options = FedClupSettings(lambda_=0.3)
    assert match in Advice(report, 1.0, 0.5, 4, 4, options).lines()[0]
    assert "no bound" in Advice(report, 1.0, 0.0, 4, 4, options).lines()[-1]
    assert "need not be convex" in Advice(report, 1.0, None, 4, 4, options).lines()[-1]


def test_r_and_what_stands_against_it_are_distances() -> None:
    """R^2 = 9 against s2 d / n = 2 * 10 / 5 = 4; an estimate below 0 is a distance of 0."""

    def finding(R2: float) -> str:
        report = LambdaReport(0.3, Reason.RULE, 0.3, R2, 0.01, 1.0, 0.5, 2.0, 5.0, 10, 4)
        return Advice(report, 1.0, 0.5, 4, 4, FedClupSettings(lambda_=0.3)).lines()[0]

    assert "R = 3, the root mean square distance" in finding(9.0)
    assert "against 2 that a client's own 5 examples leave uncertain" in finding(9.0)
    assert "R = 0, " in finding(-0.5)


@pytest.mark.parametrize(
    ("own", "expected", "known"),
    [
        ({}, 0.4 * (1 / 0.3 + 1 / 2.0), True),
        ({"stale": Stale.REPLIES}, 1 / 0.3 + 1 / 2.0, False),
        ({"stale": Stale.REUSE_MODELS}, 1 / 0.3, False),
        ({"gamma_rule": "average"}, 1 / 0.3, False),
        ({"gamma": 0.7}, 0.7, True),
        ({"gamma": 9.0}, 9.0, False),
    ],
    ids=["theory", "replies", "reuse-models", "average", "given", "given, too large"],
)
def test_gamma_follows_the_settings_and_bounds_rounds_only_where_the_theory_does(
    own: dict[str, Any], expected: float, known: bool
) -> None:
    """L = 2, lambda = 0.3, 2 of 5 clients a round: averaging takes 3.3 where (2/5)(1/0.3 + 1/2) = 1.5 is stable."""
    report = LambdaReport(0.3, Reason.RULE, 0.3, 0.1, 0.01, 1.0, 0.5, 2.0, 20.0, 10, 5)
    advice = Advice(report, 2.0, 0.5, 5, 2, FedClupSettings(lambda_=0.3, **own))
    assert advice.gamma == pytest.approx(expected, rel=1e-12)
    assert f"gamma = {expected:.4g}: " in advice.lines()[2]
    assert (advice.num_rounds is not None) is known
    assert bool(advice.warnings) is (own.get("gamma") == 9.0 or "gamma_rule" in own)


TASK_OPTIONS = LINEAR["task-options"].replace("\n", "\\n")
LINES = [
    "--task", "synthetic-linear", "--clients", "5", "--set", f'task-options="{TASK_OPTIONS}"', "--set", "fraction-train=0.4",
]  # fmt: skip
SITES = [
    "--task", "fedapps_testing:Sites", "--clients", "3", "--partition", "column", "--set", "partition-column=site",
    "--set", "task-options='sizes = \"20,30,8\"'", "--set", "validation-fraction=0.0", "--set", "fedclup.adaptive=true",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        LINES, [*LINES, "--set", "fedclup.stale=reuse-models"], [*LINES, "--set", "fedclup.gamma-rule=average"],
        [*LINES, "--set", "fedclup.gamma=0.5"], SITES,
    ],
    ids=["convex", "reuse-models", "average", "gamma given", "torch"],
)  # fmt: skip
def test_the_command_can_be_pasted_and_takes_the_gamma_that_was_told(tmp_path: Path, arguments: list[str]) -> None:
    runner = CliRunner()
    told = runner.invoke(cli, ["advise", *arguments], env={"COLUMNS": "60"})
    assert told.exit_code == 0, told.output
    lines = told.output.strip().splitlines()
    program, *words = shlex.split(lines[-1])
    assert program == "fedapps"
    more = ["--engine", "inprocess", "--rounds", "1", "--out", str(tmp_path)]
    ran = runner.invoke(cli, [*words, *more])
    assert ran.exit_code == 0, ran.output
    (path,) = (p for p in tmp_path.iterdir() if p.is_dir())
    folder = RunFolder.open(path)
    settings, (row,) = folder.read_settings(), [r for r in folder.read_metrics() if r["phase"] == "train"]
    assert f"lambda = {settings['fedclup.lambda']:.4g} (" in told.output
    gamma = float(next(line for line in lines if line.startswith("gamma = ")).split()[2].rstrip(":"))
    # The run knows the curvature of the sampled clients only.
    assert row["gamma"] == pytest.approx(gamma, rel=1e-2)
    assert (settings["fedclup.adaptive"], settings["task"]) == (False, arguments[1])
    if arguments[1] == "synthetic-linear":
        assert f"K = {settings['local-steps']} local steps" in told.output


def test_a_gamma_that_the_run_would_refuse_is_refused() -> None:
    """The advised lambda is 0.02; a gamma of 100 is above its inverse, one of 20 is above that of the default 0.3 alone."""
    config = {**LINEAR, "fedclup.stale": "reuse-models"}
    with pytest.raises(SettingsError, match="gamma with stale = reuse-models: expected at most 1/lambda"):
        advise({**config, "fedclup.gamma": 100.0}, 5)
    assert advise({**config, "fedclup.gamma": 20.0}, 5).gamma == 20.0


def test_no_second_derivative_is_asked_for_where_gamma_needs_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def largest_curvature(*_: object) -> float:
        raise AssertionError("asked for")

    monkeypatch.setattr(TorchProblem, "largest_curvature", largest_curvature)
    advice = advise({**runs.SITES, "task-options": 'sizes = "20,30,8"', "fedclup.gamma-rule": "average"}, 3)
    assert advice.gamma == 1 / advice.report.lam
    assert advice.L > 0


def test_a_wrong_setting_is_told() -> None:
    with pytest.raises(SettingsError, match=r"did you mean 'fedclup\.lambda-min'"):
        advise({**LINEAR, "fedclup.lambda-minn": 1.0}, 5)
