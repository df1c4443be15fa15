"""Settings of the zeroth-order methods: one class a method, on top of what they share.

The number of local steps ``tau`` is the shared key ``local-steps``; the learning rate and its schedule are shared, too.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from typing_extensions import override

from fedapps.errors import SettingsError
from fedapps.settings import Settings, setting
from fedapps.zeroth_order.directions import Distribution
from fedapps.zeroth_order.scheme import HessianUpdate, Scheme, radius


@dataclass(frozen=True, kw_only=True)
class ProbeSettings:
    """How a client estimates directional derivatives; all of FedZO's settings.

    Attributes:
        mu: Radius of the probes.
        mu_decay: Factor on the radius in every round after the first.
        num_probes: Probes ``P`` a local step.
        difference: Forward or central difference.
        distribution: Distribution of the directions.
    """

    mu: float = setting(1e-3, "radius mu of the probes", above=0)
    mu_decay: float = setting(1.0, "factor a round on mu", above=0, maximum=1)
    num_probes: int = setting("auto", "probes P a local step", minimum=1)
    difference: str = setting(
        "forward",
        "forward (P + 1 passes a local step) or central (2 P passes)",
        choices=("forward", "central"),
    )
    distribution: str = setting(
        "gaussian", "distribution of the directions' elements", choices=("gaussian", "rademacher")
    )

    def mu_of(self, server_round: int) -> float:
        """Give the radius of a round; see `fedapps.zeroth_order.scheme.radius`.

        Args:
            server_round: The round, from 1.

        Returns:
            The radius.
        """
        return radius(self.mu, self.mu_decay, server_round)

    def check_with(self, settings: Settings) -> None:
        """Refuse radii that are 0 or infinite in float32, the format of all arithmetic.

        Args:
            settings: The settings that these are part of.

        Raises:
            SettingsError: The radius of the first or the last round is none.
        """
        last = settings.num_server_rounds
        if not _held_by_float32(self.mu):
            raise _not_held("mu", settings.method, got=repr(self.mu), do="choose mu near 1e-3")
        if not _held_by_float32(self.mu_of(last)):
            got = f"a radius of {self.mu_of(last):g} in round {last}"
            raise _not_held("mu-decay", settings.method, got=got, do="bring mu-decay closer to 1, or take fewer rounds")


@dataclass(frozen=True, kw_only=True)
class DeComFLSettings(ProbeSettings):
    """What methods of which only scalars travel share; all of DeComFL's settings.

    Attributes:
        aggregation: How the clients' scalars become one.
        trim: Share that the trimmed mean cuts off at each end.
        clip: Bound of each client's norm over its scalars; 0 for none.
        fingerprint_every: Rounds between two fingerprints in the journal.
    """

    aggregation: str = setting(
        "mean", "how the clients' scalars become one", choices=("mean", "median", "trimmed-mean")
    )
    trim: float = setting(
        0.1,
        "share that trimmed-mean cuts off at each end: of 3 clients or more at least one value unless 0, of fewer none",
        minimum=0,
        maximum=0.49,
    )
    clip: float = setting(0.0, "bound of the norm of each client's scalars; 0 = none", minimum=0)
    fingerprint_every: int = setting(
        10, "rounds between two fingerprints in the journal, by which replicas are compared; 0 = none", minimum=0
    )


@dataclass(frozen=True, kw_only=True)
class HiSoSettings(DeComFLSettings):
    """Settings of HiSo.

    Attributes:
        nu: Weight of what is new in the diagonal ``H``.
        eps: Floor of what ``H`` learns.
        hessian_update: Which directions of a round ``H`` learns from.
    """

    nu: float = setting("auto", "weight nu of what is new in the diagonal H; 0 is DeComFL", minimum=0, maximum=1)
    eps: float = setting(1e-6, "floor of what H learns", above=0)
    hessian_update: str = setting(
        "every-step",
        "which directions of a round H learns from",
        choices=("every-step", "last-step", "round-mean"),
    )

    @override
    def check_with(self, settings: Settings) -> None:
        """Refuse radii, and a floor of ``H``, that are 0 or infinite in float32."""
        super().check_with(settings)
        if self.nu > 0 and not _held_by_float32(self.eps):
            raise _not_held("eps", settings.method, got=repr(self.eps), do="choose eps near 1e-6, or set nu to 0")


@dataclass(frozen=True, kw_only=True)
class HiSoMomentumSettings(HiSoSettings):
    """Settings of HiSo with momentum.

    Attributes:
        momentum: Weight ``beta`` of the past in the momentum.
    """

    momentum: float = setting("auto", "weight beta of the past in the momentum", minimum=0, maximum=0.999)


def _held_by_float32(value: float) -> bool:
    with np.errstate(over="ignore"):
        return bool(0 < np.float32(value) < np.inf)


def _not_held(key: str, method: str, *, got: str, do: str) -> SettingsError:
    expected = "a number above 0 also when rounded to float32 (1.4e-45 to 3.4e38)"
    return SettingsError(f"setting '{key}' of method '{method}'", expected=expected, got=got, do=do)


def scheme_of(seed: int, rule: str, own: ProbeSettings) -> Scheme:
    """Give what the journal's header fixes over a run; both ends build it from the same settings.

    Args:
        seed: Seed of the run.
        rule: The update rule, which is the name of the method.
        own: The method's own settings.

    Returns:
        The scheme.
    """
    policy = getattr(own, "hessian_update", HessianUpdate.EVERY_STEP)
    return Scheme(seed, rule, Distribution(own.distribution), HessianUpdate(policy))
