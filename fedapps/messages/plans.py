"""FedCLUP: a client's part in a round, as entries of the message's ``config``, and what a local fit reports, as metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from fedapps.errors import MessageError
from fedapps.messages.schema import GENERATION, Entries, Reply
from fedapps.personalization.local_fits import LocalFit

FIT_DISTANCE2 = "fit-distance2"
FIT_NOISE = "fit-noise"
FIT_VARIANCE = "fit-variance"
CURVATURE = "largest-curvature"
"""Metrics of a reply: the scalars of a local fit, and the client's ``L``."""


class AskedCurvature(StrEnum):
    """What a client is to say of the greatest curvature ``L`` of its loss."""

    NOTHING = "nothing"
    """Nothing: it has said it already."""
    ROUGHLY = "roughly"
    """An estimate from a few gradients, from which the server warns of unstable steps."""
    FOR_GAMMA = "for-gamma"
    """The value that sets the server step: the client fails if it cannot tell."""


@dataclass(frozen=True)
class RoundPlan:
    """A client's part in a round.

    Attributes:
        lam: ``lambda``.
        generation: Generation of the server's running sum.
        fitting: Whether to report a local fit, for the choice of ``lambda``.
        curvature: What to report of the greatest curvature of the client's loss.
    """

    lam: float
    generation: int
    fitting: bool
    curvature: AskedCurvature

    def to_entries(self) -> Entries:
        """Give the entries of the message's ``config``."""
        return {
            "lambda": self.lam,
            GENERATION: self.generation,
            "fitting": self.fitting,
            "curvature": str(self.curvature),
        }

    @classmethod
    def from_entries(cls, entries: Mapping[str, Any]) -> RoundPlan:
        """Read the entries.

        Args:
            entries: The message's ``config``.

        Returns:
            The plan.

        Raises:
            MessageError: An entry is absent or of another form.
        """
        try:
            return cls(
                lam=float(entries["lambda"]),
                generation=int(entries[GENERATION]),
                fitting=bool(entries["fitting"]),
                curvature=AskedCurvature(entries["curvature"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise MessageError(
                "server's message, record 'config'",
                expected="a client's part in a round, as FedCLUP's strategy sends it",
                got=f"{type(error).__name__}: {error}",
                do="use fedapps.strategies.FedCLUP of the same version on the server",
            ) from error


def fit_metrics(fit: LocalFit) -> dict[str, float]:
    """Give the scalars of a local fit as metrics of a reply; the number of examples travels in every reply."""
    return {FIT_DISTANCE2: fit.distance2, FIT_NOISE: fit.noise, FIT_VARIANCE: fit.variance}


def read_fit(reply: Reply) -> LocalFit:
    """Take the scalars of a local fit out of a reply's metrics.

    Args:
        reply: A checked reply.

    Returns:
        The fit.

    Raises:
        MessageError: One of them is missing.
    """
    if missing := [name for name in (FIT_DISTANCE2, FIT_NOISE, FIT_VARIANCE) if name not in reply.metrics]:
        raise MessageError(
            f"{reply.where}, metrics",
            expected="the scalars of a local fit",
            got=f"none called {', '.join(missing)}",
            do="use the same version of fedapps on both ends",
        )
    pop = reply.metrics.pop
    return LocalFit(reply.num_examples, pop(FIT_DISTANCE2), pop(FIT_NOISE), pop(FIT_VARIANCE))
