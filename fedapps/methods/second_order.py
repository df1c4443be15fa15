"""The second-order methods: their settings and their rows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import ClassVar, Literal

from pydantic import field_validator

from fedapps.curvature.compressors import Compressor, Identity, RankR, TopK
from fedapps.errors import SettingsError
from fedapps.methods.row import Method
from fedapps.settings import RoundSettings, Scalar, SettingsModel, setting


class SecondOrderSettings(SettingsModel):
    """Settings of the clients that take second-order steps.

    All but ``damping`` are about FOOF blocks: the full Hessian of a convex model is exact and new in every step.
    """

    damping: float = setting(0.1, "added to the diagonal of each curvature block", ge=0, tuned=True)
    """``P = A + damping I``; 0 is meant for convex models."""

    estimate: Literal["average", "last-batch", "full-pass"] = setting(
        "average",
        "FOOF block from the last batch (the paper), an exponential average over the round's batches (auto), or a pass over "
        "all of the client's examples before the round",
        tuned=True,
    )
    decay: float = setting(0.9, "weight of the past in the exponential average, for each local step", ge=0, le=0.999)
    refresh: int = setting(
        10, "local steps that use one FOOF block and its factorisation (auto: 10; paper: 1)", ge=1, tuned=True
    )
    """Layers with fewer rows in a batch than their width have a new one at each of the round's first ``refresh`` steps."""

    max_rows: int = setting(
        0, "rows of a batch that enter a FOOF block, a random sample; 0 (auto) = all", ge=0, tuned=True
    )
    max_width: int = setting(
        4096,
        "wider layers are cut into diagonal blocks of at most this width (auto: 4096; paper: 0); 0 = none is cut",
        ge=0,
        tuned=True,
    )


class LocalNewtonSettings(SecondOrderSettings):
    """Settings of LocalNewton."""

    line_search: str = setting(
        "", 'candidate steps of a global line search along the mean, such as "1,0.5,0.25,0.125"; empty = none, step 1'
    )

    local_search: bool = setting(
        False, "convex tasks: clients halve a step until their own loss falls enough (Armijo), for each local step"
    )
    hessian_share: float = setting(
        1.0,
        "convex tasks: share of a client's examples, sampled for each local step, whose Hessian is taken",
        gt=0,
        le=1,
    )

    @field_validator("line_search")
    @classmethod
    def _steps_above_zero(cls, text: str) -> str:
        try:
            good = all(0 < step < math.inf for step in _numbers(text))
        except ValueError:
            good = False
        if not good:
            raise ValueError("numbers > 0, separated by commas", 'write it like "1,0.5,0.25,0.125", or leave it empty')
        return text

    @property
    def steps(self) -> tuple[float, ...]:
        """The candidate steps."""
        return _numbers(self.line_search)


class FedPMSettings(SecondOrderSettings):
    """Settings of FedPM."""

    wire: Literal["float32", "bfloat16"] = setting("float32", "numbers in which P travels (float32 means as computed)")
    factor_min_rows: int = setting(
        0,
        "a block from fewer rows than its width travels as its smaller triangular factor if it has at least this many rows "
        "(2 or more); 0 = never",
        ge=0,
    )

    @field_validator("factor_min_rows")
    @classmethod
    def _more_than_a_row(cls, rows: int) -> int:
        if rows == 1:
            raise ValueError(
                "0 (off) or at least 2", "raise it: the factor of a single row is the row itself, up to sign"
            )
        return rows


class DenseHessianSettings(SettingsModel):
    """Settings of the methods whose clients hold a Hessian of all weights."""

    curvature: Literal["auto", "exact", "gauss-newton"] = setting(
        "gauss-newton",
        "Hessian of a torch model: exact, the Gauss-Newton matrix (without negative eigenvalues), or exact up to 1000 weights "
        "(auto)",
    )


