r"""Ditto's client (arXiv 2012.04221, Algorithm 1): FedAvg's, and beside it a personal model that is pulled to the received one.

.. math:: w_i \leftarrow w_i - \eta\, g_i(w_i), \qquad v_i \leftarrow v_i - \eta_p\,(g_i(v_i) + \lambda (v_i - w))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flwr.app import RecordDict

from fedapps.client_apps.fedavg import reply
from fedapps.client_apps.personal_models import Begun, Descent, finish, load_personal, stable_step
from fedapps.client_apps.problem import NO_PULL, Pull, Trained, local_problem
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
    own, problem = work.settings.own, local_problem(work)
    begun = begin(work, problem.names)
    start, pull = begun.descents[1]
    local = problem.descend(work.arrays)
    with stable_step(work, problem, pull.lam, pull.step) as metrics:
        batches = work.batches(num_steps=own.personal_steps) if own.personal_steps else None
        personal = problem.descend(start, pull, batches)
    return end(work, begun, [local, personal], metrics)


def begin(work: ClientWork, names: Sequence[str]) -> Begun:
    """Say what is to be trained: a copy of the received model, then the personal one, with a pull of ``names`` to that."""
    own, kept = work.settings.own, load_personal(work)
    received = {name: work.arrays[name] for name in names}
    pull = Pull(received, own.lambda_, pulled_step(work.lr, own.lambda_, own.personal_lr))
    return Begun(kept, (Descent(work.arrays, NO_PULL), Descent(kept.model, pull)))


def end(work: ClientWork, begun: Begun, trained: Sequence[Trained], metrics: Mapping[str, float]) -> RecordDict:
    """Keep the personal model, the second, and pack the copy of the global one, the first."""
    local, personal = trained
    return finish(work, begun.kept, personal, reply(local.arrays, local.buffers, work, local.loss), metrics)
