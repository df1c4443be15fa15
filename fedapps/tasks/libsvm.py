"""Convex tasks from LIBSVM files: any file, and a9a and w8a by name.

A line is ``label index:value index:value ...`` with indices from 1, ascending; ``#`` starts a comment. Files may be
compressed (``.gz``, ``.xz``, ``.bz2``). scikit-learn parses; only if it fails is the file read again, line by line, to
find the place.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array
from typing_extensions import override

from fedapps.errors import TaskError, explain
from fedapps.settings import setting
from fedapps.tasks.base import Data
from fedapps.tasks.compressed import DAMAGED, open_compressed
from fedapps.tasks.convex_task import ConvexTask
from fedapps.tasks.own_files import OwnFilesTask

DATASETS_PAGE = "https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/binary.html"
"""Where the LIBSVM data sets can be had."""


MOST_FEATURES = 10_000_000
"""Features that a node may speak of; the model has a number for each."""


class LibsvmTask(OwnFilesTask, ConvexTask):
    """L2-regularised logistic regression on a LIBSVM file with two classes.

    The smaller of the two labels becomes -1 and the larger +1, whether the file says -1/+1, 0/1 or 1/2. Features stay
    sparse, and no intercept is added.
    """

    FOLDER = "libsvm"
    FORMAT = "a LIBSVM file"
    EXAMPLE = "a9a"
    ADVICE = f"download it from {DATASETS_PAGE}"

    class Options(OwnFilesTask.Options, ConvexTask.Options):
        """Options of a LIBSVM file."""

        num_features: int = setting(0, "number of features; 0 = the largest index in the files")

    @override
    def load(self) -> tuple[Data, Data]:
        """Read the files: inputs CSR ``(n, d)`` float64, targets -1 or +1; without a test file the test set is empty."""
        train_path, *test_paths = self.files.values()
        d = self.options.num_features or int((self.config.agreed.get("features") or [0])[0])
        train = read_libsvm(train_path, d)
        classes = _two_classes(train[1], train_path)
        if not test_paths:
            data = _data(train, classes, train_path, train[0].shape[1])
            return data, data.take(np.empty(0, dtype=np.intp))
        test = read_libsvm(test_paths[0], d)
        width = max(train[0].shape[1], test[0].shape[1])
        return _data(train, classes, train_path, width), _data(test, classes, test_paths[0], width)

    @override
    def agree(self, told: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """Agree on the largest number of features: a sparse file need not hold the last ones."""
        widths = {name: int(each["features"][0]) for name, each in told.items()}
        widest = max(sorted(widths), key=lambda name: widths[name])
        if not 0 < widths[widest] <= MOST_FEATURES:
            raise TaskError(
                f"node {widest}, features",
                expected=f"1 to {MOST_FEATURES:,}",
                got=str(widths[widest]),
                do="correct the indices in its file",
            )
        return {"features": [self.options.num_features or widths[widest]]}

    @override
    def misfit(self, told: Mapping[str, Any], agreed: Mapping[str, Any]) -> str:
        """Refuse a file with more features than were agreed on."""
        width, agreed_width = int(told["features"][0]), int(agreed["features"][0])
        if width <= agreed_width:
            return ""
        return explain(
            "its file",
            expected=f"at most {agreed_width} features as in the run",
            got=str(width),
            do="correct it, or start a new run with num-features in task-options",
        )

    @property
    @override
    def num_features(self) -> int:
        """The option, so that a server needs no data; without it that of the files."""
        return self.options.num_features or super().num_features


class A9aTask(LibsvmTask):
    """Census income (UCI Adult, binarised by LIBSVM): 32,561 + 16,281 examples, 123 binary features."""

    class Options(LibsvmTask.Options):
        """The files of a9a."""

        file: str = setting("a9a", "training file", path=True)
        test_file: str = setting("a9a.t", "test file; empty = no test set", path=True)
        num_features: int = setting(123, "number of features (the last one never occurs in the test file)")


class W8aTask(LibsvmTask):
    """Web pages (Platt): 49,749 examples, 300 binary features, no test set."""

    class Options(LibsvmTask.Options):
        """The file of w8a."""

        file: str = setting("w8a", "training file", path=True)
        num_features: int = setting(300, "number of features")


def read_libsvm(path: Path, num_features: int = 0) -> tuple[csr_array, NDArray[np.float64]]:
    """Read a LIBSVM file: features, CSR ``(n, d)``, and labels as they are in the file, ``(n,)``, both float64.

    ``num_features`` is ``d``; 0 takes the largest index that occurs. The error for a malformed file names the line.
    """
    load = _sklearn_reader()
    try:
        with open_compressed(path) as file:
            features, labels = load(file, n_features=num_features or None, dtype=np.float64, zero_based=False)
    except DAMAGED as error:
        raise TaskError(f"file {path}", expected="a readable file", got=str(error), do="get it again") from error
    except (ValueError, OverflowError) as error:
        _raise_at_line(path, num_features, str(error), error)
    if not (np.isfinite(features.data).all() and np.isfinite(labels).all()):
        _raise_at_line(path, num_features, "a value that is not finite")
    if len(labels) == 0:
        raise TaskError(f"file {path}", expected="at least one example", got="none", do="check the file")
    return csr_array(features), labels


def line_of_row(path: Path, row: int) -> int:
    """Find the line, from 1, of an example, from 0."""
    return next(line for i, (line, _) in enumerate(_examples(path)) if i == row)


def _sklearn_reader() -> Any:
    try:
        from sklearn.datasets import load_svmlight_file
    except ImportError as error:
        raise TaskError(
            "reading a LIBSVM file",
            expected="scikit-learn",
            got=f"an import error ({error})",
            do="install fedapps[torch]",
        ) from error
    return load_svmlight_file


def _examples(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield the number and the tokens of each line that holds an example."""
    with open_compressed(path) as file:
        for number, line in enumerate(file, start=1):
            tokens = line.split(b"#", 1)[0].decode("utf-8", errors="replace").split()
            if tokens:
                yield number, tokens


