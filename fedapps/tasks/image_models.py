"""Models for small images: a simple CNN, and ResNet-18 with group normalisation."""

from __future__ import annotations

from functools import partial

from torch import nn

GROUPS = 2
"""Groups of each group normalisation in `resnet18_groupnorm`."""


def simple_cnn(image: tuple[int, int, int], num_classes: int) -> nn.Sequential:
    """Build the simple CNN of the FL literature: two convolutions with pooling, three linear layers, all with bias.

    Convolutions of 5 x 5 without padding, 6 and 16 channels, each with ReLU and 2 x 2 max pooling; linear layers of 120 and
    84 units with ReLU, and the output. 62,006 parameters for CIFAR-10, 44,426 for MNIST.

    Args:
        image: Shape of an image, ``(channels, height, width)``.
        num_classes: Number of outputs.

    Returns:
        A model from ``(n, channels, height, width)`` to ``(n, num_classes)``.

    References:
        The FedPM paper (arXiv 2511.09100) says "simple CNN" for CIFAR-10 without widths, as far as our notes of it go. These
        are LeNet-5's, used for the same purpose by Li et al. (arXiv 2102.02079).
    """
    channels, height, width = image
    flat = 16 * _after_two_stages(height) * _after_two_stages(width)
    return nn.Sequential(
        nn.Conv2d(channels, 6, kernel_size=5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, kernel_size=5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(flat, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, num_classes),
    )


def _after_two_stages(size: int) -> int:
    return ((size - 4) // 2 - 4) // 2


def resnet18_groupnorm(num_classes: int) -> nn.Module:
    """Build ResNet-18 for images of 32 x 32 pixels, with group in place of batch normalisation.

    Torchvision's ResNet-18 with a stem of one 3 x 3 convolution of stride 1 and without its max pooling. Group normalisation
    keeps no statistics of a client's data, and does not depend on the batch.

    Args:
        num_classes: Number of outputs.

    Returns:
        A model from ``(n, 3, 32, 32)`` to ``(n, num_classes)``; 11,173,962 parameters with 10 classes.

    References:
        He et al., CVPR 2016, arXiv 1512.03385, with the stem of its CIFAR models; group normalisation: Wu & He, ECCV 2018,
        arXiv 1803.08494, with the two groups of Reddi et al., arXiv 2003.00295.
    """
    from torchvision.models.resnet import BasicBlock, ResNet

    model: nn.Module = ResNet(
        BasicBlock, [2, 2, 2, 2], num_classes=num_classes, norm_layer=partial(nn.GroupNorm, GROUPS)
    )
    stem = nn.Conv2d(3, 64, kernel_size=3, stride=1, padding=1, bias=False)
    # As torchvision initialises its other convolutions.
    nn.init.kaiming_normal_(stem.weight, mode="fan_out", nonlinearity="relu")
    model.conv1, model.maxpool = stem, nn.Identity()
    return model
