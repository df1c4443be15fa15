"""The tasks ``table-net`` and ``table-regression``: a small perceptron on a table of one's own."""

from __future__ import annotations

import itertools
import math
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import field_validator
from torch.nn import functional
from typing_extensions import override

from fedapps.errors import TaskError
from fedapps.settings import setting
from fedapps.tasks.table import TableData
from fedapps.tasks.table_agreement import Categories, Column, Numbers
from fedapps.tasks.table_files import Table
from fedapps.tasks.torch_task import TorchTask


class TableNetTask(TableData, TorchTask):
    """A perceptron on a table whose label has two classes or more, numbered as they ascend or as ``classes`` says."""

    DTYPE = "float32"

    class Options(TableData.Options, TorchTask.Options):
        """The table, and the perceptron."""

        hidden: str = setting("32", "widths of the hidden layers, separated by commas; empty = a linear model")

        @field_validator("hidden")
        @classmethod
        def _widths(cls, value: str) -> str:
            try:
                right = all(0 < width <= 65536 for width in _widths(value))
            except ValueError:
                right = False
            if not right:
                raise ValueError("numbers from 1 to 65536, separated by commas")
            return value

    @override
    def build_model(self) -> torch.nn.Module:
        """Build linear layers with ReLU between them, from ``(n, d)`` to ``(n, outputs)``."""
        widths = [self.num_features, *_widths(self.options.hidden)]
        layers: list[torch.nn.Module] = []
        for inputs, outputs in itertools.pairwise(widths):
            layers += [torch.nn.Linear(inputs, outputs), torch.nn.ReLU()]
        return torch.nn.Sequential(*layers, torch.nn.Linear(widths[-1], self._outputs))

    @property
    def _outputs(self) -> int:
        return len(self.agreement.label.values or [])


class TableRegressionTask(TableNetTask):
    """A perceptron on a table whose label is a number, which it learns standardised by all nodes' mean and deviation.

    ``loss`` is the mean squared error in units of the label's variance, so that predicting the mean has loss 1 on all
    training rows together; ``absolute-error`` is the mean error in the label's own unit. Unlike the root of a mean square,
    both are means over examples, and so those of all clients are the weighted means of each one's.
    """

    metric: ClassVar[str] = "absolute-error"

    @override
    def criterion(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Compute the mean squared error of outputs ``(n, 1)`` for targets ``(n, 1)``."""
        return functional.mse_loss(outputs, targets)

    @override
    def sample_targets(self, outputs: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Draw from the normal distribution of which a squared error is the log-likelihood: variance 1/2 about the outputs."""
        noise = torch.randn(outputs.shape, generator=generator, device=outputs.device, dtype=outputs.dtype)
        return outputs + noise * math.sqrt(0.5)

    @override
    def metrics(self, model: torch.nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
        """Compute ``loss`` and ``absolute-error``, of one batch."""
        outputs = self.outputs(model, inputs)
        error = (outputs - targets).abs().mean() * self.agreement.label.scale
        return {"loss": self.criterion(outputs, targets), "absolute-error": error}

    @override
    def _label_told(self) -> Numbers | Categories:
        return Numbers.of(self._label_numbers(self._tables[0]), mean=True, variance=True)

    @override
    def _check_label(self, label: Column) -> None:
        if label.values is not None:
            raise TaskError(
                f"task '{self.name}'",
                expected="a label that is a number on all nodes",
                got="classes",
                do="run table-regression on all nodes",
            )

    @override
    def _targets(self, table: Table) -> NDArray[Any]:
        """Give each row's number, standardised, ``(n, 1)`` float32."""
        label = self.agreement.label
        return ((self._label_numbers(table) - label.mean) / label.scale).astype(np.float32)[:, None]

    def _label_numbers(self, table: Table) -> NDArray[np.float64]:
        numbers = table.numbers(self._label)
        self._refuse_missing(table, self._label, np.isnan(numbers))
        return numbers

    @property
    @override
    def _outputs(self) -> int:
        return 1


def _widths(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part.strip()]
