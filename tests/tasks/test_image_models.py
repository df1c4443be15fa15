from __future__ import annotations

import pytest
import torch
from torch import nn

from fedapps.tasks.image_models import resnet18_groupnorm, simple_cnn


def num_parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("image", "num_classes", "flat", "parameters"),
    [((1, 28, 28), 10, 256, 44_426), ((3, 32, 32), 10, 400, 62_006), ((3, 32, 32), 100, 400, 69_656)],
    ids=["mnist", "cifar10", "cifar100"],
)
def test_the_simple_cnn_has_lenets_widths(
    image: tuple[int, int, int], num_classes: int, flat: int, parameters: int
) -> None:
    """Weights and biases, layer by layer: 6 (25 c + 1) + 16 (150 + 1) + 120 (flat + 1) + 84 * 121 + 85 classes."""
    channels = image[0]
    expected = 6 * (25 * channels + 1) + 16 * 151 + 120 * (flat + 1) + 84 * 121 + 85 * num_classes
    model = simple_cnn(image, num_classes)
    assert num_parameters(model) == expected == parameters
    assert model(torch.zeros(2, *image)).shape == (2, num_classes)
    layers = [type(layer) for layer in model if any(True for _ in layer.parameters())]
    assert layers == [nn.Conv2d] * 2 + [nn.Linear] * 3


def test_resnet18_is_the_one_for_small_images_without_batch_normalisation() -> None:
    """11,173,962 parameters: as published for CIFAR-10 with batch normalisation, whose scales and shifts are as many."""
    model = resnet18_groupnorm(10)
    assert num_parameters(model) == 11_173_962
    assert list(model.buffers()) == []
    kinds = [type(module) for module in model.modules()]
    assert (kinds.count(nn.GroupNorm), kinds.count(nn.Conv2d), kinds.count(nn.MaxPool2d)) == (20, 20, 0)
    assert {m.num_groups for m in model.modules() if isinstance(m, nn.GroupNorm)} == {2}
    maps = {}
    model.layer1.register_forward_hook(lambda module, inputs, output: maps.update(layer1=output.shape))
    model.layer4.register_forward_hook(lambda module, inputs, output: maps.update(layer4=output.shape))
    assert model(torch.zeros(1, 3, 32, 32)).shape == (1, 10)
    assert maps == {"layer1": (1, 64, 32, 32), "layer4": (1, 512, 4, 4)}
