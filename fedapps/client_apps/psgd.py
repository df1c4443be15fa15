r"""PSGD's client: the gradient of its loss at the model received, over the examples of all of the round's batches.

.. math:: g_i(\theta) = \sum_{k=1}^{K} n_k\, g_{ik}(\theta) \Big/ \sum_{k=1}^{K} n_k

One local epoch is the full gradient, whatever the size of the batches; one local step is that of one mini-batch.
"""

from __future__ import annotations

from flwr.app import RecordDict

from fedapps.client_apps.fedavg import reply
from fedapps.client_apps.problem import local_problem
from fedapps.client_apps.work import ClientWork


def train(work: ClientWork) -> RecordDict:
    """Compute one client's gradient.

    Args:
        work: The round.

    Returns:
        The content of the reply: the gradient of each trainable tensor, and the buffers that the batches leave.
    """
    found = local_problem(work).gradient(work.arrays)
    return reply(found.arrays, found.buffers, work, found.loss)
