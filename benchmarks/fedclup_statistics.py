"""Statistical error of personal models over ``lambda``, and how near the adaptive choice comes: the paper's figure.

Synthetic regression of arXiv 2410.08934 with known true parameters: 50 clients, ``d`` = 15, noise 1, ``R`` = 0.3, 1 and 3
times ``sqrt(d/n)``, ``lambda`` from 1e-3 to 1e3, means over repetitions. The models are the exact minimisers of the objective
(closed form or Newton), so that nothing but ``lambda`` is measured. Linear regression with identity covariance is what the
claims are about; a decaying spectrum, logistic regression, and logistic regression with so few examples that some clients are
nearly separable, come as they come.

The adaptive choice plays by a run's rules: local fits with ``lambda`` at its lower bound from the model 0, repeated from their
mean if the report says that it has not decided.

Usage: ``python benchmarks/fedclup_statistics.py [--repetitions 10] [--out benchmarks/results]``
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import minimize

from fedapps.personalization import theory
from fedapps.personalization.choose_lambda import ChoiceConfig, LambdaReport, Rule, choose_lambda
from fedapps.personalization.local_fits import LocalFit, fit_of_folds, fit_of_gradients, fit_of_least_squares
from fedapps.personalization.proximal import Objective, Proximal
from fedapps.personalization.quadratic import JointMinimiser, least_squares, newton_joint_minimiser
from fedapps.personalization.synthetic import (
    Logistic,
    Regression,
    SyntheticConfig,
    SyntheticProblem,
    draw_problem,
    statistical_error,
)
from fedapps.results.environment import describe_environment

LAMBDAS = np.geomspace(1e-3, 1e3, 25)
FACTORS = (0.3, 1.0, 3.0)
CASES = {
    "linear, identity": SyntheticConfig(),
    "linear, decaying": SyntheticConfig(decay=1.0),
    "logistic, identity": SyntheticConfig(Regression.LOGISTIC, num_examples=200),
    "logistic, decaying": SyntheticConfig(Regression.LOGISTIC, num_examples=200, decay=1.0),
    "logistic, few examples": SyntheticConfig(Regression.LOGISTIC, num_examples=50),
}
CHOICES = {
    "adaptive": (ChoiceConfig(), 0),
    "adaptive, 2 folds": (ChoiceConfig(), 2),
    "adaptive, 10 folds": (ChoiceConfig(), 10),
    "two cases": (ChoiceConfig(rule=Rule.TWO_CASES), 0),
}
MOST_FIT_ROUNDS = 5
ROOT = Path(__file__).resolve().parent.parent


def minimise(objective: Objective, start: np.ndarray) -> np.ndarray:
    """Minimise a smooth convex objective."""
    found = minimize(
        objective.loss,
        start,
        jac=objective.gradient,
        hess=objective.hessian,
        method="trust-exact",
        options={"gtol": 1e-9},
    )
    return found.x


def client_objective(problem: SyntheticProblem, i: int, rows: np.ndarray) -> Objective:
    """Build the loss of some of a client's examples."""
    X, y = problem.X[i, rows], problem.y[i, rows]
    linear = problem.config.regression is Regression.LINEAR
    return least_squares(X, y) if linear else Logistic(X, y, problem.config.regularisation)


def fit(problem: SyntheticProblem, i: int, w: np.ndarray, lam: float, *, folds: int) -> tuple[np.ndarray, LocalFit]:
    """Fit one client's data with the pull at its lower bound, and measure the fit."""
    n = problem.config.num_examples
    whole = client_objective(problem, i, np.arange(n))
    v = minimise(Proximal(whole, w, lam), w)
    if folds:
        left_out = np.array_split(np.arange(n), folds)
        parts = [client_objective(problem, i, np.delete(np.arange(n), rows)) for rows in left_out]
        fits = [minimise(Proximal(part, w, lam), w) for part in parts]
        return v, fit_of_folds(fits, [whole.gradient(v_k) for v_k in fits], v, w, n)
    if isinstance(whole, Logistic):
        return v, fit_of_gradients(whole.hessian(v), whole.example_gradients(v), v, w, lam)
    return v, fit_of_least_squares(problem.X[i], problem.y[i], v, w, lam)


def choose(problem: SyntheticProblem, config: ChoiceConfig, *, folds: int) -> tuple[LambdaReport, int]:
    """Choose ``lambda`` as a run would; also give the rounds of local fits that it took."""
    m, d = problem.truth.shape
    w, rounds = np.zeros(d), 0
    while True:
        rounds += 1
        pairs = [fit(problem, i, w, config.lower, folds=folds) for i in range(m)]
        mean = np.mean([v for v, _ in pairs], axis=0)
        fits = dict(enumerate(report for _, report in pairs))
        report = choose_lambda(fits, dict.fromkeys(fits, 1 / m), float(np.sum((mean - w) ** 2)), d, config)
        if report.decided or rounds == MOST_FIT_ROUNDS:
            return report, rounds
        w = mean


