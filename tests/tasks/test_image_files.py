"""Image files made here, in the formats that users have, and what is said about malformed ones."""

from __future__ import annotations

import gzip
import io
import lzma
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedapps.errors import TaskError
from fedapps.tasks.image_files import read_idx, read_idx_pair, read_npz


def idx(array: np.ndarray) -> bytes:
    """The bytes of an IDX file: 0, 0, 8 (unsigned bytes), number of dimensions, sizes as big-endian integers, values."""
    header = struct.pack(">BBBB", 0, 0, 8, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape)
    return header + array.astype(np.uint8).tobytes()


def npz(**arrays: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)  # type: ignore[arg-type]
    return buffer.getvalue()


def cifar(n: int = 6, num_classes: int = 10, **change: Any) -> dict[str, Any]:
    random = np.random.default_rng(0)
    arrays = {
        "x_train": random.integers(0, 256, (n, 32, 32, 3), dtype=np.uint8),
        "y_train": (np.arange(n) % num_classes).astype(np.uint8),
        "x_test": random.integers(0, 256, (2, 32, 32, 3), dtype=np.uint8),
        "y_test": np.array([num_classes - 1, 0], np.uint8),
        "classes": np.array([f"class {i}" for i in range(num_classes)]),
    }
    return {**arrays, **change}


IMAGES = np.random.default_rng(1).integers(0, 256, (5, 28, 28))
LABELS = np.array([3, 0, 9, 1, 1])


@pytest.mark.parametrize(("suffix", "compress"), [("", bytes), (".gz", gzip.compress), (".xz", lzma.compress)])
def test_idx_files_are_read_as_they_were_written(tmp_path: Path, suffix: str, compress: Any) -> None:
    images, labels = tmp_path / f"images{suffix}", tmp_path / f"labels{suffix}"
    images.write_bytes(compress(idx(IMAGES)))
    labels.write_bytes(compress(idx(LABELS)))
    assert np.array_equal(read_idx(images, 3), IMAGES)
    data = read_idx_pair(images, labels, (1, 28, 28), 10)
    assert (data.inputs.shape, data.inputs.dtype, data.targets.dtype) == ((5, 1, 28, 28), np.uint8, np.int64)
    assert np.array_equal(np.asarray(data.inputs)[:, 0], IMAGES)
    assert data.targets.tolist() == [3, 0, 9, 1, 1]


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        pytest.param(b"", idx(LABELS), "file .*images: expected an IDX file of unsigned bytes with 3", id="empty"),
        pytest.param(b"<html>404</html>" * 9, idx(LABELS), "got first bytes b'<htm'; get the file again", id="a-page"),
        pytest.param(idx(LABELS), idx(LABELS), r"with 3 dimension\(s\), got first bytes", id="labels-for-images"),
        pytest.param(idx(IMAGES)[:-1], idx(LABELS), r"as its header says, got 3919 bytes for shape \(5, 28, 28\)", id="short"),
        pytest.param(idx(IMAGES) + b"x", idx(LABELS), "got 3921 bytes", id="long"),
        pytest.param(idx(IMAGES[:, :27]), idx(LABELS), r"uint8 images of shape \(1, 28, 28\), got .*27", id="other-size"),
        pytest.param(idx(IMAGES), idx(LABELS[:4]), r"images and labels: expected 5 integer labels, got .*\(4,\)", id="counts"),
        pytest.param(idx(IMAGES), idx(LABELS + 1), r"labels in 0\.\.9, got labels in 1\.\.10", id="label-of-no-class"),
    ],
)  # fmt: skip
def test_malformed_idx_files_are_refused_by_name(tmp_path: Path, images: bytes, labels: bytes, message: str) -> None:
    (tmp_path / "images").write_bytes(images)
    (tmp_path / "labels").write_bytes(labels)
    with pytest.raises(TaskError, match=message):
        read_idx_pair(tmp_path / "images", tmp_path / "labels", (1, 28, 28), 10)


@pytest.mark.parametrize(("suffix", "compress"), [("", bytes), (".xz", lzma.compress)])
def test_an_npz_file_is_read_with_channels_first(tmp_path: Path, suffix: str, compress: Any) -> None:
    arrays = cifar()
    path = tmp_path / f"subset.npz{suffix}"
    path.write_bytes(compress(npz(**arrays)))
    train, test = read_npz(path, (3, 32, 32), 10)
    assert (train.inputs.shape, train.inputs.dtype) == ((6, 3, 32, 32), np.uint8)
    for channel in range(3):
        assert np.array_equal(np.asarray(train.inputs)[:, channel], arrays["x_train"][..., channel])
    assert np.asarray(train.inputs).flags.c_contiguous
    assert (train.targets.tolist(), test.targets.tolist()) == ([0, 1, 2, 3, 4, 5], [9, 0])
    assert train.targets.dtype == np.int64


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param(b"", "subset.npz: expected an npz file of plain arrays", id="empty"),
        pytest.param(npz(**cifar())[:2000], "expected an npz file of plain arrays", id="cut-short"),
        pytest.param(b"no npz", "expected an npz file of plain arrays", id="text"),
        pytest.param(
            npz(**{k: v for k, v in cifar().items() if k != "y_test"}), "got none named y_test; get the file", id="missing"
        ),
        pytest.param(npz(**cifar(y_train=np.array([object()] * 6))), "expected an npz file of plain arrays", id="pickle"),
        pytest.param(
            npz(**cifar(x_train=np.zeros((6, 32, 32, 3)))), "part train: expected uint8 images.*got float64", id="floats"
        ),
        pytest.param(npz(**cifar(x_test=np.zeros((2, 3, 32, 32), np.uint8))), "part test.*shape \\(32, 3, 32\\)", id="order"),
        pytest.param(npz(**cifar(x_train=np.zeros((6, 3072), np.uint8))), r"height, width, channels\), got", id="flat"),
        pytest.param(npz(**cifar(y_train=np.zeros(6))), "expected 6 integer labels, got float64", id="float-labels"),
        pytest.param(npz(**cifar(y_test=np.array([10, 0]))), r"part test: expected labels in 0\.\.9", id="label-of-no-class"),
    ],
)  # fmt: skip
def test_malformed_npz_files_are_refused_by_name(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "subset.npz").write_bytes(content)
    with pytest.raises(TaskError, match=message):
        read_npz(tmp_path / "subset.npz", (3, 32, 32), 10)


def test_a_damaged_compression_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "subset.npz.xz"
    path.write_bytes(lzma.compress(npz(**cifar()))[:3000])
    with pytest.raises(TaskError, match=r"subset\.npz\.xz: expected a readable file"):
        read_npz(path, (3, 32, 32), 10)
