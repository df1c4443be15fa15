"""What a scalar-only method does in a round, from the settings of a run."""

from __future__ import annotations

from dataclasses import dataclass, field

from fedapps.errors import SettingsError
from fedapps.settings import Settings
from fedapps.zeroth_order.aggregate import Aggregation
from fedapps.zeroth_order.directions import Distribution
from fedapps.zeroth_order.scheme import HessianUpdate, Scheme


@dataclass(frozen=True, kw_only=True)
class ScalarOptions:
    """What a scalar-only method does in a round.

    Attributes:
        scheme: Update rule, seed, distribution and policy of ``H``.
        tau: Local steps.
        num_probes: Probes ``P`` a local step.
        mu: Radius of the probes in round 1.
        mu_decay: Factor a round on ``mu``.
        nu: Weight of what is new in ``H``.
        eps: Floor of what ``H`` learns.
        momentum: ``beta``, for rules with momentum only.
        aggregation: How the clients' scalars become one.
        trim: Share that the trimmed mean cuts off at each end.
        clip: Bound of the norm of a client's scalars, or None.
        fingerprint_every: Rounds between two fingerprints in the journal; 0 for none.
    """

    scheme: Scheme = field(default_factory=lambda: Scheme(0))
    tau: int = 1
    num_probes: int = 1
    mu: float = 1e-3
    mu_decay: float = 1.0
    nu: float = 0.0
    eps: float = 1e-6
    momentum: float | None = None
    aggregation: Aggregation = Aggregation.MEAN
    trim: float = 0.1
    clip: float | None = None
    fingerprint_every: int = 10

    def __post_init__(self) -> None:
        """Check the ranges.

        Raises:
            ValueError: ``tau`` or ``num_probes`` is below 1.
        """
        if self.tau < 1 or self.num_probes < 1:
            raise ValueError(f"tau and num_probes: expected at least 1, got {self.tau} and {self.num_probes}")

    def fingerprint_due(self, server_round: int) -> bool:
        """Say whether the journal is to hold a fingerprint of the state after a round.

        Args:
            server_round: The round, from 1.

        Returns:
            Whether it is.
        """
        return self.fingerprint_every > 0 and server_round % self.fingerprint_every == 0

    @classmethod
    def from_settings(cls, settings: Settings) -> ScalarOptions:
        """Take the options from the settings of a run.

        Args:
            settings: The settings.

        Returns:
            The options.

        Raises:
            SettingsError: ``local-steps`` is 0: all clients must take the same number of steps.
        """
        if settings.local_steps == 0:
            raise SettingsError(
                "setting 'local-steps'",
                expected="at least 1: all clients of a scalar-only method take the same number of steps",
                got="0 (which counts local-epochs)",
                do="say how many",
            )
        own = settings.own
        return cls(
            scheme=scheme_of(settings), tau=settings.local_steps, num_probes=own.num_probes, mu=own.mu,
            mu_decay=own.mu_decay, nu=getattr(own, "nu", 0.0), eps=getattr(own, "eps", 0.0),
            momentum=getattr(own, "momentum", None), aggregation=Aggregation(own.aggregation), trim=own.trim,
            clip=own.clip or None, fingerprint_every=own.fingerprint_every,
        )  # fmt: skip


def scheme_of(settings: Settings) -> Scheme:
    """Give what the journal's header fixes over the run; clients build it from the same settings.

    Args:
        settings: The settings of a scalar-only method, whose name is that of its update rule.

    Returns:
        The scheme.
    """
    policy = getattr(settings.own, "hessian_update", HessianUpdate.EVERY_STEP)
    return Scheme(settings.seed, settings.method, Distribution(settings.own.distribution), HessianUpdate(policy))
