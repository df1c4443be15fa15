from __future__ import annotations

import bz2
import gzip
import hashlib
import lzma
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from fedapps.errors import TaskError
from fedapps.tasks import PartitionConfig, PartitionKind, TaskConfig, load_task
from fedapps.tasks.libsvm import line_of_row, read_libsvm

DATA = Path(__file__).parents[1] / "data"


def task_of(folder: Path, train: str, test: str | None = None, **options):
    """A libsvm task on files with this text."""
    (folder / "train.txt").write_text(train)
    options["file"] = "train.txt"
    if test is not None:
        (folder / "test.txt").write_text(test)
        options["test-file"] = "test.txt"
    return load_task("libsvm", TaskConfig(data_dir=folder, options=options))


@pytest.mark.parametrize(("low", "high"), [("-1", "+1"), ("0", "1"), ("1", "2"), ("3", "8.5")])
def test_the_smaller_label_is_minus_one_in_both_files(tmp_path, low, high):
    task = task_of(tmp_path, f"{high} 1:1\n{low} 2:3\n", f"{low} 1:1\n{low} 1:1\n{high}\n")
    train, test = task.load()
    assert train.targets.tolist() == [1, -1]
    assert test.targets.tolist() == [-1, -1, 1]


def test_both_files_have_the_same_number_of_features(tmp_path):
    train, test = task_of(tmp_path, "0 1:1\n1 5:1\n", "0 2:1\n").load()
    assert (train.inputs.shape, test.inputs.shape) == ((2, 5), (1, 5))
    (tmp_path / "other").mkdir()
    train, test = task_of(tmp_path / "other", "0 1:1\n1 2:1\n", "0 7:1\n").load()
    assert (train.inputs.shape, test.inputs.shape) == ((2, 7), (1, 7))


def test_no_test_file_means_no_test_examples(tmp_path):
    task = task_of(tmp_path, "0 1:1\n1 2:1\n", **{"num-features": 9})
    test = task.server_data().test
    assert (len(test), test.inputs.shape) == (0, (0, 9))
    assert task.evaluate(task.initial_arrays(0), test) == {}


@pytest.mark.parametrize(
    ("train", "test", "message"),
    [
        pytest.param(
            "0 1:1\n\n1 1:1\n5 1:1\n0\n", None, "train.txt, line 4.*two labels, got label 5, .* 0 or 1", id="three"
        ),
        pytest.param(
            "7 1:1\n0\n1\n0\n1\n", None, "train.txt, line 1.*two labels, got label 7, .* 0 or 1", id="first-odd"
        ),
        pytest.param("1 1:1\n1 2:1\n", None, "train.txt: expected labels of two classes, got the label 1", id="one"),
        pytest.param("0 1:1\n1\n", "0 1:1\n2 1:1\n", "test.txt, line 2.*got label 2, .* 0 or 1", id="new-in-test"),
    ],
)
def test_labels_of_other_than_two_classes_are_refused(tmp_path, train, test, message):
    with pytest.raises(TaskError, match=message):
        task_of(tmp_path, train, test).load()


def test_a_file_is_found_in_the_folder_or_its_libsvm_folder_with_any_ending(tmp_path, monkeypatch):
    monkeypatch.delenv("FEDAPPS_DATA", raising=False)
    for name, config in [
        ("a9a", TaskConfig(data_dir=DATA, options={"file": "a9a"})),
        ("libsvm/a9a", TaskConfig(data_dir=DATA, options={"file": "libsvm/a9a"})),
        ("libsvm/a9a.gz", TaskConfig(data_dir=DATA, options={"file": "libsvm/a9a.gz"})),
        ("absolute", TaskConfig(options={"file": str(DATA / "libsvm" / "a9a.t")})),
        ("absolute wins", TaskConfig(data_dir=tmp_path, options={"file": str(DATA / "libsvm" / "a9a.t.gz")})),
    ]:
        (found,) = load_task("libsvm", config).checksums()
        assert found == ("libsvm/a9a.t.gz" if "absolute" in name else "libsvm/a9a.gz"), name


def test_a_missing_file_says_where_it_looked_and_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.delenv("FEDAPPS_DATA", raising=False)
    with pytest.raises(TaskError) as caught:
        load_task("w8a", TaskConfig(data_dir=tmp_path)).server_data()
    for part in [str(tmp_path / "libsvm" / "w8a"), "csie.ntu.edu.tw", "--data-dir", "FEDAPPS_DATA"]:
        assert part in str(caught.value)
    with pytest.raises(TaskError, match=r"no folder.*--data-dir.*FEDAPPS_DATA"):
        load_task("w8a", TaskConfig()).server_data()


def test_the_file_must_be_named():
    with pytest.raises(TaskError, match=r"option 'file': .*LIBSVM file, got nothing"):
        load_task("libsvm", TaskConfig()).server_data()


@pytest.fixture(scope="module")
def a9a():
    return load_task("a9a", TaskConfig(data_dir=DATA, partition=PartitionConfig(PartitionKind.IID)))


def test_a9a_is_what_it_should_be(a9a):
    train, test = a9a.server_data().validation, a9a.server_data().test
    assert len(train) == 0
    pool = a9a.client_data(0, 1).train
    assert (pool.inputs.shape, test.inputs.shape) == ((32561, 123), (16281, 123))
    assert (pool.inputs.nnz, test.inputs.nnz) == (451592, 225731)
    assert (np.sum(pool.targets == 1), np.sum(test.targets == 1)) == (7841, 3846)
    assert set(a9a.checksums()) == {"libsvm/a9a.gz", "libsvm/a9a.t.gz"}
    assert a9a.checksums()["libsvm/a9a.gz"] == hashlib.sha256((DATA / "libsvm" / "a9a.gz").read_bytes()).hexdigest()


def test_a9a_split_uses_every_example_once(a9a):
    parts = [a9a.client_data(i, 80).train for i in range(80)]
    assert sum(len(part) for part in parts) == 32561
    assert sum(part.inputs.sum() for part in parts) == 451592
    assert {len(part) for part in parts} == {407, 408}


def test_w8a_is_what_it_should_be():
    folder = os.environ.get("FEDAPPS_DATA")
    if not folder or not (Path(folder) / "libsvm" / "w8a.gz").is_file():
        pytest.skip("needs libsvm/w8a.gz in the folder that FEDAPPS_DATA names")
    task = load_task("w8a", TaskConfig())
    pool = task.client_data(0, 1).train
    assert (pool.inputs.shape, pool.inputs.nnz, np.sum(pool.targets == 1)) == ((49749, 300), 579586, 1479)
    assert len(task.server_data().test) == 0


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
