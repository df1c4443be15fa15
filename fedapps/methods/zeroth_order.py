"""Rows of the zeroth-order methods."""

from __future__ import annotations

from collections.abc import Mapping

from fedapps.methods.row import Method
from fedapps.settings import Scalar
from fedapps.zeroth_order_settings import DeComFLSettings, HiSoMomentumSettings, HiSoSettings, ProbeSettings

_ZEROTH_ORDER: Mapping[str, Scalar] = {
    "weighting": "uniform", "local-steps": 1, "batch-size": 64, "num-probes": 5,
}  # fmt: skip

_LANGUAGE: Mapping[str, Scalar] = {"local-steps": 1, "num-probes": 1}

METHODS: tuple[Method, ...] = (
    *(
        Method(
            name=title.lower(),
            title=title,
            family="zeroth order",
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
            task_kinds=("torch",),
            replicas=True,
            tuned={"torch": {**_ZEROTH_ORDER, **tuned}, "language": {**_LANGUAGE, "lr": language_lr}},
        )
        for title, rule, paper, own, tuned, language_lr in (
            (
                "HiSo",
                "theta - eta D, H learns D * D, z = u / sqrt(H)",
                "arXiv 2506.02370",
                HiSoSettings,
                {"lr": 0.03, "nu": 0.1},
                2e-4,
            ),
            (
                "DeComFL",
                "theta - eta D",
                "Li et al., ICLR 2025, arXiv 2405.15861",
                DeComFLSettings,
                {"lr": 0.1},
                2e-5,
            ),
            (
                "HiSo-Momentum",
                "theta - eta m, H as HiSo",
                "arXiv 2506.02370 (names it as an extension)",
                HiSoMomentumSettings,
                {"lr": 0.05, "nu": 0.1, "momentum": 0.5},
                1e-4,
            ),
        )
    ),
    Method(
        name="fedzo",
        title="FedZO",
        family="zeroth order",
        mixing="simple mean of theta_i (Flower's own strategy)",
        travels_down="model",
        travels_up="model",
        client_state="none",
        paper="Fang et al. 2022, arXiv 2201.09531",
        strategy="fedapps.strategies.fedavg:FedAvg",
        client="fedapps.client_apps.fedzo:train",
        group="fedzo",
        own_settings=ProbeSettings,
        task_kinds=("torch",),
        tuned={"torch": {**_ZEROTH_ORDER, "lr": 0.1}, "language": {**_LANGUAGE, "lr": 2e-5}},
    ),
)
