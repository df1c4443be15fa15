r"""The loss of a small torch model as a function of one vector, with a dense Hessian, for Newton-type methods.

With outputs :math:`z_j` of example ``j``, their Jacobian :math:`J_j = \partial z_j / \partial \theta` ``(c, d)`` and the
Hessian :math:`B_j` of the loss in ``z_j`` ``(c, c)``:

.. math:: \nabla^2 f = \frac1n \sum_j J_j' B_j J_j + \frac1n \sum_j \sum_a \frac{\partial \ell}{\partial z_{ja}} \nabla^2 z_{ja}

The first sum is the generalised Gauss-Newton matrix. It is positive semidefinite for a loss that is convex in the outputs, and
equals the Hessian of a model that is linear in its parameters (Schraudolph, Neural Computation 14, 2002).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacrev, vmap
from typing_extensions import override

from fedapps.curvature.newton import MOST_DENSE_BYTES, Matrix, Vector, check_dense
from fedapps.errors import CurvatureError, TaskError
from fedapps.tasks.base import Data
from fedapps.tasks.torch_task import TorchTask, evaluation_mode

MOST_EXACT = 1000
"""Weights up to which the exact Hessian is taken where nothing else is asked: it costs a Hessian-vector product for each."""

CHUNK_BYTES = 2**27
"""Bytes of Jacobians that are held at once."""


class Hessian(StrEnum):
    """Which matrix stands for the Hessian of a torch model."""

    AUTO = "auto"
    """The exact one up to `MOST_EXACT` weights, else the Gauss-Newton matrix."""
    EXACT = "exact"
    GAUSS_NEWTON = "gauss-newton"


class TorchObjective:
    """The mean loss of some examples, in evaluation mode; a `fedapps.curvature.newton.Objective`.

    The model computes in its own numbers; sums over batches are kept in float64.

    Args:
        task: The task.
        model: Its model, whose buffers stay as they are.
        names: The parameters that ``theta`` holds, in this order.
        data: The examples, at least one.
        device: Where the model is.
        kind: Which matrix `hessian` gives.
        where: Whose it is, for errors.
    """

    def __init__(
        self,
        task: TorchTask,
        model: nn.Module,
        names: Sequence[str],
        data: Data,
        *,
        device: str,
        kind: Hessian = Hessian.AUTO,
        where: str,
    ) -> None:
        parameters = dict(model.named_parameters())
        self._task, self._model, self._data, self._device, self._where = task, model, data, device, where
        self._like = {name: parameters[name].detach() for name in names}
        self._d = sum(value.numel() for value in self._like.values())
        exact = kind is Hessian.EXACT or (kind is Hessian.AUTO and self._d <= MOST_EXACT)
        self.kind = Hessian.EXACT if exact else Hessian.GAUSS_NEWTON

    def loss(self, theta: Vector) -> float:
        """Compute the value."""
        with evaluation_mode(self._model), torch.no_grad():
            values = [float(self._loss(self._vector(theta), *batch)) * share for batch, share in self._batches()]
        return sum(values)

    def gradient(self, theta: Vector) -> Vector:
        """Compute the gradient, ``(d,)``."""
        total = np.zeros(self._d)
        with evaluation_mode(self._model):
            for batch, share in self._batches():
                total += share * _numpy(grad(self._loss)(self._vector(theta), *batch))
        return total

    def hessian(self, theta: Vector) -> Matrix:
        """Compute the exact Hessian or the Gauss-Newton matrix, ``(d, d)``.

        Raises:
            CurvatureError: It is too large to be held.
            TaskError: torch cannot differentiate the model in this way.
        """
        self._check_size()
        if self.kind is Hessian.EXACT:
            return self._exact(theta)
        total = np.zeros((self._d, self._d))
        for R in self._roots(theta):
            total += R.T @ R
        return total

    def square_root(self, theta: Vector) -> Matrix:
        r"""Compute a root of the Gauss-Newton matrix, ``(n c, d)``: :math:`R'R` is it.

        Raises:
            CurvatureError: It is too large to be held.
            TaskError: As `hessian`.
        """
        self._check_size()
        rows: list[Matrix] = []
        for R in self._roots(theta):
            rows.append(R)
            if sum(part.nbytes for part in rows) > MOST_DENSE_BYTES:
                raise CurvatureError(
                    f"{self._where}, root of the Gauss-Newton matrix",
                    expected=f"at most {MOST_DENSE_BYTES / 2**30:g} GiB: outputs of all examples, times {self._d} weights",
                    got=f"more, with {len(self._data)} examples",
                    do="take fednl or fednew, whose matrix does not grow with the examples, or a smaller model",
                )
        return np.concatenate(rows)

    def _check_size(self) -> None:
        check_dense(
            self._d, self._where, do="take a method with FOOF blocks (fedpm, localnewton), or a first-order one"
        )

    def _exact(self, theta: Vector) -> Matrix:
        total = np.zeros((self._d, self._d))
        # The product with every unit vector, so many at a time.
        chunk = max(1, CHUNK_BYTES // (64 * self._d))
        with self._differentiable():
            for batch, share in self._batches():
                found = jacrev(grad(self._loss), chunk_size=chunk)(self._vector(theta), *batch)
                total += share * _numpy(found)
        return np.asarray((total + total.T) / 2)

    def _roots(self, theta: Vector) -> Iterator[Matrix]:
        r"""Give :math:`B_j^{1/2} J_j / \sqrt n` for some examples at a time, one below the other."""
        if type(self._task).loss is not TorchTask.loss:
            raise TaskError(
                f"{self._where}, Gauss-Newton matrix of task '{self._task.name}'",
                expected="a loss of the model's outputs: criterion()",
                got="a loss() of its own",
                do=f"say what the loss is of the outputs in criterion(), or take a model of at most {MOST_EXACT} weights",
            )
        vector = self._vector(theta)

        def outputs(flat: Tensor, x: Tensor) -> Tensor:
            # An example may have several outputs of several classes: a token each, for instance.
            return self._outputs(flat, x[None])[0]

        def criterion(z: Tensor, y: Tensor) -> Tensor:
            return self._task.criterion(z[None], y[None])

        with self._differentiable():
            for (inputs, targets), _ in self._batches():
                z = self._outputs(vector, inputs).detach()
                size = max(1, CHUNK_BYTES // (8 * self._d * z[0].numel()))
                for start in range(0, len(inputs), size):
                    part = slice(start, start + size)
                    J = vmap(jacrev(outputs), (None, 0))(vector, inputs[part]).reshape(len(z[part]), -1, self._d)
                    B = vmap(hessian(criterion))(z[part], targets[part]).reshape(len(J), J.shape[1], J.shape[1])
                    eigenvalues, Q = torch.linalg.eigh(B.double())
                    root = eigenvalues.clamp(min=0.0).sqrt()[:, :, None] * Q.mT
                    R = root @ J.double() / len(self._data) ** 0.5
                    yield _numpy(R.reshape(-1, self._d))

    def _loss(self, flat: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
        return self._call(self._task.loss, flat, inputs, targets)

    def _outputs(self, flat: Tensor, inputs: Tensor) -> Tensor:
        return self._call(self._task.outputs, flat, inputs)

    def _call(self, function: Callable[..., Tensor], flat: Tensor, *data: Tensor) -> Tensor:
        named = {f"model.{name}": value for name, value in self._named(flat).items()}
        value: Tensor = functional_call(_Of(function, self._model), named, data)
        return value

    def _named(self, flat: Tensor) -> dict[str, Tensor]:
        parts = torch.split(flat, [value.numel() for value in self._like.values()])
        return {
            name: part.view(value.shape).to(value.dtype)
            for (name, value), part in zip(self._like.items(), parts, strict=True)
        }

    def _vector(self, theta: Vector) -> Tensor:
        dtype = torch.promote_types(torch.float32, next(iter(self._like.values())).dtype)
        return torch.tensor(theta, dtype=dtype, device=self._device)

    def _batches(self) -> Iterator[tuple[tuple[Tensor, Tensor], float]]:
        """Give batches, each with its share of the examples."""
        for indices in self._task.evaluation_batches(self._data):
            batch = self._data.take(indices)
            yield self._task.tensors(batch, self._device), len(batch) / len(self._data)

    @contextmanager
    def _differentiable(self) -> Iterator[None]:
        """Evaluate, and say what to do if torch cannot differentiate the model as is asked."""
        try:
            with evaluation_mode(self._model):
                yield
        except RuntimeError as error:
            raise TaskError(
                f"{self._where}, {self.kind} Hessian of task '{self._task.name}'",
                expected="a model that torch.func can differentiate",
                got=str(error).splitlines()[0],
                do="leave in-place operations and fused attention out of it, or take a method with FOOF blocks or a"
                " first-order one",
            ) from error


class _Of(nn.Module):
    """A function of a model as a module, so that parameters can be put in the place of the model's own, tied ones included."""

    def __init__(self, function: Callable[..., Tensor], model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self._function = function

    @override
    def forward(self, *data: Tensor) -> Tensor:
        return self._function(self.model, *data)


def _numpy(tensor: Tensor) -> np.ndarray:
    return tensor.detach().cpu().numpy().astype(np.float64)
