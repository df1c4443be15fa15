"""The task in the docstring of ``fedapps/tasks/torch_task.py``, saved and used as its text says."""

from __future__ import annotations

import importlib
import sys
import textwrap

import numpy as np
import pytest
import torch

from fedapps.errors import TaskError
from fedapps.tasks import PartitionConfig, PartitionKind, TaskConfig, load_task, task_kind, torch_task

NAME = "my_pkg.my_mod:MyTask"


def example() -> str:
    """The indented block after the first ``::``, without its indentation."""
    lines = torch_task.__doc__.split("::\n", 1)[1].splitlines()
    end = next(i for i, line in enumerate(lines) if line and not line.startswith("    "))
    return textwrap.dedent("\n".join(lines[:end]))


@pytest.fixture
def own_task(tmp_path, monkeypatch):
    (tmp_path / "my_pkg").mkdir()
    (tmp_path / "my_pkg" / "my_mod.py").write_text(example())
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    yield lambda **config: load_task(NAME, TaskConfig(**config))
    for module in ("my_pkg", "my_pkg.my_mod"):
        sys.modules.pop(module, None)


def test_it_takes_about_thirty_lines():
    assert len([line for line in example().splitlines() if line.strip()]) <= 30


def test_it_trains_and_is_evaluated(own_task):
    task = own_task(options={"examples": 500}, validation_fraction=0.1, partition=PartitionConfig(PartitionKind.IID))
    assert task_kind(NAME) == task.kind == "torch"
    assert task.name == NAME
    client, server = task.client_data(0, 2), task.server_data()
    assert (len(client.train), len(server.validation), len(server.test)) == (180, 40, 100)
    model = task.module(task.initial_arrays(0))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for _ in range(100):
        optimizer.zero_grad()
        task.loss(model, *task.tensors(client.train)).backward()
        optimizer.step()
    assert task.evaluate_module(model, server.test)["accuracy"] > 0.85


def test_its_column_splits_it(own_task):
    task = own_task(partition=PartitionConfig(PartitionKind.COLUMN, column="site"))
    sites = [np.unique(task.client_data(i, 3).train.columns["site"]).tolist() for i in range(3)]
    assert sites == [[0], [1], [2]]


def test_its_options_are_checked(own_task):
    with pytest.raises(TaskError, match=r"option 'exmples'.*did you mean 'examples'"):
        own_task(options={"exmples": 3})
