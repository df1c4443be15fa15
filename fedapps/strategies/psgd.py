r"""PSGD, parallel gradient descent: the clients' gradients are mixed, and the server takes the step.

.. math:: \theta' = \theta - \eta \sum_i p_i g_i(\theta)

The first-order method that mixes gradients and not models, as FedPM's paper sets it beside FedAvg (arXiv 2511.09100). The
client is in `fedapps.client_apps.psgd`.
"""

from __future__ import annotations

from typing_extensions import override

from fedapps.messages.schema import Arrays
from fedapps.strategies.mean import SteppingStrategy


class PSGD(SteppingStrategy):
    """A gradient step from the weighted mean of the clients' gradients; buffers follow the plain mean or the maximum.

    Example:
        >>> PSGD().settings.weighting
        'examples'
    """

    @override
    def finish(self) -> Arrays:
        return self.moved(-self.lr)
