"""Rows of the personalised methods and of the baselines that they are measured against."""

from __future__ import annotations

from collections.abc import Mapping

from fedapps.methods.row import Method
from fedapps.personal_settings import DittoSettings, FedClupSettings, LocalTrainSettings, PFedMeSettings
from fedapps.settings import Scalar

_PERSONAL: Mapping[str, Scalar] = {"client-evaluation": "every", "client-test-fraction": 0.2}


def _personal_tuned(
    convex: Mapping[str, Scalar], torch: Mapping[str, Scalar], **tasks: Mapping[str, Scalar]
) -> Mapping[str, Mapping[str, Scalar]]:
    """Complete the tuned values of a personalised method: clients hold out data for their own models."""
    held = {"validation-fraction": 0.0, "client-validation-fraction": 0.1}
    return {
        "convex": {**_PERSONAL, "local-epochs": 10, **convex},
        "torch": {**_PERSONAL, **held, **torch},
        "language": {**held, "lr": 1e-3},
        **tasks,
    }


METHODS: tuple[Method, ...] = (
    Method(
        name="fedclup",
        title="FedCLUP",
        family="personalised",
        mixing="w - gamma lambda sum p_i (w - w_i), over the last known differences of all clients",
        travels_down="model",
        travels_up="change of w - w_i since the last folded reply",
        client_state="personal model w_i, last folded w - w_i",
        paper="Yu et al., ICML 2025, arXiv 2410.08934",
        strategy="fedapps.strategies.fedclup:FedCLUP",
        client="fedapps.client_apps.fedclup:train",
        evaluate="fedapps.client_apps.personal_models:evaluate",
        group="fedclup",
        own_settings=FedClupSettings,
        tuned=_personal_tuned({"lr": 0.4, "lambda": 0.3}, {"lr": 0.3, "lambda": 0.05}),
    ),
    Method(
        name="pfedme",
        title="pFedMe",
        family="personalised",
        mixing="(1 - beta) w + beta mean of w_i",
        travels_down="model",
        travels_up="w_i, the client's copy of the model",
        client_state="personal model theta_i",
        paper="Dinh et al., NeurIPS 2020, arXiv 2006.08848",
        strategy="fedapps.strategies.pfedme:PFedMe",
        client="fedapps.client_apps.pfedme:train",
        evaluate="fedapps.client_apps.personal_models:evaluate",
        group="pfedme",
        own_settings=PFedMeSettings,
        tuned=_personal_tuned({"lr": 0.4, "lambda": 0.3, "eta": 1.0}, {"lr": 0.3, "lambda": 0.3, "eta": 1.0}),
    ),
    Method(
        name="ditto",
        title="Ditto",
        family="personalised",
        mixing="simple mean of w_i (FedAvg)",
        travels_down="model",
        travels_up="w_i, the client's copy of the model",
        client_state="personal model v_i",
        paper="Li et al., ICML 2021, arXiv 2012.04221",
        strategy="fedapps.strategies.fedavg:FedAvg",
        client="fedapps.client_apps.ditto:train",
        evaluate="fedapps.client_apps.personal_models:evaluate",
        group="ditto",
        own_settings=DittoSettings,
        tuned=_personal_tuned({"lr": 0.4, "lambda": 0.3}, {"lr": 0.3, "lambda": 0.1}),
    ),
    Method(
        name="localtrain",
        title="LocalTrain",
        family="personalised",
        mixing="none",
        travels_down="nothing",
        travels_up="metrics",
        client_state="personal model w_i",
        paper="baseline: every client alone",
        strategy="fedapps.strategies.localtrain:LocalTrain",
        client="fedapps.client_apps.localtrain:train",
        evaluate="fedapps.client_apps.personal_models:evaluate",
        group="localtrain",
        own_settings=LocalTrainSettings,
        tuned=_personal_tuned({"lr": 0.4}, {"lr": 0.3}),
    ),
    Method(
        name="globaltrain",
        title="GlobalTrain",
        family="personalised",
        mixing="simple mean of theta_i (FedAvg)",
        travels_down="model",
        travels_up="model",
        client_state="none",
        paper="baseline: McMahan et al., AISTATS 2017, arXiv 1602.05629, measured on every client's own data",
        strategy="fedapps.strategies.fedavg:FedAvg",
        client="fedapps.client_apps.fedavg:train",
        evaluate="fedapps.client_apps.personal_models:evaluate_global",
        tuned=_personal_tuned({"lr": 0.4}, {"lr": 0.3}),
    ),
)