def errors_over(problem: SyntheticProblem, lambdas: Sequence[float]) -> list[float]:
    """Solve the personalised problem for each ``lambda`` and measure its statistical error."""
    objectives = problem.objectives()
    m, d = problem.truth.shape
    solution = JointMinimiser(np.zeros(d), np.zeros((m, d)))
    errors = {}
    # From the greatest, where the problem is best conditioned, each solution starts the next.
    for lam in sorted(lambdas, reverse=True):
        solution = newton_joint_minimiser(objectives, np.full(m, 1 / m), lam, solution, tolerance=1e-8)
        errors[lam] = statistical_error(solution.personal, problem.truth)
    return [errors[lam] for lam in lambdas]


def measure(problem: SyntheticProblem) -> dict[str, Any]:
    """Measure one repetition."""
    objectives = problem.objectives()
    d = problem.truth.shape[1]
    chosen = {name: choose(problem, config, folds=folds) for name, (config, folds) in CHOICES.items()}
    errors = errors_over(problem, [*LAMBDAS, *(report.lam for report, _ in chosen.values())])
    pooled = client_objective_of_all(problem)
    return {
        "errors": errors[: len(LAMBDAS)],
        "local": statistical_error(np.stack([minimise(f, np.zeros(d)) for f in objectives]), problem.truth),
        "global": statistical_error(minimise(pooled, np.zeros(d)), problem.truth),
        "chosen": {
            name: {"lambda": report.lam, "error": error, "R2": report.R2, "reason": str(report.reason), "fit-rounds": rounds}
            for (name, (report, rounds)), error in zip(chosen.items(), errors[len(LAMBDAS) :], strict=True)
        },
    }  # fmt: skip


def client_objective_of_all(problem: SyntheticProblem) -> Objective:
    """Build the pooled loss, that of GlobalTrain."""
    X, y = problem.X.reshape(-1, problem.X.shape[2]), problem.y.reshape(-1)
    linear = problem.config.regression is Regression.LINEAR
    return least_squares(X, y) if linear else Logistic(X, y, problem.config.regularisation)


