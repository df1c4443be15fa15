"""The embedded default task: handwritten digits that come with scikit-learn, and a small CNN."""

from __future__ import annotations

import numpy as np
import torch
from typing_extensions import override

from fedapps.errors import TaskError
from fedapps.tasks.base import Data
from fedapps.tasks.splits import Purpose, hold_out, stream
from fedapps.tasks.torch_task import TorchTask

TEST_FRACTION = 0.2
"""Share of the 1,797 images that is the test set."""

TEST_SEED = 0
"""Seed of the draw of the test set; fixed, so that every run of every seed is tested on the same images."""


class DigitsTask(TorchTask):
    """Classify handwritten digits: 1,797 images of 8 x 8 pixels in 10 classes, nothing to download.

    The test set is a fixed stratified fifth (359 images, `TEST_SEED`). Source: Alpaydin & Kaynak, Optical Recognition
    of Handwritten Digits, UCI, CC BY 4.0, the copy bundled with scikit-learn.
    """

    @override
    def load(self) -> tuple[Data, Data]:
        """Read the images that scikit-learn bundles: inputs ``(n, 1, 8, 8)`` float32 in [0, 1], targets ``(n,)`` int64."""
        try:
            from sklearn.datasets import load_digits
        except ImportError as error:
            raise TaskError(
                "task 'digits'",
                expected="scikit-learn, which bundles the images",
                got=f"an import error ({error})",
                do="install fedapps[torch]",
            ) from error
        images, labels = load_digits(return_X_y=True)
        data = Data((images / 16).astype(np.float32).reshape(-1, 1, 8, 8), labels.astype(np.int64))
        train, test = hold_out(data.targets, TEST_FRACTION, stream(Purpose.TEST_SET, TEST_SEED))
        return data.take(train), data.take(test)

    @override
    def build_model(self) -> torch.nn.Module:
        """Build a CNN, two convolutions and two linear layers with bias: 19,578 parameters, ``(n, 1, 8, 8)`` to ``(n, 10)``."""
        return torch.nn.Sequential(
            torch.nn.Conv2d(1, 16, kernel_size=3, padding=1),
            torch.nn.ReLU(),
            torch.nn.Conv2d(16, 16, kernel_size=3, padding=1),
            torch.nn.ReLU(),
            torch.nn.MaxPool2d(2),
            torch.nn.Flatten(),
            torch.nn.Linear(16 * 4 * 4, 64),
            torch.nn.ReLU(),
            torch.nn.Linear(64, 10),
        )


class DigitsMlpTask(DigitsTask):
    """The digits of `DigitsTask` with a small perceptron, whose forward pass costs next to nothing."""

    @override
    def build_model(self) -> torch.nn.Module:
        """Build a perceptron with one hidden layer: 2,410 parameters, ``(n, 1, 8, 8)`` to ``(n, 10)``."""
        return torch.nn.Sequential(
            torch.nn.Flatten(), torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10)
        )
