"""Reading the examples: files of the data folder, and a stand-in for the hub."""

from __future__ import annotations

import gzip
import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fedapps.errors import TaskError
from fedapps.tasks.language.prompts import PROMPTS
from fedapps.tasks.language.readers import SOURCES, Example, read_examples

from .conftest import REAL_FOLDER, ROWS

SIZES = {"sst2": (12, 4), "qqp": (6, 2), "rte": (6, 2), "cb": (6, 3), "boolq": (4, 2), "wic": (4, 2), "squad": (4, 2)}


def read(task: str, folder: Path | None) -> tuple[list[Example], list[Example]]:
    return read_examples(task, PROMPTS[task].fields, folder)


@pytest.mark.parametrize("task", SOURCES)
def test_files_of_the_data_folder_are_read(rows: Path, task: str) -> None:
    train, test = read(task, rows)
    assert (len(train), len(test)) == SIZES[task]
    assert all(set(example.fields) == set(PROMPTS[task].fields) for example in train + test)
    classes = len(SOURCES[task].labels)
    assert {example.label for example in train} == (set(range(classes)) if classes else {-1})
    assert all(bool(example.answers) != bool(classes) for example in train)


def test_labels_mean_what_the_data_says(rows: Path) -> None:
    """The label word of each example is the right answer to its prompt."""
    said = {
        task: [
            (text, PROMPTS[task].words[example.label]) for example in read(task, rows)[1] for text in [example.fields]
        ]
        for task in ("sst2", "rte", "cb", "boolq", "wic", "qqp")
    }
    assert [word for _, word in said["sst2"]] == [" great", " terrible", " great", " terrible"]
    assert [word for _, word in said["rte"]] == ["Yes", "No"]
    assert [word for _, word in said["cb"]] == ["Yes", "No", "Maybe"]
    assert [word for _, word in said["boolq"]] == ["No", "Yes"]
    assert [word for _, word in said["wic"]] == ["Yes", "No"]
    assert [word for _, word in said["qqp"]] == ["Yes", "No"]
    assert said["rte"][0][0] == {
        "premise": "Three of the five bridges were rebuilt.", "hypothesis": "Some bridges were rebuilt."
    }  # fmt: skip


def test_quotation_marks_quote_nothing_and_blanks_at_the_ends_go(rows: Path) -> None:
    train, _ = read("sst2", rows)
    assert train[4].fields["sentence"] == '" the long road " is best where it ends'
    assert train[5].fields["sentence"] == "good"


def test_all_right_answers_are_kept(rows: Path) -> None:
    _, test = read("squad", rows)
    assert test[0].answers == ("at the end of Long Lane", "Long Lane")


@pytest.mark.parametrize("place", ["", "rte"])
def test_compressed_files_and_files_beside_each_other_are_found(tmp_path: Path, place: str) -> None:
    (tmp_path / place).mkdir(exist_ok=True)
    for part in ("train", "dev"):
        raw = (ROWS / "rte" / f"{part}.jsonl").read_bytes()
        (tmp_path / place / f"{part}.jsonl.gz").write_bytes(gzip.compress(raw))
    assert read("rte", tmp_path) == read("rte", ROWS)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"file .*train.jsonl: expected readable rows"),
        ("[1]", r"row 6: expected columns .*got list"),
        ('{"sentence1": "a", "label": 0}', r"row 6: expected columns .*got none named sentence2"),
        ('{"sentence1": "a", "sentence2": "b", "label": 2}', r"row 6, label: expected one of .*got 2"),
        ('{"sentence1": "a", "sentence2": "b", "label": "maybe"}', r"row 6, label: .*got 'maybe'"),
        ('{"sentence1": "a", "sentence2": "b", "label": -1}', r"row 6, label: .*got -1"),
    ],
)
def test_a_malformed_row_is_named(tmp_path: Path, line: str, message: str) -> None:
    shutil.copytree(ROWS / "rte", tmp_path / "rte")
    with (tmp_path / "rte" / "train.jsonl").open("a") as file:
        file.write(line + "\n")
    with pytest.raises(TaskError, match=message):
        read("rte", tmp_path)


