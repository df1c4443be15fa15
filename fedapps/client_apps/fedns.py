r"""FedNS's client (arXiv 2401.02734): its gradient, and a sketch of a square root of its Hessian.

.. math:: Y_i = S_i R_i, \qquad R_i' R_i = \nabla^2 f_i(\theta) - \lambda I, \qquad \mathrm{E}[S_i' S_i] = I

Logistic regression and least squares have :math:`R_i = \mathrm{diag}(\sqrt{w})\, X / \sqrt{n_i}`, torch models the root of
their generalised Gauss-Newton matrix, in evaluation mode. The gradient is that of `fedapps.client_apps.psgd`.
"""

from __future__ import annotations

from typing import cast

from flwr.app import RecordDict

from fedapps.client_apps.fedavg import reply
from fedapps.client_apps.problem import local_problem
from fedapps.client_apps.work import ClientWork
from fedapps.compute import generator
from fedapps.curvature.flat import flatten, unflatten_rows
from fedapps.curvature.newton import Rooted
from fedapps.curvature.sketches import Sketch, sketch
from fedapps.messages.schema import SKETCH, pack_arrays


def train(work: ClientWork) -> RecordDict:
    """Compute one client's gradient and sketch.

    Args:
        work: The round.

    Returns:
        The content of the reply: the gradient of each trainable tensor, ``Y_i`` cut into tensors, ``(k, ...)`` each, and the
        buffers that the batches leave.

    Raises:
        TaskError: The objective has no square root of its Hessian.
        CurvatureError: The model is too large.
    """
    own, problem = work.settings.own, local_problem(work)
    work.task.check_square_root()
    found = problem.gradient(work.arrays)
    R = cast("Rooted", problem.objective(work.arrays)).square_root(flatten(work.arrays, problem.names))
    whose = () if own.shared else (work.node.partition,)
    Y = sketch(
        R, own.size or R.shape[1], Sketch(own.sketch), generator(work.settings.seed, work.server_round, *whose, 6)
    )
    content = reply(found.arrays, found.buffers, work, found.loss)
    content[SKETCH] = pack_arrays(unflatten_rows(Y, work.arrays, problem.names))
    return content
