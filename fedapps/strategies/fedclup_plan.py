"""What FedCLUP's server tells a client beside the model: entries of the message's ``config``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedapps.errors import MessageError, explain
from fedapps.settings import Scalar

FIT_DISTANCE2 = "fit-distance2"
FIT_NOISE = "fit-noise"
FIT_VARIANCE = "fit-variance"
CURVATURE = "largest-curvature"
"""Metrics of a reply: the scalars of a local fit, and the client's ``L``."""


@dataclass(frozen=True)
class RoundPlan:
    """A client's part in a round.

    Attributes:
        lam: ``lambda``.
        generation: Generation of the server's running sum.
        fitting: Whether to report a local fit, for the choice of ``lambda``.
        curvature: Whether to report the greatest curvature of the client's loss.
    """

    lam: float
    generation: int
    fitting: bool
    curvature: bool

    def to_entries(self) -> dict[str, Scalar]:
        """Give the entries of the message's ``config``."""
        return {
            "lambda": self.lam,
            "generation": self.generation,
            "fitting": self.fitting,
            "report-curvature": self.curvature,
        }

    @classmethod
    def from_entries(cls, entries: Mapping[str, Any]) -> RoundPlan:
        """Read the entries.

        Args:
            entries: The message's ``config``.

        Returns:
            The plan.

        Raises:
            MessageError: An entry is absent.
        """
        try:
            return cls(
                lam=float(entries["lambda"]),
                generation=int(entries["generation"]),
                fitting=bool(entries["fitting"]),
                curvature=bool(entries["report-curvature"]),
            )
        except KeyError as error:
            raise MessageError(
                explain(
                    f"server's message, entry {error}",
                    expected="what FedCLUP's strategy sends",
                    got="nothing",
                    do="use fedapps.strategies.FedCLUP of the same version on the server",
                )
            ) from error
