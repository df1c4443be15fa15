r"""The weighted mean of the clients' models, :math:`\sum_i p_i \theta_i`, which several methods start from."""

from __future__ import annotations

from typing_extensions import override

from fedapps.averaging import TensorSums, add_mean, finish_mean, start_mean
from fedapps.messages.schema import Arrays, Reply, check_complete
from fedapps.strategies.base import RoundStrategy


class MeanStrategy(RoundStrategy):
    """Sums the clients' whole models; a subclass says what becomes of their mean."""

    _model: Arrays
    _sums: TensorSums

    @override
    def begin(self, model: Arrays) -> None:
        self._model = model
        self._sums = start_mean(model)

    @override
    def fold(self, reply: Reply) -> None:
        check_complete(reply, set(), self._model)
        weight = self.settings.weight(reply.num_examples)
        add_mean(self._sums, weight, {**reply.arrays, **reply.buffers}, where=reply.where)

    def mean(self) -> Arrays:
        """Give the mean of the models folded so far, integers their maximum, in the order of the model."""
        mean = finish_mean(self._sums)
        return {name: mean[name] for name in self._model}
