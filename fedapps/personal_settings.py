"""Settings of the personalised methods: one class a method.

``lambda`` is a word of Python, so its field is ``lambda_``; the key is ``fedclup.lambda``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedapps.personalization.choose_lambda import ChoiceConfig, Rule
from fedapps.personalization.fedclup import FedClupConfig, Stale, default_gamma
from fedapps.personalization.proximal import check_lambda
from fedapps.settings import setting

_EXPORT = "whether each client writes its personal model, with a manifest, beside its state after the last round"


@dataclass(frozen=True, kw_only=True)
class LocalTrainSettings:
    """Settings of LocalTrain.

    Attributes:
        export: Whether clients write their personal models for use elsewhere.
    """

    export: bool = setting(False, _EXPORT)


@dataclass(frozen=True, kw_only=True)
class PulledSettings:
    """What methods with a pull between personal and global models share.

    Attributes:
        lambda_: The pull ``lambda``, in units of the curvature of the loss.
        personal_lr: Step of the personal model; 0 derives it from ``lr``, see `pulled_step`.
        export: Whether clients write their personal models for use elsewhere.
    """

    lambda_: float = setting(
        "auto", "pull between personal and global model, in units of the loss's curvature", above=0
    )
    personal_lr: float = setting(0.0, "step of the personal model; 0 = 1/(1/lr + lambda), stable if lr is", minimum=0)
    export: bool = setting(False, _EXPORT)


@dataclass(frozen=True, kw_only=True)
class DittoSettings(PulledSettings):
    """Settings of Ditto."""


@dataclass(frozen=True, kw_only=True)
class PFedMeSettings(PulledSettings):
    """Settings of pFedMe.

    Attributes:
        eta: Step of the local copy of the global model.
        beta: Mixing rate of the server.
        inner_steps: Steps ``K`` on each batch towards the personal model.
    """

    eta: float = setting("auto", "step of the local copy towards the personal model; at most 1/lambda", above=0)
    beta: float = setting(1.0, "server's mixing rate; 1 = plain mean, above 1 extrapolates", above=0)
    inner_steps: int = setting(5, "inner steps K on each batch", minimum=1)


@dataclass(frozen=True, kw_only=True)
class FedClupSettings(PulledSettings):
    """Settings of FedCLUP.

    Attributes:
        gamma: Server step; 0 takes it from ``gamma_rule``.
        gamma_rule: ``theory``, ``(|S|/N)(1/lambda + 1/L)``, or ``average``, ``1/lambda``.
        stale: What the server's sum holds of clients that did not reply.
        personal: Names of the personal parameters; empty for all.
        adaptive: Whether ``lambda`` is chosen from a round of local fits.
        lambda_min: Lower bound of the choice, and pull of the local fits.
        lambda_max: Upper bound of the choice.
        c: Factor of the choice.
        rule: Rule of the choice.
    """

    gamma: float = setting(0.0, "server step; 0 = by gamma-rule", minimum=0)
    gamma_rule: str = setting(
        "theory",
        "theory: (|S|/N)(1/lambda + 1/L), for stale = replies with all of N and for reuse-models 1/lambda;"
        " average: 1/lambda, plain averaging, which needs no L",
        choices=("theory", "average"),
    )
    stale: str = setting(
        "reuse",
        "what stands for clients that did not reply: their last difference, their last model, or nothing",
        choices=("reuse", "reuse-models", "replies"),
    )
    personal: str = setting("", "personal parameters: names, modules or patterns, with commas; empty = all")
    adaptive: bool = setting(False, "choose lambda from a first round of local fits")
    lambda_min: float = setting(1e-3, "least lambda of the choice; also that of the local fits", above=0)
    lambda_max: float = setting(1e3, "greatest lambda of the choice", above=0)
    c: float = setting(1.0, "factor of the choice; 1 is the theory's", above=0)
    rule: str = setting(
        "balance",
        "balance: c s2 d/(n R^2); two-cases: a bound, by whether R exceeds 1/sqrt(n)",
        choices=("balance", "two-cases"),
    )

    def __post_init__(self) -> None:
        check_lambda(self.lambda_, positive=True)
        if self.gamma:
            FedClupConfig(self.lambda_, self.gamma, Stale(self.stale))

    @property
    def patterns(self) -> list[str]:
        """The patterns of ``personal``, one by one."""
        return [part.strip() for part in self.personal.split(",") if part.strip()]

    @property
    def choice(self) -> ChoiceConfig | None:
        """How ``lambda`` is chosen from local fits; None where it is fixed."""
        if not self.adaptive:
            return None
        return ChoiceConfig(self.lambda_min, self.lambda_max, self.c, Rule(self.rule))

    @property
    def gamma_needs_curvature(self) -> bool:
        """Whether the server step follows from ``L``."""
        return not self.gamma and self.gamma_rule == "theory" and Stale(self.stale) is not Stale.REUSE_MODELS

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
        heard = num_clients if Stale(self.stale) is Stale.REPLIES else num_sampled
        return default_gamma(lam, L or np.inf, heard, num_clients)


def pulled_step(lr: float, lambda_: float, personal_lr: float = 0.0) -> float:
    r"""Give the step on a loss with a pull, :math:`\eta = 1/(1/\text{lr} + \lambda)`.

    With ``lr = 1/L`` it is the theory's ``1/(L + lambda)``: one learning rate fits every pull. A step of it is an implicit
    step on the pull, :math:`(\theta - \text{lr}\, g + \text{lr} \lambda w) / (1 + \text{lr} \lambda)`.

    Args:
        lr: Step on the loss alone.
        lambda_: The pull.
        personal_lr: A step of the user's own, taken as it is; 0 for none.

    Returns:
        The step.

    References:
        arXiv 2410.08934, condition ``eta <= 1/(L + lambda)``.
    """
    return personal_lr or 1.0 / (1.0 / lr + lambda_)
