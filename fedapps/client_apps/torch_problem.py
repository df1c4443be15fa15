r"""The local problem of a torch model: steps with a pull, curvature by Hessian-vector products, fits to halves of the data."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from fedapps.client_apps.local_problem import Pull, Trained
from fedapps.client_apps.torch_training import losses_of, prepare_model, read_model
from fedapps.client_apps.work import ClientWork
from fedapps.errors import TaskError
from fedapps.messages.schema import Arrays
from fedapps.personalization.local_fits import LocalFit, fit_of_folds
from fedapps.personalization.pfedme import PFedMeConfig, local_step
from fedapps.personalization.proximal import curvature_by_differences
from fedapps.personalization.torch_proximal import add_proximal_gradient, largest_curvature
from fedapps.tasks.base import Data
from fedapps.tasks.torch_arrays import trainable_names
from fedapps.tasks.torch_task import EVALUATION_BATCH, evaluation_mode

if TYPE_CHECKING:
    from fedapps.tasks.torch_task import TorchTask


class TorchProblem:
    """The local problem of a torch task; see `fedapps.client_apps.local_problem.LocalProblem`.

    Args:
        work: The round.
        task: Its task.
        arrays: A model of the task, for the names of its tensors.
    """

    def __init__(self, work: ClientWork, task: TorchTask, arrays: Arrays) -> None:
        self.names = tuple(trainable_names(task.module(arrays)))
        self._work = work
        self._task = task

    def descend(self, start: Arrays, pull: Pull, step: float, examples: np.ndarray | None = None) -> Trained:
        """Take the round's ``K`` steps of gradient descent.

        Args:
            start: The model to start from.
            pull: The pull on the personal tensors; the others take plain steps of the learning rate in force.
            step: Step of the personal tensors.
            examples: Indices of the examples to train on, for as many steps as with all; None for all.

        Returns:
            The model after the steps.
        """
        model = prepare_model(self._work, self._task, start)
        optimizer = torch.optim.SGD(self._groups(model, pull, step), lr=step)
        anchor = self._tensors(pull.anchor)

        def one_step() -> None:
            if pull.lam:
                add_proximal_gradient(model, anchor, pull.lam)
            optimizer.step()

        loss = losses_of(self._work, self._task, model, one_step, self._work.batches(examples))
        return Trained(*read_model(model), loss)

    def _groups(self, model: nn.Module, pull: Pull, step: float) -> list[dict[str, object]]:
        trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
        groups: list[dict[str, object]] = [
            {"params": [p for name, p in trainable.items() if name in pull.anchor], "lr": step},
            {"params": [p for name, p in trainable.items() if name not in pull.anchor], "lr": self._work.lr},
        ]
        return [group for group in groups if group["params"]]

    def _tensors(self, arrays: Arrays) -> dict[str, Tensor]:
        return {name: torch.from_numpy(np.array(value)).to(self._work.device) for name, value in arrays.items()}

    def move_with_copy(self, received: Arrays, theta: Arrays, config: PFedMeConfig) -> tuple[Trained, Trained]:
        """Take pFedMe's local rounds.

        Args:
            received: The global model.
            theta: The personal model to start from.
            config: pFedMe's numbers.

        Returns:
            The local copy (with the buffers of the personal model, which alone sees data), and the personal model.
        """
        model = prepare_model(self._work, self._task, theta)
        parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        optimizer = torch.optim.SGD(parameters.values(), lr=config.personal_lr)
        local = self._tensors({name: received[name] for name in parameters})
        taken = 0

        def inner_step() -> None:
            nonlocal taken
            add_proximal_gradient(model, local, config.lam)
            optimizer.step()
            taken += 1
            if taken % config.num_inner_steps == 0:
                for name, p in parameters.items():
                    local[name] = local_step(local[name], p.detach(), config.eta, config.lam)

        loss = losses_of(self._work, self._task, model, inner_step, steps_a_batch=config.num_inner_steps)
        personal = Trained(*read_model(model), loss)
        return Trained({name: t.cpu().numpy() for name, t in local.items()}, personal.buffers, loss), personal

    def largest_curvature(self, arrays: Arrays, names: tuple[str, ...]) -> float:
        """Estimate the greatest curvature of the loss by power iterations, on at most `EVALUATION_BATCH` examples.

        Args:
            arrays: The model at which it is estimated.
            names: The tensors that it is about.

        Returns:
            The estimate.

        Raises:
            TaskError: The model cannot be differentiated twice.
        """
        model = self._task.module(arrays, self._work.device)
        parameters = dict(model.named_parameters())
        examples = self._work.data.train.take(np.arange(min(self._work.num_examples, EVALUATION_BATCH)))
        inputs, targets = self._task.tensors(examples, self._work.device)
        try:
            with evaluation_mode(model):
                return largest_curvature(
                    lambda: self._task.loss(model, inputs, targets), [parameters[name] for name in names]
                )
        except RuntimeError as error:
            raise TaskError(
                f"{self._work.where}, curvature of the loss",
                expected="a model that can be differentiated twice",
                got=str(error),
                do="set fedclup.gamma-rule=average or a number for fedclup.gamma, which need no curvature",
            ) from error

    def rough_curvature(self, arrays: Arrays, names: tuple[str, ...]) -> float:
        """Estimate ``L`` by differences of gradients, in evaluation mode, as `LocalProblem.rough_curvature` says."""
        batch = self._work.data.train.take(next(self._work.batches()))
        return curvature_by_differences(
            lambda theta: self._gradient({**arrays, **_shaped(theta, arrays, names)}, names, batch),
            _flat(arrays, names),
        )

    def fit(self, received: Arrays, pull: Pull, step: float) -> tuple[Trained, LocalFit]:
        """Fit the client's data, and each half of it, by the round's ``K`` steps.

        Args:
            received: The model to start from.
            pull: A weak pull to it.
            step: Step of the personal tensors.

        Returns:
            The fit to all the data, and its report. A client of one example reports its whole step as noise.
        """
        whole = self.descend(received, pull, step)
        order = np.arange(self._work.num_examples)
        halves = [self.descend(received, pull, step, half).arrays for half in (order[::2], order[1::2]) if len(half)]
        fits = halves if len(halves) > 1 else [whole.arrays, received]
        names = tuple(pull.anchor)
        report = fit_of_folds(
            [_flat(fit, names) for fit in fits],
            [self._gradient({**received, **fit}, names, self._work.data.train) for fit in fits],
            _flat(whole.arrays, names),
            _flat(received, names),
            self._work.num_examples,
        )
        return whole, report

    def _gradient(self, arrays: Arrays, names: tuple[str, ...], data: Data) -> np.ndarray:
        """Compute the gradient of the mean loss over some examples, in evaluation mode."""
        model = self._task.module(arrays, self._work.device)
        with evaluation_mode(model):
            for start in range(0, len(data), EVALUATION_BATCH):
                batch = data.take(np.arange(start, min(start + EVALUATION_BATCH, len(data))))
                loss = self._task.loss(model, *self._task.tensors(batch, self._work.device))
                (loss * (len(batch) / len(data))).backward()  # type: ignore[no-untyped-call]
        gradients = {
            name: np.zeros(p.shape) if p.grad is None else p.grad.cpu().numpy() for name, p in model.named_parameters()
        }
        return _flat(gradients, names)


def _flat(arrays: Arrays, names: Iterable[str]) -> np.ndarray:
    return np.concatenate([np.asarray(arrays[name], dtype=np.float64).ravel() for name in names])


def _shaped(flat: np.ndarray, arrays: Arrays, names: Iterable[str]) -> Arrays:
    """Undo `_flat`."""
    shaped, start = {}, 0
    for name in names:
        like = arrays[name]
        shaped[name] = flat[start : start + like.size].reshape(like.shape).astype(like.dtype)
        start += like.size
    return shaped
