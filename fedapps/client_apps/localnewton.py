r"""LocalNewton's client (Gupta et al., arXiv 2105.07320): FedPM's steps, and the whole model as reply.

.. math:: \theta_i \leftarrow \theta_i - \eta\, P_i^{-1} g_i(\theta_i) \qquad (K \text{ times})

In its line search (arXiv 2109.02388) a client measures its loss along the averaged direction.
"""

from __future__ import annotations

from flwr.app import ConfigRecord, RecordDict

from fedapps.client_apps.fedavg import reply
from fedapps.client_apps.problem import local_problem
from fedapps.client_apps.work import ClientWork
from fedapps.curvature.line_search import along
from fedapps.messages.blocks import LAYOUT
from fedapps.messages.line_search import LINE_SEARCH, STEPS, pack_losses
from fedapps.messages.schema import DIRECTION


def train(work: ClientWork) -> RecordDict:
    """Train one client for one round of LocalNewton, or measure its losses if the message is that of the line search.

    Args:
        work: The round.

    Returns:
        The content of the reply: the whole model after training, with what was preconditioned if that is less than the
        handshake said; or the losses.
    """
    if LINE_SEARCH in work.records:
        return losses_along(work)
    own = work.settings.own
    trained = local_problem(work).descend_preconditioned(
        work.arrays, search=own.local_search, hessian_share=own.hessian_share
    )
    content = reply(trained.arrays, trained.buffers, work, trained.loss)
    if trained.unseen:
        content[LAYOUT] = ConfigRecord({LAYOUT: trained.layout.to_json()})
    return content


def losses_along(work: ClientWork) -> RecordDict:
    """Measure the loss of a client's training data at step 0 and at the candidates of a line search.

    Args:
        work: The round, with the model at step 0, the direction and the candidates.

    Returns:
        The content of the reply: ``losses``.
    """
    steps = (0.0, *work.records[LINE_SEARCH][STEPS])
    models = (along(work.arrays, work.records[DIRECTION], step) for step in steps)
    losses = [work.task.evaluate(model, work.data.train, work.device)["loss"] for model in models]
    return pack_losses(losses)
