r"""The local problem of a torch model: the training loop, FOOF blocks, curvature by Hessian-vector products, fits to halves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim.sgd import sgd
from typing_extensions import override

from fedapps.client_apps.problem import (
    NO_PULL,
    Batch,
    LocalProblem,
    Preconditioned,
    Pull,
    Rule,
    State,
    Stepped,
    Tensors,
    Trained,
    warn_of_damping,
)
from fedapps.client_apps.torch_objective import Hessian, TorchObjective
from fedapps.client_apps.work import ClientWork
from fedapps.compute import generator
from fedapps.curvature.flat import flatten, unflatten
from fedapps.curvature.foof import Estimate, FoofPreconditioner
from fedapps.curvature.layers import model_layout
from fedapps.curvature.layout import Layout
from fedapps.curvature.traces import no_traces
from fedapps.errors import TaskError
from fedapps.messages.schema import Arrays
from fedapps.personalization.local_fits import LocalFit, fit_of_folds
from fedapps.personalization.pfedme import PFedMeConfig, local_step
from fedapps.personalization.proximal import curvature_by_differences
from fedapps.personalization.torch_proximal import add_proximal_gradient, largest_curvature, squared_gradient
from fedapps.settings import Settings
from fedapps.tasks.base import Data
from fedapps.tasks.torch_arrays import array_tensor, module_arrays, trainable_names
from fedapps.tasks.torch_task import EVALUATION_BATCH, TorchTask, evaluation_mode


@dataclass(frozen=True)
class TorchBatch(Batch):
    """The examples of a step, and the model before it, in training mode with its gradients."""

    step: int
    num_examples: int
    model: nn.Module
    parameters: Mapping[str, nn.Parameter]
    loss: Callable[[], Tensor]
    """Computes the loss of the batch anew; `gradient` is that of an earlier pass, with other draws of dropout."""
    sampled_loss: Callable[[], Tensor]
    """Likewise, at labels drawn from the model."""
    where: str

    @property
    def gradient(self) -> Tensors:  # type: ignore[override]
        """Give the gradients that are in the model; zero where there are none."""
        return {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in self.parameters.items()}

    @override
    def hessian_row(self) -> Tensors:
        parameters = list(self.parameters.values())
        # Of the kinds of attention only this one can be differentiated twice.
        with no_traces(self.model), sdpa_kernel(SDPBackend.MATH), self._differentiable():
            gradients = torch.autograd.grad(
                self.loss(), parameters, create_graph=True, allow_unused=True, materialize_grads=True
            )
            g_1 = gradients[0].reshape(-1)[0]
            if not g_1.requires_grad:
                return {name: torch.zeros_like(p) for name, p in self.parameters.items()}
            row = torch.autograd.grad(g_1, parameters, allow_unused=True, materialize_grads=True)
        return dict(zip(self.parameters, row, strict=True))

    @override
    def sampled_gradient(self) -> Tensors:
        with no_traces(self.model):
            found = torch.autograd.grad(
                self.sampled_loss(), list(self.parameters.values()), allow_unused=True, materialize_grads=True
            )
        return dict(zip(self.parameters, found, strict=True))

    @contextmanager
    def _differentiable(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise TaskError(
                f"{self.where}, first row of the Hessian",
                expected="a model that can be differentiated twice",
                got=str(error).splitlines()[0],
                do="leave modules without a second derivative (EmbeddingBag) out of it, or take fedsophia or a first-order"
                " method, which need none",
            ) from error


class TorchProblem(LocalProblem):
    """The local problem of a torch task.

    Args:
        work: The round.
        task: Its task.
    """

    def __init__(self, work: ClientWork, task: TorchTask) -> None:
        self._work = work
        self._task = task

    @staticmethod
    @override
    def layout(task: TorchTask, settings: Settings) -> Layout:
        return model_layout(task.build_model(), max_width=settings.own.max_width)

    @cached_property
    @override
    def names(self) -> tuple[str, ...]:
        return tuple(self._task.trainable_names())

    @override
    def objective(self, arrays: Arrays) -> TorchObjective:
        work = self._work
        return TorchObjective(
            self._task,
            self._task.module(arrays, work.device),
            self.names,
            work.data.train,
            device=work.device,
            kind=Hessian(work.settings.own.curvature),
            where=work.where,
        )

    @override
    def gradient(self, arrays: Arrays, batches: Iterable[np.ndarray] | None = None) -> Trained:
        """Compute the gradient in training mode, as that of a step is, and sum the batches in float64."""
        model = self._model(arrays)
        parameters, seen = _trainable(model), 0
        total = {name: np.zeros(p.shape) for name, p in parameters.items()}

        def add(batch: Data) -> None:
            nonlocal seen
            seen += len(batch)
            for name, p in parameters.items():
                if p.grad is not None:
                    total[name] += len(batch) * p.grad.cpu().numpy().astype(np.float64)

        trained = self._train(model, add, batches)
        mean = {name: (total[name] / seen).astype(arrays[name].dtype) for name in total}
        return Trained(mean, trained.buffers, trained.loss)

    @override
    def descend(
        self,
        start: Arrays,
        pull: Pull = NO_PULL,
        batches: Iterable[np.ndarray] | None = None,
        shift: Arrays | None = None,
    ) -> Trained:
        model = self._model(start)
        parameters = _trainable(model)
        anchor = {n: array_tensor(pull.anchor[n], p) for n, p in parameters.items() if n in pull.anchor}
        shifts = {n: array_tensor(value, parameters[n]) for n, value in (shift or {}).items()}
        pulled = [p for n, p in parameters.items() if n in anchor]
        others = [p for n, p in parameters.items() if n not in anchor]
        steps = _PlainSteps(
            [(pulled, pull.step), (others, self._work.lr)],
            momentum=self._work.settings.local_momentum,
            weight_decay=self._work.settings.weight_decay,
        )

        def take_step(_: Data) -> None:
            if pull.lam:
                add_proximal_gradient(model, anchor, pull.lam)
            for name, value in shifts.items():
                p = parameters[name]
                p.grad = value.clone() if p.grad is None else p.grad.add_(value)
            steps.take()

        return self._train(model, take_step, batches)

    @override
    def descend_by(self, start: Arrays, rule: Rule, state: Mapping[str, Arrays] | None = None) -> Stepped:
        model = self._model(start)
        parameters, taken = _trainable(model), 0
        held: State = {
            kind: {name: array_tensor(arrays[name], p) for name, p in parameters.items()}
            for kind, arrays in (state or {}).items()
        }
        labels = torch.Generator(self._work.device).manual_seed(int(self._work.labels().integers(2**63)))

        def take_step(data: Data) -> None:
            nonlocal held, taken
            loss, sampled = partial(self._loss, model, data), partial(self._sampled_loss, model, data, labels)
            batch = TorchBatch(taken, len(data), model, parameters, loss, sampled, self._work.where)
            moved, held = rule({name: p.detach() for name, p in parameters.items()}, held, batch)
            taken += 1
            with torch.no_grad():
                for name, p in parameters.items():
                    p.copy_(moved[name])

        trained = self._train(model, take_step)
        kept = {kind: {name: value.cpu().numpy() for name, value in values.items()} for kind, values in held.items()}
        return Stepped(trained.arrays, trained.buffers, trained.loss, kept)

    @override
    def descend_preconditioned(
        self, start: Arrays, *, factor_min_rows: int = 0, search: bool = False, hessian_share: float = 1.0
    ) -> Preconditioned:
        """Take ``K`` steps with FOOF blocks."""
        work, own = self._work, self._work.settings.own
        model = self._model(start)
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
                self._show_all(model, foof)
            trained = self._train(model, lambda _: foof.step(work.lr))
        warn_of_damping(work, foof.added_damping)
        return Preconditioned(trained.arrays, trained.buffers, trained.loss, foof.layout, foof.unseen, foof.blocks)

    @override
    def move_with_copy(self, received: Arrays, theta: Arrays, config: PFedMeConfig) -> tuple[Trained, Trained]:
        model = self._model(theta)
        parameters = _trainable(model)
        steps = _PlainSteps([(list(parameters.values()), config.personal_lr)])
        local = {name: array_tensor(received[name], p) for name, p in parameters.items()}
        taken = 0

        def inner_step(_: Data) -> bool:
            nonlocal taken
            add_proximal_gradient(model, local, config.lam)
            accurate = config.inner_accuracy > 0 and squared_gradient(model) <= config.inner_accuracy
            if not accurate:
                steps.take()
                taken += 1
            solved = accurate or taken == config.num_inner_steps
            if solved:
                taken = 0
                for name, p in parameters.items():
                    local[name] = local_step(local[name], p.detach(), config.eta, config.lam)
            return solved

        personal = self._train(model, inner_step, steps_a_batch=config.num_inner_steps)
        copy = {name: tensor.cpu().numpy() for name, tensor in local.items()}
        return Trained(copy, personal.buffers, personal.loss), personal

    @override
    def fit(self, received: Arrays, pull: Pull) -> tuple[Trained, LocalFit]:
        """Fit the client's data, and each half of it, by ``K`` steps; one example reports its whole step as noise."""
        whole = self.descend(received, pull)
        order = np.arange(self._work.num_examples)
        halves = [
            self.descend(received, pull, self._work.batches(half)).arrays
            for half in (order[::2], order[1::2])
            if len(half)
        ]
        fits = halves if len(halves) > 1 else [whole.arrays, received]
        names = tuple(name for name in self.names if name in pull.anchor)
        report = fit_of_folds(
            [flatten(fit, names) for fit in fits],
            [self._gradient({**received, **fit}, names, self._work.data.train) for fit in fits],
            flatten(whole.arrays, names),
            flatten(received, names),
            self._work.num_examples,
        )
        return whole, report

    @override
    def largest_curvature(self, arrays: Arrays, names: Sequence[str]) -> float:
        """Estimate ``L`` by power iterations, in evaluation mode, on at most `EVALUATION_BATCH` examples.

        By differences of gradients where the model cannot be differentiated twice.
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
                expected="a model that can be differentiated twice, or parameters in float32",
                got=str(error),
                do="set fedclup.gamma-rule=average or a number for fedclup.gamma, which need no curvature",
            ) from error

    @override
    def least_curvature(self, arrays: Arrays) -> None:
        return None

    @override
    def rough_curvature(self, arrays: Arrays, names: Sequence[str]) -> float:
        """Estimate ``L`` by differences of gradients, in evaluation mode."""
        batch = self._work.data.train.take(next(self._work.batches()))
        return curvature_by_differences(
            lambda theta: self._gradient({**arrays, **unflatten(theta, arrays, names)}, names, batch),
            flatten(arrays, names),
        )

    def _model(self, arrays: Arrays) -> nn.Module:
        """Build the model that training starts from, and seed torch for the round."""
        model = self._task.module(arrays, self._work.device)
        torch.manual_seed(self._work.torch_seed)
        return model.train()

    def _train(
        self,
        model: nn.Module,
        take_step: Callable[[Data], object],
        batches: Iterable[np.ndarray] | None = None,
        steps_a_batch: int = 1,
    ) -> Trained:
        """Run batches forward, backward, step.

        Args:
            model: The model; gradients are cleared before each backward pass.
            take_step: Takes one step from the gradients that are in the model, of the batch, and says
                whether it is done with this batch before `steps_a_batch`.
            batches: Indices of the batches; None for those of the round.
            steps_a_batch: Most steps on each batch, which is drawn and augmented once for all of them.

        Returns:
            The model; its loss is the mean over examples, each batch at the parameters before each of its steps.

        Raises:
            TaskError: The loss is not finite.
        """
        work, total, seen, k = self._work, 0.0, 0, 0
        for batch in self._augmented(work.batches() if batches is None else batches):
            for _ in range(steps_a_batch):
                model.zero_grad(set_to_none=True)
                loss = self._loss(model, batch)
                if not torch.isfinite(loss):
                    raise TaskError(
                        f"{work.where}, round {work.server_round}, local step {k}",
                        expected="a finite loss",
                        got=str(float(loss.detach())),
                        do="lower the learning rate, or check the client's data",
                    )
                torch.autograd.backward(loss)
                done = take_step(batch)
                total += float(loss.detach()) * len(batch)
                seen += len(batch)
                k += 1
                if done:
                    break
        return Trained(*read_model(model), total / seen)

    def _augmented(self, batches: Iterable[np.ndarray]) -> Iterator[Data]:
        random = self._work.augmentation()
        return (self._task.augment(self._work.data.train.take(indices), random) for indices in batches)

    def _loss(self, model: nn.Module, batch: Data) -> Tensor:
        # Copied for every step: a module may write into its inputs.
        inputs, targets = self._task.tensors(batch, self._work.device)
        with _batch_norm_fits(model, len(batch)):
            return self._task.loss(model, inputs, targets)

    def _sampled_loss(self, model: nn.Module, batch: Data, labels: torch.Generator) -> Tensor:
        inputs, _ = self._task.tensors(batch, self._work.device)
        with _batch_norm_fits(model, len(batch)):
            outputs = self._task.outputs(model, inputs)
        return self._task.criterion(outputs, self._task.sample_targets(outputs.detach(), labels))

    def _show_all(self, model: nn.Module, foof: FoofPreconditioner) -> None:
        """Show all of the client's examples to the preconditioner, in order."""
        with foof.full_pass():
            for batch in self._augmented(self._work.all_examples()):
                self._loss(model, batch)

    def _gradient(self, arrays: Arrays, names: Sequence[str], data: Data) -> np.ndarray:
        """Compute the gradient of the mean loss over some examples, in evaluation mode."""
        model = self._task.module(arrays, self._work.device)
        with evaluation_mode(model):
            for indices in self._task.evaluation_batches(data):
                batch = data.take(indices)
                loss = self._task.loss(model, *self._task.tensors(batch, self._work.device))
                torch.autograd.backward(loss * (len(batch) / len(data)))
        gradients = {
            name: np.zeros(p.shape) if p.grad is None else p.grad.cpu().numpy() for name, p in model.named_parameters()
        }
        return flatten(gradients, names)


