r"""LTDA's client (Sen, Mohan & Qin, PReMI 2023): steps divided by a diagonal from the first row of each batch's Hessian.

.. math:: d_j = \frac{h_{1j}^2}{h_{11}}, \qquad
          \theta_j \leftarrow \theta_j - \eta\, \frac{g_j}{\max(|d_j|, \text{damping})} \qquad (K \text{ times})

Where :math:`|h_{11}| < \epsilon` the row says nothing, and the step is a plain one: it counts in the metric ``plain-steps``.
"""

from __future__ import annotations

from flwr.app import RecordDict

from fedapps.client_apps.fedavg import reply
from fedapps.client_apps.problem import Batch, State, Tensors, local_problem
from fedapps.client_apps.work import ClientWork
from fedapps.curvature import ltda
from fedapps.messages.schema import METRICS, PLAIN_STEPS


def train(work: ClientWork) -> RecordDict:
    """Train one client for one round of LTDA.

    Args:
        work: The round.

    Returns:
        The content of the reply: the whole model after training, and how many of its steps were plain.
    """
    own, plain = work.settings.own, 0

    def step(theta: Tensors, state: State, batch: Batch) -> tuple[Tensors, State]:
        nonlocal plain
        d = ltda.diagonal(batch.hessian_row(), own.eps)
        plain += d is None
        return ltda.step(theta, batch.gradient, d, lr=work.lr, damping=own.damping), state

    trained = local_problem(work).descend_by(work.arrays, step)
    content = reply(trained.arrays, trained.buffers, work, trained.loss)
    content.metric_records[METRICS][PLAIN_STEPS] = plain
    return content
