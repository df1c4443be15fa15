r"""FedNew (Elgabli et al., ICML 2022, arXiv 2206.08829): a step along the mean of the directions that clients compute.

.. math:: y = \sum_i p_i y_i, \qquad \theta' = \theta - \eta\, y

A client needs two directions: the last ``y``, near which it looks for its own, and that of the round of its own last folded
reply, for its dual variable. They are the same for a client that was in the last round; for the others the server keeps the
``y`` of every round that is the last one of some client. Mathematics and client are `fedapps.curvature.fednew` and
`fedapps.client_apps.fednew`.

A client that has lost its store has lost a dual variable, and those of all clients no longer sum to zero. Then they start anew,
and so does ``y``; the round takes no step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from typing_extensions import override

from fedapps.curvature.flat import flatten
from fedapps.defences import refuse_changed_replies
from fedapps.messages.schema import ARRAYS, CONFIG, DIRECTION, OWN_DIRECTION, Arrays, Records, Reply
from fedapps.settings import RoundSettings
from fedapps.strategies.vector import VectorStrategy


class FedNew(VectorStrategy):
    """A step along the mean of the clients' directions.

    Args:
        settings: As `RoundStrategy`.
        **rounds: Further arguments of `RoundStrategy`.

    Example:
        >>> FedNew(RoundSettings(fraction_train=0.5)).settings.fraction_train
        0.5
    """

    def __init__(self, settings: RoundSettings | None = None, **rounds: Any) -> None:
        super().__init__(settings, **rounds)
        refuse_changed_replies(self.settings.defence, "fednew")
        # Round -> its y, by name.
        self._y: dict[int, Arrays] = {}

    @override
    def begin(self, model: Arrays) -> None:
        super().begin(model)
        zero = {name: np.zeros_like(model[name]) for name in self.names}
        self._last = self._y[max(self._y)] if self._y else zero

    @override
    def records_for(self, partition: int, through: int, model: Arrays) -> Records:
        """Send the model and directions; the model alone where it is only to be measured."""
        if through == self.rounds.report.server_round:
            return {ARRAYS: model}
        records: dict[str, Any] = {ARRAYS: model, DIRECTION: self._last, CONFIG: self.remembered.entries}
        own = self._y.get(self.rounds.last_folded.get(partition, 0), self._last)
        return records if own is self._last else {**records, OWN_DIRECTION: own}

    @override
    def fold(self, reply: Reply) -> None:
        self.sent(reply)  # As the method of a vector asks: every trainable tensor.
        super().fold(reply)
        self.remembered.fold(reply)

    @override
    def finish(self) -> Arrays:
        """Take the step, and keep the directions that clients may still need."""
        lost = self.remembered.lost
        self.remembered.end()
        if lost:
            self.rounds.note("the dual variables start anew at zero: no step is taken")
            self._y = {}
            return self.stepped(np.zeros_like(self.theta))
        mean = self.mean()
        y = {name: mean[name] for name in self.names}
        report = self.rounds.report
        needed = {number for p, number in self.rounds.last_folded.items() if p not in report.folded}
        self._y = {number: old for number, old in self._y.items() if number in needed} | {report.server_round: y}
        return self.stepped(-self.lr * flatten(y, self.names))

    # Resume ----------------------------------------------------------------------------------

    @override
    def state_arrays(self) -> Arrays:
        """Give the directions, as ``round/name``."""
        return {f"{number}/{name}": value for number, y in self._y.items() for name, value in y.items()}

    @override
    def load_state_arrays(self, arrays: Mapping[str, np.ndarray]) -> None:
        self._y = {}
        for key, value in arrays.items():
            number, _, name = key.partition("/")
            self._y.setdefault(int(number), {})[name] = value
