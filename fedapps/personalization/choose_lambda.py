r"""Choosing ``lambda`` from scalars of one round of local fits.

What a user lacks is the heterogeneity ``R``. Clients report local fits ``v_i`` (`fedapps.personalization.local_fits`) made
with ``lambda`` at its lower bound; never models at the current ``lambda``, which are shrunk towards each other, so that an
iteration on them runs away. With ``w`` the model that the fits were measured from and ``v = sum p_i v_i``,

.. math:: \text{spread} = \frac{\sum_i p_i |v_i - w|^2 - |v - w|^2}{1 - \sum_i p_i^2}, \qquad
          R^2 = \text{spread} - \text{mean}\,q_i, \qquad
          \lambda = c\,\frac{s_2\, d}{n R^2}

``s2`` is the mean of the clients' residual variances, ``n`` the harmonic mean of their examples, ``d`` the number of
personalised parameters. The rule balances what a client's own data leaves uncertain against what others do not share with
it: for quadratics of identity curvature it is the ``lambda`` of least error (`fedapps.personalization.theory.personal_error`).

If ``R^2`` is below two standard errors the clients cannot be told apart and ``lambda`` takes its upper bound. The standard
error comes from how ``|v_i - w|^2 - q_i`` varies over clients. It is too large while ``w`` is far from all of them, where
a fit's distance says little about its distance from the others: then the answer is *not decided*, and the round of local
fits is repeated from their mean. So it is if one client of several reported.

Departures: the paper (arXiv 2410.08934, Corollary 1) takes ``R`` as given and has two cases, `Rule.TWO_CASES`, with a
constant ``c`` that nobody knows: there it is that of the settings, and the noise ``s2 d`` is not looked at. For unequal
``p_i`` the factor ``m/(m-1)`` is ``1/(1 - sum p_i^2)`` and the mean of ``q_i`` has weights ``p_i (1 - p_i)``, which keeps
both unbiased.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from fedapps.errors import MessageError, SettingsError
from fedapps.personalization.local_fits import LocalFit
from fedapps.personalization.proximal import check_lambda


class Rule(StrEnum):
    """How ``lambda`` follows from ``R``."""

    BALANCE = "balance"
    """``lambda = c s2 d / (n R^2)``."""
    TWO_CASES = "two-cases"
    """``lambda = c / (n R^2)`` if ``R > 1/sqrt(n)``, else ``c / (sqrt(n) R)``: the authors' choice for arXiv 2410.08934,
    Corollary 1, where the ``1/n`` of the theory stands for ``s2 d / n``."""


class Reason(StrEnum):
    """Why ``lambda`` is what it is."""

    RULE = "rule"
    """The rule's value, inside the bounds."""
    BELOW_BOUND = "below-bound"
    """The rule's value is below the lower bound."""
    ABOVE_BOUND = "above-bound"
    """The rule's value is above the upper bound."""
    ALIKE = "alike"
    """``R^2`` is below two standard errors: the clients cannot be told apart."""
    FAR = "far"
    """Not decided: ``R^2`` is below two standard errors, but ``w`` is too far from the fits for these to mean anything."""
    FEW = "few"
    """Not decided: of several clients one reported, which says nothing about how they differ."""
    ALONE = "alone"
    """One client in all, which has nobody to share with."""


@dataclass(frozen=True)
class ChoiceConfig:
    """Settings of the choice.

    Raises:
        SettingsError: A number is out of range.
    """

    lower: float = 1e-3  # least ``lambda``, above 0; also the ``lambda`` of the local fits
    upper: float = 1e3  # greatest ``lambda``
    c: float = 1.0  # factor of the rule, above 0; 1 is the theory's
    rule: Rule = Rule.BALANCE  # how ``lambda`` follows from ``R``

    def __post_init__(self) -> None:
        check_lambda(self.lower, positive=True)
        check_lambda(self.upper, positive=True)
        if self.upper < self.lower or not (np.isfinite(self.c) and self.c > 0):
            raise SettingsError(
                "choice of lambda",
                expected="lower <= upper and c above 0",
                got=f"bounds {self.lower:g} and {self.upper:g}, c = {self.c:g}",
            )


@dataclass(frozen=True)
class LambdaReport:
    """The choice and everything it rests on, to be logged."""

    lam: float  # the chosen ``lambda``; the lower bound while not decided
    reason: Reason  # why
    unbounded: float  # what the rule says without bounds; infinite where ``R^2`` is not above 0
    R2: float  # estimate of ``R^2``; may be negative, and is not a number where one client reported of several
    standard_error: float  # of ``R2``, over clients
    spread: float  # estimated mean square distance of a fit from the mean of all, noise included
    noise: float  # mean of ``q_i``
    s2: float  # mean residual variance
    harmonic_examples: float  # ``n``, harmonic mean
    dimension: int  # ``d``
    num_clients: int  # clients that reported

    @property
    def decided(self) -> bool:
        """Whether ``lam`` can be used; if not, repeat the local fits from their mean."""
        return self.reason not in (Reason.FAR, Reason.FEW)

    def describe(self) -> str:
        """Say the choice and its grounds in one line, for a log."""
        return (
            f"lambda = {self.lam:.4g} ({_REASONS[self.reason]}): R^2 = {self.R2:.4g} +- {self.standard_error:.2g}"
            f" (spread {self.spread:.4g} - noise {self.noise:.4g}), s2 = {self.s2:.4g}, d = {self.dimension},"
            f" n = {self.harmonic_examples:.4g}, {self.num_clients} clients; rule without bounds: {self.unbounded:.4g}"
        )


