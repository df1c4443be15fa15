"""The clients of FedCLUP's relatives: pFedMe, Ditto and LocalTrain. Each keeps its personal model in its store."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from flwr.app import RecordDict

from fedapps.client_apps.first_order import reply
from fedapps.client_apps.local_problem import LocalProblem, Pull, Trained, local_problem
from fedapps.client_apps.personal_models import Kept, PersonalModel, load_personal, save_personal
from fedapps.client_apps.work import ClientWork
from fedapps.errors import TaskError
from fedapps.messages.schema import METRICS, STEP_LIMIT, STORE_LOST
from fedapps.personalization.pfedme import PFedMeConfig
from fedapps.personalization.proximal import pulled_step, safe_step, unstable_step


def train_pfedme(work: ClientWork) -> RecordDict:
    """Train one client for one round of pFedMe (arXiv 2006.08848, Algorithm 1).

    Args:
        work: The round.

    Returns:
        The content of the reply: the local copy ``w_i``; the personal model ``theta_i`` stays in the store.
    """
    own = work.settings.own
    kept = load_personal(work)
    config = PFedMeConfig(
        lam=own.lambda_,
        eta=own.eta,
        personal_lr=pulled_step(work.lr, own.lambda_, own.personal_lr),
        num_inner_steps=own.inner_steps,
    )
    problem = local_problem(work, work.arrays)
    limit = _passed_limit(work, problem, own.lambda_, config.personal_lr)
    with _naming(limit):
        local, theta = problem.move_with_copy(work.arrays, kept.model, config)
    return _finish(work, kept, theta, reply(local.arrays, local.buffers, work, theta.loss), limit)


def train_ditto(work: ClientWork) -> RecordDict:
    """Train one client for one round of Ditto (arXiv 2012.04221, Algorithm 1).

    Args:
        work: The round.

    Returns:
        The content of the reply: the copy of the global model; the personal model, trained on the same batches, stays in
        the store.
    """
    own = work.settings.own
    kept = load_personal(work)
    problem = local_problem(work, work.arrays)
    received = {name: work.arrays[name] for name in problem.names}
    local = problem.descend(work.arrays, Pull(received, 0.0), work.lr)
    step = pulled_step(work.lr, own.lambda_, own.personal_lr)
    limit = _passed_limit(work, problem, own.lambda_, step)
    with _naming(limit):
        personal = problem.descend(kept.model, Pull(received, own.lambda_), step)
    return _finish(work, kept, personal, reply(local.arrays, local.buffers, work, local.loss), limit)


def train_localtrain(work: ClientWork) -> RecordDict:
    """Train one client alone for one round.

    Args:
        work: The round; nothing of the message's model is used.

    Returns:
        The content of the reply: metrics.
    """
    kept = load_personal(work)
    problem = local_problem(work, kept.model)
    start = {name: kept.model[name] for name in problem.names}
    trained = problem.descend(kept.model, Pull(start, 0.0), work.lr)
    return _finish(work, kept, trained, reply({}, {}, work, trained.loss))


def _passed_limit(work: ClientWork, problem: LocalProblem, lam: float, step: float) -> float | None:
    """Give ``2/(L + lambda)`` if a step on the loss with the pull is not below it; None if it is, and after the first round.

    A client estimates ``L`` once: it costs six gradients, which training does not need.
    """
    if work.last_folded:
        return None
    limit = 2 * safe_step(problem.rough_curvature(work.arrays, problem.names), lam)
    return limit if step >= limit else None


@contextmanager
def _naming(limit: float | None) -> Iterator[None]:
    """Let the error of a training that diverged say that its step was beyond the limit."""
    try:
        yield
    except TaskError as error:
        if limit is None:
            raise
        raise TaskError(f"{error}; {unstable_step(limit)}") from error


def _finish(
    work: ClientWork, kept: Kept, personal: Trained, content: RecordDict, limit: float | None = None
) -> RecordDict:
    save_personal(work, PersonalModel({**personal.arrays, **personal.buffers}))
    if kept.lost:
        content.metric_records[METRICS][STORE_LOST] = 1.0
    if limit is not None:
        content.metric_records[METRICS][STEP_LIMIT] = limit
    return content
