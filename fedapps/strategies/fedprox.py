r"""FedProx: FedAvg's server, by Flower's own strategy; the proximal term is the client's.

.. math:: \theta_i \approx \arg\min_w f_i(w) + \frac{\mu}{2} |w - \theta|^2, \qquad \theta' = \sum_i p_i \theta_i

Li et al., MLSys 2020, arXiv 1812.06127, Algorithm 2. The client is in `fedapps.client_apps.fedprox`.
"""

from __future__ import annotations

from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedProx as FlowerFedProx

from fedapps.strategies.fedavg import FlowerStrategyMixin

PROXIMAL_MU = "proximal-mu"
"""Entry of ``config`` in which Flower's FedProx sends ``mu``, for clients that were written for it."""


class FedProx(FlowerStrategyMixin, FlowerFedProx):
    """Flower's FedProx with this package's rounds.

    Args:
        options: The shared options.
        **flower: Arguments of Flower's strategy: ``proximal_mu``.

    Example:
        >>> FedProx(proximal_mu=0.1).proximal_mu
        0.1
    """

    @staticmethod
    def flower_arguments(own: Any) -> dict[str, Any]:
        """Name the method's own settings as Flower's strategy does.

        Args:
            own: A `fedapps.first_order_settings.FedProxSettings`.

        Returns:
            Arguments of Flower's strategy.
        """
        return {"proximal_mu": own.mu}

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Compose the messages of a round, with ``mu`` in their config.

        Args:
            server_round: The round, from 1.
            arrays: The model.
            config: Entries to send to every client; left unchanged.
            grid: Flower's grid.

        Returns:
            One message for each sampled partition that has a node, in order of partition ids.
        """
        with_mu = ConfigRecord({**config, PROXIMAL_MU: self.proximal_mu})
        return super().configure_train(server_round, arrays, with_mu, grid)
