"""From the settings of a run to its task: the same on the server and on every client."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedapps.settings import Settings, parse_toml_options
from fedapps.tasks import PartitionConfig, PartitionKind, Task, TaskConfig, load_task


def load_task_of(settings: Settings, agreed: Mapping[str, Any] | None = None) -> Task:
    """Load the task that the settings name; asked again in the same process for the same, give the same object.

    Args:
        settings: The settings.
        agreed: What nodes with data of their own agreed on (`Task.agree`); None before they have.

    Raises:
        TaskError: There is no such task, or an option is wrong.
        SettingsError: ``task-options`` is not TOML.
    """
    config = TaskConfig(
        data_dir=Path(settings.data_dir) if settings.data_dir else None,
        options=parse_toml_options("task-options", settings.task_options),
        seed=settings.seed,
        partition=PartitionConfig(
            kind=PartitionKind(settings.partition),
            alpha=settings.alpha,
            classes_per_client=settings.classes_per_client,
            column=settings.partition_column,
            min_size=settings.partition_min_size,
        ),
        validation_fraction=settings.validation_fraction,
        client_validation_fraction=settings.client_validation_fraction,
        client_test_fraction=settings.client_test_fraction,
        agreed=agreed or {},
    )
    return load_task(settings.task, config)
