from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from fedapps.errors import CheckpointError
from fedapps.results import storage
from fedapps.results.storage import (
    GrowingSum,
    append_row,
    from_json,
    load_arrays,
    read_lines,
    save_arrays,
    to_json,
    write_atomically,
)


def test_floats_that_are_not_finite_survive_valid_json() -> None:
    value = {"loss": math.nan, "bounds": [-math.inf, math.inf, 0.1], "name": "infinite", "deep": {"3": {"x": math.nan}}}
    text = to_json(value)
    json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    back = from_json(text)
    assert math.isnan(back["loss"])
    assert math.isnan(back["deep"]["3"]["x"])
    assert back["bounds"] == [-math.inf, math.inf, 0.1]
    assert back["name"] == "infinite"


def test_numpy_scalars_become_plain_numbers() -> None:
    row = {"a": np.float32(0.5), "b": np.int64(7), "c": np.float64("nan"), "d": np.bool_(True), "e": (1, 2)}
    back = from_json(to_json(row))
    assert math.isnan(back.pop("c"))
    assert back == {"a": 0.5, "b": 7, "d": True, "e": [1, 2]}


def test_rows_come_back_in_order_and_a_torn_last_one_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    rows = [{"round": 1, "text": "ä\u2028 line"}, {"round": 2, "x": 1e-300}]
    for row in rows:
        append_row(path, row)
    assert [row for _, row in read_lines(path)] == rows
    with path.open("ab") as file:
        file.write('{"round": 3, "text": "ä'.encode()[:-1])
    assert [row for _, row in read_lines(path)] == rows
    assert read_lines(tmp_path / "absent.jsonl") == []


@pytest.mark.parametrize("line", ["{broken}", "[1, 2]"], ids=["not JSON", "not an object"])
def test_a_broken_line_in_the_middle_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"round": 1}\n' + line + '\n{"round": 2}\n')
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl, line 2: expected a JSON object"):
        read_lines(path)


@pytest.mark.parametrize(
    ("line", "match"),
    [
        (b"\xff\xfe{}", "line 1: expected a JSON object"),
        (b"[" * 100_000, "maximum recursion depth"),
        (b'{"round": 1}', "a row without 'phase'"),
        (b'{"phase": "train"}', "a row without 'round'"),
        (b'{"round": null, "phase": "train"}', "round = None"),
        (b'{"round": true, "phase": "train"}', "round = True"),
        (b'{"round": 1, "phase": "train", "seconds": "long"}', "seconds = 'long'"),
        (b'{"round": 1, "phase": "train", "payload-up": [1]}', r"payload-up = \[1\]"),
        (b'{"round": 1, "phase": "train", "refused": 3}', "refused = 3"),
    ],
    ids=["not UTF-8", "deep", "no phase", "no round", "null", "true", "text", "list", "number"],
)  # fmt: skip
def test_a_row_of_another_form_is_named(tmp_path: Path, line: bytes, match: str) -> None:
    path = tmp_path / "rows"
    path.write_bytes(line + b"\n")
    with pytest.raises(CheckpointError, match=match) as raised:
        read_lines(path, ("round", "phase"))
    assert len(str(raised.value).splitlines()) == 1


def test_a_folder_in_place_of_a_file_is_named(tmp_path: Path) -> None:
    for read in (read_lines, load_arrays):
        with pytest.raises(CheckpointError, match=rf"{tmp_path}: expected "):
            read(tmp_path)


def test_a_sum_grows_with_its_file(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    grown = GrowingSum(path)
    for text in (b"", b"a line\n", b"", b"two\nlines\n"):
        with path.open("ab") as file:
            file.write(text)
        assert grown.hexdigest() == hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_kill_while_writing_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "summary.json"
    write_atomically(path, "old")

    def die(_: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(storage, "sync_file", die)
    with pytest.raises(KeyboardInterrupt):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    monkeypatch.undo()
    write_atomically(path, "new")
    assert path.read_text() == "new"
    assert [file.name for file in tmp_path.iterdir()] == ["summary.json"]


ARRAYS = {
    "z.weight": np.arange(6, dtype=np.float32).reshape(2, 3),
    "a.num_batches_tracked": np.array(7, dtype=np.int64),
    "scalar of numpy": np.float32(2.5),
    "flags": np.array([True, False]),
    "empty": np.zeros((0, 3), dtype=np.float16),
    "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "strided": np.arange(10.0)[::2],
    "other byte order": np.arange(3, dtype=">i4"),
    "complex": np.array([1 + 2j], dtype=np.complex64),
    "nan": np.array([np.nan, -np.inf]),
    "uint64": np.array([2**64 - 1], dtype=np.uint64),
}


def test_arrays_keep_values_dtypes_shapes_and_order(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_arrays(path, ARRAYS)
    back = load_arrays(path)
    assert list(back) == list(ARRAYS)
    for name, array in ARRAYS.items():
        assert back[name].shape == np.shape(array), name
        assert back[name].dtype == np.asarray(array).dtype.newbyteorder("="), name
        np.testing.assert_array_equal(back[name], array, err_msg=name)
        assert back[name].flags.writeable, name
    assert set(load_file(path)) == set(ARRAYS)


def test_no_arrays_are_a_file_too(tmp_path: Path) -> None:
    save_arrays(tmp_path / "none.safetensors", {})
    assert load_arrays(tmp_path / "none.safetensors") == {}


def test_a_file_that_was_cut_off_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_arrays(path, ARRAYS)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: .*safetensors file"):
        load_arrays(path)


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"missing/w\.safetensors: .*16 bytes"):
        save_arrays(tmp_path / "missing" / "w.safetensors", {"w": np.ones(2)})


def test_a_file_of_somebody_else_loads(tmp_path: Path) -> None:
    save_file({"w": np.ones(2)}, tmp_path / "w.safetensors")
    np.testing.assert_array_equal(load_arrays(tmp_path / "w.safetensors")["w"], np.ones(2))


@pytest.mark.parametrize("array", [np.array(["text"]), np.array([object()])], ids=["text", "objects"])
def test_arrays_that_are_not_numbers_are_refused(tmp_path: Path, array: np.ndarray) -> None:
    with pytest.raises(CheckpointError, match="array 'w': expected a boolean, integer, floating or complex dtype"):
        save_arrays(tmp_path / "w.safetensors", {"w": array})
