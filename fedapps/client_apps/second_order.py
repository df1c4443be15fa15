r"""Clients that take second-order steps: FedPM and LocalNewton.

.. math:: \theta_i \leftarrow \theta_i - \eta\, P_i^{-1} g_i(\theta_i) \qquad (K \text{ times})

with the full Hessian for convex tasks and FOOF blocks for torch models (arXiv 2511.09100, equation 8). FedPM sends
``P_i`` of the last step and ``M_i = P_i (theta_i - theta)``; LocalNewton sends ``theta_i``, and in its line search the
losses along the averaged direction.
"""

from __future__ import annotations

from collections.abc import Mapping
from logging import getLogger
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from flwr.app import Message, MetricRecord, RecordDict

from fedapps.client_apps.first_order import reply
from fedapps.client_apps.work import ClientWork
from fedapps.compute import generator
from fedapps.curvature.blocks import WireDtype, triangle_block
from fedapps.curvature.layout import BlockSpec, Layout
from fedapps.curvature.line_search import along
from fedapps.curvature.newton import NewtonSteps, newton_steps
from fedapps.messages.blocks import pack_blocks
from fedapps.messages.line_search import DIRECTION, LINE_SEARCH, STEPS, pack_losses
from fedapps.messages.schema import ARRAYS, NUM_EXAMPLES, Arrays, unpack_arrays
from fedapps.tasks.base import Task
from fedapps.tasks.convex_task import WEIGHTS, ConvexTask

if TYPE_CHECKING:
    from torch import nn

    from fedapps.curvature.foof import FoofPreconditioner
    from fedapps.tasks.torch_task import TorchTask

logger = getLogger("flwr")


def preconditioned_names(task: Task) -> tuple[str, ...]:
    """Name the tensors of a task's model that have a curvature block.

    Args:
        task: The task.

    Returns:
        Parameter names.
    """
    if isinstance(task, ConvexTask):
        return (WEIGHTS,)
    from fedapps.curvature.layers import model_layout
    from fedapps.tasks.torch_task import TorchTask

    return model_layout(task.build_model()).preconditioned if isinstance(task, TorchTask) else ()


def train_fedpm(work: ClientWork) -> RecordDict:
    """Train one client for one round of FedPM.

    Args:
        work: The round.

    Returns:
        The content of the reply: ``P_i`` and ``M_i`` of every block, and the other tensors.
    """
    if isinstance(work.task, ConvexTask):
        steps, loss = _newton(work, work.task)
        spec = BlockSpec(WEIGHTS, (WEIGHTS,), 1, len(steps.theta))
        delta = (steps.theta - work.arrays[WEIGHTS])[None]
        block = triangle_block(spec, [steps.P], delta, WireDtype(work.settings.own.wire))
        return pack_blocks([block], Layout((spec,)), {}, {}, work.metrics(train_loss=loss))
    trained = _train_with_foof(work, factor_min_rows=work.settings.own.factor_min_rows)
    blocks = trained.foof.blocks(WireDtype(work.settings.own.wire))
    trainable, buffers = _others(trained.model, trained.foof.layout)
    metrics = work.metrics(train_loss=trained.loss)
    return pack_blocks(blocks, trained.foof.layout, trainable, buffers, metrics)


def train_localnewton(work: ClientWork) -> RecordDict:
    """Train one client for one round of LocalNewton, or measure its losses if the message is that of the line search.

    Args:
        work: The round.

    Returns:
        The content of the reply: the whole model after training, or the losses.
    """
    if LINE_SEARCH in work.records:
        return losses_along(work)
    if isinstance(work.task, ConvexTask):
        steps, loss = _newton(work, work.task)
        return reply({WEIGHTS: steps.theta}, {}, work, loss)
    from fedapps.client_apps.torch_training import read_model

    trained = _train_with_foof(work)
    return reply(*read_model(trained.model), work, trained.loss)


