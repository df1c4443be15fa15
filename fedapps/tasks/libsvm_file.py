"""Reading LIBSVM text files, with errors that name the file and the line.

A line is ``label index:value index:value ...`` with indices from 1, ascending; ``#`` starts a comment. Files may be
compressed (``.gz``, ``.xz``, ``.bz2``). scikit-learn parses; only if it fails is the file read again, line by line, to
find the place.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from fedapps.errors import TaskError
from fedapps.tasks.compressed import DAMAGED, open_compressed


def read_libsvm(path: Path, num_features: int = 0) -> tuple[csr_array, NDArray[np.float64]]:
    """Read a LIBSVM file.

    Args:
        path: The file.
        num_features: Number ``d`` of features; 0 takes the largest index that occurs.

    Returns:
        Features, CSR of shape ``(n, d)``, and labels as they are in the file, ``(n,)``, both float64.

    Raises:
        TaskError: The file is damaged, malformed (with the line), empty, or scikit-learn is not installed.
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
    """Find the line of an example.

    Args:
        path: The file.
        row: Number of the example, from 0.

    Returns:
        Number of the line, from 1.
    """
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
