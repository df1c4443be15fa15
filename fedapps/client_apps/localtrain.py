"""LocalTrain's client: gradient descent on its own data alone, from where its last round ended."""

from __future__ import annotations

from flwr.app import RecordDict

from fedapps.client_apps.fedavg import reply
from fedapps.client_apps.personal_models import finish, load_personal
from fedapps.client_apps.problem import local_problem
from fedapps.client_apps.work import ClientWork


def train(work: ClientWork) -> RecordDict:
    """Train one client alone for one round.

    Args:
        work: The round; nothing of the message's model is used.

    Returns:
        The content of the reply: metrics.
    """
    kept = load_personal(work)
    trained = local_problem(work).descend(kept.model)
    return finish(work, kept, trained, reply({}, {}, work, trained.loss))
