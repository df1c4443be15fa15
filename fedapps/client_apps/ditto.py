r"""Ditto's client (arXiv 2012.04221, Algorithm 1): FedAvg's, and beside it a personal model that is pulled to the received one.

.. math:: w_i \leftarrow w_i - \eta\, g_i(w_i), \qquad v_i \leftarrow v_i - \eta_p\,(g_i(v_i) + \lambda (v_i - w))
"""

from __future__ import annotations

from flwr.app import RecordDict

from fedapps.client_apps.fedavg import reply
from fedapps.client_apps.personal_models import finish, load_personal, stable_step
from fedapps.client_apps.problem import Pull, local_problem
from fedapps.client_apps.work import ClientWork
from fedapps.personalization.proximal import pulled_step


def train(work: ClientWork) -> RecordDict:
    """Train one client for one round of Ditto.

    Args:
        work: The round.

    Returns:
        The content of the reply: the copy of the global model; the personal model, trained on the same batches (for
        ``personal-steps`` of them, going on beyond the last if these are more), stays in the store.
    """
    own, kept, problem = work.settings.own, load_personal(work), local_problem(work)
    local = problem.descend(work.arrays)
    step = pulled_step(work.lr, own.lambda_, own.personal_lr)
    with stable_step(work, problem, own.lambda_, step) as metrics:
        batches = work.batches(num_steps=own.personal_steps) if own.personal_steps else None
        personal = problem.descend(kept.model, Pull(work.arrays, own.lambda_, step), batches)
    return finish(work, kept, personal, reply(local.arrays, local.buffers, work, local.loss), metrics)
