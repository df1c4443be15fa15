r"""pFedMe's client (arXiv 2006.08848, Algorithm 1): inner steps of the personal model, and one of the local copy, a batch.

.. math:: \theta_i \leftarrow \theta_i - \eta_p\,(g_i(\theta_i) + \lambda (\theta_i - w_i)), \qquad
          w_i \leftarrow w_i - \eta \lambda\, (w_i - \theta_i)
"""

from __future__ import annotations

from flwr.app import RecordDict

from fedapps.client_apps.fedavg import reply
from fedapps.client_apps.personal_models import finish, load_personal, stable_step
from fedapps.client_apps.problem import local_problem
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
    own, kept, problem = work.settings.own, load_personal(work), local_problem(work)
    step = pulled_step(work.lr, own.lambda_, own.personal_lr)
    config = PFedMeConfig(
        lam=own.lambda_,
        eta=own.eta,
        personal_lr=step,
        num_inner_steps=own.inner_steps,
        inner_accuracy=own.inner_accuracy,
    )
    with stable_step(work, problem, own.lambda_, step) as metrics:
        local, theta = problem.move_with_copy(work.arrays, kept.model, config)
    return finish(work, kept, theta, reply(local.arrays, local.buffers, work, theta.loss), metrics)
