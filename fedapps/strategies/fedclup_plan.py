"""What FedCLUP's server tells a client beside the model: entries of the message's ``config``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from fedapps.errors import MessageError
from fedapps.settings import Scalar

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

    def to_entries(self) -> dict[str, Scalar]:
        """Give the entries of the message's ``config``."""
        return {
            "lambda": self.lam,
            "generation": self.generation,
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
            MessageError: An entry is absent.
        """
        try:
            return cls(
                lam=float(entries["lambda"]),
                generation=int(entries["generation"]),
                fitting=bool(entries["fitting"]),
                curvature=AskedCurvature(entries["curvature"]),
            )
        except KeyError as error:
            raise MessageError(
                f"server's message, entry {error}",
                expected="what FedCLUP's strategy sends",
                got="nothing",
                do="use fedapps.strategies.FedCLUP of the same version on the server",
            ) from error
