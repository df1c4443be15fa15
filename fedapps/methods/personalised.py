"""The personalised methods and the baselines that they are measured against: their settings and their rows.

``lambda`` is a word of Python, so its field is ``lambda_``; the key is ``fedclup.lambda``.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Literal

import numpy as np

from fedapps.methods.row import Method
from fedapps.personalization.choose_lambda import ChoiceConfig, Rule
from fedapps.personalization.fedclup import FedClupConfig, Stale, default_gamma
from fedapps.settings import Scalar, SettingsModel, setting

_EXPORT = "whether each client writes its personal model, with a manifest, beside its state after the last round"

GIVEN_GAMMA = "set fedclup.gamma-rule=average or a number for fedclup.gamma, which need no Hessian"
"""What to do instead of a server step from ``L``."""

GIVEN_LAMBDA = "set fedclup.adaptive=false and a number for fedclup.lambda"
"""What to do instead of choosing ``lambda`` from fits."""


class LocalTrainSettings(SettingsModel):
    """Settings of LocalTrain."""

    export: bool = setting(False, _EXPORT)


class PulledSettings(SettingsModel):
    """What methods with a pull between personal and global models share."""

    lambda_: float = setting(
        0.1, "pull between personal and global model, in units of the loss's curvature", gt=0, tuned=True
    )
    personal_lr: float = setting(0.0, "step of the personal model; 0 = 1/(1/lr + lambda), stable if lr is", ge=0)
    """See `fedapps.personalization.proximal.pulled_step`."""

    export: bool = setting(False, _EXPORT)


class PFedMeSettings(PulledSettings):
    """Settings of pFedMe."""

    eta: float = setting(1.0, "step of the local copy towards the personal model; at most 1/lambda", gt=0, tuned=True)
    beta: float = setting(1.0, "server's mixing rate; 1 = plain mean, above 1 extrapolates", gt=0)
    inner_steps: int = setting(5, "most inner steps K on each batch", ge=1)
    inner_accuracy: float = setting(
        0.0, "squared norm nu of the inner problem's gradient at which its steps end; 0 = all K are taken", ge=0
    )


class DittoSettings(PulledSettings):
    """Settings of Ditto."""

    personal_steps: int = setting(
        0, "steps s of the personal model in a round; 0 = as many as of the global copy", ge=0
    )


class FedClupSettings(PulledSettings):
    """Settings of FedCLUP."""

    gamma: float = setting(0.0, "server step; 0 = by gamma-rule", ge=0)
    gamma_rule: Literal["theory", "average"] = setting(
        "theory",
        "theory: (|S|/N)(1/lambda + 1/L), for stale = replies with all of N and for reuse-models 1/lambda;"
        " average: 1/lambda, plain averaging, which needs no L",
    )
    stale: Stale = setting(
        Stale.REUSE, "what stands for clients that did not reply: their last difference, their last model, or nothing"
    )
    personal: str = setting("", "personal parameters: names, modules or patterns, with commas; empty = all")
    adaptive: bool = setting(False, "choose lambda from a first round of local fits")
    lambda_min: float = setting(1e-3, "least lambda of the choice; also that of the local fits", gt=0)
    lambda_max: float = setting(1e3, "greatest lambda of the choice", gt=0)
    c: float = setting(1.0, "factor of the choice; 1 is the theory's", gt=0)
    rule: Rule = setting(
        Rule.BALANCE,
        "balance (auto): c s2 d/(n R^2); two-cases (paper): c/(n R^2) if R exceeds 1/sqrt(n), else c/(sqrt(n) R)",
        tuned=True,
    )

    @property
    def patterns(self) -> list[str]:
        """The patterns of ``personal``, one by one."""
        return [part.strip() for part in self.personal.split(",") if part.strip()]

    @property
    def choice(self) -> ChoiceConfig | None:
        """How ``lambda`` is chosen from local fits; None where it is fixed."""
        return ChoiceConfig(self.lambda_min, self.lambda_max, self.c, self.rule) if self.adaptive else None

    @property
    def gamma_needs_curvature(self) -> bool:
        """Whether the server step follows from ``L``."""
        return not self.gamma and self.gamma_rule == "theory" and self.stale is not Stale.REUSE_MODELS

    def gamma_of(self, lam: float, L: float, num_sampled: int, num_clients: int) -> float:
        """Give the server step in force.

        Args:
            lam: ``lambda`` in force.
            L: Greatest curvature over the clients; 0 if it is not known, or the loss has none.
            num_sampled: ``|S|``, clients in the round.
            num_clients: ``N``.

        Returns:
            The step.
        """
        if self.gamma:
            return self.gamma
        if not self.gamma_needs_curvature:
            return 1 / lam
        # Of a loss without curvature only the pull is known.
        return default_gamma(lam, L or np.inf, num_clients if self.stale is Stale.REPLIES else num_sampled, num_clients)

    def check_hessian(self, d: int) -> None:
        """Refuse a convex model of ``d`` weights if the clients would need its full Hessian, and it is too large.

        Raises:
            CurvatureError: See `check_dense`.
        """
        from fedapps.curvature.newton import check_dense  # imports SciPy, which a list of the methods does not need

        if self.adaptive:
            check_dense(d, "method 'fedclup', choice of lambda", do=GIVEN_LAMBDA)
        if self.gamma_needs_curvature:
            check_dense(d, "method 'fedclup', server step", do=GIVEN_GAMMA)

    def check_gamma(self) -> None:
        """Refuse a given ``gamma`` that ``lambda`` forbids; not with the settings, since `advise` sets ``lambda`` later.

        Raises:
            SettingsError: See `FedClupConfig`.
        """
        if self.gamma:
            FedClupConfig(self.lambda_, self.gamma, self.stale)


def _tuned(convex: Mapping[str, Scalar], torch: Mapping[str, Scalar]) -> Mapping[str, Mapping[str, Scalar]]:
    """Complete the tuned values of a personalised method: clients hold out data for their own models."""
    personal: Mapping[str, Scalar] = {"client-evaluation": "every", "client-test-fraction": 0.2}
    held: Mapping[str, Scalar] = {"validation-fraction": 0.0, "client-validation-fraction": 0.1}
    return {
        "convex": {**personal, "local-epochs": 10, "lr": 0.4, **convex},
        "torch": {**personal, **held, "lr": 0.3, **torch},
        "language": {**held, "lr": 1e-3},
    }


_method = partial(
    Method,
    family="personalised",
    travels_down="model",
    evaluate="fedapps.client_apps.personal_models:evaluate",
)

METHODS: tuple[Method, ...] = (
    _method(
        name="fedclup",
        title="FedCLUP",
        mixing="w - gamma lambda sum p_i (w - w_i), over the last known differences of all clients",
        travels_up="change of w - w_i since the last folded reply",
        client_state="personal model w_i, last folded w - w_i",
        paper="Yu et al., ICML 2025, arXiv 2410.08934",
        strategy="fedapps.strategies.fedclup:FedCLUP",
        client="fedapps.client_apps.fedclup:train",
        group="fedclup",
        own_settings=FedClupSettings,
        # Gradient descent on all of a client's data; the server step 1/lambda + 1/L is the default.
        published={"": {"batch-size": 0, "rule": "two-cases"}},
        tuned=_tuned({"lambda": 0.3, "rule": "balance"}, {"lambda": 0.05, "rule": "balance"}),
    ),
    _method(
        name="pfedme",
        title="pFedMe",
        mixing="(1 - beta) w + beta mean of w_i",
        travels_up="w_i, the client's copy of the model",
        client_state="personal model theta_i",
        paper="Dinh et al., NeurIPS 2020, arXiv 2006.08848",
        strategy="fedapps.strategies.pfedme:PFedMe",
        client="fedapps.client_apps.pfedme:train",
        group="pfedme",
        own_settings=PFedMeSettings,
        tuned=_tuned({"lambda": 0.3, "eta": 1.0}, {"lambda": 0.3, "eta": 1.0}),
    ),
    _method(
        name="ditto",
        title="Ditto",
        mixing="simple mean of w_i (FedAvg)",
        travels_up="w_i, the client's copy of the model",
        client_state="personal model v_i",
        paper="Li et al., ICML 2021, arXiv 2012.04221",
        strategy="fedapps.strategies.ditto:Ditto",
        client="fedapps.client_apps.ditto:train",
        plain_steps=True,
        group="ditto",
        own_settings=DittoSettings,
        tuned=_tuned({"lambda": 0.3}, {"lambda": 0.1}),
    ),
    _method(
        name="localtrain",
        title="LocalTrain",
        mixing="none",
        travels_down="nothing",
        travels_up="metrics",
        client_state="personal model w_i",
        paper="baseline: every client alone",
        strategy="fedapps.strategies.localtrain:LocalTrain",
        client="fedapps.client_apps.localtrain:train",
        plain_steps=True,
        group="localtrain",
        own_settings=LocalTrainSettings,
        tuned=_tuned({}, {}),
    ),
    _method(
        name="globaltrain",
        title="GlobalTrain",
        mixing="simple mean of theta_i (FedAvg)",
        travels_up="model",
        client_state="none",
        paper="baseline: McMahan et al., AISTATS 2017, arXiv 1602.05629, measured on every client's own data",
        strategy="fedapps.strategies.fedavg:FedAvg",
        client="fedapps.client_apps.fedavg:train",
        evaluate="fedapps.client_apps.personal_models:evaluate_global",
        plain_steps=True,
        tuned=_tuned({}, {}),
    ),
)
