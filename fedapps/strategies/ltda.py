r"""LTDA: local steps divided by an estimate of the Hessian's diagonal, simple mixing.

.. math:: \theta' = \sum_i p_i \theta_i

Sen, Mohan & Qin, PReMI 2023. The steps are the client's, `fedapps.client_apps.ltda`.
"""

from __future__ import annotations

from typing_extensions import override

from fedapps.messages.schema import PLAIN_STEPS, Arrays, Reply
from fedapps.strategies.mean import MeanStrategy


class LTDA(MeanStrategy):
    """The weighted mean of the clients' models; integer buffers take the maximum. Notes who took plain steps.

    Example:
        >>> LTDA().settings.weighting
        'examples'
    """

    @override
    def begin(self, model: Arrays) -> None:
        super().begin(model)
        self._plain: list[str] = []

    @override
    def fold(self, reply: Reply) -> None:
        super().fold(reply)
        if reply.metrics.get(PLAIN_STEPS, 0) > 0:
            self._plain.append(str(reply.partition))

    @override
    def finish(self) -> Arrays:
        if self._plain:
            self.rounds.note(
                f"client{'s' * (len(self._plain) > 1)} {', '.join(self._plain)}: plain steps where the Hessian's first row"
                " said nothing (h_11 below eps); see plain-steps"
            )
        return self.mean()
