r"""pFedMe's client (arXiv 2006.08848, Algorithm 1): inner steps of the personal model, and one of the local copy, a batch.

.. math:: \theta_i \leftarrow \theta_i - \eta_p\,(g_i(\theta_i) + \lambda (\theta_i - w_i)), \qquad
          w_i \leftarrow w_i - \eta \lambda\, (w_i - \theta_i)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flwr.app import RecordDict

from fedapps.client_apps.fedavg import reply
from fedapps.client_apps.personal_models import Begun, Descent, finish, load_personal, stable_step
from fedapps.client_apps.problem import Pull, Trained, local_problem
from fedapps.client_apps.work import ClientWork
from fedapps.personalization.pfedme import PFedMeConfig
from fedapps.personalization.proximal import pulled_step


def train(work: ClientWork) -> RecordDict:
    """Train one client for one round of pFedMe.

    Args:
        work: The round.

    Returns:
        The content of the reply: the local copy ``w_i``; the personal model ``theta_i`` stays in the store.
    """
    problem, config = local_problem(work), config_of(work)
    begun = begin(work, problem.names)
    with stable_step(work, problem, config.lam, config.personal_lr) as metrics:
        trained = problem.move_with_copy(work.arrays, begun.descents[0].start, config)
    return end(work, begun, trained, metrics)


def config_of(work: ClientWork) -> PFedMeConfig:
    """Give pFedMe's numbers."""
    own = work.settings.own
    return PFedMeConfig(
        lam=own.lambda_,
        eta=own.eta,
        personal_lr=pulled_step(work.lr, own.lambda_, own.personal_lr),
        num_inner_steps=own.inner_steps,
        inner_accuracy=own.inner_accuracy,
    )


def begin(work: ClientWork, names: Sequence[str]) -> Begun:
    """Say what is to be trained: ``theta_i``, with a pull of ``names`` to the local copy, at first the received model."""
    kept, config = load_personal(work), config_of(work)
    received = {name: work.arrays[name] for name in names}
    return Begun(kept, (Descent(kept.model, Pull(received, config.lam, config.personal_lr)),))


def end(work: ClientWork, begun: Begun, trained: Sequence[Trained], metrics: Mapping[str, float]) -> RecordDict:
    """Keep ``theta_i``, the second of the models, and pack the local copy ``w_i``, the first."""
    local, theta = trained
    return finish(work, begun.kept, theta, reply(local.arrays, local.buffers, work, theta.loss), metrics)