class FedNLSettings(DenseHessianSettings):
    """Settings of FedNL."""

    compressor: Literal["rank-r", "top-k", "identity"] = setting(
        "rank-r", "what a client sends of the difference between its Hessian and what it has learned of it"
    )
    rank: int = setting(1, "eigenvalues and eigenvectors that rank-r sends", ge=1)
    k: int = setting(0, "entries of the upper triangle that top-k sends; 0 = as many as the model has weights", ge=0)
    option: int = setting(
        2,
        "step: 1 = eigenvalues of H below mu are raised to it; 2 = H + l I, with the clients' mean error l",
        ge=1,
        le=2,
    )
    mu: float = setting(
        0.0,
        "bound of the eigenvalues from below (option 2: of those that l leaves below it); 0 = the penalty of a convex task",
        ge=0,
        tuned=True,
    )
    alpha: float = setting(1.0, "share of the compressed difference that is learned", gt=0, le=1)
    initial: Literal["exact", "zero"] = setting(
        "exact", "H_i at the start: the client's Hessian, sent in full with its first reply, or zero"
    )
    hessian: Literal["previous", "latest"] = setting(
        "previous",
        "H of a step: from before the differences of its round (the paper), or after them; partial participation: latest",
    )
    line_search: bool = setting(False, "halve the step until the clients' mean loss falls enough")

    @property
    def steps(self) -> tuple[float, ...]:
        """The steps that the line search tries, in this order."""
        return tuple(2.0**-k for k in range(21))

    def compressor_of(self, d: int) -> Compressor:
        """Give the compressor for ``d`` weights."""
        if self.compressor == "identity":
            return Identity()
        return RankR(self.rank) if self.compressor == "rank-r" else TopK(self.k or d)

    def check_with(self, settings: RoundSettings) -> None:
        """Refuse what the paper's algorithms do not put together."""
        if settings.fraction_train < 1 and (self.option == 1 or self.line_search):
            key, value = ("option", 1) if self.option == 1 else ("line-search", "true")
            raise SettingsError(
                f"setting 'fednl.{key}'",
                expected="option 2 without a line search, which is what FedNL has for fraction-train < 1",
                got=f"{value} with fraction-train = {settings.fraction_train:g}",
                do="leave it out, or set fraction-train=1",
            )
        if self.initial == "zero" and self.option == 1 and not self.line_search:
            raise SettingsError(
                "setting 'fednl.initial'",
                expected="exact with option 1: the first steps from a Hessian of zero are gradients divided by mu",
                got="zero",
                do="set fednl.option=2 or fednl.line-search=true",
            )


class FedNewSettings(DenseHessianSettings):
    """Settings of FedNew."""

    alpha: float = setting(0.01, "damping of the Newton direction", ge=0, tuned=True)
    rho: float = setting(
        0.01, "penalty of a client's direction for differing from the clients' last one", gt=0, tuned=True
    )
    refresh: int = setting(1, "folded rounds of a client that use one Hessian; 0 = the first one serves for good", ge=0)


class LtdaSettings(SettingsModel):
    """Settings of LTDA."""

    damping: float = setting(
        0.1,
        "least absolute value of the diagonal that a step divides by; lr <= 2 damping / L is stable",
        gt=0,
        tuned=True,
    )
    eps: float = setting(1e-8, "an h_11 of smaller absolute value counts as zero, and the step is a plain one", gt=0)


class FedSophiaSettings(SettingsModel):
    """Settings of FedSophia."""

    beta_1: float = setting(0.9, "weight of the past in the average m of gradients", ge=0, le=0.999)
    beta_2: float = setting(0.95, "weight of the past in the average v of curvature", ge=0, le=0.9999)
    refresh: int = setting(10, "local steps from one estimate of the curvature to the next (tau), over rounds", ge=1)
    rho: float = setting(0.04, "largest step of a weight, in units of lr", gt=0, tuned=True)
    eps: float = setting(1e-12, "least curvature that is divided by", gt=0, tuned=True)
    weight_decay: float = setting(0.0, "decoupled weight decay: lr weight-decay theta is taken off", ge=0)


class FedNSSettings(SettingsModel):
    """Settings of FedNS."""

    curvature: ClassVar[str] = "gauss-newton"
    """Only this matrix of a torch model has a square root."""

    sketch: Literal["gaussian", "srht", "count-sketch"] = setting("srht", "how the square root is sketched")
    size: int = setting(0, "rows k of the sketch; 0 = as many as there are weights", ge=0)
    shared: bool = setting(False, "whether all clients of a round draw their sketches alike; else each its own")
    damping: float = setting(0.0, "added to the diagonal, beside the regularisation of a convex task", ge=0, tuned=True)


PUBLISHED_BLOCKS: Mapping[str, Scalar] = {"estimate": "last-batch", "refresh": 1, "max-rows": 0, "max-width": 0}
"""FOOF blocks as in arXiv 2511.09100; what stands in their place otherwise are the defaults above."""


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in text.split(",")) if text else ()


_BLOCKS = {key: SecondOrderSettings.model_fields[key.replace("-", "_")].default for key in PUBLISHED_BLOCKS}

_method = partial(
    Method,
    family="second order",
    client_state="none",
    layout="fedapps.client_apps.problem:layout_of",
    tuned={
        "convex": {"lr": 1.0, "damping": 0.0, **_BLOCKS},
        "torch": {"lr": 0.1, "damping": 0.1, **_BLOCKS},
        # At 0.1 FedPM diverges after round 7 on the CIFAR-10 subset (10 clients, alpha 0.1).
        "language": {"lr": 0.01},
        "cifar10": {"lr": 0.03},
        "cifar100": {"lr": 0.03},
    },
)

