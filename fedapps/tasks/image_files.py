"""Reading image data sets from files, with errors that name the file: IDX (MNIST) and npz (subsets of CIFAR).

Files may be compressed (``.gz``, ``.xz``, ``.bz2``). Images stay uint8, channels first.

=========================================  =====================================================================
file                                       content
=========================================  =====================================================================
``train-images-idx3-ubyte``, ``t10k-...``  ``(n, 28, 28)`` uint8, IDX format
``train-labels-idx1-ubyte``, ``t10k-...``  ``(n,)`` uint8, IDX format
``cifar10_subset.npz``, ``cifar100_...``   ``x_train``, ``x_test`` ``(n, 32, 32, 3)`` uint8; ``y_train``, ``y_test``
=========================================  =====================================================================
"""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedapps.errors import TaskError
from fedapps.tasks.base import Data
from fedapps.tasks.compressed import DAMAGED, open_compressed

IDX_UBYTE = 8
"""Third byte of an IDX file of unsigned bytes; the fourth is the number of dimensions."""


def read_idx(path: Path, num_dims: int) -> NDArray[np.uint8]:
    """Read an IDX file of unsigned bytes with so many dimensions.

    Raises:
        TaskError: The file is damaged, not such a file, or of another length than its header says.
    """
    raw = _read(path)
    header = 4 + 4 * num_dims
    if len(raw) < header or raw[:4] != bytes([0, 0, IDX_UBYTE, num_dims]):
        raise _wrong(path, f"an IDX file of unsigned bytes with {num_dims} dimension(s)", f"first bytes {raw[:4]!r}")
    shape = tuple(int(size) for size in np.frombuffer(raw, ">u4", num_dims, offset=4))
    if len(raw) - header != np.prod(shape, dtype=np.int64):
        raise _wrong(path, "as many bytes as its header says", f"{len(raw) - header} bytes for shape {shape}")
    return np.frombuffer(raw, np.uint8, offset=header).reshape(shape)


def read_idx_pair(images_path: Path, labels_path: Path, image: tuple[int, ...], num_classes: int) -> Data:
    """Read images of one channel and their labels from two IDX files; see `checked_images`.

    Raises:
        TaskError: A file is malformed, or the two do not fit.
    """
    images, labels = read_idx(images_path, 3), read_idx(labels_path, 1)
    return checked_images(images[:, None], labels, image, num_classes, f"file {images_path} and {labels_path.name}")


def read_npz(path: Path, image: tuple[int, ...], num_classes: int) -> tuple[Data, Data]:
    """Read training and test part from an npz file with images whose last dimension is the channel; see `checked_images`.

    Raises:
        TaskError: The file is malformed or lacks an array.
    """
    raw = _read(path)
    try:
        with np.load(io.BytesIO(raw), allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files if name in NPZ_NAMES}
    except (*DAMAGED, ValueError, TypeError, zipfile.BadZipFile) as error:
        raise _wrong(path, "an npz file of plain arrays", str(error)) from error
    if missing := [name for name in NPZ_NAMES if name not in arrays]:
        raise _wrong(path, f"arrays {', '.join(NPZ_NAMES)}", f"none named {', '.join(missing)}")
    train, test = (
        checked_images(
            _channels_first(arrays[f"x_{part}"], path),
            arrays[f"y_{part}"],
            image,
            num_classes,
            f"file {path}, part {part}",
        )
        for part in ("train", "test")
    )
    return train, test


NPZ_NAMES = ("x_train", "y_train", "x_test", "y_test")
"""Arrays of an npz file that are read."""


def checked_images(
    images: NDArray[Any], labels: NDArray[Any], image: tuple[int, ...], num_classes: int, where: str
) -> Data:
    """Check images ``(n, channels, height, width)`` and labels ``(n,)``, counted from 0, and join them.

    Args:
        images: uint8.
        labels: Integers.
        image: Shape that an image must have, ``(channels, height, width)``.
        num_classes: Number of classes.
        where: What they are, for the error message.

    Returns:
        Inputs uint8, targets int64.
    """
    if images.dtype != np.uint8 or images.shape[1:] != image:
        raise _wrong(where, f"uint8 images of shape {image}", f"{images.dtype} of shape {images.shape[1:]}")
    if labels.dtype.kind not in "ui" or labels.shape != images.shape[:1]:
        raise _wrong(where, f"{len(images)} integer labels", f"{labels.dtype} of shape {labels.shape}")
    if len(labels) and not 0 <= labels.min() <= labels.max() < num_classes:
        raise _wrong(where, f"labels in 0..{num_classes - 1}", f"labels in {labels.min()}..{labels.max()}")
    return Data(np.ascontiguousarray(images), labels.astype(np.int64))


def _channels_first(images: NDArray[Any], path: Path) -> NDArray[Any]:
    if images.ndim != 4:
        raise _wrong(path, "images of shape (n, height, width, channels)", f"shape {images.shape}")
    return images.transpose(0, 3, 1, 2)


def _read(path: Path) -> bytes:
    try:
        with open_compressed(path) as file:
            return file.read()
    except DAMAGED as error:
        raise _wrong(path, "a readable file", str(error)) from error


def _wrong(where: Path | str, expected: str, got: str) -> TaskError:
    place = f"file {where}" if isinstance(where, Path) else where
    return TaskError(place, expected=expected, got=got, do="get the file again, or check how it was made")
