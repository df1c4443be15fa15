r"""FedPM's client (arXiv 2511.09100, equation 8), and what a client of one's own needs.

.. math:: \theta_i \leftarrow \theta_i - \eta\, P_i^{-1} g_i(\theta_i) \qquad (K \text{ times})

with the full Hessian for convex tasks and FOOF blocks for torch models. It sends ``P_i`` of the last step and
``M_i = P_i (theta_i - theta)`` of every block, and all other tensors as they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flwr.app import Message, MetricRecord, RecordDict

from fedapps.client_apps.problem import local_problem
from fedapps.client_apps.work import ClientWork
from fedapps.curvature.blocks import WireDtype
from fedapps.messages.blocks import pack_blocks
from fedapps.messages.schema import ARRAYS, NUM_EXAMPLES, unpack_arrays

if TYPE_CHECKING:
    from torch import nn

    from fedapps.curvature.foof import FoofPreconditioner


def train(work: ClientWork) -> RecordDict:
    """Train one client for one round of FedPM.

    Args:
        work: The round.

    Returns:
        The content of the reply: ``P_i`` and ``M_i`` of every block, and the other tensors.
    """
    own = work.settings.own
    trained = local_problem(work).descend_preconditioned(work.arrays, factor_min_rows=own.factor_min_rows)
    blocks = trained.blocks(WireDtype(own.wire))
    return pack_blocks(blocks, trained.layout, trained.arrays, trained.buffers, work.metrics(train_loss=trained.loss))


# For clients of one's own ---------------------------------------------------------------------------------


def received_model(model: nn.Module, message: Message) -> nn.Module:
    """Fill a model with what the server sent.

    Args:
        model: The model, built as on the server.
        message: A train or evaluate message.

    Returns:
        The same model.

    Raises:
        MessageError: The message holds no model.
        TaskError: It holds another one.
    """
    from fedapps.tasks.torch_arrays import load_module_arrays

    load_module_arrays(model, unpack_arrays(message.content, ARRAYS, "server's message"))
    return model


def fedpm_reply(
    foof: FoofPreconditioner,
    model: nn.Module,
    *,
    num_examples: int,
    wire: WireDtype = WireDtype.FLOAT32,
    **metrics: float,
) -> RecordDict:
    """Pack the reply of a client that trained with `FoofPreconditioner` in a loop of its own.

    Args:
        foof: The preconditioner after the round's last step.
        model: The model that it stepped.
        num_examples: Examples that the client trained on.
        wire: In which numbers ``P`` travels.
        **metrics: Further metrics, with ``_`` for ``-``.

    Returns:
        The content of the reply that the strategy `FedPM` expects.
    """
    from fedapps.client_apps.torch_problem import read_model

    values: dict[str, Any] = {name.replace("_", "-"): float(value) for name, value in metrics.items()}
    record = MetricRecord({NUM_EXAMPLES: num_examples, **values})
    return pack_blocks(foof.blocks(wire), foof.layout, *read_model(model), record)
