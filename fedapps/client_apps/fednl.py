r"""FedNL's client (Safaryan et al., ICML 2022, arXiv 2106.02969, Algorithm 1): its gradient, and what it learns of its Hessian.

.. math:: S_i = C(\nabla^2 f_i(\theta) - H_i), \qquad l_i = |H_i - \nabla^2 f_i(\theta)|_F, \qquad
          H_i \leftarrow H_i + \alpha S_i

It keeps :math:`H_i` in its store. Where only some clients take part (Algorithm 2) it sends, in place of its gradient, the
change of :math:`q_i = (H_i + l_i I)\,\theta - g_i` since its last folded reply. It keeps that too: the sum of the changes that
it sent, as rounded for the wire, so that the server's sum holds just that.
"""

from __future__ import annotations

import numpy as np
from flwr.app import RecordDict

from fedapps.client_apps.fedavg import reply
from fedapps.client_apps.kept import keep, load_kept
from fedapps.client_apps.localnewton import losses_along
from fedapps.client_apps.problem import local_problem
from fedapps.client_apps.work import ClientWork
from fedapps.curvature.compressors import Identity
from fedapps.curvature.fednl import learn, norm, product
from fedapps.curvature.flat import flatten, unflatten
from fedapps.curvature.packing import pack_upper
from fedapps.messages.hessians import add_hessian
from fedapps.messages.line_search import LINE_SEARCH


def train(work: ClientWork) -> RecordDict:
    """Learn for one round of FedNL, or measure losses if the message is that of the line search.

    Args:
        work: The round.

    Returns:
        The content of the reply: gradient (or change of ``q_i``), what was learned of the Hessian, and the buffers as they
        came; or the losses.
    """
    if LINE_SEARCH in work.records:
        return losses_along(work)
    own, problem, kept = work.settings.own, local_problem(work), load_kept(work)
    objective, theta = problem.objective(work.arrays), flatten(work.arrays, problem.names)
    hessian, g = pack_upper(objective.hessian(theta)), objective.gradient(theta)

    partial = work.settings.fraction_train < 1
    first = kept.state is None and own.initial == "exact"
    if first:
        H, message, error = hessian, Identity().compress(hessian), 0.0
    else:
        before = np.zeros_like(hessian) if kept.state is None else kept.state["H"]
        H, message = learn(before, hessian, own.compressor_of(len(theta)), own.alpha)
        error = norm((H if partial or own.hessian == "latest" else before) - hessian)

    state, sent = {"H": H}, g
    if partial:
        known = np.zeros_like(theta) if kept.state is None else kept.state["q"]
        sent = product(H, error, theta) - g - known
    arrays = unflatten(sent, work.arrays, problem.names)
    if partial:
        state["q"] = known + flatten(arrays, problem.names)

    buffers = {name: value for name, value in work.arrays.items() if name not in problem.names}
    content = reply(arrays, buffers, work, objective.loss(theta))
    add_hessian(content, first=first, message=message, error=error)
    return keep(work, kept, state, content)