METHODS: tuple[Method, ...] = (
    _method(
        name="fedpm",
        title="FedPM",
        mixing="preconditioned: (sum p_i P_i)^-1 sum p_i P_i theta_i",
        travels_down="model",
        travels_up="P_i (upper triangles) and P_i (theta_i - theta)",
        paper="Federated Preconditioned Mixing, AAAI 2026, arXiv 2511.09100",
        strategy="fedapps.strategies.fedpm:FedPM",
        client="fedapps.client_apps.fedpm:train",
        group="fedpm",
        published={"": {"weighting": "uniform", **PUBLISHED_BLOCKS}},
        own_settings=FedPMSettings,
    ),
    _method(
        name="localnewton",
        title="LocalNewton",
        mixing="simple mean of theta_i; optional line search along it",
        travels_down="model (line search: it and the direction again)",
        travels_up="model (line search: losses)",
        paper="Gupta et al. 2021, arXiv 2105.07320; line search: Bischoff et al., arXiv 2109.02388",
        strategy="fedapps.strategies.localnewton:LocalNewton",
        client="fedapps.client_apps.localnewton:train",
        group="localnewton",
        own_settings=LocalNewtonSettings,
    ),
    Method(
        name="fednl",
        title="FedNL",
        family="second order",
        mixing="theta - [H]_mu^-1 g or theta - (H + l I)^-1 g, with H = sum p_i H_i learned from the S_i",
        travels_down="model (line search: it and the direction again)",
        travels_up="gradient g_i and S_i = C(Hessian - H_i); once H_i in full (line search: losses)",
        client_state="H_i (partial participation: and q_i)",
        paper="Safaryan et al., ICML 2022, arXiv 2106.02969",
        strategy="fedapps.strategies.fednl:FedNL",
        client="fedapps.client_apps.fednl:train",
        group="fednl",
        own_settings=FedNLSettings,
        tuned={
            "convex": {"lr": 1.0, "mu": 0.0},
            "torch": {"lr": 1.0, "mu": 0.1},
            # Only adapters are small enough.
            "language": {"lr": 0.01},
        },
    ),
    Method(
        name="fednew",
        title="FedNew",
        family="second order",
        mixing="theta - eta y, with y = sum p_i y_i by one pass of ADMM a round",
        travels_down="model, y of the last round and of the client's last folded one",
        travels_up="direction y_i",
        client_state="dual variable, y_i (and Hessian, if it is refreshed more rarely than every round)",
        paper="Elgabli et al., ICML 2022, arXiv 2206.08829",
        strategy="fedapps.strategies.fednew:FedNew",
        client="fedapps.client_apps.fednew:train",
        group="fednew",
        own_settings=FedNewSettings,
        tuned={
            "convex": {"lr": 1.0, "alpha": 0.01, "rho": 0.01},
            "torch": {"lr": 1.0, "alpha": 0.1, "rho": 0.1},
            # Only adapters are small enough.
            "language": {"lr": 0.01},
        },
    ),
    _method(
        name="ltda",
        title="LTDA",
        mixing="simple mean of theta_i",
        travels_down="model",
        travels_up="model",
        paper="Sen, Mohan & Qin, PReMI 2023",
        strategy="fedapps.strategies.ltda:LTDA",
        client="fedapps.client_apps.ltda:train",
        layout="",
        group="ltda",
        own_settings=LtdaSettings,
        tuned={
            "convex": {"lr": 1.0, "damping": 1.0},
            "torch": {"lr": 0.1, "damping": 0.3},
            "language": {"lr": 1e-3, "damping": 1.0},
        },
    ),
    _method(
        name="fedsophia",
        title="FedSophia",
        mixing="simple mean of theta_i",
        travels_down="model",
        travels_up="model",
        client_state="averages m, v of gradients and curvature",
        paper="Elbakary et al. 2024, arXiv 2406.06655",
        strategy="fedapps.strategies.fedsophia:FedSophia",
        client="fedapps.client_apps.fedsophia:train",
        layout="",
        group="fedsophia",
        own_settings=FedSophiaSettings,
        tuned={
            "convex": {"lr": 0.3, "rho": 1.0, "eps": 0.1},
            "torch": {"lr": 0.1, "rho": 0.04, "eps": 0.1},
            "language": {"lr": 1e-3, "rho": 0.04, "eps": 1e-12},
        },
    ),
    _method(
        name="fedns",
        title="FedNS",
        mixing="theta - eta [sum p_i Y_i'Y_i + lambda I]^-1 sum p_i g_i",
        travels_down="model",
        travels_up="gradient g_i and sketched square root Y_i of its Hessian",
        paper="Li et al., AAAI 2024, arXiv 2401.02734",
        strategy="fedapps.strategies.fedns:FedNS",
        client="fedapps.client_apps.fedns:train",
        layout="",
        group="fedns",
        own_settings=FedNSSettings,
        tuned={
            "convex": {"lr": 0.5, "damping": 0.0},
            "torch": {"lr": 0.5, "damping": 0.1, "local-epochs": 1},
            "language": {"lr": 0.01, "damping": 0.1},
        },
    ),
)
