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
from typing_extensions import override

from fedapps.messages.schema import Arrays, pack_arrays
from fedapps.settings import Settings
from fedapps.strategies.fedavg import FlowerStrategy


class FedAvgM(FlowerStrategy):
    """Flower's FedAvgM with this package's rounds: ``server_learning_rate``, ``server_momentum``.

    Example:
        >>> FedAvgM(server_momentum=0.9).flower.server_opt
        True
    """

    FLOWER = FlowerFedAvgM
    _names: tuple[str, ...] = ()

    @override
    @classmethod
    def own_arguments(cls, settings: Settings) -> dict[str, Any]:
        return {"server_learning_rate": settings.own.server_lr, "server_momentum": settings.own.momentum}

    @override
    def set_model(self, arrays: Arrays) -> None:
        self._names = tuple(arrays)
        self.flower.current_arrays = pack_arrays(arrays)

    @override
    def state_arrays(self) -> Arrays:
        """Give the momentum, by tensor; nothing before the first accepted round."""
        if self.flower.momentum_vector is None:
            return {}
        return {name: np.asarray(v) for name, v in zip(self._names, self.flower.momentum_vector, strict=True)}

    @override
    def load_state_arrays(self, arrays: Mapping[str, np.ndarray]) -> None:
        self._names = tuple(arrays)
        self.flower.momentum_vector = list(arrays.values()) or None
