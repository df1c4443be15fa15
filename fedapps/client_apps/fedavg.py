r"""FedAvg's client, and that of every method that differs from it on the server only.

.. math:: \theta_i \leftarrow \theta_i - \eta\, g_i(\theta_i) \qquad (K \text{ times})

McMahan et al., AISTATS 2017, arXiv 1602.05629, Algorithm 1 (ClientUpdate).
"""

from __future__ import annotations

import numpy as np
from flwr.app import RecordDict

from fedapps.client_apps.problem import local_problem
from fedapps.client_apps.work import ClientWork
from fedapps.messages.schema import ARRAYS, BUFFERS, METRICS, Arrays, pack_arrays


def train(work: ClientWork) -> RecordDict:
    """Train one client for one round by gradient descent.

    Args:
        work: The round.

    Returns:
        The content of the reply: the whole model after training.
    """
    # The round's batches as they are drawn, also where one batch is all examples.
    trained = local_problem(work).descend(work.arrays, batches=work.batches())
    return reply(trained.arrays, trained.buffers, work, trained.loss)


def reply(trainable: Arrays, buffers: Arrays, work: ClientWork, train_loss: float) -> RecordDict:
    """Pack the reply of a client that sends its whole model.

    Args:
        trainable: Trainable tensors after training, by name.
        buffers: Buffers after training, by name.
        work: The round.
        train_loss: Mean loss over the round's batches (convex: loss at the end).

    Returns:
        The content of the reply.
    """
    content = RecordDict({ARRAYS: pack_arrays(trainable), METRICS: work.metrics(train_loss=train_loss)})
    if buffers:
        content[BUFFERS] = pack_arrays({name: np.asarray(value) for name, value in buffers.items()})
    return content
