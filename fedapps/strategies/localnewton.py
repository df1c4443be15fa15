r"""LocalNewton: local second-order steps, simple mixing.

.. math:: \theta' = \sum_i p_i \theta_i

Gupta et al. 2021, arXiv 2105.07320. The client is FedPM's; only the mixing differs, so the two show what the
preconditioned mixing is worth. The optional global line search of Bischoff et al. (arXiv 2109.02388) is not included.
"""

from __future__ import annotations

from flwr.serverapp.strategy import Strategy

from fedapps.curvature.mixing import TensorSums, add_mean, finish_mean, start_mean
from fedapps.records import Arrays, Reply, check_complete
from fedapps.strategies.options import RoundOptions
from fedapps.strategies.rounds import RoundMixin


class LocalNewton(RoundMixin, Strategy):
    """The weighted mean of the clients' models; integer buffers take the maximum.

    Args:
        options: The shared options.

    Example:
        >>> LocalNewton(options=RoundOptions(weighting="uniform")).options.weight(7)
        1.0
    """

    def __init__(self, *, options: RoundOptions | None = None) -> None:
        self.set_up_rounds(options or RoundOptions())

    def begin(self, arrays: Arrays) -> None:
        """Start a round.

        Args:
            arrays: The model that is sent out, by name.
        """
        self._model = arrays
        self._sums: TensorSums = start_mean(arrays)

    def fold(self, reply: Reply) -> None:
        """Add the client's model to the sums.

        Args:
            reply: A checked reply.

        Raises:
            MessageError: A tensor of the model is missing.
        """
        check_complete(reply, set(), self._model)
        tensors = {**reply.arrays, **reply.buffers}
        add_mean(self._sums, self.options.weight(reply.num_examples), tensors, where=reply.where)

    def finish(self) -> Arrays:
        """Take the mean.

        Returns:
            The new model, by name, in the order of the old one.
        """
        new = finish_mean(self._sums)
        return {name: new[name] for name in self._model}
