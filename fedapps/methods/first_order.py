"""The first-order methods, Flower's own strategies with our client side: their settings and their rows."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Literal

from fedapps.errors import SettingsError
from fedapps.methods.row import Method
from fedapps.settings import Scalar, Settings, SettingsModel, setting


class FedAvgMSettings(SettingsModel):
    """Settings of FedAvgM."""

    server_lr: float = setting(1.0, "server learning rate eta_s", gt=0, tuned=True)
    momentum: float = setting(0.9, "momentum beta, sum form", ge=0, le=0.999, tuned=True)
    """Share of the old momentum that is kept; in sum form a constant difference grows by ``1/(1 - momentum)``."""


class FedProxSettings(SettingsModel):
    """Settings of FedProx."""

    mu: float = setting(0.01, "weight of the proximal term mu/2 |w - received|^2", ge=0, tuned=True)
    """0 is FedAvg."""


class ScaffoldSettings(SettingsModel):
    """Settings of SCAFFOLD."""

    option: Literal["I", "II"] = setting(
        "II", "new control variate of a client: I = gradient at the received model, a further pass; II = from its steps"
    )
    server_lr: float = setting(1.0, "server learning rate eta_g", gt=0)

    def check_with(self, settings: Settings) -> None:
        """Refuse momentum with option II, whose ``(x - y)/(K eta)`` would no longer be a mean of gradients."""
        if self.option == "II" and settings.local_momentum:
            raise SettingsError(
                "setting 'local-momentum' of method 'scaffold'",
                expected="0 with scaffold.option = II, which reads the mean gradient off the steps",
                got=f"{settings.local_momentum:g}",
                do="set scaffold.option=I",
            )
        if self.option == "I" and settings.weight_decay:
            raise SettingsError(
                "setting 'weight-decay' of method 'scaffold'",
                expected="0 with scaffold.option = I, whose control variate is the gradient of the loss alone",
                got=f"{settings.weight_decay:g}",
                do="set scaffold.option=II, or give the task its own penalty",
            )


class FedAdagradSettings(SettingsModel):
    """Settings of FedAdagrad."""

    server_lr: float = setting(0.1, "server learning rate eta_s", gt=0, tuned=True)
    tau: float = setting(1e-3, "added to the root of the second moment; larger is less adaptive", gt=0, tuned=True)


class FedOptSettings(FedAdagradSettings):
    """Settings of FedAdam and FedYogi."""

    beta_1: float = setting(0.9, "weight of the past in the first moment", ge=0, le=0.999)
    beta_2: float = setting(0.99, "weight of the past in the second moment", ge=0, le=0.9999)


_TUNED: Mapping[str, Mapping[str, Scalar]] = {
    "convex": {"lr": 1.0},
    "torch": {"lr": 0.3},
    "language": {"lr": 1e-3},
    "mnist": {"lr": 0.1},
    "cifar10": {"lr": 0.1},
    "cifar100": {"lr": 0.1},
}

_method = partial(
    Method,
    family="first order",
    mixing="simple mean of theta_i (Flower's own strategy)",
    travels_down="model",
    travels_up="model",
    client_state="none",
    client="fedapps.client_apps.fedavg:train",
    plain_steps=True,
    tuned=_TUNED,
)

METHODS: tuple[Method, ...] = (
    _method(
        name="fedavg",
        title="FedAvg",
        paper="McMahan et al., AISTATS 2017, arXiv 1602.05629",
        strategy="fedapps.strategies.fedavg:FedAvg",
    ),
    _method(
        name="fedavgm",
        title="FedAvgM",
        mixing="mean of theta_i, then a step with momentum (Flower's own strategy)",
        paper="Hsu, Qi & Brown 2019, arXiv 1909.06335",
        strategy="fedapps.strategies.fedavgm:FedAvgM",
        group="fedavgm",
        own_settings=FedAvgMSettings,
        tuned={
            "convex": {"lr": 1.0, "server-lr": 1.0, "momentum": 0.9},
            "torch": {"lr": 0.1, "server-lr": 1.0, "momentum": 0.7},
            "language": {"lr": 3e-4, "server-lr": 1.0, "momentum": 0.7},
            "digits": {"lr": 0.2},
        },
    ),
    _method(
        name="fedprox",
        title="FedProx",
        paper="Li et al., MLSys 2020, arXiv 1812.06127",
        strategy="fedapps.strategies.fedprox:FedProx",
        client="fedapps.client_apps.fedprox:train",
        group="fedprox",
        own_settings=FedProxSettings,
        tuned={task: {**values, "mu": 0.01} for task, values in _TUNED.items()},
    ),
    _method(
        name="scaffold",
        title="SCAFFOLD",
        mixing="x + eta_g mean of (y_i - x); c + sum p_i (change of c_i) over all clients",
        travels_down="model and control variate c",
        travels_up="changes of the model and of c_i",
        client_state="control variate c_i",
        paper="Karimireddy et al., ICML 2020, arXiv 1910.06378",
        strategy="fedapps.strategies.scaffold:SCAFFOLD",
        client="fedapps.client_apps.scaffold:train",
        group="scaffold",
        own_settings=ScaffoldSettings,
    ),
    _method(
        name="psgd",
        title="PSGD",
        mixing="theta - eta sum p_i g_i, a step along the mean gradient",
        travels_up="gradient g_i",
        paper="baseline: gradient mixing, as in FedPM's paper, arXiv 2511.09100",
        strategy="fedapps.strategies.psgd:PSGD",
        client="fedapps.client_apps.psgd:train",
        plain_steps=False,
        # A round is one step, so that more than one epoch would compute the same gradient again.
        tuned={**_TUNED, "torch": {"lr": 0.3, "local-epochs": 1}},
    ),
    *(
        _method(
            name=title.lower(),
            title=title,
            mixing=f"mean of theta_i, then an adaptive step ({step}; Flower's own strategy)",
            paper="Reddi et al., ICLR 2021, arXiv 2003.00295",
            strategy=f"fedapps.strategies.fedopt:{title}",
            group=title.lower(),
            own_settings=own,
            tuned={
                "convex": {"lr": 1.0, "server-lr": 0.1, "tau": 1e-3},
                "torch": {"lr": 0.1, "server-lr": 0.03, "tau": 1e-3},
                "language": {"lr": 1e-3, "server-lr": 1e-4, "tau": 1e-3},
                "digits": {"lr": 0.3},
            },
        )
        for title, step, own in (
            ("FedAdam", "Adam", FedOptSettings),
            ("FedYogi", "Yogi", FedOptSettings),
            ("FedAdagrad", "Adagrad", FedAdagradSettings),
        )
    ),
)
