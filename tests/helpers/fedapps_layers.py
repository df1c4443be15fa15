"""Tasks for the tests of second-order clients: models with every kind of layer, in worker processes too."""

from __future__ import annotations

import torch
from fedapps_testing import Sites
from torch import nn

from fedapps.tasks import setting


class Layered(Sites):
    """A model with a wide linear layer, a grouped and a plain convolution, normalisation and dropout."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(4, 64),
            nn.Unflatten(1, (4, 4, 4)),
            nn.Conv2d(4, 4, 3, padding=1, groups=2, bias=False),
            nn.GroupNorm(2, 4),
            nn.Dropout(0.3),
            nn.Conv2d(4, 3, 2, stride=2),
            nn.Flatten(),
            nn.Linear(12, 2),
        )


class _Tied(nn.Module):
    """Two layers that share their weight, and one that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.twice = nn.Linear(4, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.twice(torch.tanh(self.twice(self.second(self.first(x))))))


class Tied(Sites):
    """A model with tied weights."""

    def build_model(self) -> nn.Module:
        return _Tied()


class _Branches(nn.Module):
    """A layer for inputs around 0 and one for inputs far from it."""

    def __init__(self) -> None:
        super().__init__()
        self.near = nn.Linear(4, 2)
        self.far = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.far(x / 100) if x.mean() > 50 else self.near(x)


class Branches(Sites):
    """With ``shift = 100`` client 0 uses one layer and the others another."""

    def build_model(self) -> nn.Module:
        return _Branches()


class Wide(Sites):
    """A multilayer perceptron of 0.27 million parameters."""

    class Options(Sites.Options):
        width: int = setting(512, "units of the hidden layers")

    def build_model(self) -> nn.Module:
        width = self.options.width
        return nn.Sequential(
            nn.Linear(4, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2)
        )  # fmt: skip


class Compiled(Sites):
    """The model of `Sites` behind ``torch.compile``; its backend runs the code as it is."""

    def build_model(self) -> nn.Module:
        return torch.compile(super().build_model(), backend="eager")


class _Mapped(nn.Module):
    """A layer that is called for each example by ``torch.vmap``."""

    def __init__(self) -> None:
        super().__init__()
        self.each = nn.Linear(4, 5)
        self.head = nn.Linear(5, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(torch.vmap(self.each)(x)))


class Mapped(Sites):
    """A model with ``torch.vmap`` in its forward pass."""

    def build_model(self) -> nn.Module:
        return _Mapped()
