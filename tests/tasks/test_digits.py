from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

from fedapps.errors import TaskError
from fedapps.tasks import TaskConfig, load_task
from fedapps.tasks.digits import DigitsTask


@pytest.fixture(scope="module")
def task() -> DigitsTask:
    return DigitsTask(TaskConfig(), "digits")


def test_images_and_labels(task):
    train, test = task.load()
    assert (train.inputs.shape, test.inputs.shape) == ((1438, 1, 8, 8), (359, 1, 8, 8))
    assert train.inputs.dtype == np.float32
    assert (train.inputs.min(), train.inputs.max()) == (0, 1)
    assert set(np.bincount(test.targets)) <= {35, 36, 37}  # a fifth of 174 to 183 images of each class


def test_the_test_set_is_the_same_for_every_seed(task):
    other = DigitsTask(TaskConfig(seed=5))
    assert task.server_data().test.sha256() == other.server_data().test.sha256()
    assert task.checksums() == other.checksums()


@pytest.mark.slow
def test_data_is_the_same_in_another_process(task):
    code = (
        "from fedapps.tasks import *; task = load_task('digits', TaskConfig(seed=3, validation_fraction=0.1));"
        "print([task.client_data(i, 10).train.sha256() for i in range(10)], task.server_data().validation.sha256())"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    here = load_task("digits", TaskConfig(seed=3, validation_fraction=0.1))
    clients = [here.client_data(i, 10).train.sha256() for i in range(10)]
    assert out.strip() == f"{clients} {here.server_data().validation.sha256()}"


def test_model_is_small_and_made_of_layers_with_blocks(task):
    model = task.build_model()
    assert sum(p.numel() for p in model.parameters()) == 19_578
    layers = [layer for layer in model if any(True for _ in layer.parameters())]
    assert [type(layer) for layer in layers] == [torch.nn.Conv2d] * 2 + [torch.nn.Linear] * 2
    assert all(layer.bias is not None for layer in layers)


def test_the_model_learns(task):
    """60 steps of plain gradient descent on the pool: well above chance (0.1) on the test set."""
    data = task.client_data(0, 1).train
    model = task.module(task.initial_arrays(0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    generator = np.random.default_rng(0)
    for _ in range(60):
        inputs, targets = task.tensors(data.take(generator.permutation(len(data))[:64]))
        optimizer.zero_grad()
        task.loss(model, inputs, targets).backward()
        optimizer.step()
    assert task.evaluate_module(model, task.server_data().test)["accuracy"] > 0.5


def test_without_scikit_learn(monkeypatch, task):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(TaskError, match=r"task 'digits'.*install fedapps\[torch\]"):
        task.load()
