r"""The client of first-order methods: ``K`` steps of (stochastic) gradient descent.

.. math:: \theta_i \leftarrow \theta_i - \eta\, g_i(\theta_i)

McMahan et al., AISTATS 2017, arXiv 1602.05629, Algorithm 1 (ClientUpdate).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from flwr.app import RecordDict

from fedapps.client_apps.work import ClientWork
from fedapps.records import ARRAYS, BUFFERS, METRICS, Arrays, pack_arrays

if TYPE_CHECKING:
    from fedapps.tasks.convex_task import ConvexTask
    from fedapps.tasks.torch_task import TorchTask


def train(work: ClientWork) -> RecordDict:
    """Train one client for one round by gradient descent.

    Args:
        work: The round.

    Returns:
        The content of the reply: the whole model after training.
    """
    if work.task.kind == "convex":
        return _train_convex(work, work.task)  # type: ignore[arg-type]
    return _train_torch(work, work.task)  # type: ignore[arg-type]


def _train_convex(work: ClientWork, task: ConvexTask) -> RecordDict:
    theta = work.arrays["weights"].copy()
    for batch in work.batches():
        theta -= work.lr * task.objective(work.data.train.take(batch)).gradient(theta)
    loss = task.objective(work.data.train).loss(theta)
    return reply({"weights": theta}, {}, work, loss)


def _train_torch(work: ClientWork, task: TorchTask) -> RecordDict:
    import torch

    from fedapps.client_apps.torch_training import losses_of, prepare_model, read_model

    model = prepare_model(work, task)
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=work.lr)
    mean_loss = losses_of(work, task, model, optimizer.step)
    return reply(*read_model(model), work, mean_loss)


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
