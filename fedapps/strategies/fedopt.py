r"""FedAdam, FedYogi and FedAdagrad: adaptive steps on the server, by Flower's own strategies.

With :math:`\Delta = \sum_i p_i \theta_i - \theta`, elementwise, and :math:`m = v = 0` at the start:

.. math::
   m \leftarrow \beta_1 m + (1 - \beta_1) \Delta, \qquad \theta' = \theta + \eta_t \frac{m}{\sqrt{v} + \tau}

============  ===================================================================================================
method        second moment and step
============  ===================================================================================================
FedAdam       :math:`v \leftarrow \beta_2 v + (1 - \beta_2) \Delta^2`,
              :math:`\eta_t = \eta_s \sqrt{1 - \beta_2^{t+1}} / (1 - \beta_1^{t+1})`
FedYogi       :math:`v \leftarrow v - (1 - \beta_2) \Delta^2\, \mathrm{sign}(v - \Delta^2)`, :math:`\eta_t = \eta_s`
FedAdagrad    :math:`v \leftarrow v + \Delta^2`, :math:`\beta_1 = 0`, :math:`\eta_t = \eta_s`
============  ===================================================================================================

Reddi et al., ICLR 2021, arXiv 2003.00295, Algorithm 2. Departures, all Flower's: the paper has no bias correction, and
FedAdam's has the exponent ``t + 1`` in round ``t`` (from 1), where Kingma & Ba have ``t``; moments start at 0, the paper's
``v`` at :math:`\tau^2` or more.

NumPy 2 makes Flower's FedAdam give float64 for a float32 model. A model keeps its dtypes here: the result is rounded to them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from flwr.serverapp.strategy import FedAdagrad as FlowerFedAdagrad
from flwr.serverapp.strategy import FedAdam as FlowerFedAdam
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg
from flwr.serverapp.strategy import FedYogi as FlowerFedYogi
from typing_extensions import override

from fedapps.messages.schema import Arrays
from fedapps.settings import Settings
from fedapps.strategies.fedavg import FlowerStrategy

MOMENTS = {"m_t": "m/", "v_t": "v/"}
"""Attribute of Flower's strategy -> prefix of its tensors in a checkpoint."""


class FedAdam(FlowerStrategy):
    """Flower's FedAdam with this package's rounds: ``eta``, ``beta_1``, ``beta_2``, ``tau``.

    Example:
        >>> FedAdam(eta=0.03).flower.eta
        0.03
    """

    FLOWER: ClassVar[type[FlowerFedAvg]] = FlowerFedAdam

    @override
    @classmethod
    def own_arguments(cls, settings: Settings) -> dict[str, Any]:
        own = settings.own
        return {"eta": own.server_lr, "beta_1": own.beta_1, "beta_2": own.beta_2, "tau": own.tau}

    @override
    def set_model(self, arrays: Arrays) -> None:
        self.flower.current_arrays = dict(arrays)

    @override
    def state_arrays(self) -> Arrays:
        """Give both moments, by tensor; nothing before the first accepted round."""
        return {
            prefix + name: np.asarray(value)
            for moment, prefix in MOMENTS.items()
            for name, value in (getattr(self.flower, moment) or {}).items()
        }

    @override
    def load_state_arrays(self, arrays: Mapping[str, np.ndarray]) -> None:
        for moment, prefix in MOMENTS.items():
            own = {name.removeprefix(prefix): value for name, value in arrays.items() if name.startswith(prefix)}
            setattr(self.flower, moment, own or None)


class FedYogi(FedAdam):
    """Flower's FedYogi with this package's rounds; arguments and state as `FedAdam`."""

    FLOWER = FlowerFedYogi


class FedAdagrad(FedAdam):
    """Flower's FedAdagrad with this package's rounds: ``eta``, ``tau``."""

    FLOWER = FlowerFedAdagrad

    @override
    @classmethod
    def own_arguments(cls, settings: Settings) -> dict[str, Any]:
        return {"eta": settings.own.server_lr, "tau": settings.own.tau}
