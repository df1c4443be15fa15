r"""pFedMe: personal models as proximal points of local copies of the global model.

Dinh, Tran & Nguyen, NeurIPS 2020, arXiv 2006.08848, Algorithm 1. In each of ``R`` local rounds, on one batch,

.. math:: \theta_i \approx \arg\min_\theta f_i(\theta) + \tfrac{\lambda}{2}|\theta - w_i|^2, \qquad
          w_i \leftarrow w_i - \eta\lambda\,(w_i - \theta_i),

and on the server :math:`w \leftarrow (1-\beta)\,w + \beta \cdot \text{mean}_i\, w_i`.

============ ================= ======= ==============================================================
symbol       identifier        shape   which model it is
============ ================= ======= ==============================================================
theta_i      ``theta``         (d,)    the *personal* model: evaluated, kept on the client, never sent
w_i          ``local``         (d,)    the client's copy of the global model: moved, sent, then forgotten
w            ``received``      (d,)    the *global* model
============ ================= ======= ==============================================================

The inner problem :math:`h(\theta) = f_i(\theta) + \tfrac{\lambda}{2}|\theta - w_i|^2` is solved by at most ``K``
gradient steps, until :math:`|\nabla h(\theta)|^2 \le \nu` (line 7); with ``nu = 0`` all ``K`` are taken, as in the authors'
experiments.

Departures: it is warm-started from the client's last ``theta_i`` (its first is ``w``). Nothing is averaged but ``w_i``, once a
round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from fedapps.errors import SettingsError
from fedapps.personalization.proximal import Objective, Proximal, Vector, check_lambda, descend

if TYPE_CHECKING:
    import torch

    Tensor = TypeVar("Tensor", NDArray[np.float64], NDArray[np.float32], torch.Tensor)
else:
    Tensor = TypeVar("Tensor")


@dataclass(frozen=True)
class PFedMeConfig:
    """The client's numbers.

    Attributes:
        lam: ``lambda >= 0``; the paper takes 15. 0 leaves the personal model alone with its own data (LocalTrain).
        eta: Step of the local copy, above 0; ``eta lambda <= 1``, or the copy jumps past ``theta_i``. Paper: 0.005.
        personal_lr: Inner step, above 0; stable below ``2/(L + lambda)``.
        num_inner_steps: ``K``, most inner steps a batch, at least 1. Paper: 5.
        inner_accuracy: ``nu >= 0``: squared norm of the inner gradient at which the inner steps end.

    Raises:
        SettingsError: A number is out of range.
    """

    lam: float
    eta: float
    personal_lr: float
    num_inner_steps: int = 5
    inner_accuracy: float = 0.0

    def __post_init__(self) -> None:
        check_lambda(self.lam)
        if not (self.eta > 0 and self.eta * self.lam <= 1 + 1e-9):
            raise SettingsError(
                "pFedMe, eta",
                expected=f"above 0 and at most 1/lambda, for lambda = {self.lam:g}",
                got=f"{self.eta:g}",
                do="lower the learning rate or lambda",
            )
        if not self.personal_lr > 0 or self.num_inner_steps < 1 or not self.inner_accuracy >= 0:
            raise SettingsError(
                "pFedMe, inner problem",
                expected="personal-lr above 0, at least one inner step, and an accuracy of 0 or more",
                got=f"{self.personal_lr:g}, {self.num_inner_steps} and {self.inner_accuracy:g}",
            )


@dataclass(frozen=True)
class PFedMeResult:
    """What a round of a client leaves."""

    local: Vector  # ``w_i``, ``(d,)``, to send
    theta: Vector  # ``theta_i``, ``(d,)``, to keep: the personal model


def train_client(
    batches: Sequence[Objective], received: Vector, theta: Vector | None, config: PFedMeConfig
) -> PFedMeResult:
    """Run the ``R`` local rounds of a client.

    Args:
        batches: ``R`` objectives, one a local round: a mini-batch's, or the full one ``R`` times.
        received: ``w``, ``(d,)``; not modified.
        theta: The client's last personal model, ``(d,)``; None the first time, which starts at ``w``.
        config: The client's numbers.

    References:
        arXiv 2006.08848, Algorithm 1, lines 5-9.
    """
    local = np.array(received, dtype=np.float64)
    personal = local.copy() if theta is None else theta
    for batch in batches:
        inner = Proximal(batch, local, config.lam)
        personal = descend(
            [inner] * config.num_inner_steps, personal, config.personal_lr, accuracy=config.inner_accuracy
        )
        local = local_step(local, personal, config.eta, config.lam)
    return PFedMeResult(local=local, theta=personal)


def local_step(local: Tensor, theta: Tensor, eta: float, lam: float) -> Tensor:
    r"""Move the local copy towards the personal model, :math:`w_i - \eta\lambda (w_i - \theta_i)`; NumPy or torch, any shape.

    References:
        arXiv 2006.08848, Algorithm 1, line 8.
    """
    return local - (eta * lam) * (local - theta)


def server_step(model: Tensor, mean_local: Tensor, beta: float) -> Tensor:
    r"""Mix the mean of the local copies into the global model, :math:`(1-\beta)\,w + \beta\,\bar w`.

    ``beta > 0``; 1 is plain averaging. Above 1 it extrapolates, as in the paper's experiments.

    References:
        arXiv 2006.08848, Algorithm 1, line 11.

    Raises:
        SettingsError: ``beta`` is not above 0.
    """
    if not beta > 0:
        raise SettingsError(
            "pFedMe, beta", expected="a number above 0", got=f"{beta:g}", do="take 1 for plain averaging"
        )
    return (1 - beta) * model + beta * mean_local
