r"""FedAvgM: momentum on the server, by Flower's own strategy.

.. math:: v \leftarrow \beta v + \Big(\theta - \sum_i p_i \theta_i\Big), \qquad \theta' = \theta - \eta_s v

Hsu, Qi & Brown 2019, arXiv 1909.06335, Section 4. Flower uses the *sum* form of momentum, as torch's SGD does: the new
difference enters with weight 1, not with :math:`1 - \beta`, so a constant difference ends as a step :math:`1/(1 - \beta)`
times as long. :math:`v = 0` at the start. With :math:`\beta = 0` and :math:`\eta_s = 1` it is FedAvg, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from flwr.serverapp.strategy import FedAvgM as FlowerFedAvgM

from fedapps.records import Arrays, pack_arrays
from fedapps.strategies.fedavg import FlowerStrategyMixin


class FedAvgM(FlowerStrategyMixin, FlowerFedAvgM):
    """Flower's FedAvgM with this package's rounds.

    Args:
        options: The shared options.
        **flower: Arguments of Flower's strategy: ``server_learning_rate``, ``server_momentum``.

    Example:
        >>> FedAvgM(server_momentum=0.9).server_opt
        True
    """

    _names: tuple[str, ...] = ()

    @staticmethod
    def flower_arguments(own: Any) -> dict[str, Any]:
        """Name the method's own settings as Flower's strategy does.

        Args:
            own: A `fedapps.methods.first_order.FedAvgMSettings`.

        Returns:
            Arguments of Flower's strategy.
        """
        return {"server_learning_rate": own.server_lr, "server_momentum": own.momentum}

    def set_model(self, arrays: Arrays) -> None:
        """Tell Flower's strategy the model that was sent out.

        Args:
            arrays: The trainable tensors, by name.
        """
        self._names = tuple(arrays)
        self.current_arrays = pack_arrays(arrays)

    def state_arrays(self) -> Arrays:
        """Give the momentum, by tensor, for a checkpoint; nothing before the first accepted round."""
        if self.momentum_vector is None:
            return {}
        return {name: np.asarray(v) for name, v in zip(self._names, self.momentum_vector, strict=True)}

    def load_state_arrays(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Take back the momentum of a checkpoint.

        Args:
            arrays: What `state_arrays` gave, in its order.
        """
        self._names = tuple(arrays)
        self.momentum_vector = list(arrays.values()) or None
