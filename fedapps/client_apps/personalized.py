"""The clients of FedCLUP's relatives: pFedMe, Ditto and LocalTrain. Each keeps its personal model in its store."""

from __future__ import annotations

from flwr.app import RecordDict

from fedapps.client_apps.first_order import reply
from fedapps.client_apps.local_problem import Pull, Trained, local_problem
from fedapps.client_apps.personal_models import Kept, PersonalModel, load_personal, save_personal
from fedapps.client_apps.work import ClientWork
from fedapps.personal_settings import pulled_step
from fedapps.personalization.pfedme import PFedMeConfig
from fedapps.records import METRICS, STORE_LOST


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
    local, theta = local_problem(work, work.arrays).move_with_copy(work.arrays, kept.model, config)
    return _finish(work, kept, theta, reply(local.arrays, local.buffers, work, theta.loss))


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
    personal = problem.descend(kept.model, Pull(received, own.lambda_), step)
    return _finish(work, kept, personal, reply(local.arrays, local.buffers, work, local.loss))


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


def _finish(work: ClientWork, kept: Kept, personal: Trained, content: RecordDict) -> RecordDict:
    save_personal(work, PersonalModel({**personal.arrays, **personal.buffers}))
    if kept.lost:
        content.metric_records[METRICS][STORE_LOST] = 1.0
    return content
