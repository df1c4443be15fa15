"""Files that survive a kill: atomic writes, rows of JSON, named arrays.

JSON has no ``nan`` and no infinities, so a float that is not finite is written as the string ``"nan"``, ``"inf"`` or
``"-inf"`` and read back as a float. A text that is exactly one of these three words therefore comes back as a float.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from fedapps.errors import CheckpointError

Row = dict[str, Any]
"""One line of ``metrics.jsonl`` or ``ledger.jsonl``."""

NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}

_NAMES = "names"
_PLAIN_KINDS = "biufc"


def to_json(value: object, *, indent: int | None = None) -> str:
    """Write a value as JSON; floats that are not finite become strings.

    Args:
        value: Dictionaries, lists, strings, numbers (NumPy scalars included), booleans, None.
        indent: Spaces a level; None for one line.

    Returns:
        The text.

    Raises:
        TypeError: The value holds something that JSON cannot.
    """
    return json.dumps(_encode(value), indent=indent, ensure_ascii=False, allow_nan=False)


def _encode(value: object) -> object:
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return str(float(value))
    if isinstance(value, Mapping):
        return {key: _encode(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_encode(item) for item in value]
    return value


def from_json(text: str) -> Any:
    """Read what `to_json` wrote.

    Args:
        text: JSON.

    Returns:
        The value.

    Raises:
        json.JSONDecodeError: The text is not JSON.
    """
    return _decode(json.loads(text))


def _decode(value: Any) -> Any:
    if isinstance(value, str):
        return NOT_FINITE.get(value, value)
    if isinstance(value, dict):
        return {key: _decode(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_decode(item) for item in value]
    return value


def sync_folder(folder: Path) -> None:
    """Make creations and renames in a folder last over a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_file(path: Path) -> None:
    """Make the content of a file last over a power cut."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def write_atomically(path: Path, text: str, *, mode: int | None = None) -> None:
    """Replace a file by new text; a kill leaves the old or the new one, whole.

    Args:
        path: The file.
        text: Its new content.
        mode: Who may read it; None for what the umask says.
    """
    aside = path.with_name(f".{path.name}.tmp")
    aside.write_text(text, encoding="utf-8")
    if mode is not None:
        aside.chmod(mode)
    sync_file(aside)
    aside.replace(path)
    sync_folder(path.parent)


def append_row(path: Path, row: Mapping[str, Any]) -> None:
    """Add one row to a file of rows.

    Args:
        path: The file; made if missing.
        row: The row.
    """
    with path.open("ab") as file:
        file.write((to_json(row) + "\n").encode())


def read_lines(path: Path) -> list[tuple[str, Row]]:
    """Read the rows of a file, each with its text.

    A last line without its end is what a kill leaves: it is not returned.

    Args:
        path: The file; none is an empty one.

    Returns:
        ``(text with newline, row)`` in the order of the file.

    Raises:
        CheckpointError: Another line is not a row.
    """
    if not path.exists():
        return []
    lines = path.read_bytes().splitlines(keepends=True)
    if lines and not lines[-1].endswith(b"\n"):
        lines.pop()
    pairs = []
    for number, line in enumerate(lines, start=1):
        try:
            row = from_json(line.decode())
        except ValueError as error:
            raise _not_a_row(path, number, str(error)) from error
        if not isinstance(row, dict):
            raise _not_a_row(path, number, f"a {type(row).__name__}")
        pairs.append((line.decode(), row))
    return pairs


def _not_a_row(path: Path, number: int, got: str) -> CheckpointError:
    return CheckpointError(
        f"{path}, line {number}", expected="a JSON object", got=got, do="remove the line or restore the file"
    )


def save_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write named arrays as safetensors, with their order.

    Args:
        path: The file; its mode is what it was, or what the umask says.
        arrays: Name -> boolean, integer, floating or complex array of any shape, ``()`` included.

    Raises:
        CheckpointError: An array has another dtype, or the file cannot be written, for want of space for instance.
    """
    plain = {name: _plain(name, array) for name, array in arrays.items()}
    try:
        path.touch()
        mode = path.stat().st_mode & 0o777  # safetensors makes files for their owner only, whatever the umask.
        # The format sorts tensors by dtype and name; the order of the model is kept beside them.
        save_file(plain, path, metadata={_NAMES: json.dumps(list(arrays))})
        path.chmod(mode)
    except (SafetensorError, OSError) as error:
        size = sum(array.nbytes for array in plain.values())
        expected, do = f"to write {size} bytes", "make room, or choose a folder that can be written"
        raise CheckpointError(str(path), expected=expected, got=str(error), do=do) from error


def _plain(name: str, array: np.ndarray) -> np.ndarray:
    array = np.asarray(array)
    if array.dtype.kind not in _PLAIN_KINDS:
        raise CheckpointError(
            f"array '{name}'",
            expected="a boolean, integer, floating or complex dtype",
            got=str(array.dtype),
            do="convert it, or keep it in the JSON state",
        )
    # safetensors writes the memory as it lies: Fortran order would be garbled in silence.
    return np.asarray(array, order="C")


def load_arrays(path: Path) -> dict[str, np.ndarray]:
    """Read a safetensors file.

    Args:
        path: The file; one not written by `save_arrays` gives its own order.

    Returns:
        Name -> array, writable, in the order in which they were saved.

    Raises:
        CheckpointError: It is damaged.
    """
    try:
        with safe_open(path, framework="numpy") as file:
            names = json.loads((file.metadata() or {}).get(_NAMES, "null"))
            return {name: file.get_tensor(name) for name in (file.keys() if names is None else names)}
    except SafetensorError as error:
        do = "take a whole copy of it; it may have been cut off"
        raise CheckpointError(str(path), expected="a safetensors file", got=str(error), do=do) from error