def summarise(config: SyntheticConfig, repetitions: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Take means over the repetitions of one ``R``."""
    errors = np.mean([r["errors"] for r in repetitions], axis=0)
    local, pooled = (float(np.mean([r[name] for r in repetitions])) for name in ("local", "global"))
    best = int(np.argmin(errors))
    names = list(repetitions[0]["chosen"])
    return {
        "R": config.heterogeneity, "errors": errors.tolist(), "local": local, "global": pooled,
        "best-lambda": refine(errors, best), "best-grid-lambda": float(LAMBDAS[best]), "best-error": float(errors[best]),
        "lower-end-over-local": float(errors[0] / local), "upper-end-over-global": float(errors[-1] / pooled),
        "over-best": {
            name: float(np.mean([r["chosen"][name]["error"] for r in repetitions]) / errors[best]) for name in names
        },
        "chosen": {name: [r["chosen"][name] for r in repetitions] for name in names},
    }  # fmt: skip


def refine(errors: np.ndarray, best: int) -> float:
    """Find the minimum between grid points, from the parabola through the three around the least."""
    if not 0 < best < len(LAMBDAS) - 1:
        return float(LAMBDAS[best])
    around = slice(best - 1, best + 2)
    a, b, _ = np.polyfit(np.log(LAMBDAS[around]), np.log(errors[around]), 2)
    return float(np.exp(-b / (2 * a)))


def run_case(case: SyntheticConfig, repetitions: int) -> dict[str, Any]:
    """Measure one case for every ``R``."""
    rows = []
    for factor in FACTORS:
        R = factor * np.sqrt(case.dimension / case.num_examples)
        config = replace(case, heterogeneity=float(R))
        found = [measure(draw_problem(replace(config, seed=seed))) for seed in range(repetitions)]
        rows.append({"factor": factor, **summarise(config, found)})
    slope = np.polyfit(np.log(FACTORS), np.log([row["best-lambda"] for row in rows]), 1)[0]
    ends = [abs(row[name] - 1) for row in rows for name in ("lower-end-over-local", "upper-end-over-global")]
    over = [row["over-best"]["adaptive"] for row in rows]
    return {
        "rows": rows,
        "claims": {
            "ends within 2 %": max(ends) <= 0.02, "greatest difference at the ends": max(ends),
            "slope of the best lambda over R": float(slope), "slope within -2 +- 0.3": bool(abs(slope + 2) <= 0.3),
            "adaptive error over the best": over, "adaptive within 10 %": max(over) <= 1.1,
        },
    }  # fmt: skip


def show(name: str, case: dict[str, Any]) -> None:
    """Print a table and the claims."""
    print(f"\n{name}")
    print(
        f"{'R':>6} {'best lambda':>11} {'error':>7} {'local':>7} {'global':>7}  error over best: " + ", ".join(CHOICES)
    )
    for row in case["rows"]:
        over = "  ".join(f"{row['over-best'][choice]:.3f}" for choice in CHOICES)
        rounds = max(chosen["fit-rounds"] for chosen in row["chosen"]["adaptive"])
        print(
            f"{row['R']:>6.3f} {row['best-lambda']:>11.4g} {row['best-error']:>7.4f} {row['local']:>7.4f} {row['global']:>7.4f}"
            f"  {over}   (at most {rounds} fit rounds)"
        )
    for claim, value in case["claims"].items():
        print(f"  {claim}: {value}")


def draw(cases: dict[str, dict[str, Any]], path: Path) -> None:
    """Draw statistical error over ``lambda``, a panel a case."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.axes import Axes

    figure, axes = plt.subplots(2, 3, figsize=(13, 7.5), constrained_layout=True)
    colors = ("#0072B2", "#D55E00", "#009E73")
    panels: list[Axes] = list(axes.flat)
    for panel, (name, case) in zip(panels, cases.items(), strict=False):
        for row, color in zip(case["rows"], colors, strict=True):
            draw_curve(panel, row, color, prediction_of(CASES[name], row["R"]))
        panel.set(xscale="log", yscale="log", title=name, xlabel=r"$\lambda$", ylabel=r"mean $|w_i - w_i^*|^2$")
    for panel in panels[len(cases) :]:
        panel.axis("off")
        handles, labels = panels[0].get_legend_handles_labels()
        panel.legend(handles, labels, loc="center", frameon=False)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def draw_curve(panel: Any, row: dict[str, Any], color: str, prediction: Callable[[float], float] | None) -> None:
    """Draw one ``R``: measured errors, its ends, the adaptive choices, and theory where it speaks."""
    panel.plot(LAMBDAS, row["errors"], color=color, label=rf"R = {row['factor']:g} $\sqrt{{d/n}}$")
    for end, mark in (("local", "<"), ("global", ">")):
        label = {"local": "LocalTrain", "global": "GlobalTrain"}[end] if row["factor"] == 1 else None
        at = LAMBDAS[0] / 2 if end == "local" else LAMBDAS[-1] * 2
        panel.plot([at], [row[end]], mark, color=color, label=label, clip_on=False)
    adaptive = row["chosen"]["adaptive"]
    panel.plot(
        [chosen["lambda"] for chosen in adaptive], [chosen["error"] for chosen in adaptive], "o", color=color,
        alpha=0.45, markersize=5, label="adaptive, each repetition" if row["factor"] == 1 else None,
    )  # fmt: skip
    if prediction is not None:
        label = "leading order, identity covariance" if row["factor"] == 1 else None
        panel.plot(LAMBDAS, [prediction(lam) for lam in LAMBDAS], ":", color=color, label=label)


def prediction_of(config: SyntheticConfig, R: float) -> Callable[[float], float] | None:
    """Give the predicted error, for the case that theory has a formula for."""
    if config.regression is not Regression.LINEAR or config.decay > 0:
        return None
    s2, d, n, m = config.noise**2, config.dimension, config.num_examples, config.num_clients
    return lambda lam: theory.personal_error(lam, R**2, s2, d, n, m)


def main() -> None:
    """Run, print, and write ``fedclup_statistics.json`` and ``.png``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=10)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    arguments = parser.parse_args()
    started = time.time()
    cases = {}
    for name, config in CASES.items():
        cases[name] = run_case(config, arguments.repetitions)
        show(name, cases[name])
    record = {
        "benchmark": "fedclup_statistics", "status": "finished", "seconds": round(time.time() - started, 1),
        "settings": {
            "lambdas": LAMBDAS.tolist(), "factors": FACTORS, "seeds": list(range(arguments.repetitions)),
            "cases": {name: {**asdict(config), "heterogeneity": "factor * sqrt(d/n)"} for name, config in CASES.items()},
        },
        "environment": describe_environment(device="cpu", data_checksums={}, working_folder=ROOT),
        "cases": cases,
    }  # fmt: skip
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "fedclup_statistics.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    draw(cases, arguments.out / "fedclup_statistics.png")


if __name__ == "__main__":
    main()
