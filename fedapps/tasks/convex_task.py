"""Tasks with a convex objective: L2-regularised logistic regression in float64 NumPy.

A task of one's own derives from `ConvexTask` and implements `load`, with inputs ``(n, d)`` (dense or CSR) and targets
-1 or +1. It has the option ``regularisation``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit
from typing_extensions import override

from fedapps.curvature.logistic import LogisticRegression
from fedapps.curvature.newton import Objective
from fedapps.errors import TaskError
from fedapps.personalization.local_fits import LocalFit, fit_of_gradients
from fedapps.settings import setting
from fedapps.tasks.base import ROOT, SAMPLING, Data, Task, TaskKind, describe_targets

WEIGHTS = "weights"
"""Name of the one array of a convex model, ``(d,)`` float64."""


class ConvexTask(Task):
    r"""A task whose model is a weight vector ``theta`` ``(d,)`` and whose clients know gradient and Hessian.

    The objective of ``n`` examples is :math:`\frac1n \sum_j \log(1 + e^{-y_j x_j'\theta})
    + \frac{\lambda}{2} |\theta|^2` with the option ``regularisation`` as lambda, and training starts from zero.

    Raises:
        TaskError: An option is wrong.
    """

    kind: ClassVar[TaskKind] = TaskKind.CONVEX

    class Options(Task.Options):
        """Options of every convex task."""

        regularisation: float = setting(1e-3, "weight of the L2 penalty", ge=0)

    def objective(self, data: Data) -> Objective:
        """Give the regularised objective, with value, gradient and Hessian, of at least one example with target -1 or +1.

        Raises:
            TaskError: A target is neither -1 nor +1.
        """
        ConvexTask.check_targets(self, data, f"task '{self.name}', targets")
        return LogisticRegression(data.inputs, data.targets, self.options.regularisation)

    @override
    def check_targets(self, data: Data, where: str) -> None:
        """Refuse targets that are not -1 or +1, ``(n,)``, where the objective is that of logistic regression."""
        if type(self).objective is not ConvexTask.objective:
            return
        wrong = np.zeros(0) if data.targets.dtype.kind in "US" else data.targets[~np.isin(data.targets, (-1, 1))]
        if data.targets.ndim != 1 or data.targets.dtype.kind in "US" or len(wrong):
            raise TaskError(
                where,
                expected="-1 or +1 for each example, shape (n,)",
                got=describe_targets(data.targets),
                do="map the two classes to -1 and +1 in load()",
            )

    @override
    def check_sampling(self) -> None:
        """Refuse an objective without `fedapps.curvature.newton.Labelled.sampled_gradient`."""
        self._check_objective(SAMPLING, "sampled_gradient(theta, random)")

    @override
    def check_square_root(self) -> None:
        """Refuse an objective without `fedapps.curvature.newton.Rooted.square_root`."""
        self._check_objective(ROOT, "square_root(theta)")

    def _check_objective(self, what: str, method: str) -> None:
        if type(self).objective is ConvexTask.objective:
            return  # Logistic regression has both; a server without data could not even make one.
        objective = self.objective(self._pool.take(np.arange(1)))
        if not hasattr(objective, method.partition("(")[0]):
            expected = f"an objective with {method}, as those of logistic regression and least squares"
            raise self._lacks(what, expected, f"{type(objective).__name__}, which has none")

    def local_fit(self, data: Data, v: NDArray[Any], received: NDArray[Any], lam: float) -> LocalFit:
        r"""Measure a fit to some examples, for the choice of ``lambda`` in FedCLUP.

        With the gradient of each example's loss, :math:`-y_j x_j / (1 + e^{y_j x_j'v}) + \text{regularisation} \cdot v`.

        Args:
            data: The examples.
            v: The fit ``(d,)``: minimiser of the objective with the pull ``lambda/2 |v - received|^2``.
            received: ``(d,)``.
            lam: ``lambda``.
        """
        X = data.inputs if isinstance(data.inputs, np.ndarray) else data.inputs.toarray()
        slopes = -data.targets * expit(-data.targets * (X @ v))
        gradients = slopes[:, None] * X + self.options.regularisation * v
        return fit_of_gradients(self.objective(data).hessian(v), gradients, v, received, lam)

    @override
    def initial_arrays(self, seed: int) -> dict[str, NDArray[Any]]:
        """Give the zero vector, ``(d,)`` float64."""
        return {WEIGHTS: np.zeros(self.num_features)}

    @property
    def num_features(self) -> int:
        """The number ``d`` of features: what nodes with data of their own agreed on, else that of the data here.

        A task may know it without reading them.
        """
        agreed = self.config.agreed.get("features")
        return int(agreed[0]) if agreed else int(self._pool.inputs.shape[1])

    @override
    def evaluate(self, arrays: Mapping[str, NDArray[Any]], data: Data, device: str = "cpu") -> dict[str, float]:
        """Measure a weight vector: ``loss``, the objective with its penalty, and ``accuracy``; nothing without examples.

        The latter is the share of examples on whose side of zero (zero counts as +1) ``x'theta`` lies.
        """
        if len(data) == 0:
            return {}
        theta = arrays[WEIGHTS]
        predicted = np.where(data.inputs @ theta >= 0, 1, -1)
        return {"loss": float(self.objective(data).loss(theta)), "accuracy": float(np.mean(predicted == data.targets))}
