"""The tasks mnist, cifar10 and cifar100: files in the data folder, or torchvision's download.

With a data folder (``--data-dir`` or ``FEDAPPS_DATA``) data is read from it and nothing is downloaded: the files of
`fedapps.tasks.image_files` first, in the folder or its sub-folder named after the task, else torchvision's own files.
Without one, torchvision downloads into ``~/.cache/fedapps`` (``XDG_CACHE_HOME`` is respected).

Images stay uint8 in memory; a batch becomes float32, normalised by channel, when it is used.
"""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import os
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import cached_property, partial
from math import prod
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from typing_extensions import override

from fedapps.errors import TaskError
from fedapps.settings import setting
from fedapps.tasks.base import DATA_VARIABLE, Data
from fedapps.tasks.compressed import find_compressed
from fedapps.tasks.image_files import checked_images, read_idx_pair, read_npz
from fedapps.tasks.splits import Purpose, hold_out, stream
from fedapps.tasks.torch_task import TorchTask

CROP_PADDING = 4
"""Black pixels on each side from which `crop_and_flip` cuts."""


class ImageTask(TorchTask):
    """Classify small images; what the tasks of this module share.

    Raises:
        TaskError: An option is wrong.
    """

    class Options(TorchTask.Options):
        """Options of the image tasks; ``model``, which each declares with its own choices, comes on top."""

        train_examples: int = setting(
            0, "size of the training pool, drawn by the run's seed, classes in proportion; 0 = all", ge=0
        )

    FOLDER: ClassVar[str]
    """Sub-folder of the data folder."""

    FILES: ClassVar[tuple[str, ...]]
    """Names of the files, without the ending of a compression."""

    DATASET: ClassVar[str]
    """Class of ``torchvision.datasets``."""

    IMAGE: ClassVar[tuple[int, int, int]]
    """Shape of an image, ``(channels, height, width)``."""

    NUM_CLASSES: ClassVar[int]
    MEAN: ClassVar[tuple[float, ...]]
    """Mean of each channel of the whole training set, pixels in [0, 1]."""

    DEVIATION: ClassVar[tuple[float, ...]]
    """Standard deviation of each channel of the whole training set, pixels in [0, 1]."""

    @abstractmethod
    def read(self, files: Mapping[str, Path]) -> tuple[Data, Data]:
        """Read training pool and test set from the files of the data folder, each of `FILES` -> where it is.

        Raises:
            TaskError: A file is malformed.
        """

    @override
    def load(self) -> tuple[Data, Data]:
        """Read the images: inputs ``(n, channels, height, width)`` uint8, targets ``(n,)`` int64."""
        train, test = self.read(self._files) if self._files else self._load_with_torchvision()
        return self._some_of(train), test

    @override
    def checksums(self) -> dict[str, str]:
        """Identify the data: ``cifar10/cifar10_subset.npz.xz`` -> SHA-256 of its bytes; without such files, as for any task."""
        if not self._files:
            return super().checksums()
        return {
            f"{path.parent.name}/{path.name}": hashlib.sha256(path.read_bytes()).hexdigest()
            for path in self._files.values()
        }

    @override
    def build_model(self) -> torch.nn.Module:
        """Build the model that the option ``model`` names, from ``(n, channels, height, width)`` to ``(n, classes)``."""
        match self.options.model:
            case "logistic":
                return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(prod(self.IMAGE), self.NUM_CLASSES))
            case "resnet18":
                return resnet18_groupnorm(self.NUM_CLASSES)
            case _:
                return simple_cnn(self.IMAGE, self.NUM_CLASSES)

    @override
    def tensors(self, data: Data, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
        """Turn pixels 0..255 into float32, less the mean and divided by the deviation of their channel."""
        mean, deviation = (torch.tensor(v, device=device).view(1, -1, 1, 1) for v in (self.MEAN, self.DEVIATION))
        pixels = torch.tensor(data.inputs, device=device).float()
        return (pixels / 255 - mean) / deviation, torch.tensor(data.targets, device=device)

    def _some_of(self, train: Data) -> Data:
        """Draw as many examples as the option ``train-examples`` says, and leave the others unused."""
        wanted = self.options.train_examples
        if wanted > len(train):
            raise TaskError(
                f"task '{self.name}', option 'train-examples'",
                expected=f"0 (all) to {len(train)}, the training images that there are",
                got=str(wanted),
                do="change it in task-options",
            )
        if wanted in (0, len(train)):
            return train
        _, drawn = hold_out(train.targets, wanted / len(train), stream(Purpose.SUBSET, self.config.seed))
        return train.take(drawn)

    @cached_property
    def _files(self) -> dict[str, Path]:
        """Each of `FILES` -> where it is; empty if none is there."""
        if self.data_dir is None:
            return {}
        folders = self.data_dir / self.FOLDER, self.data_dir
        found = {name: find_compressed([folder / name for folder in folders]) for name in self.FILES}
        files = {name: path for name, path in found.items() if path is not None}
        if files and len(files) < len(found):
            missing = ", ".join(name for name in found if name not in files)
            raise self._no_data(f"no {missing} in {' or '.join(map(str, folders))}")
        return files

    def _load_with_torchvision(self) -> tuple[Data, Data]:
        try:
            import torchvision
        except ImportError as error:
            raise TaskError(
                f"task '{self.name}'", expected="torchvision", got=str(error), do="install fedapps[torch]"
            ) from error
        dataset = getattr(torchvision.datasets, self.DATASET)
        given = self.data_dir
        try:
            with nullcontext(given) if given else _only_one_process(cache_folder()) as folder:
                train, test = (dataset(str(folder), train=part, download=given is None) for part in (True, False))
        except (RuntimeError, OSError) as error:
            raise self._no_data(f"{type(error).__name__}: {error}") from error
        return self._data_of(train), self._data_of(test)

    def _data_of(self, dataset: Any) -> Data:
        images, labels = np.asarray(dataset.data), np.asarray(dataset.targets)
        images = images[:, None] if images.ndim == 3 else images.transpose(0, 3, 1, 2)
        return checked_images(images, labels, self.IMAGE, self.NUM_CLASSES, f"torchvision's {self.DATASET}")

    def _no_data(self, got: str) -> TaskError:
        names = ", ".join(self.FILES)
        do = f"put them there, or start without --data-dir and {DATA_VARIABLE} to let torchvision download"
        if self.data_dir is None:
            do = f"connect to the network, or put {names} into a folder and set --data-dir or {DATA_VARIABLE} to it"
            return TaskError(
                f"task '{self.name}'", expected=f"a download of {self.DATASET} by torchvision", got=got, do=do
            )
        expected = f"{names} (plain or with .gz, .xz or .bz2), or torchvision's own files, in {self.data_dir}"
        return TaskError(f"task '{self.name}'", expected=expected, got=got, do=do)


class MnistTask(ImageTask):
    """Handwritten digits: 60,000 + 10,000 images of 28 x 28 pixels in 10 classes (LeCun, Cortes & Burges)."""

    class Options(ImageTask.Options):
        """Options of mnist."""

        model: Literal["cnn", "logistic"] = setting(
            "cnn", "cnn (simple CNN) or logistic (logistic regression on the pixels)"
        )

    FOLDER = "mnist"
    FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
    DATASET = "MNIST"
    IMAGE = (1, 28, 28)
    NUM_CLASSES = 10
    MEAN = (0.1307,)
    DEVIATION = (0.3081,)

    @override
    def read(self, files: Mapping[str, Path]) -> tuple[Data, Data]:
        """Read the four IDX files."""
        paths = [files[name] for name in self.FILES]
        train = read_idx_pair(paths[0], paths[1], self.IMAGE, self.NUM_CLASSES)
        return train, read_idx_pair(paths[2], paths[3], self.IMAGE, self.NUM_CLASSES)


class Cifar10Task(ImageTask):
    """Photographs of 32 x 32 pixels in 10 classes (Krizhevsky 2009): 50,000 + 10,000, or a subset from a file."""

    class Options(ImageTask.Options):
        """Options of the CIFAR tasks."""

        model: Literal["cnn", "resnet18", "logistic"] = setting(
            "cnn", "cnn (simple CNN), resnet18 (ResNet-18 with group normalisation) or logistic"
        )
        augment: bool = setting(
            False, "crop training images at random from a border of 4 black pixels, and flip half of them"
        )

    FOLDER = "cifar10"
    FILES = ("cifar10_subset.npz",)
    DATASET = "CIFAR10"
    IMAGE = (3, 32, 32)
    NUM_CLASSES = 10
    MEAN = (0.49139968, 0.48215841, 0.44653091)
    DEVIATION = (0.24703223, 0.24348513, 0.26158784)

    @override
    def read(self, files: Mapping[str, Path]) -> tuple[Data, Data]:
        """Read the npz file."""
        (path,) = files.values()
        return read_npz(path, self.IMAGE, self.NUM_CLASSES)

    @override
    def augment(self, batch: Data, random: np.random.Generator) -> Data:
        """Crop and flip the images of a training batch if the option ``augment`` says so."""
        if not self.options.augment:
            return batch
        return dataclasses.replace(batch, inputs=crop_and_flip(np.asarray(batch.inputs), random))


class Cifar100Task(Cifar10Task):
    """Photographs of 32 x 32 pixels in 100 classes (Krizhevsky 2009): 50,000 + 10,000, or a subset from a file."""

    class Options(Cifar10Task.Options):
        """Options of cifar100."""

        model: Literal["cnn", "resnet18", "logistic"] = setting(
            "resnet18", "resnet18 (ResNet-18 with group normalisation), cnn (simple CNN) or logistic"
        )

    FOLDER = "cifar100"
    FILES = ("cifar100_subset.npz",)
    DATASET = "CIFAR100"
    NUM_CLASSES = 100
    MEAN = (0.50707516, 0.48654887, 0.44091784)
    DEVIATION = (0.26733429, 0.25643846, 0.27615047)


def crop_and_flip(images: NDArray[Any], random: np.random.Generator) -> NDArray[Any]:
    """Cut each image at random from itself with a black border, and mirror half of them: the usual CIFAR augmentation.

    Gives new images ``(n, channels, height, width)`` of the same dtype.
    """
    n, _, height, width = images.shape
    border = CROP_PADDING
    padded = np.pad(images, ((0, 0), (0, 0), (border, border), (border, border)))
    top, left = random.integers(0, 2 * border + 1, (2, n))
    mirrored = random.random((n, 1)) < 0.5
    rows = top[:, None] + np.arange(height)  # (n, height)
    columns = left[:, None] + np.where(mirrored, np.arange(width)[::-1], np.arange(width))  # (n, width)
    cut = padded[np.arange(n)[:, None, None], :, rows[:, :, None], columns[:, None, :]]  # (n, height, width, channels)
    return np.ascontiguousarray(cut.transpose(0, 3, 1, 2))


def cache_folder() -> Path:
    """Tell where torchvision downloads to: ``fedapps`` in ``XDG_CACHE_HOME``, else in ``~/.cache``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedapps"


@contextmanager
def _only_one_process(folder: Path) -> Iterator[Path]:
    """Let no two processes, such as two SuperNodes of a machine, download into the folder at the same time."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "download.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder


GROUPS = 2
"""Groups of each group normalisation in `resnet18_groupnorm`."""


def simple_cnn(image: tuple[int, int, int], num_classes: int) -> nn.Sequential:
    """Build the simple CNN of the FL literature: two convolutions with pooling, three linear layers, all with bias.

    Convolutions of 5 x 5 without padding, 6 and 16 channels, each with ReLU and 2 x 2 max pooling; linear layers of 120 and
    84 units with ReLU, and the output. 62,006 parameters for CIFAR-10, 44,426 for MNIST.

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
    keeps no statistics of a client's data, and does not depend on the batch. 11,173,962 parameters with 10 classes.

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
