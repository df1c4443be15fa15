"""The image tasks on tiny files made here, with a stand-in for torchvision's download, and on real data if it is there."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from torch import nn

from fedapps.errors import TaskError
from fedapps.tasks import TaskConfig, load_task
from fedapps.tasks.base import Data
from fedapps.tasks.images import (
    Cifar10Task,
    Cifar100Task,
    ImageTask,
    MnistTask,
    cache_folder,
    crop_and_flip,
    resnet18_groupnorm,
    simple_cnn,
)

from .test_image_files import cifar, idx, npz

TASKS: dict[str, type[ImageTask]] = {"mnist": MnistTask, "cifar10": Cifar10Task, "cifar100": Cifar100Task}
every_task = pytest.mark.parametrize("name", TASKS)

REAL_FOLDER = os.environ.get("FEDAPPS_DATA", "")
"""Read before the tests hide it."""


@pytest.fixture(autouse=True)
def _no_data_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("FEDAPPS_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def write_files(folder: Path, name: str) -> None:
    """A tiny data set in the formats of `fedapps.tasks.image_files`."""
    folder.mkdir(exist_ok=True, parents=True)
    if name == "mnist":
        random = np.random.default_rng(0)
        for part, n in (("train", 6), ("t10k", 2)):
            (folder / f"{part}-images-idx3-ubyte").write_bytes(idx(random.integers(0, 256, (n, 28, 28))))
            (folder / f"{part}-labels-idx1-ubyte").write_bytes(idx(np.arange(n)))
    else:
        (folder / f"{name}_subset.npz").write_bytes(npz(**cifar(num_classes=TASKS[name].NUM_CLASSES)))


@every_task
@pytest.mark.parametrize("place", ["", "its sub-folder"])
def test_files_are_read_from_the_data_folder(tmp_path: Path, name: str, place: str) -> None:
    write_files(tmp_path / name if place else tmp_path, name)
    task = load_task(name, TaskConfig(data_dir=tmp_path))
    assert isinstance(task, ImageTask)
    train, test = task.load()
    assert (len(train), len(test)) == (6, 2)
    assert train.inputs.dtype == np.uint8
    inputs, targets = task.tensors(train)
    assert task.build_model()(inputs).shape == (6, task.NUM_CLASSES)
    assert (inputs.dtype, targets.dtype) == (torch.float32, torch.int64)
    assert len(task.checksums()) == len(task.FILES)
    assert all(len(digest) == 64 for digest in task.checksums().values())
    assert set(task.evaluate(task.initial_arrays(0), test)) == {"loss", "accuracy"}


@every_task
def test_pixels_are_normalised_by_channel(name: str) -> None:
    """Pixel values 0 and 255 are 0 and 1 before the channel's mean is taken off."""
    task = TASKS[name](TaskConfig())
    pixels = np.zeros((2, *task.IMAGE), np.uint8)
    pixels[1] = 255
    inputs, _ = task.tensors(Data(pixels, np.array([0, 1])))
    for channel, (mean, deviation) in enumerate(zip(task.MEAN, task.DEVIATION, strict=True)):
        np.testing.assert_allclose(inputs[0, channel], (0 - mean) / deviation, rtol=1e-5)
        np.testing.assert_allclose(inputs[1, channel], (1 - mean) / deviation, rtol=1e-5)


@every_task
def test_without_files_the_message_says_which_and_how(tmp_path: Path, name: str) -> None:
    with pytest.raises(TaskError) as caught:
        load_task(name, TaskConfig(data_dir=tmp_path)).server_data()
    for part in [
        TASKS[name].FILES[0],
        str(tmp_path),
        "without --data-dir and FEDAPPS_DATA to let torchvision download",
    ]:
        assert part in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_some_of_the_files_are_not_enough(tmp_path: Path) -> None:
    write_files(tmp_path, "mnist")
    (tmp_path / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(TaskError, match="got no t10k-labels-idx1-ubyte in"):
        load_task("mnist", TaskConfig(data_dir=tmp_path)).server_data()


# Torchvision's loaders, with a stand-in for its data sets -------------------------------------------------


class StandIn:
    """A data set as torchvision's look, which notes how it was asked for."""

    asked: list[dict[str, Any]]

    def __init__(self, root: str, *, train: bool, download: bool) -> None:
        self.asked.append({"root": root, "train": train, "download": download})
        n = 4 if train else 2
        self.data: Any = np.full((n, 32, 32, 3), [10, 20, 30], np.uint8)
        self.targets: Any = list(range(n))


class MnistStandIn(StandIn):
    def __init__(self, root: str, *, train: bool, download: bool) -> None:
        super().__init__(root, train=train, download=download)
        self.data = torch.full((len(self.targets), 28, 28), 7, dtype=torch.uint8)
        self.targets = torch.tensor(self.targets)


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str) -> list[dict[str, Any]]:
    asked: list[dict[str, Any]] = []
    cls = type("Dataset", (MnistStandIn if name == "mnist" else StandIn,), {"asked": asked})
    monkeypatch.setattr(torchvision.datasets, TASKS[name].DATASET, cls)
    return asked