def _raise_at_line(path: Path, num_features: int, reason: str, cause: Exception | None = None) -> None:
    for number, tokens in _examples(path):
        problem = _problem(tokens, num_features)
        if problem:
            raise TaskError(
                f"file {path}, line {number}",
                expected="'label index:value ...' with ascending indices from 1",
                got=problem,
                do="correct the line",
            ) from cause
    raise TaskError(f"file {path}", expected="LIBSVM text", got=reason, do="correct the file") from cause


def _problem(tokens: list[str], num_features: int) -> str:
    """Say what is wrong with an example; "" if nothing is."""
    label, *pairs = tokens
    if not _is_finite_number(label):
        return f"label '{label}', which is not a finite number"
    previous = 0
    for pair in pairs:
        index, colon, value = pair.partition(":")
        if index == "qid":
            continue
        if not (colon and index.isascii() and index.isdigit() and _is_finite_number(value)):
            return f"'{pair}', which is not an index and a finite number"
        if int(index) <= previous:
            return f"index {index} after {previous}" if previous else f"index {index}"
        if num_features and int(index) > num_features:
            return f"index {index}, but the number of features is {num_features}"
        previous = int(index)
    return ""


def _is_finite_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _two_classes(labels: NDArray[np.float64], path: Path) -> tuple[float, float]:
    """Give the two most frequent labels, ascending; any other is refused with its line by `_data`."""
    values, counts = np.unique(labels, return_counts=True)
    if len(values) < 2:
        raise TaskError(
            f"file {path}",
            expected="labels of two classes",
            got=f"the label {values[0]:g} on every line",
            do="use a file with both classes",
        )
    low, high = sorted(values[np.argsort(-counts, kind="stable")[:2]])
    return float(low), float(high)


def _data(content: tuple[csr_array, NDArray[np.float64]], classes: tuple[float, float], path: Path, width: int) -> Data:
    features, labels = content
    others = np.flatnonzero(~np.isin(labels, classes))
    if len(others):
        raise TaskError(
            f"file {path}, line {line_of_row(path, int(others[0]))}",
            expected="one of two labels",
            got=f"label {labels[others[0]]:g}, where the others are {classes[0]:g} or {classes[1]:g}",
            do="logistic regression tells two classes apart: use a binary data set",
        )
    wide: Any = csr_array((features.data, features.indices, features.indptr), shape=(len(labels), width))
    return Data(wide, np.where(labels == classes[1], 1.0, -1.0))
