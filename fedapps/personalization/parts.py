"""Personal parts: which named tensors of a model are personal, and which are shared by all clients."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from fedapps.errors import SettingsError


def personal_names(names: Sequence[str], patterns: Sequence[str]) -> tuple[str, ...]:
    """Pick the personal tensors of a model.

    Args:
        names: Names of the trainable tensors.
        patterns: Names, modules (``head`` stands for ``head.weight`` and ``head.bias``) or shell patterns
            (``layers.*.bias``); none makes every tensor personal.

    Returns:
        The personal names, in the order of ``names``.

    Raises:
        SettingsError: A pattern names no tensor.
    """
    for pattern in patterns:
        if not any(_names(pattern, name) for name in names):
            raise SettingsError(
                f"personal parts, '{pattern}'",
                expected="the name of a tensor or module of the model",
                got="one that names nothing; the tensors are " + ", ".join(names),
                do="correct it, or leave personal parts empty to personalise everything",
            )
    if not patterns:
        return tuple(names)
    return tuple(name for name in names if any(_names(pattern, name) for pattern in patterns))


def _names(pattern: str, name: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")
