from __future__ import annotations

import bz2
import gzip
import lzma
import sys

import numpy as np
import pytest

from fedapps.errors import TaskError
from fedapps.tasks.libsvm_file import line_of_row, read_libsvm

TEXT = b"# a comment\n\n+1 1:0.5 3:-2 # another\n0 2:1e3\n+1\n"
FEATURES = [[0.5, 0, -2], [0, 1000, 0], [0, 0, 0]]


@pytest.mark.parametrize(
    ("name", "pack"),
    [("x", bytes), ("x.txt", bytes), ("x.gz", gzip.compress), ("x.xz", lzma.compress), ("x.bz2", bz2.compress)],
)
def test_plain_and_compressed_files(tmp_path, name, pack):
    path = tmp_path / name
    path.write_bytes(pack(TEXT))
    features, labels = read_libsvm(path)
    assert features.dtype == labels.dtype == np.float64
    assert features.toarray().tolist() == FEATURES
    assert labels.tolist() == [1, 0, 1]
    assert line_of_row(path, 2) == 5


def test_the_number_of_features_may_be_given(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(TEXT)
    assert read_libsvm(path, 7)[0].shape == (3, 7)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        pytest.param(b"yes 1:1", "label 'yes', which is not a finite number", id="text-label"),
        pytest.param(b"nan 1:1", "label 'nan', which is not a finite number", id="nan-label"),
        pytest.param(b"1,2 1:1", "label '1,2'", id="two-labels"),
        pytest.param(b"1 1:1 junk", "'junk', which is not an index and a finite number", id="no-colon"),
        pytest.param(b"1 1:x", "'1:x'", id="text-value"),
        pytest.param(b"1 1:", "'1:'", id="no-value"),
        pytest.param(b"1 1:2:3", "'1:2:3'", id="two-colons"),
        pytest.param(b"1 1:nan", "'1:nan'", id="nan-value"),
        pytest.param(b"1 1:1e999", "'1:1e999'", id="infinite-value"),
        pytest.param(b"1 1.5:1", "'1.5:1'", id="fractional-index"),
        pytest.param(b"1 -1:1", "'-1:1'", id="negative-index"),
        pytest.param(b"1 0:1", "got index 0;", id="index-from-0"),
        pytest.param(b"1 2:1 1:1", "index 1 after 2", id="descending"),
        pytest.param(b"1 2:1 2:1", "index 2 after 2", id="twice"),
        pytest.param(b"1 6:1", "index 6, but the number of features is 5", id="too-many-features"),
        pytest.param(b"1 99999999999999999999:1", "number of features is 5", id="enormous-index"),
        pytest.param(b"<html>", "label '<html>'", id="a-web-page"),
        pytest.param(b"\xff\xfe", "label '", id="binary"),
    ],
)
def test_malformed_lines_are_named(tmp_path, line, message):
    path = tmp_path / "bad.gz"
    path.write_bytes(gzip.compress(b"1 1:1\n\n# comment\n" + line + b"\n1 1:1\n"))
    with pytest.raises(TaskError, match=f"file .*bad.gz, line 4: .*{message}"):
        read_libsvm(path, 5)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        pytest.param("x", b"", "at least one example, got none", id="empty"),
        pytest.param("x", b"# nothing\n", "at least one example, got none", id="only-comments"),
        pytest.param("x.gz", b"1 1:1\n", "a readable file", id="not-gzip"),
        pytest.param("x.gz", gzip.compress(TEXT * 99)[:-20], "a readable file", id="gzip-cut-short"),
        pytest.param("x.xz", b"1 1:1\n", "a readable file", id="not-xz"),
        pytest.param("x.xz", lzma.compress(TEXT * 99)[:-20], "a readable file", id="xz-cut-short"),
        pytest.param("x.bz2", b"1 1:1\n", "a readable file", id="not-bz2"),
        pytest.param("absent", None, "a readable file", id="absent"),
    ],
)
def test_unreadable_files_are_named(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(TaskError, match=f"file .*{name}: expected {message}"):
        read_libsvm(tmp_path / name)


def test_without_scikit_learn(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(TaskError, match=r"install fedapps\[torch\]"):
        read_libsvm(tmp_path / "x")
