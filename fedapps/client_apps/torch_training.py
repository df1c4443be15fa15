"""The training loop of torch clients, shared by every method: model in, batches, one step a batch, model out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from fedapps.client_apps.work import ClientWork
from fedapps.errors import TaskError
from fedapps.messages.schema import Arrays
from fedapps.tasks.torch_arrays import module_arrays, trainable_names

if TYPE_CHECKING:
    from fedapps.tasks.torch_task import TorchTask


def prepare_model(work: ClientWork, task: TorchTask, arrays: Arrays | None = None) -> nn.Module:
    """Build the model that training starts from, and seed torch for the round.

    Args:
        work: The round.
        task: The task.
        arrays: Its parameters and buffers; None for those that the server sent.

    Returns:
        The model, on the client's device, in training mode.
    """
    model = task.module(work.arrays if arrays is None else arrays, work.device)
    torch.manual_seed(work.torch_seed)
    return model.train()


def losses_of(
    work: ClientWork,
    task: TorchTask,
    model: nn.Module,
    step: Callable[[], object],
    batches: Iterable[np.ndarray] | None = None,
    steps_a_batch: int = 1,
) -> float:
    """Run the batches of a round: forward, backward, step.

    Args:
        work: The round.
        task: The task.
        model: The model; gradients are cleared before each backward pass.
        step: Takes one step from the gradients that are in the model.
        batches: Indices of the batches; None for those of the round.
        steps_a_batch: Steps on each batch, which is drawn and augmented once for all of them.

    Returns:
        Mean loss over the examples of the round, each batch at the parameters before each of its steps.

    Raises:
        TaskError: The loss is not finite.
    """
    total, seen = 0.0, 0
    random = work.augmentation()
    drawn = (
        task.augment(work.data.train.take(indices), random)
        for indices in (work.batches() if batches is None else batches)
    )
    for k, batch in enumerate(batch for batch in drawn for _ in range(steps_a_batch)):
        # Copied for every step: a module may write into its inputs.
        inputs, targets = task.tensors(batch, work.device)
        model.zero_grad(set_to_none=True)
        with batch_norm_fits(model, len(batch)):
            loss = task.loss(model, inputs, targets)
        if not torch.isfinite(loss):
            raise TaskError(
                f"{work.where}, round {work.server_round}, local step {k}",
                expected="a finite loss",
                got=str(float(loss.detach())),
                do="lower the learning rate, or check the client's data",
            )
        loss.backward()  # type: ignore[no-untyped-call]
        step()
        total += float(loss.detach()) * len(batch)
        seen += len(batch)
    return total / seen


@contextmanager
def batch_norm_fits(model: nn.Module, batch_size: int) -> Iterator[None]:
    """Let batch normalisation use its running statistics for a batch of one example, which has no variance.

    Args:
        model: The model, in training mode.
        batch_size: Examples in the batch.

    Yields:
        Nothing; training mode is put back at the end.
    """
    frozen = []
    if batch_size == 1:
        frozen = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.training]
    for module in frozen:
        module.eval()
    try:
        yield
    finally:
        for module in frozen:
            module.train()


def read_model(model: nn.Module) -> tuple[Arrays, Arrays]:
    """Read a model after training.

    Args:
        model: The model.

    Returns:
        Trainable tensors by name, and buffers by name.
    """
    arrays = module_arrays(model)
    names = set(trainable_names(model))
    return (
        {name: value for name, value in arrays.items() if name in names},
        {name: value for name, value in arrays.items() if name not in names},
    )
