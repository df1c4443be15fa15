r"""pFedMe's server (arXiv 2006.08848, Algorithm 1, line 11): :math:`w \leftarrow (1-\beta)\,w + \beta \sum_i p_i w_i`.

Buffers follow the plain mean (floating) or the maximum (integer).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from typing_extensions import override

from fedapps.messages.method_facts import tell_method
from fedapps.messages.schema import STEP_LIMIT, Arrays, Entries, Reply
from fedapps.personalization.pfedme import PFedMeConfig, server_step
from fedapps.personalization.proximal import pulled_step, unstable_step
from fedapps.settings import RoundSettings, Settings
from fedapps.strategies.base import RoundStrategy
from fedapps.strategies.mean import MeanStrategy


class PFedMe(MeanStrategy):
    """The global model mixed with the mean of the clients' copies; never with their personal models.

    Args:
        settings: As `RoundStrategy`.
        beta: Mixing rate, above 0.
        **rounds: Further arguments of `RoundStrategy`.

    Example:
        >>> PFedMe(beta=0.5).beta
        0.5
    """

    def __init__(self, settings: RoundSettings | None = None, *, beta: float = 1.0, **rounds: Any) -> None:
        super().__init__(settings, **rounds)
        self.beta = beta

    @override
    @classmethod
    def own_arguments(cls, settings: Settings) -> dict[str, Any]:
        own = settings.own
        # The clients' numbers must go together.
        PFedMeConfig(own.lambda_, own.eta, pulled_step(settings.lr, own.lambda_, own.personal_lr), own.inner_steps)
        return {"beta": own.beta}

    @override
    def told_clients(self) -> Entries:
        return tell_method("pfedme")

    @override
    def fold(self, reply: Reply) -> None:
        super().fold(reply)
        warn_of_step(self, reply)

    @override
    def finish(self) -> Arrays:
        return {
            name: value if name in self._buffers else self._mix(self._model[name], value)
            for name, value in self.mean().items()
        }

    def _mix(self, w: np.ndarray, mean: np.ndarray) -> np.ndarray:
        return server_step(w.astype(np.float64), mean.astype(np.float64), self.beta).astype(w.dtype)


def warn_of_step(strategy: RoundStrategy, reply: Reply) -> None:
    """Note, once a run, that a client's step on its loss with the pull is unstable.

    Args:
        strategy: The strategy.
        reply: A reply; its metric ``step-limit``, which the step is not below, is taken out.
    """
    limit = reply.metrics.pop(STEP_LIMIT, None)
    if limit is not None:
        strategy.note_once("step", f"client {reply.partition}: {unstable_step(limit)}")
