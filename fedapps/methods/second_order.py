"""Rows of the second-order methods."""

from __future__ import annotations

from collections.abc import Mapping

from fedapps.methods.row import Method
from fedapps.second_order_settings import FedPMSettings, LocalNewtonSettings
from fedapps.settings import Scalar

_SECOND_ORDER_TUNED: Mapping[str, Mapping[str, Scalar]] = {
    "convex": {"lr": 1.0, "damping": 0.0},
    "torch": {"lr": 0.1, "damping": 0.1},
    # At 0.1 FedPM diverges after round 7 on the CIFAR-10 subset (10 clients, alpha 0.1).
    "language": {"lr": 0.01},
    "cifar10": {"lr": 0.03},
    "cifar100": {"lr": 0.03},
}

METHODS: tuple[Method, ...] = (
    Method(
        name="fedpm",
        title="FedPM",
        family="second order",
        mixing="preconditioned: (sum p_i P_i)^-1 sum p_i P_i theta_i",
        travels_down="model",
        travels_up="P_i (upper triangles) and P_i (theta_i - theta)",
        client_state="none",
        paper="Federated Preconditioned Mixing, AAAI 2026, arXiv 2511.09100",
        strategy="fedapps.strategies.fedpm:FedPM",
        client="fedapps.client_apps.fedpm:train",
        layout="fedapps.client_apps.problem:preconditioned_names",
        group="fedpm",
        own_settings=FedPMSettings,
        tuned=_SECOND_ORDER_TUNED,
    ),
    Method(
        name="localnewton",
        title="LocalNewton",
        family="second order",
        mixing="simple mean of theta_i; optional line search along it",
        travels_down="model (line search: it and the direction again)",
        travels_up="model (line search: losses)",
        client_state="none",
        paper="Gupta et al. 2021, arXiv 2105.07320; line search: Bischoff et al., arXiv 2109.02388",
        strategy="fedapps.strategies.localnewton:LocalNewton",
        client="fedapps.client_apps.localnewton:train",
        layout="fedapps.client_apps.problem:preconditioned_names",
        group="localnewton",
        own_settings=LocalNewtonSettings,
        tuned=_SECOND_ORDER_TUNED,
    ),
)
