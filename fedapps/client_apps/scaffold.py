r"""SCAFFOLD's client (arXiv 1910.06378, Algorithm 1): gradient steps corrected by the difference of two control variates.

.. math::
    y_i &\leftarrow y_i - \eta\,(g_i(y_i) - c_i + c) \qquad (K \text{ times, from } x)\\
    c_i^+ &= g_i(x) \quad \text{(option I)}, \qquad c_i^+ = c_i - c + \frac{1}{K \eta} (x - y_i) \quad \text{(option II)}

It sends ``y_i - x`` and the change of ``c_i`` since its last folded reply, and keeps ``c_i`` in its store, in float64: the sum
of the changes that it sent, as rounded for the wire, so that the server's ``c`` holds just that.
"""

from __future__ import annotations

import numpy as np
from flwr.app import RecordDict

from fedapps.client_apps.fedavg import reply
from fedapps.client_apps.kept import keep, load_kept
from fedapps.client_apps.problem import local_problem
from fedapps.client_apps.work import ClientWork
from fedapps.messages.schema import CONTROL, Arrays, pack_arrays


def train(work: ClientWork) -> RecordDict:
    """Train one client for one round of SCAFFOLD.

    Args:
        work: The round, with the server's control variate ``c``.

    Returns:
        The content of the reply: the changes of the model and of the control variate, and the buffers.
    """
    problem, x, c, kept = local_problem(work), work.arrays, work.records[CONTROL], load_kept(work)
    held = kept.state or {f"c/{name}": np.zeros(x[name].shape) for name in problem.names}
    c_i = {name: held[f"c/{name}"] for name in problem.names}

    shift = {name: c[name] - c_i[name] for name in problem.names}
    trained = problem.descend(x, batches=work.batches(), shift=shift)
    dy = {name: trained.arrays[name] - x[name] for name in problem.names}
    if work.settings.own.option == "I":
        new = problem.gradient(x, work.all_examples()).arrays
    else:
        new = {name: c_i[name] - c[name] - dy[name] / (work.num_steps * work.lr) for name in problem.names}
    dc: Arrays = {name: (new[name] - c_i[name]).astype(x[name].dtype) for name in problem.names}

    content = reply(dy, trained.buffers, work, trained.loss)
    content[CONTROL] = pack_arrays(dc)
    return keep(work, kept, {f"c/{name}": c_i[name] + dc[name] for name in problem.names}, content)
