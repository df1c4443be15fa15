r"""Synthetic regression with known true parameters: one problem a client, :math:`w_i^* = w^* + R\,u_i`.

The problem is `fedapps.personalization.synthetic`'s. Column ``client`` says whose an example is, and the split by it is what
these tasks ask for, so that partition ``i`` is client ``i``. Its test examples come from its own distribution and cost it no
training examples. Since the truth is known, an evaluation reports the ``statistical-error`` :math:`|w - w_i^*|^2` beside
the loss, as the mean over the examples' clients.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from fedapps.curvature.newton import Objective
from fedapps.errors import SettingsError, TaskError
from fedapps.personalization.local_fits import LocalFit, fit_of_least_squares
from fedapps.personalization.quadratic import least_squares
from fedapps.personalization.synthetic import Regression, SyntheticConfig, SyntheticProblem, draw_problem
from fedapps.settings import setting
from fedapps.tasks.base import ClientData, Data
from fedapps.tasks.convex_task import WEIGHTS, ConvexTask
from fedapps.tasks.partitioning import PartitionKind

CLIENT = "client"
"""Column that says whose an example is."""


class _SyntheticTask(ConvexTask):
    regression: ClassVar[Regression]

    class Options(ConvexTask.Options):
        """Options of the synthetic tasks."""

        clients: int = setting(10, "number of clients m; the run needs as many")
        examples: int = setting(50, "training examples n of each client")
        test_examples: int = setting(50, "test examples of each client")
        dimension: int = setting(15, "number of parameters d")
        heterogeneity: float = setting(0.5, "distance R of each client's true parameters from their centre")
        noise: float = setting(1.0, "standard deviation of the targets' noise (linear only)")
        decay: float = setting(0.0, "covariates have variance j^-decay; 0 = identity")
        norm: float = setting(1.0, "length of the centre")

    @cached_property
    def problem(self) -> SyntheticProblem:
        """The problem; of each client's examples the last ``test-examples`` are for testing.

        Raises:
            TaskError: An option is out of range.
        """
        options = self.options
        try:
            config = SyntheticConfig(
                regression=self.regression,
                num_clients=options.clients,
                num_examples=options.examples,
                dimension=options.dimension,
                heterogeneity=options.heterogeneity,
                noise=options.noise,
                decay=options.decay,
                norm=options.norm,
                seed=self.config.seed,
            )
            more = dataclasses.replace(config, num_examples=config.num_examples + max(0, options.test_examples))
        except SettingsError as error:
            raise TaskError(f"task '{self.name}', task-options: {error}") from error
        return draw_problem(more)

    @override
    def load(self) -> tuple[Data, Data]:
        """Draw the data: inputs ``(n, d)`` and targets ``(n,)`` float64, column ``client``."""
        n = self.options.examples
        return self._examples(slice(None, n)), self._examples(slice(n, None))

    def _examples(self, part: slice) -> Data:
        X, y = self.problem.X[:, part], self.problem.y[:, part]
        clients = np.repeat(np.arange(len(y)), y.shape[1])
        return Data(X.reshape(-1, X.shape[-1]), y.ravel(), {CLIENT: clients})

    @override
    def client_data(self, partition: int, num_partitions: int) -> ClientData:
        """Give the data of one client.

        For testing, unless ``client-test-fraction`` cuts some from its examples, it has those of the test set that are its own.
        """
        mine = super().client_data(partition, num_partitions)
        if len(mine.test) or self.config.partition.kind is not PartitionKind.COLUMN:
            return mine
        test = self.server_data().test
        own = np.flatnonzero(test.columns[CLIENT] == mine.train.columns[CLIENT][0])
        return dataclasses.replace(mine, test=test.take(own))

    @override
    def evaluate(self, arrays: Mapping[str, NDArray[Any]], data: Data, device: str = "cpu") -> dict[str, float]:
        """Measure a weight vector: what the base class gives, and ``statistical-error``; nothing if there are no examples."""
        metrics = super().evaluate(arrays, data)
        if metrics:
            truth = self.problem.truth[data.columns[CLIENT]]
            metrics["statistical-error"] = float(np.mean(np.sum((truth - arrays[WEIGHTS]) ** 2, axis=1)))
        return metrics


class SyntheticLogisticTask(_SyntheticTask):
    """Logistic regression of the paper: targets -1 or +1 with ``P(y = 1) = 1/(1 + exp(-x'w_i*))``."""

    regression: ClassVar[Regression] = Regression.LOGISTIC


class SyntheticLinearTask(_SyntheticTask):
    r"""Linear regression of the paper, objective :math:`|X\theta - y|^2 / (2n) + \frac{\text{reg}}{2} |\theta|^2`."""

    regression: ClassVar[Regression] = Regression.LINEAR
    metric = "loss"  # Nobody can choose by the statistical error where the truth is not known.

    class Options(_SyntheticTask.Options):
        """Options of linear regression."""

        regularisation: float = setting(0.0, "weight of the L2 penalty", ge=0)

    @override
    def objective(self, data: Data) -> Objective:
        return least_squares(np.asarray(data.inputs), data.targets, self.options.regularisation)

    @override
    def local_fit(self, data: Data, v: NDArray[Any], received: NDArray[Any], lam: float) -> LocalFit:
        """Measure a fit as least squares can, with the residual variance."""
        return fit_of_least_squares(np.asarray(data.inputs), data.targets, v, received, lam)

    @override
    def evaluate(self, arrays: Mapping[str, NDArray[Any]], data: Data, device: str = "cpu") -> dict[str, float]:
        """Measure a weight vector: ``loss`` and ``statistical-error``; nothing if there are no examples."""
        metrics = super().evaluate(arrays, data)
        metrics.pop("accuracy", None)  # The side of zero on which a prediction lies means nothing here.
        return metrics
