r"""FedSophia's client (arXiv 2406.06655): Sophia's steps, whose averages ``m`` and ``v`` go on from round to round.

.. math::
    m &\leftarrow \beta_1 m + (1 - \beta_1)\, g_i(\theta_i)\\
    v &\leftarrow \beta_2 v + (1 - \beta_2)\, B\, \hat g_i \odot \hat g_i \qquad \text{at the first and then every }
        \tau\text{-th step}\\
    \theta_i &\leftarrow \theta_i - \eta w \theta_i - \eta\, \mathrm{clip}(m / \max(v, \epsilon), \rho) \qquad (K \text{ times})

:math:`\hat g_i` is the batch's gradient, without regularisation, at labels drawn from the model. Steps are counted over rounds.
The client keeps ``m``, ``v`` and their number in its store, and goes on from those of its last folded reply.
"""

from __future__ import annotations

import numpy as np
from flwr.app import RecordDict

from fedapps.client_apps.fedavg import reply
from fedapps.client_apps.kept import keep, load_kept
from fedapps.client_apps.problem import Batch, State, Tensors, local_problem
from fedapps.client_apps.work import ClientWork
from fedapps.curvature import sophia

STEPS = "steps"
"""Name in the store, beside ``m/<tensor>`` and ``v/<tensor>``."""


def train(work: ClientWork) -> RecordDict:
    """Train one client for one round of FedSophia.

    Args:
        work: The round.

    Returns:
        The content of the reply: the whole model after training.

    Raises:
        TaskError: The task's labels cannot be drawn from the model.
    """
    own, problem = work.settings.own, local_problem(work)
    work.task.check_sampling()
    kept = load_kept(work)
    zeros = {f"{moment}/{name}": np.zeros_like(work.arrays[name]) for moment in "mv" for name in problem.names}
    found = kept.state or {**zeros, STEPS: np.array(0)}
    steps = int(found[STEPS])

    def step(theta: Tensors, state: State, batch: Batch) -> tuple[Tensors, State]:
        m, v = sophia.average(state["m"], batch.gradient, own.beta_1), state["v"]
        if (steps + batch.step) % own.refresh == 0:
            v = sophia.average(v, sophia.bartlett(batch.sampled_gradient(), batch.num_examples), own.beta_2)
        moved = sophia.step(theta, m, v, lr=work.lr, weight_decay=own.weight_decay, rho=own.rho, eps=own.eps)
        return moved, {"m": m, "v": v}

    held = {moment: {name: found[f"{moment}/{name}"] for name in problem.names} for moment in "mv"}
    trained = problem.descend_by(work.arrays, step, held)
    state = {f"{moment}/{name}": value for moment, values in trained.state.items() for name, value in values.items()}
    state[STEPS] = np.array(steps + work.num_steps, dtype=np.int64)
    return keep(work, kept, state, reply(trained.arrays, trained.buffers, work, trained.loss))
