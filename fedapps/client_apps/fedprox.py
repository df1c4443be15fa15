r"""FedProx's client: FedAvg's with a pull to the model received.

.. math:: \theta_i \leftarrow \theta_i - \eta\, \big( g_i(\theta_i) + \mu\, (\theta_i - \theta) \big) \qquad (K \text{ times})

Li et al., MLSys 2020, arXiv 1812.06127, Algorithm 2: the objective gains :math:`\frac{\mu}{2} |\theta_i - \theta|^2`, where the
anchor :math:`\theta` does not move. The reported loss is without that term.
"""

from __future__ import annotations

from flwr.app import RecordDict

from fedapps.client_apps.fedavg import reply
from fedapps.client_apps.problem import Pull, local_problem
from fedapps.client_apps.work import ClientWork


def train(work: ClientWork) -> RecordDict:
    """Train one client for one round of FedProx.

    Args:
        work: The round; its settings say ``mu``.

    Returns:
        The content of the reply: the whole model after training.
    """
    pull = Pull(work.arrays, work.settings.own.mu, work.lr)
    trained = local_problem(work).descend(work.arrays, pull, work.batches())
    return reply(trained.arrays, trained.buffers, work, trained.loss)
