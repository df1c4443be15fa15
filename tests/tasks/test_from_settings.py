from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from fedapps.errors import SettingsError
from fedapps.tasks import PartitionConfig, PartitionKind, TaskConfig
from fedapps.tasks.from_settings import load_task_of

DATA = Path(__file__).parents[1] / "data"


def settings(**changes):
    values = {
        "task": "a9a", "data_dir": str(DATA), "task_options": "regularisation = 0.01", "seed": 5,
        "partition": "classes", "alpha": 0.3, "classes_per_client": 1, "partition_column": "site",
        "partition_min_size": 4, "validation_fraction": 0.1, "client_validation_fraction": 0.2,
        "client_test_fraction": 0.3,
    }  # fmt: skip
    return SimpleNamespace(**values | changes)


def test_settings_reach_the_task():
    task = load_task_of(settings())
    assert task.name == "a9a"
    assert task.config == TaskConfig(
        data_dir=DATA,
        options={"regularisation": 0.01},
        seed=5,
        partition=PartitionConfig(PartitionKind.CLASSES, 0.3, 1, "site", 4),
        validation_fraction=0.1,
        client_validation_fraction=0.2,
        client_test_fraction=0.3,
    )
    assert load_task_of(settings(data_dir="", task_options="")).config.data_dir is None


def test_options_that_are_not_toml_are_refused():
    with pytest.raises(SettingsError, match="task-options"):
        load_task_of(settings(task_options="file = a9a"))