_REASONS = {
    Reason.RULE: "by the rule",
    Reason.BELOW_BOUND: "lower bound; the rule's value is below it",
    Reason.ABOVE_BOUND: "upper bound; the rule's value is above it",
    Reason.ALIKE: "upper bound; clients cannot be told apart",
    Reason.FAR: "not decided; repeat the local fits from their mean",
    Reason.FEW: "not decided; repeat the local fits, of which two at least are needed",
    Reason.ALONE: "lower bound; a single client has nobody to share with",
}


def choose_lambda(
    fits: Mapping[int, LocalFit],
    weights: Mapping[int, float],
    mean_distance2: float,
    dimension: int,
    config: ChoiceConfig,
    num_clients: int | None = None,
) -> LambdaReport:
    """Choose ``lambda`` from one round of local fits.

    Args:
        fits: Partition -> what it reported.
        weights: Partition -> ``p_i``; scaled to sum to 1 over ``fits``.
        mean_distance2: ``|sum p_i v_i - w|^2``, of the mean reply of the round, with the same weights.
        dimension: ``d``, the number of personalised parameters.
        config: Bounds, factor and rule.
        num_clients: ``N``, clients in all; None if all have reported.

    Raises:
        MessageError: There is no fit, or a number is impossible.
    """
    _check(fits, mean_distance2, dimension)
    # A fixed order makes the sums independent of arrival.
    order = sorted(fits)
    p = np.array([weights[i] for i in order], dtype=np.float64)
    p /= p.sum()
    distance2 = np.array([fits[i].distance2 for i in order])
    q = np.array([fits[i].noise for i in order])
    s2 = float(p @ [fits[i].variance for i in order])
    n = 1.0 / float(p @ [1.0 / fits[i].num_examples for i in order])
    if len(order) == 1:
        alone = num_clients in (None, 1)
        reason, R2 = (Reason.ALONE, 0.0) if alone else (Reason.FEW, math.nan)
        return LambdaReport(config.lower, reason, config.lower, R2, R2, R2, float(q[0]), s2, n, dimension, 1)
    others = 1.0 - float(p @ p)
    spread = (float(p @ distance2) - mean_distance2) / others
    noise = float((p * (1 - p)) @ q) / others
    R2, error = spread - noise, _standard_error(distance2 - q, p)
    unbounded = _apply_rule(config, R2, s2, dimension, n)
    lam, reason = _decide(config, unbounded, R2, error, far=mean_distance2 > spread)
    return LambdaReport(lam, reason, unbounded, R2, error, spread, noise, s2, n, dimension, len(order))


def _apply_rule(config: ChoiceConfig, R2: float, s2: float, d: int, n: float) -> float:
    if config.rule is Rule.TWO_CASES:
        # Both are c where R = 1/sqrt(n).
        nR2 = n * max(R2, 0.0)
        return config.c / (nR2 if nR2 > 1 else math.sqrt(nR2)) if nR2 > 0 else math.inf
    return config.c * s2 * d / (n * R2) if R2 > 0 else math.inf


def _decide(config: ChoiceConfig, unbounded: float, R2: float, error: float, *, far: bool) -> tuple[float, Reason]:
    if 2 * error > R2:
        return (config.lower, Reason.FAR) if far else (config.upper, Reason.ALIKE)
    if unbounded < config.lower:
        return config.lower, Reason.BELOW_BOUND
    if unbounded > config.upper:
        return config.upper, Reason.ABOVE_BOUND
    return unbounded, Reason.RULE


def _standard_error(values: np.ndarray, p: np.ndarray) -> float:
    """Give the standard error of a weighted mean; for equal weights the standard deviation over ``sqrt(m)``."""
    m = len(values)
    deviations = values - p @ values
    return float(np.sqrt(m / (m - 1) * np.sum((p * deviations) ** 2)))


def _check(fits: Mapping[int, LocalFit], mean_distance2: float, dimension: int) -> None:
    if not fits or dimension < 1 or not (np.isfinite(mean_distance2) and mean_distance2 >= 0):
        raise MessageError(
            "choice of lambda",
            expected="at least one local fit, one parameter, and a finite distance of their mean",
            got=f"{len(fits)} fits, {dimension} parameters, distance {mean_distance2}",
            do="let at least one client finish the round of local fits",
        )
