r"""The clients of first-order methods: ``K`` steps of (stochastic) gradient descent, FedProx's with a proximal term.

.. math:: \theta_i \leftarrow \theta_i - \eta\, \big( g_i(\theta_i) + \mu\, (\theta_i - \theta) \big)

McMahan et al., AISTATS 2017, arXiv 1602.05629, Algorithm 1 (ClientUpdate), with :math:`\mu = 0`; Li et al., MLSys 2020,
arXiv 1812.06127, Algorithm 2: the objective gains :math:`\frac{\mu}{2} |\theta_i - \theta|^2`, where the anchor
:math:`\theta`, the model that was received, is a copy that training does not move. The reported loss is without that term.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from flwr.app import RecordDict

from fedapps.client_apps.work import ClientWork
from fedapps.messages.schema import ARRAYS, BUFFERS, METRICS, Arrays, pack_arrays

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
    return _train(work, mu=0.0)


def train_fedprox(work: ClientWork) -> RecordDict:
    """Train one client for one round by gradient descent with FedProx's proximal term.

    Args:
        work: The round; its settings say ``mu``.

    Returns:
        The content of the reply: the whole model after training.
    """
    return _train(work, mu=work.settings.own.mu)


def _train(work: ClientWork, *, mu: float) -> RecordDict:
    if work.task.kind == "convex":
        return _train_convex(work, work.task, mu)  # type: ignore[arg-type]
    return _train_torch(work, work.task, mu)  # type: ignore[arg-type]


def _train_convex(work: ClientWork, task: ConvexTask, mu: float) -> RecordDict:
    anchor = work.arrays["weights"]
    theta = anchor.copy()
    for batch in work.batches():
        gradient = task.objective(work.data.train.take(batch)).gradient(theta)
        if mu:
            gradient = gradient + mu * (theta - anchor)
        theta -= work.lr * gradient
    loss = task.objective(work.data.train).loss(theta)
    return reply({"weights": theta}, {}, work, loss)


def _train_torch(work: ClientWork, task: TorchTask, mu: float) -> RecordDict:
    import torch

    from fedapps.client_apps.torch_training import losses_of, prepare_model, read_model
    from fedapps.personalization.torch_proximal import add_proximal_gradient, take_anchor

    model = prepare_model(work, task)
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=work.lr)
    anchor = take_anchor(model) if mu else {}

    def step() -> None:
        add_proximal_gradient(model, anchor, mu)
        optimizer.step()

    mean_loss = losses_of(work, task, model, step)
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
