"""The settings of first-order methods: one class for each group of keys in the registry."""

from __future__ import annotations

from dataclasses import dataclass

from fedapps.settings import setting

_SERVER_LR = "server learning rate eta_s"
_TAU = "added to the root of the second moment; larger is less adaptive"


@dataclass(frozen=True, kw_only=True)
class FedAvgMSettings:
    """Settings of FedAvgM.

    Attributes:
        server_lr: Length of the server's step along the momentum.
        momentum: Share of the old momentum that is kept (sum form: a constant difference grows by ``1/(1 - momentum)``).
    """

    server_lr: float = setting("auto", _SERVER_LR, above=0)
    momentum: float = setting("auto", "momentum beta, sum form", minimum=0, maximum=0.999)


@dataclass(frozen=True, kw_only=True)
class FedProxSettings:
    """Settings of FedProx.

    Attributes:
        mu: Weight of the proximal term ``mu/2 |w - w_received|^2`` in the client's objective; 0 is FedAvg.
    """

    mu: float = setting("auto", "weight of the proximal term mu/2 |w - received|^2", minimum=0)


@dataclass(frozen=True, kw_only=True)
class FedAdagradSettings:
    """Settings of FedAdagrad.

    Attributes:
        server_lr: Server learning rate.
        tau: Degree of adaptivity.
    """

    server_lr: float = setting("auto", _SERVER_LR, above=0)
    tau: float = setting("auto", _TAU, above=0)


@dataclass(frozen=True, kw_only=True)
class FedOptSettings(FedAdagradSettings):
    """Settings of FedAdam and FedYogi.

    Attributes:
        beta_1: Weight of the past in the first moment.
        beta_2: Weight of the past in the second moment.
    """

    beta_1: float = setting(0.9, "weight of the past in the first moment", minimum=0, maximum=0.999)
    beta_2: float = setting(0.99, "weight of the past in the second moment", minimum=0, maximum=0.9999)
