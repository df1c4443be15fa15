r"""FedProx: FedAvg's server, by Flower's own strategy; the proximal term is the client's.

.. math:: \theta_i \approx \arg\min_w f_i(w) + \frac{\mu}{2} |w - \theta|^2, \qquad \theta' = \sum_i p_i \theta_i

Li et al., MLSys 2020, arXiv 1812.06127, Algorithm 2. The client is in `fedapps.client_apps.fedprox`.
"""

from __future__ import annotations

from typing import Any

from flwr.serverapp.strategy import FedProx as FlowerFedProx
from typing_extensions import override

from fedapps.messages.schema import ARRAYS, CONFIG, Arrays, Records
from fedapps.settings import Settings
from fedapps.strategies.fedavg import FlowerStrategy

PROXIMAL_MU = "proximal-mu"
"""Entry of ``config`` in which Flower's FedProx sends ``mu``, for clients that were written for it."""


class FedProx(FlowerStrategy):
    """Flower's FedProx with this package's rounds: ``proximal_mu``.

    Example:
        >>> FedProx(proximal_mu=0.1).flower.proximal_mu
        0.1
    """

    FLOWER = FlowerFedProx

    @override
    @classmethod
    def own_arguments(cls, settings: Settings) -> dict[str, Any]:
        return {"proximal_mu": settings.own.mu}

    @override
    def records_for(self, partition: int, through: int, model: Arrays) -> Records:
        """Send the model, and ``mu`` in the config."""
        return {ARRAYS: model, CONFIG: {PROXIMAL_MU: self.flower.proximal_mu}}
