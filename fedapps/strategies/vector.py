"""The trainable tensors as one vector, for steps with a Hessian of all of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from typing_extensions import override

from fedapps.curvature.flat import flatten, unflatten
from fedapps.curvature.newton import Vector, check_dense
from fedapps.errors import MessageError
from fedapps.messages.schema import Arrays, Reply
from fedapps.settings import RoundSettings
from fedapps.strategies.mean import SteppingStrategy
from fedapps.strategies.remembered import Remembered


class VectorStrategy(SteppingStrategy):
    """Steps of a vector ``theta`` ``(d,)``, by a method whose clients keep something over rounds; buffers follow the mean.

    Attributes:
        remembered: The clients that the method's sums hold.
        names: The tensors of which ``theta`` consists, in this order: the trainable ones, or all floating ones where there is
            no task to ask.
        theta: The model that was sent out.
    """

    names: tuple[str, ...]
    theta: Vector

    def __init__(self, settings: RoundSettings | None = None, **rounds: Any) -> None:
        super().__init__(settings, **rounds)
        self.remembered = Remembered()

    @override
    def check_model(self, arrays: Arrays) -> None:
        """Refuse a model, too, whose Hessian could not be held.

        Raises:
            CurvatureError: It has too many weights.
        """
        super().check_model(arrays)
        d = sum(arrays[name].size for name in self._names_of(arrays))
        check_dense(
            d,
            f"{type(self).__name__}, the model",
            do="take a first-order method (fedavg, scaffold), or one with FOOF blocks (fedpm, localnewton) for a torch model",
        )

    def _names_of(self, model: Arrays) -> tuple[str, ...]:
        return tuple(k for k, value in self.changing(model).items() if np.issubdtype(value.dtype, np.floating))

    @override
    def begin(self, model: Arrays) -> None:
        super().begin(model)
        self.names = self._names_of(model)
        self.theta = flatten(model, self.names)
        self.remembered.begin()

    def sent(self, reply: Reply) -> Vector:
        """Give what a reply holds in place of ``theta``, ``(d,)``.

        Raises:
            MessageError: A tensor is missing.
        """
        if missing := [name for name in self.names if name not in reply.arrays]:
            raise MessageError(
                f"{reply.where}, record 'arrays'",
                expected=f"all {len(self.names)} trainable tensors",
                got=f"none called {', '.join(missing[:5])}",
                do="use the same version of fedapps on both ends",
            )
        return flatten(reply.arrays, self.names)

    def stepped(self, step: Vector) -> Arrays:
        """Give ``theta + step`` by name, with the mean of the buffers."""
        new = unflatten(self.theta + step, self._model, self.names)
        return {name: new.get(name, mean) for name, mean in self.mean().items()}

    @override
    def state(self) -> dict[str, Any]:
        return {**super().state(), "remembered": self.remembered.state()}

    @override
    def load_state(self, state: Mapping[str, Any], last_folded: Mapping[int, int]) -> None:
        super().load_state(state, last_folded)
        self.remembered.load_state(state["remembered"])
