r"""FedZO's client (arXiv 2201.09531, Algorithm 1): local steps along directions of its own, from forward passes only.

.. math:: g_{kp} = \frac{f(x_k + \mu u_{kp}) - f(x_k)}{\mu}, \qquad x_{k+1} = x_k - \frac{\eta}{P} \sum_p g_{kp} u_{kp}

with directions of unit variance, or on the unit sphere as in the paper, :math:`v = u / |u|`, whose estimate has the factor
``d``. ``f`` is the mean loss of a batch: with ``b1`` examples a batch and ``P = b2`` probes this is the paper's mean over
``b1 b2`` pairs, since every example of a batch sees the same directions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from flwr.app import RecordDict

from fedapps.client_apps.fedavg import reply
from fedapps.client_apps.probes import Measured, mean_loss, probe, rounding
from fedapps.client_apps.work import ClientWork
from fedapps.compute import generator
from fedapps.messages.schema import METRICS
from fedapps.zeroth_order.directions import Distribution
from fedapps.zeroth_order.probing import Prober
from fedapps.zeroth_order.scheme import LocalStep, Scheme

if TYPE_CHECKING:
    from fedapps.tasks.torch_task import TorchTask

_OWN_DIRECTIONS = 4
"""What the draw of a client's own directions belongs to, beside seed and partition."""


def train(work: ClientWork) -> RecordDict:
    """Train one client for one round of FedZO with the task's loss on the round's batches.

    Args:
        work: The round.

    Returns:
        As `train_on`.
    """
    return train_on(work, Measured.of_task(work))


def train_on(work: ClientWork, measured: Measured) -> RecordDict:
    """Train one client for one round of FedZO.

    Args:
        work: The round.
        measured: The loss and the batches.

    Returns:
        The content of the reply: the whole model; buffers are as received.
    """
    own = work.settings.own
    seed = int(generator(work.settings.seed, work.node.partition, _OWN_DIRECTIONS).integers(2**63))
    prober = Prober(
        cast("TorchTask", work.task).module(work.arrays, work.device),
        Scheme(seed, "decomfl", Distribution(own.distribution)),
        fixed=work.task.fixed_elements(),
        threads=work.settings.compute_threads,
    )
    first_step = (work.server_round - 1) * len(measured.batches)
    result = probe(work, prober, measured, first_step, own.mu_of(work.server_round), sphere=own.sphere)
    steps = [LocalStep(first_step + k, g, work.lr) for k, g in enumerate(result.scalars)]
    moved = {name: tensor.detach().cpu().numpy() for name, tensor in prober.displaced(steps).items()}
    buffers = {name: value for name, value in work.arrays.items() if name not in moved}
    content = reply(moved, buffers, work, mean_loss(result))
    content.metric_records[METRICS].update(rounding(result))
    return content
