r"""SCAFFOLD (arXiv 1910.06378, Algorithm 1): steps of the server with control variates that remember every client.

.. math:: x \leftarrow x + \eta_g \frac{\sum_{i \in S} p_i\,(y_i - x)}{\sum_{i \in S} p_i}, \qquad
          c \leftarrow c + \sum_{i \in S} p_i\,(c_i^+ - c_i)

with ``p_i`` over all ``N`` clients, so that always :math:`c = \sum_i p_i c_i`; ``c = c_i = 0`` at the start. With uniform
weights the second sum is the paper's ``|S|/N`` times the mean. The client is in `fedapps.client_apps.scaffold`.

A client that has lost its store cannot take back what ``c`` holds of it. Then the control variates start anew, all at zero:
it trains as one that takes part for the first time, and from the next round on every client's ``c_i`` is of a new generation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from typing_extensions import override

from fedapps.defences import refuse_changed_replies, update_norm
from fedapps.errors import MessageError
from fedapps.messages.schema import ARRAYS, CONFIG, CONTROL, Announced, Arrays, Records, Reply
from fedapps.settings import RoundSettings, Settings
from fedapps.strategies.mean import ChangeStrategy
from fedapps.strategies.remembered import Remembered


class SCAFFOLD(ChangeStrategy):
    """A step along the clients' mean change, and a control variate that is the mean of all clients' own.

    Args:
        settings: As `RoundStrategy`.
        server_lr: ``eta_g``.
        **rounds: Further arguments of `RoundStrategy`.

    Attributes:
        remembered: The clients whose ``c_i`` are in ``c``.

    Example:
        >>> SCAFFOLD(server_lr=0.5).server_lr
        0.5
    """

    takes_newcomers = False

    def __init__(self, settings: RoundSettings | None = None, *, server_lr: float = 1.0, **rounds: Any) -> None:
        super().__init__(settings, **rounds)
        refuse_changed_replies(self.settings.defence, "scaffold")
        self.server_lr = server_lr
        self.remembered = Remembered()
        self._c: Arrays = {}

    @override
    @classmethod
    def own_arguments(cls, settings: Settings) -> dict[str, Any]:
        return {"server_lr": settings.own.server_lr}

    @override
    def announced(self, model: Arrays) -> Announced:
        return {**super().announced(model), CONTROL: self.changing(model)}

    @override
    def begin(self, model: Arrays) -> None:
        super().begin(model)
        x = self.changing(model)
        self._c = self._c or {name: np.zeros(value.shape) for name, value in x.items()}
        self._sent = {name: self._c[name].astype(value.dtype) for name, value in x.items()}
        self._dc = {name: np.zeros(value.shape) for name, value in x.items()}
        self.remembered.begin()

    @override
    def records_for(self, partition: int, through: int, model: Arrays) -> Records:
        """Send the model and ``c``; the model alone where it is only to be measured."""
        if through == self.rounds.report.server_round:
            return {ARRAYS: model}
        return {ARRAYS: model, CONTROL: self._sent, CONFIG: self.remembered.entries}

    @override
    def norms(self, reply: Reply) -> Mapping[str, float]:
        """Measure a reply; the first change of a ``c_i``, from zero, is a whole gradient, and no measure of later ones."""
        first = "first " if self.remembered.is_first(reply) else ""
        return {**super().norms(reply), f"{first}change of c_i": update_norm(reply.records.get(CONTROL, {}), {})}

    @override
    def fold(self, reply: Reply) -> None:
        dc = reply.records.get(CONTROL, {})
        if dc.keys() != reply.arrays.keys():
            raise MessageError(
                f"{reply.where}, record '{CONTROL}'",
                expected=f"the change of c_i for each of the {len(reply.arrays)} tensors in 'arrays'",
                got=f"{len(dc)} tensors",
                do="use fedapps.client_apps.scaffold on every node",
            )
        share = self.share_of_all(reply.partition)
        super().fold(reply)
        self.remembered.fold(reply)
        for name, change in dc.items():
            self._dc[name] += np.multiply(change, share, dtype=np.float64)

    @override
    def finish(self) -> Arrays:
        """Move the model along the mean change, and ``c`` by the clients' own changes."""
        new = self.moved(self.server_lr)
        if self.remembered.lost:
            self.rounds.note("the control variates start anew at zero")
            self._c = {}
        else:
            self._c = {name: c + self._dc[name] for name, c in self._c.items()}
        self.remembered.end()
        return new

    # Resume ----------------------------------------------------------------------------------

    @override
    def state_arrays(self) -> Arrays:
        """Give ``c``."""
        return dict(self._c)

    @override
    def load_state_arrays(self, arrays: Mapping[str, np.ndarray]) -> None:
        self._c = dict(arrays)

    @override
    def state(self) -> dict[str, Any]:
        return {**super().state(), "remembered": self.remembered.state()}

    @override
    def load_state(self, state: Mapping[str, Any], last_folded: Mapping[int, int]) -> None:
        super().load_state(state, last_folded)
        self.remembered.load_state(state["remembered"])
