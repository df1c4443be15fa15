r"""A global line search: how far to go from the old model along the averaged direction.

.. math:: s^* = \arg\min_{s \,\in\, S \cup \{0\}} \sum_i p_i f_i(\theta + s\, d), \qquad d = \sum_i p_i \theta_i - \theta

Bischoff et al., arXiv 2109.02388, for LocalNewton (Gupta et al., arXiv 2105.07320). The candidates ``S`` are few, so clients
measure them all in one exchange. Step 0 is among them: the measured loss never rises. FedNL backtracks over candidates that are
measured in the same way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedapps.curvature.newton import SUFFICIENT_DECREASE

Array = NDArray[Any]

ROUNDING = 8 * float(np.finfo(np.float64).eps)
"""Relative difference below which two losses count as equal: close to the minimum it is all that is left."""


class Chosen(NamedTuple):
    """What `choose_step` gives."""

    step: float
    loss: float  # the mean loss there
    start_loss: float  # the mean loss at step 0


def along(theta: Mapping[str, Array], direction: Mapping[str, Array], step: float) -> dict[str, Array]:
    """Go a step along a direction, ``theta + s d``, in the order and dtypes of ``theta``; tensors without a direction stay."""
    return {
        name: (value + step * direction[name]).astype(value.dtype, copy=False) if name in direction else value
        for name, value in theta.items()
    }


def choose_step(steps: Sequence[float], losses: Mapping[int, Sequence[float]], weights: Mapping[int, float]) -> Chosen:
    """Choose the step with the least mean loss; of equal ones, up to rounding, the longest.

    Args:
        steps: The candidates ``S``, > 0.
        losses: Client -> its loss at step 0, then at every candidate. NaN and infinity rule a candidate out.
        weights: Client -> ``p_i`` up to a common factor, > 0.

    References:
        arXiv 2109.02388, the global line search.

    Raises:
        ValueError: No client, or one with another number of losses.
    """
    means = _mean_losses(len(steps), losses, weights)
    found = {step: mean for step, mean in zip((0.0, *steps), means, strict=True) if np.isfinite(mean)}
    least = min(found.values(), default=np.inf)
    step = max((step for step, mean in found.items() if mean <= least + ROUNDING * abs(least)), default=0.0)
    return Chosen(step, found.get(step, means[0]), means[0])


def backtrack(
    steps: Sequence[float], losses: Mapping[int, Sequence[float]], weights: Mapping[int, float], slope: float
) -> Chosen:
    r"""Choose the first step with Armijo's sufficient decrease, :math:`f(\theta + s\,d) \le f(\theta) + c\,s\,g'd`; else 0.

    Args:
        steps: The candidates in the order of trial, > 0.
        losses: As for `choose_step`.
        weights: As for `choose_step`.
        slope: ``g'd``, below 0.

    References:
        arXiv 2106.02969, Algorithm 3 (FedNL-LS).

    Raises:
        ValueError: As for `choose_step`.
    """
    start, *means = _mean_losses(len(steps), losses, weights)
    # Close to the minimum the decrease drowns in the rounding of the loss: that much is forgiven.
    for step, mean in zip(steps, means, strict=True):
        if mean <= start + SUFFICIENT_DECREASE * step * slope + ROUNDING * abs(start):
            return Chosen(step, mean, start)
    return Chosen(0.0, start, start)


def _mean_losses(num_steps: int, losses: Mapping[int, Sequence[float]], weights: Mapping[int, float]) -> list[float]:
    """Average the losses at step 0 and at every candidate over the clients."""
    if not losses or any(len(row) != num_steps + 1 for row in losses.values()):
        raise ValueError(f"line search: expected {num_steps + 1} losses from at least one client, got {dict(losses)}")
    # In order of the clients, so that the sum does not depend on who answered first.
    clients = sorted(losses)
    total = sum(weights[client] for client in clients)
    return [
        sum(weights[client] * losses[client][place] for client in clients) / total for place in range(num_steps + 1)
    ]
