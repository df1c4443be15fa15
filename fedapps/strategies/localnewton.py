r"""LocalNewton: local second-order steps, simple mixing.

.. math:: \theta' = \sum_i p_i \theta_i

Gupta et al. 2021, arXiv 2105.07320. The client is FedPM's; only the mixing differs, so the two show what the
preconditioned mixing is worth. With candidate steps ``S`` a global line search follows (Bischoff et al., arXiv 2109.02388):

.. math:: \theta' = \theta + s^* d, \qquad d = \sum_i p_i \theta_i - \theta, \qquad
          s^* = \arg\min_{s \,\in\, S \cup \{0\}} \sum_i p_i f_i(\theta + s\, d)

in a second exchange of the same round, with the clients whose models are in the mean: ``theta`` and ``d`` go down, one loss a
candidate comes up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from typing_extensions import override

from fedapps.curvature.layout import Layout
from fedapps.curvature.line_search import choose_step
from fedapps.errors import SettingsError
from fedapps.messages.blocks import LAYOUT, read_layout
from fedapps.messages.schema import Arrays, Reply
from fedapps.settings import RoundSettings, Settings
from fedapps.strategies.base import RunFiles
from fedapps.strategies.layouts import Layouts
from fedapps.strategies.line_search import ONE_EXCHANGE, LineSearch
from fedapps.strategies.mean import MeanStrategy
from fedapps.strategies.rounds import FollowUp
from fedapps.tasks.base import Task, TaskKind


class LocalNewton(MeanStrategy):
    """The weighted mean of the clients' models; integer buffers take the maximum.

    Args:
        settings: As `RoundStrategy`.
        steps: Candidates of the line search, > 0; without any the step is 1.
        convex_only: Keys of the settings that are in force and that only clients of a convex task obey.
        **rounds: Further arguments of `RoundStrategy`.

    Attributes:
        layouts: What the clients precondition.

    Example:
        >>> LocalNewton(steps=(1.0, 0.5)).steps
        (1.0, 0.5)
    """

    def __init__(
        self,
        settings: RoundSettings | None = None,
        *,
        steps: Sequence[float] = (),
        convex_only: Sequence[str] = (),
        **rounds: Any,
    ) -> None:
        super().__init__(settings, **rounds)
        self.steps = tuple(steps)
        self._convex_only = convex_only
        self.layouts = Layouts(self.roster, self.rounds)
        self._search: LineSearch | None = None

    @override
    @classmethod
    def own_arguments(cls, settings: Settings) -> dict[str, Any]:
        own = settings.own
        asked = {"localnewton.local-search": own.local_search, "localnewton.hessian-share": own.hessian_share < 1}
        return {"steps": own.steps, "convex_only": tuple(key for key, is_asked in asked.items() if is_asked)}

    @override
    def curvature_layout(self) -> Layout | None:
        """Say what most clients preconditioned in the first round, before that what they told in the handshake."""
        return self.layouts.common or self.roster.layout()

    @override
    def open(self, arrays: Arrays, task: Task, files: RunFiles, *, resumed: bool) -> Arrays:
        """Prepare for a run, and refuse what only convex tasks have."""
        if self._convex_only and task.kind is not TaskKind.CONVEX:
            raise SettingsError(
                f"method 'localnewton', {' and '.join(self._convex_only)}",
                expected="a convex task, whose local steps have all of a client's examples",
                got=f"'{task.name}', a {task.kind} task",
                do="take localnewton.line-search (global) and localnewton.max-rows (rows that enter a block) instead",
            )
        return super().open(arrays, task, files, resumed=resumed)

    @override
    def begin(self, model: Arrays) -> None:
        super().begin(model)
        self._weights: dict[int, float] = {}
        self._parameters: set[str] = set()
        self._search = None
        self.layouts.begin(model)

    @override
    def fold(self, reply: Reply) -> None:
        layout = read_layout(reply) if LAYOUT in reply.entries else self.roster.layout()
        if layout is not None:
            self.layouts.check(layout, reply.where)
        super().fold(reply)
        if layout is not None:
            self.layouts.fold(layout, reply.where)
        self._weights[reply.partition] = self.settings.weight(reply.num_examples)
        trainable = reply.arrays.keys() if self.trainable is None else self.trainable
        self._parameters |= {k for k in trainable if np.issubdtype(self._model[k].dtype, np.floating)}

    @override
    def follow_up(self, *, enough: bool) -> FollowUp | None:
        """Ask the clients whose models are in the mean for their losses along it.

        One without usable losses stays in the mean, but has no say in the step.
        """
        if not self.steps or not enough or self._search is not None:
            return None
        mean = self.mean()
        self._search = LineSearch(
            start={name: old if name in self._parameters else mean[name] for name, old in self._model.items()},
            direction={name: mean[name] - old for name, old in self._model.items() if name in self._parameters},
            steps=self.steps,
        )
        return self._search.ask(self._weights)

    @override
    def answer(self, reply: Reply) -> None:
        if self._search is not None:
            self._search.take(reply)

    @override
    def finish(self) -> Arrays:
        """Take the mean, or the step of the line search."""
        self.layouts.finish()
        search, self._search = self._search, None
        if search is None:
            if self.steps:
                self.rounds.note(ONE_EXCHANGE)
            return self.mean()
        return search.moved(lambda losses: choose_step(self.steps, losses, self._weights), self.rounds)