@every_task
def test_without_a_data_folder_torchvision_downloads(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    asked = stand_in(monkeypatch, name)
    task = TASKS[name](TaskConfig())
    train, test = task.load()
    assert asked == [{"root": str(cache_folder()), "train": part, "download": True} for part in (True, False)]
    assert (train.inputs.shape, len(test)) == ((4, *task.IMAGE), 2)
    assert train.inputs[0, :, 0, 0].tolist() == ([7] if name == "mnist" else [10, 20, 30])
    assert train.targets.tolist() == [0, 1, 2, 3]
    assert set(task.checksums()) == {"train", "test"}


@every_task
def test_torchvisions_own_files_in_the_data_folder_are_taken_without_download(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    asked = stand_in(monkeypatch, name)
    TASKS[name](TaskConfig(data_dir=tmp_path)).load()
    assert asked == [{"root": str(tmp_path), "train": part, "download": False} for part in (True, False)]


@pytest.mark.parametrize("error", [OSError("<urlopen error no route to host>"), RuntimeError("Error downloading")])
def test_a_failed_download_says_how_to_give_files(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(root: str, *, train: bool, download: bool) -> None:
        raise error

    monkeypatch.setattr(torchvision.datasets, "CIFAR10", fail)
    with pytest.raises(TaskError) as caught:
        Cifar10Task(TaskConfig(), "cifar10").load()
    for part in ["task 'cifar10': expected a download of CIFAR10", str(error), "cifar10_subset.npz", "--data-dir"]:
        assert part in str(caught.value)


def test_without_torchvision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(TaskError, match=r"task 'mnist': expected torchvision.*install fedapps\[torch\]"):
        MnistTask(TaskConfig(), "mnist").load()


def test_data_of_another_form_from_torchvision_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    found = SimpleNamespace(data=np.zeros((2, 16, 16, 3), np.uint8), targets=[0, 1])
    monkeypatch.setattr(torchvision.datasets, "CIFAR10", lambda root, *, train, download: found)
    with pytest.raises(TaskError, match=r"torchvision's CIFAR10: expected uint8 images of shape \(3, 32, 32\)"):
        Cifar10Task(TaskConfig()).load()


# Options and augmentation ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "resnet"),
    [
        ("cifar10", {}, False), ("cifar10", {"model": "resnet18"}, True),
        ("cifar100", {}, True), ("cifar100", {"model": "cnn"}, False),
    ],
)  # fmt: skip
def test_the_model_is_an_option(name: str, options: dict[str, Any], resnet: bool) -> None:
    task = TASKS[name](TaskConfig(options=options))
    assert isinstance(task.build_model(), torchvision.models.ResNet) == resnet


@every_task
def test_logistic_regression_is_one_linear_layer_on_the_pixels(name: str) -> None:
    task = TASKS[name](TaskConfig(options={"model": "logistic"}))
    pixels = np.random.default_rng(0).integers(0, 256, (3, *task.IMAGE), dtype=np.uint8)
    inputs, _ = task.tensors(Data(pixels, np.zeros(3, np.int64)))
    arrays = task.initial_arrays(0)
    assert [value.shape for value in arrays.values()] == [(task.NUM_CLASSES, pixels[0].size), (task.NUM_CLASSES,)]
    weight, bias = (value.astype(np.float64) for value in arrays.values())
    mean, deviation = (np.array(v).reshape(-1, 1, 1) for v in (task.MEAN, task.DEVIATION))
    expected = ((pixels / 255 - mean) / deviation).reshape(3, -1) @ weight.T + bias
    found = task.module(arrays)(inputs).detach().numpy()
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_wrong_options_are_refused() -> None:
    with pytest.raises(TaskError, match="option 'model': expected one of cnn, logistic, got 'resnet18'"):
        MnistTask(TaskConfig(options={"model": "resnet18"}), "mnist")
    with pytest.raises(
        TaskError,
        match="option 'model': expected one of cnn, resnet18, logistic, got 'resnet50'; did you",
    ):
        Cifar10Task(TaskConfig(options={"model": "resnet50"}), "cifar10")
    with pytest.raises(TaskError, match="option 'augment': expected one of train-examples, model, got an unknown key"):
        MnistTask(TaskConfig(options={"augment": True}), "mnist")
    with pytest.raises(TaskError, match="option 'augment': expected a value of type bool"):
        Cifar100Task(TaskConfig(options={"augment": 1}), "cifar100")


def test_a_pool_of_fewer_examples_is_drawn_by_the_seed_with_classes_in_proportion(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of 40 + 20 examples a quarter: 10 + 5, without one twice; the test set is whole."""
    labels = np.array([0, 1, 0] * 20)
    numbers = np.arange(60, dtype=np.uint8).reshape(60, 1, 1, 1)
    whole = (
        Data(np.broadcast_to(numbers, (60, 1, 28, 28)), labels),
        Data(np.zeros((3, 1, 28, 28), np.uint8), np.arange(3)),
    )
    monkeypatch.setattr(MnistTask, "_files", {"a file": Path()})
    monkeypatch.setattr(MnistTask, "read", lambda self, files: whole)

    def drawn(examples: int, seed: int = 0) -> tuple[Data, Data]:
        return MnistTask(TaskConfig(options={"train-examples": examples}, seed=seed)).load()

    train, test = drawn(15)
    chosen = np.asarray(train.inputs)[:, 0, 0, 0]
    assert (len(np.unique(chosen)), len(test)) == (15, 3)
    np.testing.assert_array_equal(np.bincount(train.targets), [10, 5])
    np.testing.assert_array_equal(train.targets, labels[chosen])
    np.testing.assert_array_equal(drawn(15)[0].inputs, train.inputs)
    assert not np.array_equal(drawn(15, seed=1)[0].inputs, train.inputs)
    for all_of_them in (0, 60):
        assert drawn(all_of_them)[0] is whole[0]
    for wrong, expected in ((-1, ">= 0"), (61, r"0 \(all\) to 60")):
        with pytest.raises(TaskError, match=f"option 'train-examples': expected .*{expected}.*got {wrong}"):
            drawn(wrong)


def test_crops_are_windows_of_the_image_in_a_black_border_and_half_are_mirrored() -> None:
    """Every result is found again among the 81 windows of the padded image, plain or mirrored, and all kinds occur."""
    random = np.random.default_rng(0)
    image = random.integers(1, 256, (3, 8, 6), dtype=np.uint8)
    padded = np.zeros((3, 16, 14), np.uint8)
    padded[:, 4:12, 4:10] = image
    windows = {}
    for top in range(9):
        for left in range(9):
            window = padded[:, top : top + 8, left : left + 6]
            windows[window.tobytes()] = (top, left, False)
            windows[np.ascontiguousarray(window[:, :, ::-1]).tobytes()] = (top, left, True)
    images = np.repeat(image[None], 4000, axis=0)
    found = [windows[result.tobytes()] for result in crop_and_flip(images, random)]
    assert len(set(found)) == 162
    # Binomial with 4000 draws of one half: standard deviation 31.6; five of them.
    assert abs(sum(mirrored for *_, mirrored in found) - 2000) < 158
    assert (images == image).all()


def test_augmentation_is_off_by_default_and_leaves_the_batch_alone() -> None:
    random = np.random.default_rng(0)
    batch = Data(random.integers(0, 256, (4, 3, 32, 32), dtype=np.uint8), np.arange(4), {"site": np.arange(4)})
    before = np.array(batch.inputs)
    assert Cifar10Task(TaskConfig()).augment(batch, random) is batch
    task = Cifar10Task(TaskConfig(options={"augment": True}))
    first, again, other = (task.augment(batch, np.random.default_rng(seed)) for seed in (1, 1, 2))
    assert first.sha256() == again.sha256() != other.sha256()
    assert first.columns.keys() == {"site"}
    assert first.inputs.dtype == np.uint8
    assert np.array_equal(batch.inputs, before)


# Real data ------------------------------------------------------------------------------------------------

REAL = {"mnist": ((60_000, 10_000), 10_000), "cifar10": ((10_000, 2_000), 3_000), "cifar100": ((3_000, 1_000), 3_000)}


@every_task
def test_real_data_is_what_it_should_be(name: str) -> None:
    folder = REAL_FOLDER
    if not folder or not (Path(folder) / name).is_dir():
        pytest.skip(f"needs the files of {name} in the folder that FEDAPPS_DATA names")
    task = TASKS[name](TaskConfig(data_dir=Path(folder)), name)
    sizes, some = REAL[name]
    train, test = task.load()
    assert (len(train), len(test)) == sizes
    assert set(np.bincount(test.targets)) == ({980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009} if name == "mnist"
                                              else {sizes[1] // task.NUM_CLASSES})  # fmt: skip
    inputs, _ = task.tensors(train.take(np.arange(some)))
    # Means over some 10^6 pixels that are far from independent: within a twentieth of a deviation.
    assert inputs.mean(dim=(0, 2, 3)).abs().max() < 0.05
    assert (inputs.std(dim=(0, 2, 3)) - 1).abs().max() < 0.05


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
