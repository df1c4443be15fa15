r"""The weighted mean of what clients send, :math:`\sum_i p_i \theta_i`, which several methods start from."""

from __future__ import annotations

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid
from typing_extensions import override

from fedapps.averaging import TensorSums, add_mean, finish_mean, start_mean
from fedapps.messages.schema import ARRAYS, Announced, Arrays, Reply, check_complete
from fedapps.strategies.base import RoundStrategy, lr_of


class MeanStrategy(RoundStrategy):
    """Sums the clients' whole models; a subclass says what becomes of their mean."""

    _model: Arrays
    _sums: TensorSums
    _buffers: set[str]

    @override
    def begin(self, model: Arrays) -> None:
        self._model = model
        self._sums = start_mean(model)
        self._buffers = set()

    @override
    def fold(self, reply: Reply) -> None:
        check_complete(reply, set(), self._model)
        weight = self.settings.weight(reply.num_examples)
        add_mean(self._sums, weight, {**reply.arrays, **reply.buffers}, where=reply.where)
        self._buffers |= set(reply.buffers)

    def mean(self) -> Arrays:
        """Give the mean of the models folded so far, integers their maximum, in the order of the model."""
        mean = finish_mean(self._sums)
        return {name: mean[name] for name in self._model}


class ChangeStrategy(MeanStrategy):
    r"""Sums a change :math:`\Delta_i` of each trainable tensor, which clients send in its place, and buffers as they are.

    A subclass says how far the server goes along the mean change.
    """

    @override
    def announced(self, model: Arrays) -> Announced:
        return {**super().announced(model), ARRAYS: self.changing(model)}

    def changing(self, model: Arrays) -> Arrays:
        """Give the trainable tensors of a model; all of them where there is no task to ask."""
        return model if self.trainable is None else {k: v for k, v in model.items() if k in self.trainable}

    @override
    def origin(self, reply: Reply) -> Arrays:
        """Say what tensors are measured from: only buffers do not come as changes."""
        return {name: self._model[name] for name in reply.buffers}

    def moved(self, step: float, direction: Arrays | None = None) -> Arrays:
        r"""Give :math:`\theta + \text{step} \sum_i p_i \Delta_i`, computed in float64, with the mean of the buffers.

        Args:
            step: How far to go.
            direction: What to go along in place of the mean change.
        """
        mean = self.mean()
        along = mean if direction is None else direction
        return {
            name: mean[name] if name in self._buffers else _moved(theta, step, along[name])
            for name, theta in self._model.items()
        }


class SteppingStrategy(ChangeStrategy):
    """Takes the step itself, with the learning rate in force, along what clients send in place of trainable tensors."""

    lr: float

    @override
    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Compose the messages of a round, as `RoundStrategy` does.

        Raises:
            MessageError: ``lr``, the server's step, is missing in the config.
        """
        self.lr = lr_of(config)
        return super().configure_train(server_round, arrays, config, grid)


def _moved(theta: np.ndarray, step: float, change: np.ndarray) -> np.ndarray:
    return np.asarray(theta + step * change.astype(np.float64), theta.dtype)
