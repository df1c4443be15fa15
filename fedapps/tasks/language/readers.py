"""Examples of the language tasks: from files in the data folder, else from the Hugging Face hub.

=======================================  ==================================================================
files (plain or ``.gz``, ``.xz``)        content
=======================================  ==================================================================
``sst2/train.tsv``, ``dev.tsv``          ``sentence``, ``label`` (1 = positive), with a header
``qqp/train.jsonl``, ``dev.jsonl``       ``question1``, ``question2``, ``label`` (1 = duplicate)
``rte/train.jsonl``, ``dev.jsonl``       ``sentence1``, ``sentence2``, ``label`` (0 = entailment)
``superglue_small/cb_train.jsonl``, ...  ``premise``, ``hypothesis``, ``label`` (entailment, ...)
``.../boolq_train.jsonl``, ...           ``passage``, ``question``, ``label`` (yes or no)
``.../wic_train.jsonl``, ...             ``word``, ``sentence1``, ``sentence2``, ``label`` (yes or no)
``squad/train_subset.jsonl``, ...        ``context``, ``question``, ``answers`` {``text``: [...]}
=======================================  ==================================================================

Labels may be numbers, as on the hub, or names.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedapps.errors import TaskError
from fedapps.tasks.base import DATA_VARIABLE
from fedapps.tasks.compressed import DAMAGED, find_compressed, open_compressed


@dataclass(frozen=True)
class Example:
    """One example."""

    fields: Mapping[str, str]  # name in the prompt's template -> text
    label: int = -1  # class number; -1 if the answer is free text
    answers: tuple[str, ...] = ()  # right answers, at least one; empty if there are classes


@dataclass(frozen=True)
class Source:
    """Where the examples of a task are.

    Attributes:
        train: File with the training pool in the data folder, without the ending of a compression.
        test: File with the test set.
        hub: Arguments of ``datasets.load_dataset``; its parts are ``train`` and ``validation``.
        columns: Field of the template -> column of the data, where the names differ.
        labels: Names of the classes in their order; empty if the answer is free text.
    """

    train: str
    test: str
    hub: tuple[str, ...]
    columns: Mapping[str, str] = field(default_factory=dict)
    labels: tuple[str, ...] = ()


SOURCES: dict[str, Source] = {
    "sst2": Source(
        "sst2/train.tsv", "sst2/dev.tsv", ("nyu-mll/glue", "sst2"), labels=("negative", "positive")
    ),
    "qqp": Source(
        "qqp/train.jsonl", "qqp/dev.jsonl", ("nyu-mll/glue", "qqp"), labels=("not_duplicate", "duplicate")
    ),
    "rte": Source(
        "rte/train.jsonl",
        "rte/dev.jsonl",
        ("nyu-mll/glue", "rte"),
        columns={"premise": "sentence1", "hypothesis": "sentence2"},
        labels=("entailment", "not_entailment"),
    ),
    "cb": Source(
        "superglue_small/cb_train.jsonl",
        "superglue_small/cb_test.jsonl",
        ("aps/super_glue", "cb"),
        labels=("entailment", "contradiction", "neutral"),
    ),
    "boolq": Source(
        "superglue_small/boolq_train.jsonl",
        "superglue_small/boolq_test.jsonl",
        ("aps/super_glue", "boolq"),
        labels=("no", "yes"),
    ),
    "wic": Source(
        "superglue_small/wic_train.jsonl",
        "superglue_small/wic_test.jsonl",
        ("aps/super_glue", "wic"),
        labels=("no", "yes"),
    ),
    "squad": Source("squad/train_subset.jsonl", "squad/dev_subset.jsonl", ("rajpurkar/squad",)),
}  # fmt: skip
"""Task -> where its examples are."""


def read_examples(task: str, fields: Iterable[str], data_dir: Path | None) -> tuple[list[Example], list[Example]]:
    """Read training pool and test set of a task, a key of `SOURCES`; without a data folder from the hub.

    ``fields`` are those of the task's prompt.

    Raises:
        TaskError: A file is missing or malformed, or the download fails.
    """
    source, names = SOURCES[task], tuple(fields)
    parts = _from_hub(task, source) if data_dir is None else _from_files(task, source, data_dir)
    train, test = ([_example(source, names, row, where) for where, row in part] for part in parts)
    return train, test


Rows = list[tuple[str, Mapping[str, Any]]]
"""Where a row is, for messages, and the row."""


def _from_files(task: str, source: Source, folder: Path) -> tuple[Rows, Rows]:
    paths = [find_compressed([folder / name, folder / Path(name).name]) for name in (source.train, source.test)]
    if None in paths:
        missing = source.train if paths[0] is None else source.test
        raise TaskError(
            f"task '{task}'",
            expected=f"{source.train} and {source.test} (plain or with .gz, .xz or .bz2) in {folder}",
            got=f"no {missing}",
            do=f"put it there, or start without --data-dir and {DATA_VARIABLE} to load {' '.join(source.hub)} from the hub",
        )
    train, test = (_read_file(path) for path in paths if path is not None)
    return train, test


def _from_hub(task: str, source: Source) -> tuple[Rows, Rows]:
    name = " ".join(source.hub)
    try:
        import datasets
    except ImportError as error:
        raise TaskError(
            f"task '{task}'", expected="the package datasets", got=str(error), do="install fedapps[llm]"
        ) from error
    try:
        loaded = datasets.load_dataset(*source.hub)
    except Exception as error:
        raise TaskError(
            f"task '{task}'",
            expected=f"a download of the data set {name} from the Hugging Face hub",
            got=f"{type(error).__name__}: {error}",
            do=f"connect to the network, or put {source.train} and {source.test} into a folder and set --data-dir or "
            f"{DATA_VARIABLE} to it",
        ) from error
    train, test = (
        [(f"data set {name}, {part}, row {i}", row) for i, row in enumerate(loaded[part])]
        for part in ("train", "validation")
    )
    return train, test


def _read_file(path: Path) -> Rows:
    parse: Callable[[str], Iterable[Mapping[str, Any]]] = _parse_tsv if ".tsv" in path.suffixes else _parse_json_lines
    try:
        with open_compressed(path) as file:
            rows = list(parse(file.read().decode("utf-8")))
    except (*DAMAGED, ValueError) as error:
        raise _malformed(f"file {path}", "readable rows", f"{type(error).__name__}: {error}") from error
    return [(f"file {path}, row {i}", row) for i, row in enumerate(rows)]


def _parse_tsv(text: str) -> Iterable[Mapping[str, Any]]:
    # Sentences hold quotation marks that quote nothing.
    return csv.DictReader(io.StringIO(text, newline=""), delimiter="\t", quoting=csv.QUOTE_NONE)


def _parse_json_lines(text: str) -> Iterable[Mapping[str, Any]]:
    # Not splitlines(), which also splits at separators that occur inside texts.
    return (json.loads(line) for line in text.split("\n") if line.strip())


def _example(source: Source, names: Iterable[str], row: Mapping[str, Any], where: str) -> Example:
    columns = {name: source.columns.get(name, name) for name in names}
    wanted = [*columns.values(), "label" if source.labels else "answers"]
    if not isinstance(row, Mapping) or (missing := [column for column in wanted if row.get(column) is None]):
        got = type(row).__name__ if not isinstance(row, Mapping) else f"none named {', '.join(missing)}"
        raise _malformed(where, f"columns {', '.join(wanted)}", got)
    fields = {name: str(row[column]).strip() for name, column in columns.items()}
    if not source.labels:
        return Example(fields, answers=_answers(row["answers"], where))
    return Example(fields, label=_label(row["label"], source.labels, where))


def _label(value: Any, names: tuple[str, ...], where: str) -> int:
    text = str(value).strip()
    label = names.index(text) if text in names else int(text) if text.isdecimal() else -1
    if not 0 <= label < len(names):
        raise _malformed(f"{where}, label", f"one of {', '.join(names)}, or 0 to {len(names) - 1}", repr(value))
    return label


def _answers(value: Any, where: str) -> tuple[str, ...]:
    texts = value.get("text") if isinstance(value, Mapping) else None
    # One line each: an answer ends where the line does.
    answers = tuple(dict.fromkeys(" ".join(str(text).split()) for text in texts or ()))
    if not answers or not all(answers):
        raise _malformed(f"{where}, answers", "a list 'text' with an answer", repr(value))
    return answers


def _malformed(where: str, expected: str, got: str) -> TaskError:
    return TaskError(where, expected=expected, got=got, do="get the data again, or check how it was made")
