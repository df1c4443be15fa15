r"""PSGD, parallel gradient descent: the clients' gradients are mixed, and the server takes the step.

.. math:: \theta' = \theta - \eta \sum_i p_i g_i(\theta)

The first-order method that mixes gradients and not models, as FedPM's paper sets it beside FedAvg (arXiv 2511.09100). The
client is in `fedapps.client_apps.psgd`.
"""

from __future__ import annotations

from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid
from typing_extensions import override

from fedapps.messages.schema import Arrays
from fedapps.strategies.base import lr_of
from fedapps.strategies.mean import ChangeStrategy


class PSGD(ChangeStrategy):
    """A gradient step from the weighted mean of the clients' gradients; buffers follow the plain mean or the maximum.

    Example:
        >>> PSGD().settings.weighting
        'examples'
    """

    @override
    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Compose the messages of a round, as `RoundStrategy` does.

        Raises:
            MessageError: ``lr``, the server's step, is missing in the config.
        """
        self._lr = lr_of(config)
        return super().configure_train(server_round, arrays, config, grid)

    @override
    def finish(self) -> Arrays:
        return self.moved(-self._lr)
