"""The perceptron on a table: several classes, and a number."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedapps.errors import TaskError
from fedapps.tasks import TaskConfig, task_class

FLOWERS = "length,width,kind\n1,2,iris\n3,5,rose\n2,2,oak\n4,1,rose\n"


def task_of(folder: Path, name: str, text: str = FLOWERS, **options: Any) -> Any:
    (folder / "flowers.csv").write_text(text)
    given = {"file": "flowers.csv", "label": "kind", **options}
    return task_class(name)(TaskConfig(data_dir=folder, options=given), name)


def test_several_classes(tmp_path: Path) -> None:
    task = task_of(tmp_path, "table-net", hidden="5, 4")
    train, _ = task.load()
    assert (train.inputs.dtype, train.targets.dtype) == (np.float32, np.int64)
    assert train.targets.tolist() == [0, 2, 1, 2]  # iris, oak, rose
    shapes = {name: array.shape for name, array in task.initial_arrays(0).items()}
    assert list(shapes.values()) == [(5, 2), (5,), (4, 5), (4,), (3, 4), (3,)]
    metrics = task.evaluate(task.initial_arrays(0), train)
    assert set(metrics) == {"loss", "accuracy"}


def test_without_hidden_layers_the_model_is_linear(tmp_path: Path) -> None:
    assert [a.shape for a in task_of(tmp_path, "table-net", hidden="").initial_arrays(0).values()] == [(3, 2), (3,)]


@pytest.mark.parametrize("hidden", ["x", "0", "8, -1", "1.5", "65537", "²"])
def test_widths_are_numbers(tmp_path: Path, hidden: str) -> None:
    with pytest.raises(TaskError, match="option 'hidden': expected numbers from 1 to 65536"):
        task_of(tmp_path, "table-net", hidden=hidden)


def test_a_number_is_learned_standardised_and_measured_in_its_unit(tmp_path: Path) -> None:
    """Widths 2, 5, 2, 1: mean 2.5, variance 2.25. Of a linear model with weights 0 and bias b the outputs are all b."""
    task = task_of(tmp_path, "table-regression", label="width", features="length", hidden="")
    train, _ = task.load()
    z = (np.array([2, 5, 2, 1]) - 2.5) / 1.5
    assert train.targets.dtype == np.float32
    assert train.targets == pytest.approx(z[:, None], rel=1e-6)
    for b in (0.0, 0.7):
        arrays = {
            name: np.zeros_like(array) + (b if array.ndim == 1 else 0) for name, array in task.initial_arrays(0).items()
        }
        assert task.evaluate(arrays, train) == pytest.approx(
            {"loss": np.mean((z - b) ** 2), "absolute-error": np.mean(np.abs(z - b)) * 1.5}, rel=1e-6
        )
    assert (task.metric, task.tell()["classes"]) == ("absolute-error", [])
    task.check_targets(train, "targets")
    task.check_sampling()


def test_drawn_numbers_are_those_of_which_the_loss_is_the_log_likelihood(tmp_path: Path) -> None:
    """exp(-(y - f)^2) is a normal density of variance 1/2; of 40,000 draws the variance is 0.5 +- 0.004 (one deviation)."""
    task = task_of(tmp_path, "table-regression", label="width", features="length")
    outputs = torch.full((40_000, 1), 3.0)
    drawn = task.sample_targets(outputs, torch.Generator().manual_seed(0))
    assert drawn.shape == outputs.shape
    assert float(drawn.mean()) == pytest.approx(3, abs=0.02)
    assert float(drawn.var()) == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (FLOWERS, {}, r"line 2, column 'kind': expected a number"),
        (
            FLOWERS.replace("5,rose", ",rose"),
            {"label": "width", "ignore": "kind"},
            "line 3, column 'width': expected a value",
        ),
    ],
)
def test_a_label_that_is_no_number_is_named(tmp_path: Path, text: str, options: dict[str, str], message: str) -> None:
    with pytest.raises(TaskError, match=message):
        task_of(tmp_path, "table-regression", text, **options).tell()


def test_classes_and_numbers_do_not_agree(tmp_path: Path) -> None:
    classes = task_of(tmp_path, "table-net", features="length")
    number = task_of(tmp_path, "table-regression", label="width", features="length")
    told = [number.tell(), number.tell(), classes.tell()]
    agreed = number.agree(dict(zip("abc", told, strict=True)))
    assert number.misfit(told[0], agreed) == ""
    assert "column '(label)': expected numbers, as on the other nodes, got categories" in number.misfit(told[2], agreed)
    for task, other, message in [
        (number, told[2], "a label that is a number on all nodes, got classes"),
        (classes, told[0], "at least two classes, got none"),
    ]:
        config = dataclasses.replace(task.config, agreed=task.agree({"a": other}))
        with pytest.raises(TaskError, match=message):
            type(task)(config, task.name).initial_arrays(0)