def losses_along(work: ClientWork) -> RecordDict:
    """Measure the loss of a client's training data at step 0 and at the candidates of a line search.

    Args:
        work: The round, with the model at step 0, the direction and the candidates.

    Returns:
        The content of the reply: ``losses``.
    """
    steps = (0.0, *work.records[LINE_SEARCH][STEPS])
    losses = [_loss(work, along(work.arrays, work.records[DIRECTION], step)) for step in steps]
    return pack_losses(losses)


def _loss(work: ClientWork, arrays: Arrays) -> float:
    if isinstance(work.task, ConvexTask):
        return work.task.objective(work.data.train).loss(arrays[WEIGHTS])
    task: TorchTask = work.task  # type: ignore[assignment]  # the only other kind of task
    return task.evaluate(arrays, work.data.train, work.device)["loss"]


def _newton(work: ClientWork, task: ConvexTask) -> tuple[NewtonSteps, float]:
    """Take ``K`` steps with the full Hessian of all the client's examples."""
    objective = task.objective(work.data.train)
    steps = newton_steps(
        objective,
        work.arrays[WEIGHTS],
        num_steps=work.settings.local_steps or work.settings.local_epochs,
        lr=work.lr,
        damping=work.settings.own.damping,
        where=work.where,
    )
    _warn_damping(work, {WEIGHTS: steps.added_damping} if steps.added_damping else {})
    return steps, objective.loss(steps.theta)


class _Trained(NamedTuple):
    model: nn.Module
    foof: FoofPreconditioner
    loss: float


def _train_with_foof(work: ClientWork, *, factor_min_rows: int = 0) -> _Trained:
    """Take the round's steps with FOOF blocks."""
    from fedapps.client_apps.torch_training import losses_of, prepare_model
    from fedapps.curvature.foof import Estimate, FoofPreconditioner

    task: TorchTask = work.task  # type: ignore[assignment]  # the only other kind of task
    own = work.settings.own
    model = prepare_model(work, task)
    foof = FoofPreconditioner(
        model,
        damping=own.damping,
        estimate=Estimate(own.estimate),
        decay=own.decay,
        refresh=own.refresh,
        max_rows=own.max_rows,
        max_width=own.max_width,
        factor_min_rows=factor_min_rows,
        seed=int(generator(work.settings.seed, work.server_round, work.node.partition, 2).integers(2**63)),
        where=work.where,
    )
    with foof:
        if own.estimate == Estimate.FULL_PASS:
            _pass_over_examples(work, task, model, foof)
        loss = losses_of(work, task, model, lambda: foof.step(work.lr))
    _warn_damping(work, foof.added_damping)
    return _Trained(model, foof, loss)


def _pass_over_examples(work: ClientWork, task: TorchTask, model: nn.Module, foof: FoofPreconditioner) -> None:
    """Show all of the client's examples to the preconditioner, in order."""
    from fedapps.client_apps.torch_training import batch_norm_fits

    n = work.num_examples
    size = min(work.settings.batch_size or n, n)
    random = work.augmentation()
    with foof.full_pass():
        for start in range(0, n, size):
            batch = task.augment(work.data.train.take(np.arange(start, min(start + size, n))), random)
            with batch_norm_fits(model, len(batch)):
                task.loss(model, *task.tensors(batch, work.device))


def _warn_damping(work: ClientWork, added: Mapping[str, float]) -> None:
    for layer, damping in added.items():
        logger.warning(
            "round %d, %s, layer '%s': its block could not be factorised; damping was raised by %.1e",
            work.server_round, work.where, layer, damping,
        )  # fmt: skip


def _others(model: nn.Module, layout: Layout) -> tuple[Arrays, Arrays]:
    """Read the trainable tensors that no block covers, and the buffers."""
    from fedapps.client_apps.torch_training import read_model

    trainable, buffers = read_model(model)
    return {name: value for name, value in trainable.items() if name not in layout.preconditioned}, buffers


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
    values: dict[str, Any] = {name.replace("_", "-"): float(value) for name, value in metrics.items()}
    record = MetricRecord({NUM_EXAMPLES: num_examples, **values})
    return pack_blocks(foof.blocks(wire), foof.layout, *_others(model, foof.layout), record)
