"""Sums over a convolution's rows without unfolding, against the rows themselves, over random geometries in float64."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from fedapps.curvature import convolutions
from fedapps.curvature.convolutions import conv_moment, conv_rows, num_positions, shifted_moment, unfolded_moment

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")

KINDS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}


def rows_with_one(module: Any, x: torch.Tensor, bias: bool) -> torch.Tensor:
    rows = conv_rows(module, x)
    return torch.cat([rows, rows.new_ones(*rows.shape[:2], 1)], dim=2) if bias else rows


def geometries(
    seed: int, count: int, *, dims: tuple[int, ...], unit_stride: bool
) -> Iterator[tuple[Any, torch.Tensor]]:
    """Draw layers with an input that they accept."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    while count:
        n, groups = draw.choice(dims), draw.choice([1, 2, 3])
        channels = groups * draw.randint(1, 3)
        options: dict[str, Any] = {
            "kernel_size": [draw.randint(1, 4) for _ in range(n)],
            "padding_mode": draw.choice(["zeros", "zeros", "circular", "replicate"]),
        }
        if unit_stride:
            options["padding"] = draw.choice(["same", "valid", [draw.randint(0, 3) for _ in range(n)]])
        else:
            options |= {key: [draw.randint(1, 3) for _ in range(n)] for key in ("stride", "dilation")}
            options["padding"] = [draw.randint(0, 2) for _ in range(n)]
        module = KINDS[n](channels, 2 * groups, groups=groups, dtype=torch.float64, **options)
        x = torch.randn(2, channels, *(draw.randint(3, 9) for _ in range(n)), dtype=torch.float64)
        try:
            module(x)
        except RuntimeError:
            continue  # The image is smaller than the kernel or than a circular padding.
        count -= 1
        yield module, x


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_shifting_equals_unfolding(bias: bool) -> None:
    """Stride 1 and dilation 1, one and two dimensions, any padding, groups; kernels of even and odd sides."""
    tried = 0
    for module, x in geometries(0, 120, dims=(1, 2), unit_stride=True):
        shape = convolutions._geometry(module, x)
        assert shape is not None
        if not convolutions._borders_fit(shape):
            continue
        rows = rows_with_one(module, x, bias)
        torch.testing.assert_close(shifted_moment(shape, module.groups, bias), rows.mT @ rows, msg=str(module))
        tried += 1
    assert tried > 60


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_moment_and_number_of_rows_are_those_of_the_rows_for_every_geometry(bias: bool) -> None:
    for module, x in geometries(1, 80, dims=(1, 2, 3), unit_stride=False):
        rows = rows_with_one(module, x, bias)
        assert num_positions(module, x) == rows.shape[1]
        for moment in (unfolded_moment, conv_moment):
            torch.testing.assert_close(moment(module, x, bias), rows.mT @ rows, msg=str(module))


def test_chosen_rows_are_those_of_all() -> None:
    for module, x in geometries(2, 30, dims=(1, 2, 3), unit_stride=False):
        rows = conv_rows(module, x)
        chosen = torch.randperm(rows.shape[1], generator=torch.Generator().manual_seed(0))[:3]
        torch.testing.assert_close(conv_rows(module, x, chosen), rows[:, chosen], rtol=0, atol=0)


def test_one_image_without_batch_is_a_batch_of_one() -> None:
    conv = nn.Conv2d(3, 4, 3, padding=1, dtype=torch.float64)
    x = torch.randn(3, 20, 20, dtype=torch.float64)
    torch.testing.assert_close(conv_moment(conv, x, True), conv_moment(conv, x[None], True))
    assert num_positions(conv, x) == 400


@pytest.mark.parametrize(
    ("conv", "image", "shifts"),
    [
        (nn.Conv2d(16, 16, 3, padding=1), (16, 32, 32), True),
        (nn.Conv2d(32, 8, 5, padding=2), (32, 14, 14), True),
        (nn.Conv2d(6, 16, 5), (6, 14, 14), False),
        (nn.Conv2d(16, 16, 3, padding=1, stride=2), (16, 32, 32), False),
        (nn.Conv2d(16, 16, 3, padding=2, dilation=2), (16, 32, 32), False),
        (nn.Conv2d(16, 16, 5), (16, 5, 5), False),
        (nn.Conv2d(16, 16, 1), (16, 32, 32), True),
    ],
    ids=["3 x 3", "5 x 5", "few channels, unpadded", "stride", "dilation", "image of the kernel's size", "1 x 1"],
)
def test_the_cheaper_way_is_taken(
    conv: nn.Conv2d, image: tuple[int, ...], shifts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As timing confirmed: shifting for many channels on padded images, else unfolding. 1 x 1 needs one shift, by 0."""
    taken = []
    monkeypatch.setattr(convolutions, "shifted_moment", lambda *a: taken.append("shifted"))
    monkeypatch.setattr(convolutions, "unfolded_moment", lambda *a: taken.append("unfolded"))
    conv_moment(conv, torch.zeros(64, *image), True)
    assert taken == ["shifted" if shifts else "unfolded"]
