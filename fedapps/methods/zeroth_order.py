"""The zeroth-order methods: their settings and their rows.

The number of local steps ``tau`` is the shared key ``local-steps``; the learning rate and its schedule are shared, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Literal

import numpy as np
from typing_extensions import override

from fedapps.errors import SettingsError
from fedapps.methods.row import Method
from fedapps.settings import Scalar, Settings, SettingsModel, setting
from fedapps.zeroth_order.aggregate import Aggregation
from fedapps.zeroth_order.directions import Distribution
from fedapps.zeroth_order.scheme import HessianUpdate, Scheme, radius


class ProbeSettings(SettingsModel):
    """How a client estimates directional derivatives."""

    mu: float = setting(1e-3, "radius mu of the probes", gt=0)
    mu_decay: float = setting(1.0, "factor a round on mu", gt=0, le=1)
    num_probes: int = setting(1, "probes P a local step", ge=1, tuned=True)
    difference: Literal["forward", "central"] = setting(
        "forward", "forward (P + 1 passes a local step) or central (2 P passes)"
    )
    distribution: Distribution = setting(Distribution.GAUSSIAN, "distribution of the directions' elements")

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


class FedZOSettings(ProbeSettings):
    """Settings of FedZO."""

    sphere: bool = setting(
        False,
        "directions on the unit sphere, as in the paper: mu is then the length of a probe (take about mu sqrt(d))",
    )


class DeComFLSettings(ProbeSettings):
    """What methods of which only scalars travel share; all of DeComFL's settings."""

    aggregation: Aggregation = setting(Aggregation.MEAN, "how the clients' scalars become one")
    trim: float = setting(
        0.1,
        "share that trimmed-mean cuts off at each end: of 3 clients or more at least one value unless 0, of fewer none",
        ge=0,
        le=0.49,
    )
    clip: float = setting(0.0, "bound of the norm of each client's scalars; 0 = none", ge=0)
    fingerprint_every: int = setting(
        10, "rounds between two fingerprints in the journal, by which replicas are compared; 0 = none", ge=0
    )


class HiSoSettings(DeComFLSettings):
    """Settings of HiSo."""

    nu: float = setting(0.0, "weight nu of what is new in the diagonal H; 0 is DeComFL", ge=0, le=1, tuned=True)
    eps: float = setting(1e-6, "floor of what H learns", gt=0)
    hessian_update: HessianUpdate = setting(HessianUpdate.EVERY_STEP, "which directions of a round H learns from")

    @override
    def check_with(self, settings: Settings) -> None:
        """Refuse radii, and a floor of ``H``, that are 0 or infinite in float32."""
        super().check_with(settings)
        if self.nu > 0 and not _held_by_float32(self.eps):
            raise _not_held("eps", settings.method, got=repr(self.eps), do="choose eps near 1e-6, or set nu to 0")


class HiSoMomentumSettings(HiSoSettings):
    """Settings of HiSo with momentum."""

    momentum: float = setting(0.5, "weight beta of the past in the momentum", ge=0, le=0.999, tuned=True)


def scheme_of(seed: int, rule: str, own: ProbeSettings) -> Scheme:
    """Give what the journal's header fixes over a run; both ends build it from the same settings.

    Args:
        seed: Seed of the run.
        rule: The update rule, which is the name of the method.
        own: The method's own settings.

    Returns:
        The scheme.
    """
    return Scheme(seed, rule, own.distribution, getattr(own, "hessian_update", HessianUpdate.EVERY_STEP))


def _held_by_float32(value: float) -> bool:
    with np.errstate(over="ignore"):
        return bool(0 < np.float32(value) < np.inf)


def _not_held(key: str, method: str, *, got: str, do: str) -> SettingsError:
    expected = "a number above 0 also when rounded to float32 (1.4e-45 to 3.4e38)"
    return SettingsError(f"setting '{key}' of method '{method}'", expected=expected, got=got, do=do)


def _tuned(torch: Mapping[str, Scalar], language_lr: float) -> Mapping[str, Mapping[str, Scalar]]:
    every: Mapping[str, Scalar] = {"weighting": "uniform", "local-steps": 1, "batch-size": 64, "num-probes": 5}
    return {"torch": {**every, **torch}, "language": {"local-steps": 1, "num-probes": 1, "lr": language_lr}}


_DECOMFL_PUBLISHED: Mapping[str, Mapping[str, Scalar]] = {
    "": {"weighting": "uniform", "local-steps": 1, "batch-size": 32, "num-probes": 5},
    "language": {"lr": 1e-5},
}
"""The command of the authors' repository (github.com/ZidongLiu/DeComFL), whose mu, forward difference and Gaussian directions
are the defaults here; its weight decay of 5e-4 has no counterpart."""

_method = partial(
    Method,
    family="zeroth order",
    task_kinds=("torch",),
    kinds_because="directions are laid over the tensors of a torch model",
)

METHODS: tuple[Method, ...] = (
    *(
        _method(
            name=title.lower(),
            title=title,
            mixing=f"mean of the scalars; every replica applies them: {rule}",
            travels_down="the journal's rounds since the last acknowledged one",
            travels_up="tau x P scalars",
            client_state="journal (kilobytes); the replica is a cache",
            paper=paper,
            strategy="fedapps.strategies.hiso:HiSo",
            client="fedapps.client_apps.hiso:train",
            evaluate="fedapps.client_apps.hiso:evaluate",
            group=title.lower(),
            own_settings=own,
            replicas=True,
            published=published,
            tuned=tuned,
        )
        for title, rule, paper, own, published, tuned in (
            (
                "HiSo",
                "theta - eta D, H learns D * D, z = u / sqrt(H)",
                "arXiv 2506.02370",
                HiSoSettings,
                {},
                _tuned({"lr": 0.03, "nu": 0.1}, 2e-4),
            ),
            (
                "DeComFL",
                "theta - eta D",
                "Li et al., ICLR 2025, arXiv 2405.15861",
                DeComFLSettings,
                _DECOMFL_PUBLISHED,
                _tuned({"lr": 0.1}, 2e-5),
            ),
            (
                "HiSo-Momentum",
                "theta - eta m, H as HiSo",
                "arXiv 2506.02370 (names it as an extension)",
                HiSoMomentumSettings,
                {},
                _tuned({"lr": 0.05, "nu": 0.1, "momentum": 0.5}, 1e-4),
            ),
        )
    ),
    _method(
        name="fedzo",
        title="FedZO",
        mixing="simple mean of theta_i (Flower's own strategy)",
        travels_down="model",
        travels_up="model",
        client_state="none",
        paper="Fang et al. 2022, arXiv 2201.09531",
        strategy="fedapps.strategies.fedavg:FedAvg",
        client="fedapps.client_apps.fedzo:train",
        group="fedzo",
        own_settings=FedZOSettings,
        tuned=_tuned({"lr": 0.1}, 2e-5),
    ),
)
