r"""FedNS (Li et al., AAAI 2024, arXiv 2401.02734): Newton steps from sketched square roots of the clients' Hessians.

.. math:: \theta' = \theta - \eta \Big[ \sum_i p_i Y_i' Y_i + (\lambda + \text{damping}) I \Big]^{-1} \sum_i p_i g_i

``Y_i`` ``(k, d)`` stands for the data term of the Hessian; the regularisation :math:`\lambda` of the task is added once. The
client is in `fedapps.client_apps.fedns`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from typing_extensions import override

from fedapps.curvature.flat import flatten, flatten_rows, unflatten
from fedapps.curvature.newton import check_dense
from fedapps.curvature.solve import solve_spd
from fedapps.defences import Defence, update_norm
from fedapps.errors import MessageError, SettingsError
from fedapps.messages.schema import SKETCH, Announced, Arrays, Reply
from fedapps.settings import RoundSettings, Settings
from fedapps.strategies.base import RunFiles
from fedapps.strategies.psgd import PSGD
from fedapps.tasks.base import Task, TaskKind

SUPPORTED = (
    "take a convex task or a torch model of at most so many weights (a whole matrix stands for its Hessian), or a method with"
    " FOOF blocks (fedpm, localnewton)"
)


class FedNS(PSGD):
    """PSGD's step, divided by the sum of what the clients' sketches stand for.

    Args:
        settings: As `RoundStrategy`.
        size: Rows ``k`` of each sketch; 0 = as many as there are weights.
        damping: Added to the diagonal, beside the regularisation of a convex task.
        **rounds: Further arguments of `RoundStrategy`.

    Example:
        >>> FedNS(size=20, damping=0.1).size
        20
    """

    def __init__(
        self, settings: RoundSettings | None = None, *, size: int = 0, damping: float = 0.0, **rounds: Any
    ) -> None:
        super().__init__(settings, **rounds)
        if self.settings.defence in (Defence.MEDIAN, Defence.TRIMMED_MEAN):
            raise SettingsError(
                "setting 'defence' of method 'fedns'",
                expected="clip or multi-krum: the median of each number of Y_i, each from a draw of its own, is no sketch",
                got=self.settings.defence.value,
                do="choose multi-krum",
            )
        self.size, self.damping, self.lam = size, damping, 0.0

    @override
    @classmethod
    def own_arguments(cls, settings: Settings) -> dict[str, Any]:
        return {"size": settings.own.size, "damping": settings.own.damping}

    @override
    def open(self, arrays: Arrays, task: Task, files: RunFiles, *, resumed: bool) -> Arrays:
        """Prepare for a run, and refuse a task without a square root of its Hessian."""
        arrays = super().open(arrays, task, files, resumed=resumed)
        task.check_square_root()
        self.lam = task.options.regularisation if task.kind is TaskKind.CONVEX else 0.0
        return arrays

    @override
    def announced(self, model: Arrays) -> Announced:
        """Announce the sketch, of ``k`` rows for each trainable tensor."""
        x = self.changing(model)
        k = self.size or sum(value.size for value in x.values())
        # Views of one number, since only shape and dtype count.
        Y = {name: np.broadcast_to(np.zeros((), value.dtype), (k, *value.shape)) for name, value in x.items()}
        return {**super().announced(model), SKETCH: Y}

    @override
    def norms(self, reply: Reply) -> Mapping[str, float]:
        return {**super().norms(reply), "sketch": update_norm(reply.records.get(SKETCH, {}), {})}

    @override
    def begin(self, model: Arrays) -> None:
        """Start a round.

        Raises:
            CurvatureError: The model is too large, which is told before anyone trains.
        """
        super().begin(model)
        d = sum(value.size for value in self.changing(model).values())
        check_dense(d, "method 'fedns'", do=SUPPORTED)
        if 0 < self.size < d:
            self.note_once(
                "size",
                f"sketches of {self.size} rows for {d} weights: such steps may diverge at a large lr (above 0.5)",
            )
        self._P = np.zeros((d, d))

    @override
    def fold(self, reply: Reply) -> None:
        Y = reply.records.get(SKETCH, {})
        if Y.keys() != reply.arrays.keys():
            raise MessageError(
                f"{reply.where}, record '{SKETCH}'",
                expected=f"the sketch of each of the {len(reply.arrays)} tensors in 'arrays'",
                got=f"{len(Y)} tensors",
                do="use fedapps.client_apps.fedns on every node",
            )
        super().fold(reply)
        rows = flatten_rows(Y, [name for name in self._model if name in Y])
        self._P += self.settings.weight(reply.num_examples) * rows.T @ rows

    @override
    def finish(self) -> Arrays:
        mean = self.mean()
        g = {name: value for name, value in mean.items() if name not in self._buffers}
        P = self._P / self._sums.weight + (self.lam + self.damping) * np.eye(len(self._P))
        direction, added = solve_spd(P, flatten(g, g), where="server, sum of the clients' sketches")
        if added:
            self.rounds.note(f"the sum of the sketches could not be factorised; damping was raised by {added:.1e}")
        return self.moved(-self.lr, unflatten(direction, g, g))
