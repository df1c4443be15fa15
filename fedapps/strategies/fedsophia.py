r"""FedSophia (Elbakary et al. 2024, arXiv 2406.06655): local steps of Sophia, simple mixing.

.. math:: \theta' = \sum_i p_i \theta_i

The steps, and what is kept over rounds, are the client's, `fedapps.client_apps.fedsophia`.
"""

from __future__ import annotations

from typing_extensions import override

from fedapps.messages.schema import Arrays
from fedapps.strategies.base import RunFiles
from fedapps.strategies.mean import MeanStrategy
from fedapps.tasks.base import Task


class FedSophia(MeanStrategy):
    """The weighted mean of the clients' models; integer buffers take the maximum.

    Example:
        >>> FedSophia().settings.weighting
        'examples'
    """

    @override
    def open(self, arrays: Arrays, task: Task, files: RunFiles, *, resumed: bool) -> Arrays:
        """Prepare for a run, and refuse a task whose labels cannot be drawn from the model."""
        task.check_sampling()
        return super().open(arrays, task, files, resumed=resumed)

    @override
    def finish(self) -> Arrays:
        return self.mean()
