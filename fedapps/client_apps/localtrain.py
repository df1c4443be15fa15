"""LocalTrain's client: gradient descent on its own data alone, from where its last round ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flwr.app import RecordDict

from fedapps.client_apps.fedavg import reply
from fedapps.client_apps.personal_models import Begun, Descent, finish, load_personal
from fedapps.client_apps.problem import NO_PULL, Trained, local_problem
from fedapps.client_apps.work import ClientWork


def train(work: ClientWork) -> RecordDict:
    """Train one client alone for one round.

    Args:
        work: The round; nothing of the message's model is used.

    Returns:
        The content of the reply: metrics.
    """
    problem = local_problem(work)
    begun = begin(work, problem.names)
    return end(work, begun, [problem.descend(begun.descents[0].start)], {})


def begin(work: ClientWork, names: Sequence[str]) -> Begun:  # noqa: ARG001 - the same call for every method
    """Say what is to be trained: the personal model, which nothing pulls."""
    kept = load_personal(work)
    return Begun(kept, (Descent(kept.model, NO_PULL),))


def end(work: ClientWork, begun: Begun, trained: Sequence[Trained], metrics: Mapping[str, float]) -> RecordDict:
    """Keep the personal model, and pack metrics alone."""
    (personal,) = trained
    return finish(work, begun.kept, personal, reply({}, {}, work, personal.loss), metrics)
