"""Rows of the first-order methods: Flower's own strategies with our client side."""

from __future__ import annotations

from collections.abc import Mapping

from fedapps.first_order_settings import FedAdagradSettings, FedAvgMSettings, FedOptSettings, FedProxSettings
from fedapps.methods.row import Method
from fedapps.settings import Scalar

_FIRST_ORDER_TUNED: Mapping[str, Mapping[str, Scalar]] = {
    "convex": {"lr": 1.0},
    "torch": {"lr": 0.3},
    "language": {"lr": 1e-3},
    "mnist": {"lr": 0.1},
    "cifar10": {"lr": 0.1},
    "cifar100": {"lr": 0.1},
}
_ADAPTIVE_TUNED: Mapping[str, Mapping[str, Scalar]] = {
    "convex": {"lr": 1.0, "server-lr": 0.1, "tau": 1e-3},
    "torch": {"lr": 0.1, "server-lr": 0.03, "tau": 1e-3},
    "language": {"lr": 1e-3, "server-lr": 1e-4, "tau": 1e-3},
    "digits": {"lr": 0.3},
}

METHODS: tuple[Method, ...] = (
    Method(
        name="fedavg",
        title="FedAvg",
        family="first order",
        mixing="simple mean of theta_i (Flower's own strategy)",
        travels_down="model",
        travels_up="model",
        client_state="none",
        paper="McMahan et al., AISTATS 2017, arXiv 1602.05629",
        strategy="fedapps.strategies.fedavg:FedAvg",
        client="fedapps.client_apps.fedavg:train",
        tuned=_FIRST_ORDER_TUNED,
    ),
    Method(
        name="fedavgm",
        title="FedAvgM",
        family="first order",
        mixing="mean of theta_i, then a step with momentum (Flower's own strategy)",
        travels_down="model",
        travels_up="model",
        client_state="none",
        paper="Hsu, Qi & Brown 2019, arXiv 1909.06335",
        strategy="fedapps.strategies.fedavgm:FedAvgM",
        client="fedapps.client_apps.fedavg:train",
        group="fedavgm",
        own_settings=FedAvgMSettings,
        tuned={
            "convex": {"lr": 1.0, "server-lr": 1.0, "momentum": 0.9},
            "torch": {"lr": 0.1, "server-lr": 1.0, "momentum": 0.7},
            "language": {"lr": 3e-4, "server-lr": 1.0, "momentum": 0.7},
            "digits": {"lr": 0.2},
        },
    ),
    Method(
        name="fedprox",
        title="FedProx",
        family="first order",
        mixing="simple mean of theta_i (Flower's own strategy)",
        travels_down="model",
        travels_up="model",
        client_state="none",
        paper="Li et al., MLSys 2020, arXiv 1812.06127",
        strategy="fedapps.strategies.fedprox:FedProx",
        client="fedapps.client_apps.fedprox:train",
        group="fedprox",
        own_settings=FedProxSettings,
        tuned={task: {**values, "mu": 0.01} for task, values in _FIRST_ORDER_TUNED.items()},
    ),
    *(
        Method(
            name=title.lower(),
            title=title,
            family="first order",
            mixing=f"mean of theta_i, then an adaptive step ({step}; Flower's own strategy)",
            travels_down="model",
            travels_up="model",
            client_state="none",
            paper="Reddi et al., ICLR 2021, arXiv 2003.00295",
            strategy=f"fedapps.strategies.fedopt:{title}",
            client="fedapps.client_apps.fedavg:train",
            group=title.lower(),
            own_settings=own,
            tuned=_ADAPTIVE_TUNED,
        )
        for title, step, own in (
            ("FedAdam", "Adam", FedOptSettings),
            ("FedYogi", "Yogi", FedOptSettings),
            ("FedAdagrad", "Adagrad", FedAdagradSettings),
        )
    ),
)