def test_an_answer_must_be_there(tmp_path: Path) -> None:
    shutil.copytree(ROWS / "squad", tmp_path / "squad")
    row = {"context": "c", "question": "q", "answers": {"text": [], "answer_start": []}}
    (tmp_path / "squad" / "dev_subset.jsonl").write_text(json.dumps(row))
    with pytest.raises(TaskError, match=r"row 0, answers: expected a list 'text' with an answer"):
        read("squad", tmp_path)


def test_a_missing_file_is_named_with_both_ways_out(tmp_path: Path) -> None:
    (tmp_path / "train.tsv").write_bytes((ROWS / "sst2" / "train.tsv").read_bytes())
    with pytest.raises(TaskError, match=r"got no sst2/dev.tsv;.*--data-dir .*nyu-mll/glue"):
        read("sst2", tmp_path)


# The hub ---------------------------------------------------------------------------------------------------


def hub(monkeypatch: pytest.MonkeyPatch, parts: dict[str, list[dict[str, Any]]]) -> list[tuple[str, ...]]:
    asked: list[tuple[str, ...]] = []

    def load_dataset(*arguments: str) -> dict[str, list[dict[str, Any]]]:
        asked.append(arguments)
        if not parts:
            raise ConnectionError("no route to the hub")
        return parts

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    return asked


@pytest.mark.parametrize(
    ("task", "arguments"),
    [
        ("sst2", ("nyu-mll/glue", "sst2")), ("qqp", ("nyu-mll/glue", "qqp")), ("rte", ("nyu-mll/glue", "rte")),
        ("cb", ("aps/super_glue", "cb")), ("boolq", ("aps/super_glue", "boolq")), ("wic", ("aps/super_glue", "wic")),
        ("squad", ("rajpurkar/squad",)),
    ],
)  # fmt: skip
def test_without_a_data_folder_the_hub_is_asked(
    monkeypatch: pytest.MonkeyPatch, rows: Path, task: str, arguments: tuple[str, ...]
) -> None:
    """The hub's columns are the files', its labels numbers, its test set is called validation."""
    files = read(task, rows)
    columns = SOURCES[task].columns
    parts = {
        part: [
            {columns.get(name, name): text for name, text in example.fields.items()}
            | {"label": example.label, "answers": {"text": list(example.answers)}}
            for example in examples
        ]
        for part, examples in zip(("train", "validation"), files, strict=True)
    }
    asked = hub(monkeypatch, parts)
    assert read(task, None) == files
    assert asked == [arguments]


def test_a_failed_download_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    hub(monkeypatch, {})
    with pytest.raises(TaskError, match=r"got ConnectionError: no route to the hub;.*sst2/train.tsv .*--data-dir"):
        read("sst2", None)


def test_without_datasets_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(TaskError, match=r"install fedapps\[llm\]"):
        read("sst2", None)


@pytest.mark.skipif(not REAL_FOLDER, reason="FEDAPPS_DATA is not set")
@pytest.mark.parametrize(
    ("task", "sizes", "classes"),
    [
        ("sst2", (67349, 872), [29780, 37569]), ("qqp", (9000, 1000), [5667, 3333]), ("rte", (2490, 277), [1249, 1241]),
        ("cb", (216, 56), [100, 100, 16]), ("boolq", (200, 100), [100, 100]), ("wic", (200, 100), [100, 100]),
        ("squad", (4330, 1190), []),
    ],
)  # fmt: skip
def test_the_real_files_are_read(task: str, sizes: tuple[int, int], classes: list[int]) -> None:
    train, test = read(task, Path(REAL_FOLDER))
    assert (len(train), len(test)) == sizes
    assert [sum(example.label == label for example in train) for label in range(len(classes))] == classes
