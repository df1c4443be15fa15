r"""pFedMe's server (arXiv 2006.08848, Algorithm 1, line 11): :math:`w \leftarrow (1-\beta)\,w + \beta \sum_i p_i w_i`.

Buffers follow the plain mean (floating) or the maximum (integer).
"""

from __future__ import annotations

import numpy as np
from flwr.serverapp.strategy import Strategy

from fedapps.curvature.mixing import TensorSums, add_mean, finish_mean, start_mean
from fedapps.personalization.pfedme import PFedMeConfig, server_step
from fedapps.personalization.proximal import pulled_step
from fedapps.records import Arrays, Reply, check_complete
from fedapps.settings import Settings
from fedapps.strategies.options import RoundOptions
from fedapps.strategies.rounds import RoundMixin


class PFedMe(RoundMixin, Strategy):
    """The global model mixed with the mean of the clients' copies; never with their personal models.

    Args:
        options: The shared options.
        beta: Mixing rate, above 0.

    Example:
        >>> PFedMe(options=RoundOptions(seed=1), beta=0.5).beta
        0.5
    """

    def __init__(self, *, options: RoundOptions | None = None, beta: float = 1.0) -> None:
        self.set_up_rounds(options or RoundOptions())
        self.beta = beta

    @classmethod
    def from_settings(cls, settings: Settings, experiment: str) -> PFedMe:
        """Build the strategy of a run.

        Args:
            settings: The settings.
            experiment: Identity of the experiment.

        Returns:
            The strategy.

        Raises:
            SettingsError: The clients' numbers do not go together, which is told before anyone trains.
        """
        own = settings.own
        PFedMeConfig(own.lambda_, own.eta, pulled_step(settings.lr, own.lambda_, own.personal_lr), own.inner_steps)
        return cls(options=RoundOptions.from_settings(settings, experiment), beta=own.beta)

    def begin(self, arrays: Arrays) -> None:
        """Start a round.

        Args:
            arrays: The model that is sent out, by name.
        """
        self._model = arrays
        self._sums: TensorSums = start_mean(arrays)
        self._buffers: set[str] = set()

    def fold(self, reply: Reply) -> None:
        """Add the client's copy to the sums.

        Args:
            reply: A checked reply.

        Raises:
            MessageError: A tensor of the model is missing.
        """
        check_complete(reply, set(), self._model)
        tensors = {**reply.arrays, **reply.buffers}
        add_mean(self._sums, self.options.weight(reply.num_examples), tensors, where=reply.where)
        self._buffers |= set(reply.buffers)

    def finish(self) -> Arrays:
        """Mix the mean into the global model.

        Returns:
            The new model, by name, in the order of the old one.
        """
        mean = finish_mean(self._sums)
        return {
            name: mean[name] if name in self._buffers else self._mix(w, mean[name]) for name, w in self._model.items()
        }

    def _mix(self, w: np.ndarray, mean: np.ndarray) -> np.ndarray:
        return server_step(w.astype(np.float64), mean.astype(np.float64), self.beta).astype(w.dtype)