class _PlainSteps:
    """The steps of torch's SGD, by its function: the class loads torch's compiler, seconds in each process that trains.

    Args:
        groups: Parameters, and their step.
        momentum: Share of the last direction that is kept.
        weight_decay: Added to gradients, times the parameters.
    """

    def __init__(
        self,
        groups: Sequence[tuple[Sequence[nn.Parameter], float]],
        *,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
    ) -> None:
        self._groups, self._momentum, self._weight_decay = groups, momentum, weight_decay
        self._directions: dict[nn.Parameter, Tensor | None] = {}

    @torch.no_grad()
    def take(self) -> None:
        """Take a step from the gradients that are in the parameters."""
        for parameters, lr in self._groups:
            moving = {p: p.grad for p in parameters if p.grad is not None}
            if not moving:
                continue
            directions = [self._directions.get(p) for p in moving]
            sgd(
                list(moving),
                list(moving.values()),
                directions,
                has_sparse_grad=any(g.is_sparse for g in moving.values()),
                weight_decay=self._weight_decay,
                momentum=self._momentum,
                lr=lr,
                dampening=0.0,
                nesterov=False,
                maximize=False,
            )
            self._directions |= dict(zip(moving, directions, strict=True))


def read_model(model: nn.Module) -> tuple[Arrays, Arrays]:
    """Read a model after training.

    Args:
        model: The model.

    Returns:
        Trainable tensors by name, and buffers by name.
    """
    arrays = module_arrays(model)
    trainable = {name: arrays.pop(name) for name in trainable_names(model)}
    return trainable, arrays


@contextmanager
def _batch_norm_fits(model: nn.Module, batch_size: int) -> Iterator[None]:
    """Let batch normalisation use its running statistics for a batch of one example, which has no variance."""
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


def _trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}
