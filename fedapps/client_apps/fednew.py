r"""FedNew's client (Elgabli et al., ICML 2022, arXiv 2206.08829, Algorithm 1): one pass of ADMM for the Newton direction.

.. math:: \lambda_i \leftarrow \lambda_i + \rho\,(y_i - y), \qquad
          y_i = (H_i + (\alpha + \rho) I)^{-1} (g_i - \lambda_i + \rho\, y)

The first line is the end of the client's last folded round, whose ``y`` it learns now; the ``y`` of the second is the latest.
It keeps :math:`\lambda_i`, :math:`y_i` as it was sent, and its Hessian where that serves for several rounds.
"""

from __future__ import annotations

import numpy as np
from flwr.app import RecordDict

from fedapps.client_apps.fedavg import reply
from fedapps.client_apps.kept import keep, load_kept
from fedapps.client_apps.problem import local_problem, warn_of_damping
from fedapps.client_apps.work import ClientWork
from fedapps.curvature.fednew import next_dual, primal
from fedapps.curvature.flat import flatten, unflatten
from fedapps.curvature.packing import pack_upper, unpack_upper
from fedapps.messages.schema import DIRECTION, OWN_DIRECTION, Arrays


def train(work: ClientWork) -> RecordDict:
    """Compute one client's direction.

    Args:
        work: The round, with the last direction and that of the client's last folded round.

    Returns:
        The content of the reply: the direction ``y_i`` by name, and the buffers as they came.
    """
    own, problem, kept = work.settings.own, local_problem(work), load_kept(work)
    objective, theta = problem.objective(work.arrays), flatten(work.arrays, problem.names)
    g, y = objective.gradient(theta), flatten(work.records[DIRECTION], problem.names)

    dual, state = np.zeros_like(theta), kept.state
    if state is not None:
        mean = flatten(work.records.get(OWN_DIRECTION, work.records[DIRECTION]), problem.names)
        dual = next_dual(state["dual"], state["y"], mean, own.rho)
    hessian, age = _hessian(state, own.refresh)
    if hessian is None:
        hessian, age = pack_upper(objective.hessian(theta)), 0

    y_i, added = primal(unpack_upper(hessian), g, dual, y, alpha=own.alpha, rho=own.rho, where=work.where)
    warn_of_damping(work, {"all": added} if added else {})
    arrays = unflatten(y_i, work.arrays, problem.names)
    new: Arrays = {"dual": dual, "y": flatten(arrays, problem.names)}
    if own.refresh != 1:
        new |= {"hessian": hessian, "age": np.array(age + 1)}

    buffers = {name: value for name, value in work.arrays.items() if name not in problem.names}
    return keep(work, kept, new, reply(arrays, buffers, work, objective.loss(theta)))


def _hessian(state: Arrays | None, refresh: int) -> tuple[np.ndarray | None, int]:
    """Give the Hessian that is kept, and for how many folded rounds it has served; None where a new one is due."""
    if state is None or "hessian" not in state:
        return None, 0
    age = int(state["age"])
    return (state["hessian"] if refresh == 0 or age < refresh else None), age
