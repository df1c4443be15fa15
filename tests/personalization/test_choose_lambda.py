"""The adaptive lambda: by hand, unbiased for unequal weights, its bounds, and near the best on a small grid."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fedapps.errors import MessageError, SettingsError
from fedapps.personalization.choose_lambda import ChoiceConfig, LambdaReport, Reason, Rule, choose_lambda
from fedapps.personalization.local_fits import LocalFit, fit_of_least_squares
from fedapps.personalization.quadratic import Quadratic, joint_minimiser
from fedapps.personalization.synthetic import SyntheticConfig, SyntheticProblem, draw_problem, statistical_error

WIDE = ChoiceConfig(lower=1e-6, upper=1e6)


def fits_of(distances: list[float], noise: float = 0.5, n: int = 10, variance: float = 2.0) -> dict[int, LocalFit]:
    return {i: LocalFit(n, distance, noise, variance) for i, distance in enumerate(distances)}


def choose(problem: SyntheticProblem, w: np.ndarray, config: ChoiceConfig) -> tuple[LambdaReport, np.ndarray]:
    """One round of exact local fits from ``w``; also gives their mean."""
    d, m = len(w), len(problem.truth)
    clients = problem.objectives()
    assert all(isinstance(client, Quadratic) for client in clients)
    pulled = config.lower * np.eye(d)
    v = np.stack([np.linalg.solve(c.A + pulled, c.b + config.lower * w) for c in clients])  # type: ignore[attr-defined]
    fits = {i: fit_of_least_squares(problem.X[i], problem.y[i], v[i], w, config.lower) for i in range(m)}
    mean = v.mean(axis=0)
    return choose_lambda(fits, dict.fromkeys(fits, 1 / m), float(np.sum((mean - w) ** 2)), d, config), mean


def test_four_clients_by_hand() -> None:
    """Distances 4, 5, 5, 6, mean at distance 1: spread = (4/3)(5 - 1) = 16/3, R^2 = 16/3 - 1/2 = 29/6.

    lambda = c s2 d / (n R^2) = 2 * 2 * 3 / (10 * 29/6) with c = 2; the standard error is sqrt((2/3)/4).
    """
    config = ChoiceConfig(lower=1e-6, upper=1e6, c=2.0)
    report = choose_lambda(fits_of([4, 5, 5, 6]), dict.fromkeys(range(4), 0.25), 1.0, 3, config)
    assert report.reason is Reason.RULE
    assert report.spread == pytest.approx(16 / 3)
    assert pytest.approx(29 / 6) == report.R2
    assert report.standard_error == pytest.approx(math.sqrt(2 / 3 / 4))
    assert report.lam == pytest.approx(2 * 2 * 3 / (10 * 29 / 6))
    assert report.decided
    assert "R^2 = 4.833" in report.describe()


def test_examples_enter_by_their_harmonic_mean() -> None:
    fits = {0: LocalFit(10, 4, 0.1, 1.0), 1: LocalFit(30, 6, 0.1, 3.0), 2: LocalFit(30, 5, 0.1, 2.0)}
    report = choose_lambda(fits, {0: 0.5, 1: 0.25, 2: 0.25}, 0.5, 4, WIDE)
    assert report.harmonic_examples == pytest.approx(1 / (0.5 / 10 + 0.5 / 30))
    assert report.s2 == pytest.approx(0.5 * 1 + 0.25 * 3 + 0.25 * 2)


def test_estimate_of_r2_is_unbiased_for_unequal_weights_and_noise() -> None:
    """v_i = w_i* + noise with E|w_i* - E w_i*|^2 = 0.8, most noise where most weight is; 4,000 draws leave about 4 %."""
    random = np.random.default_rng(0)
    p, q, d = np.array([0.05, 0.05, 0.2, 0.7]), np.array([0.1, 0.2, 0.0, 2.0]), 6
    found = []
    for _ in range(4000):
        v = random.standard_normal((4, d)) * np.sqrt((0.8 + q) / d)[:, None]
        fits = {i: LocalFit(10, float(v[i] @ v[i]), q[i], 1.0) for i in range(4)}
        found.append(choose_lambda(fits, dict(enumerate(p)), float(np.sum((p @ v) ** 2)), d, WIDE).R2)
    assert np.mean(found) == pytest.approx(0.8, abs=0.1)


def test_only_the_weights_ratios_and_not_the_order_matter() -> None:
    fits = fits_of([4, 5, 5.5, 6])
    weights = {0: 0.1, 1: 0.2, 2: 0.3, 3: 0.4}
    one = choose_lambda(fits, weights, 1.0, 3, WIDE)
    turned = choose_lambda(dict(reversed(fits.items())), {i: 2 * p for i, p in weights.items()}, 1.0, 3, WIDE)
    assert one.lam == pytest.approx(turned.lam, rel=1e-14)


@pytest.mark.parametrize(
    ("fits", "mean_distance2", "config", "lam", "reason"),
    [
        pytest.param(fits_of([4, 5, 5, 6]), 1.0, ChoiceConfig(10, 20), 10, Reason.BELOW_BOUND, id="rule below bounds"),
        pytest.param(fits_of([4, 5, 5, 6]), 1.0, ChoiceConfig(1e-3, 0.01), 0.01, Reason.ABOVE_BOUND, id="above"),
        pytest.param(fits_of([1, 2, 3, 4], noise=1.8), 0.5, WIDE, 1e6, Reason.ALIKE, id="1.3 standard errors"),
        pytest.param(
            fits_of([1, 2, 3, 4], noise=1.2), 0.5, WIDE, 6 / (80 / 3 - 12), Reason.RULE, id="2.3 standard errors"
        ),
        pytest.param(fits_of([1, 2, 3, 4], noise=9.0), 0.5, WIDE, 1e6, Reason.ALIKE, id="less spread than noise"),
        pytest.param(fits_of([7, 9, 11, 13], noise=1.0), 8.5, WIDE, 1e-6, Reason.FAR, id="reference far away"),
        pytest.param(fits_of([3]), 3.0, WIDE, 1e-6, Reason.ALONE, id="one client"),
    ],
)
def test_bounds_and_reasons(
    fits: dict[int, LocalFit], mean_distance2: float, config: ChoiceConfig, lam: float, reason: Reason
) -> None:
    report = choose_lambda(fits, dict.fromkeys(fits, 1.0), mean_distance2, 3, config)
    assert report.reason is reason
    assert report.lam == pytest.approx(lam, rel=1e-12)
    assert report.decided is (reason is not Reason.FAR)
    assert f"lambda = {lam:.4g}" in report.describe()


def test_one_fit_decides_for_a_client_that_is_alone_and_for_no_other() -> None:
    few = choose_lambda(fits_of([3]), {0: 1.0}, 3.0, 3, WIDE, num_clients=10)
    assert (few.reason, few.lam, few.decided) == (Reason.FEW, 1e-6, False)
    assert math.isnan(few.R2)
    assert "not decided" in few.describe()
    alone = choose_lambda(fits_of([3]), {0: 1.0}, 3.0, 3, WIDE, num_clients=1)
    assert (alone.reason, alone.decided) == (Reason.ALONE, True)
    two = choose_lambda(fits_of([4, 6]), {0: 1.0, 1: 1.0}, 0.5, 3, WIDE, num_clients=10)
    assert two.decided


@pytest.mark.parametrize(
    ("n", "expected"),
    [
        pytest.param(10, 0.5 / (10 * 0.4 / 3), id="R above"),
        pytest.param(2, 0.5 / math.sqrt(2 * 0.4 / 3), id="R below"),
    ],
)
def test_the_papers_two_cases_compare_r_with_one_over_root_n(n: int, expected: float) -> None:
    """R^2 = (4/3)(0.5 - 0.1) - 0.4 = 0.133: above 1/10, below 1/2; c / (n R^2) and c / (sqrt(n) R) with c = 0.5."""
    config = ChoiceConfig(0.1, 7.0, 0.5, rule=Rule.TWO_CASES)
    fits = fits_of([0.499, 0.5, 0.5, 0.501], noise=0.4, n=n)
    report = choose_lambda(fits, dict.fromkeys(fits, 0.25), 0.1, 3, config)
    assert pytest.approx(0.4 / 3) == report.R2
    assert report.lam == pytest.approx(expected)
    assert report.reason is Reason.RULE


@pytest.mark.parametrize("factor", [0.3, 1.0, 3.0])
def test_adaptive_is_within_a_tenth_of_the_best_on_a_small_grid(factor: float) -> None:
    """The claim of issue 5 in small: mean error over 10 draws, 50 clients, n = 50, d = 15, noise 1, identity covariance."""
    grid = np.geomspace(1e-3, 1e3, 13)
    R = factor * math.sqrt(15 / 50)
    fixed, adaptive = [], []
    p = np.full(50, 1 / 50)
    for seed in range(10):
        problem = draw_problem(SyntheticConfig(heterogeneity=R, seed=seed))
        report, mean = choose(problem, np.zeros(15), ChoiceConfig())
        if not report.decided:
            report, _ = choose(problem, mean, ChoiceConfig())
        assert report.decided
        clients = [c for c in problem.objectives() if isinstance(c, Quadratic)]
        errors = [
            statistical_error(joint_minimiser(clients, p, lam).personal, problem.truth) for lam in (*grid, report.lam)
        ]
        fixed.append(errors[:-1])
        adaptive.append(errors[-1])
    assert np.mean(adaptive) <= 1.1 * np.mean(fixed, axis=0).min()


def test_a_far_start_is_not_mistaken_for_alike_clients() -> None:
    """From a model 10 away the standard error drowns R; from the fits' mean it does not, and one repetition is enough."""
    problem = draw_problem(SyntheticConfig(heterogeneity=math.sqrt(0.3), norm=10.0))
    first, mean = choose(problem, np.zeros(15), ChoiceConfig())
    assert first.reason is Reason.FAR
    second, _ = choose(problem, mean, ChoiceConfig())
    assert second.reason is Reason.RULE
    assert pytest.approx(0.3, rel=0.3) == second.R2


@pytest.mark.parametrize(
    "values", [{"lower": 0.0}, {"lower": 2.0, "upper": 1.0}, {"c": 0.0}, {"upper": float("inf")}, {"c": float("nan")}]
)
def test_impossible_settings_are_refused(values: dict[str, float]) -> None:
    with pytest.raises(SettingsError, match="lambda"):
        ChoiceConfig(**values)


def test_no_fits_are_refused() -> None:
    with pytest.raises(MessageError, match="at least one local fit"):
        choose_lambda({}, {}, 0.0, 3, WIDE)
