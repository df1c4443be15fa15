r"""Ditto: FedAvg for the global model, and beside it a personal model that is pulled to it.

Li, Hu, Beirami & Smith, ICML 2021, arXiv 2012.04221, Algorithm 1. The global model never sees the personal ones:

.. math:: w_i \leftarrow w_i - \eta\,\nabla f_i(w_i), \qquad
          v_i \leftarrow v_i - \eta_p\,(\nabla f_i(v_i) + \lambda (v_i - w)), \qquad
          w \leftarrow \sum_i p_i w_i.

============ ================= ======= ==============================================================
symbol       identifier        shape   which model it is
============ ================= ======= ==============================================================
w            ``received``      (d,)    the *global* model; the anchor of the whole round
w_i          ``local``         (d,)    the client's copy of it: trained, sent, then forgotten
v_i          ``personal``      (d,)    the *personal* model: kept on the client, never sent
============ ================= ======= ==============================================================

Departures: none. The pull is to the received ``w``, not to the copy that is being trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedapps.personalization.proximal import Objective, Proximal, Vector, check_lambda, descend


@dataclass(frozen=True)
class DittoResult:
    """What a round of a client leaves."""

    local: Vector  # ``w_i``, ``(d,)``, to send; the server takes the weighted mean
    personal: Vector  # ``v_i``, ``(d,)``, to keep


def train_client(
    batches: Sequence[Objective],
    received: Vector,
    personal: Vector | None,
    *,
    lam: float,
    eta: float,
    personal_lr: float,
) -> DittoResult:
    """Train a client's copy of the global model and its personal model on the same batches.

    Args:
        batches: One objective a step.
        received: ``w``, ``(d,)``; not modified.
        personal: The client's last ``v_i``, ``(d,)``; None the first time, which starts at ``w``.
        lam: ``lambda >= 0``; 0 is LocalTrain for the personal model.
        eta: Step of the global copy.
        personal_lr: Step of the personal model; stable below ``2/(L + lambda)``.

    References:
        arXiv 2012.04221, Algorithm 1, lines 5-7.

    Raises:
        SettingsError: ``lam`` is negative or not finite.
    """
    check_lambda(lam)
    anchor = np.array(received, dtype=np.float64)
    return DittoResult(
        local=descend(batches, anchor, eta),
        personal=descend(
            [Proximal(batch, anchor, lam) for batch in batches], anchor if personal is None else personal, personal_lr
        ),
    )
