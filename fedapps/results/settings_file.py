"""``settings.toml``: a flat run config as TOML that ``flwr run --run-config`` accepts too."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from typing import Any

from fedapps.errors import CheckpointError
from fedapps.settings import Scalar, toml_float

_BARE = re.compile(r"[A-Za-z0-9_-]+")


def to_toml(settings: Mapping[str, Scalar]) -> str:
    """Write a flat run config, one ``key = value`` a line; a dotted key is a nested table to TOML and to Flower.

    Args:
        settings: Dotted kebab-case key -> value.

    Returns:
        The text; `from_toml` gives the same dictionary.

    Raises:
        CheckpointError: A key is empty or is another key's table, or a value is not a scalar.
    """
    for key, value in settings.items():
        _check(key, value, settings)
    return "".join(f"{_toml_key(key)} = {_toml_value(value)}\n" for key, value in settings.items())


def _check(key: str, value: object, settings: Mapping[str, Scalar]) -> None:
    tables = [key[:place] for place, letter in enumerate(key) if letter == "."]
    if not all(key.split(".")) or any(table in settings for table in tables):
        raise CheckpointError(
            f"setting {key!r}",
            expected="a dotted key without empty parts, none of whose tables is a setting itself",
            got=repr(key),
            do="rename it",
        )
    if not isinstance(value, int | float | bool | str):
        raise CheckpointError(
            f"setting {key!r}",
            expected="an int, float, bool or str",
            got=type(value).__name__,
            do="write lists as comma strings and an absent value as ''",
        )


def _toml_key(key: str) -> str:
    return ".".join(part if _BARE.fullmatch(part) else _toml_string(part) for part in key.split("."))


def _toml_value(value: Scalar) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return _toml_string(value)
    return repr(float(value) if isinstance(value, float) else int(value))


def _toml_string(text: str) -> str:
    # JSON's escapes are TOML's; only DEL is allowed bare in the one and not in the other.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def from_toml(text: str) -> dict[str, Scalar]:
    """Read a run config.

    Args:
        text: TOML of scalars, nested tables allowed.

    Returns:
        Dotted key -> value.

    Raises:
        tomllib.TOMLDecodeError: The text is not TOML.
    """
    return _flatten(tomllib.loads(text, parse_float=toml_float), "")


def _flatten(table: Mapping[str, Any], prefix: str) -> dict[str, Scalar]:
    flat: dict[str, Scalar] = {}
    for key, value in table.items():
        flat |= _flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat
