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
from typing import Any

import numpy as np
from flwr.serverapp.strategy import FedAdagrad as FlowerFedAdagrad
from flwr.serverapp.strategy import FedAdam as FlowerFedAdam
from flwr.serverapp.strategy import FedYogi as FlowerFedYogi

from fedapps.records import Arrays
from fedapps.strategies.fedavg import FlowerStrategyMixin

MOMENTS = {"m_t": "m/", "v_t": "v/"}
"""Attribute of Flower's strategy -> prefix of its tensors in a checkpoint."""


class FedOptMixin(FlowerStrategyMixin):
    """What the strategies on Flower's ``FedOpt`` share: the moments ``m_t`` and ``v_t``, by tensor."""

    current_arrays: dict[str, np.ndarray] | None
    m_t: dict[str, np.ndarray] | None
    v_t: dict[str, np.ndarray] | None

    @staticmethod
    def flower_arguments(own: Any) -> dict[str, Any]:
        """Name the method's own settings as Flower's strategy does.

        Args:
            own: A `fedapps.methods.first_order.FedOptSettings`.

        Returns:
            Arguments of Flower's strategy.
        """
        return {"eta": own.server_lr, "beta_1": own.beta_1, "beta_2": own.beta_2, "tau": own.tau}

    def set_model(self, arrays: Arrays) -> None:
        """Tell Flower's strategy the model that was sent out.

        Args:
            arrays: The trainable tensors, by name.
        """
        self.current_arrays = dict(arrays)

    def state_arrays(self) -> Arrays:
        """Give both moments, by tensor, for a checkpoint; nothing before the first accepted round."""
        return {
            prefix + name: np.asarray(value)
            for moment, prefix in MOMENTS.items()
            for name, value in (getattr(self, moment) or {}).items()
        }

    def load_state_arrays(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Take back the moments of a checkpoint.

        Args:
            arrays: What `state_arrays` gave.
        """
        for moment, prefix in MOMENTS.items():
            own = {name.removeprefix(prefix): value for name, value in arrays.items() if name.startswith(prefix)}
            setattr(self, moment, own or None)


class FedAdam(FedOptMixin, FlowerFedAdam):
    """Flower's FedAdam with this package's rounds.

    Args:
        options: The shared options.
        **flower: Arguments of Flower's strategy: ``eta``, ``beta_1``, ``beta_2``, ``tau``.

    Example:
        >>> FedAdam(eta=0.03).eta
        0.03
    """


class FedYogi(FedOptMixin, FlowerFedYogi):
    """Flower's FedYogi with this package's rounds.

    Args:
        options: The shared options.
        **flower: Arguments of Flower's strategy: ``eta``, ``beta_1``, ``beta_2``, ``tau``.
    """


class FedAdagrad(FedOptMixin, FlowerFedAdagrad):
    """Flower's FedAdagrad with this package's rounds.

    Args:
        options: The shared options.
        **flower: Arguments of Flower's strategy: ``eta``, ``tau``.
    """

    @staticmethod
    def flower_arguments(own: Any) -> dict[str, Any]:
        """Name the method's own settings as Flower's strategy does.

        Args:
            own: A `fedapps.methods.first_order.FedAdagradSettings`.

        Returns:
            Arguments of Flower's strategy.
        """
        return {"eta": own.server_lr, "tau": own.tau}
