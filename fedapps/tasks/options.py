"""The options of a task (``task-options``): declared by the task's class, checked before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedapps.errors import TaskError, did_you_mean


@dataclass(frozen=True)
class Option:
    """One key of ``task-options``.

    Attributes:
        default: Value if the key is not given; its type (bool, int, float or str) is the type of the key.
        about: Meaning, for the list of tasks.
    """

    default: bool | int | float | str
    about: str


def resolve_options(task: str, known: Mapping[str, Option], given: Mapping[str, Any]) -> dict[str, Any]:
    """Check options and fill in defaults.

    Args:
        task: Name of the task, for error messages.
        known: The keys that the task declares.
        given: The options of the run.

    Returns:
        A value for each declared key, in the type of its default.

    Raises:
        TaskError: A key is unknown or a value has the wrong type.
    """
    for key in given:
        if key not in known:
            raise TaskError(
                f"task '{task}', option '{key}'",
                expected="one of " + ", ".join(known) if known else "no options, since the task has none",
                got="an unknown key",
                do=did_you_mean(key, known, "remove it from task-options"),
            )
    return {key: _typed(task, key, option, given.get(key, option.default)) for key, option in known.items()}


def _typed(task: str, key: str, option: Option, value: Any) -> Any:
    kind = type(option.default)
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise TaskError(
            f"task '{task}', option '{key}'",
            expected=f"a value of type {kind.__name__} ({option.about})",
            got=f"{value!r}",
            do=f"write for example {key} = {option.default!r} in task-options",
        )
    return value
