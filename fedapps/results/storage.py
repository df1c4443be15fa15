"""Files that survive a kill: atomic writes, rows of JSON, named arrays.

JSON has no ``nan`` and no infinities, so a float that is not finite is written as the string ``"nan"``, ``"inf"`` or
``"-inf"`` and read back as a float. A text that is exactly one of these three words therefore comes back as a float.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from fedapps.errors import CheckpointError

Row = dict[str, Any]
"""One line of ``metrics.jsonl`` or ``ledger.jsonl``."""

NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}

UNREADABLE = (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError)
"""What reading a file raises that is damaged in any way: absent, a folder, not UTF-8, of another form, nested too deeply."""

T = TypeVar("T")

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


def read_as(path: Path, expected: str, parse: Callable[[str], T]) -> T:
    """Read a text file.

    Args:
        path: The file.
        expected: What it should hold, for the error.
        parse: Makes the value from its text.

    Returns:
        The value.

    Raises:
        CheckpointError: The file is damaged, in whatever way.
    """
    try:
        return parse(path.read_text(encoding="utf-8"))
    except UNREADABLE as error:
        raise CheckpointError(str(path), expected=expected, got=fault(error), do="restore the file") from error


def fault(error: BaseException) -> str:
    """Say in one line what was wrong with a file."""
    if isinstance(error, KeyError):
        return f"no key {error}"
    return " ".join(str(error).split()) or type(error).__name__


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


ROW_KEYS: Mapping[str, type | tuple[type, ...]] = {
    "round": int, "phase": str, "partition": (int, type(None)), "num-examples": int, "seconds": (int, float),
    "payload-down": int, "payload-up": int, "wire-down": int, "wire-up": int, "lr": (int, float),
    "train-loss": (int, float), "sampled": list, "folded": list, "refused": dict,
}  # fmt: skip
"""Keys of rows that are read back, and their types."""


def read_lines(path: Path, keys: Collection[str] = ()) -> list[tuple[str, Row]]:
    """Read the rows of a file, each with its text.

    A last line without its end is what a kill leaves: it is not returned.

    Args:
        path: The file; none is an empty one.
        keys: Those of `ROW_KEYS` that each row must have.

    Returns:
        ``(text with newline, row)`` in the order of the file.

    Raises:
        CheckpointError: Another line is not a row.
    """
    if not path.exists():
        return []
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except OSError as error:
        raise CheckpointError(str(path), expected="rows of JSON", got=fault(error), do="restore the file") from error
    if lines and not lines[-1].endswith(b"\n"):
        lines.pop()
    pairs = []
    for number, line in enumerate(lines, start=1):
        try:
            row = from_json(line.decode())
        except (ValueError, RecursionError) as error:
            raise _not_a_row(path, number, fault(error)) from error
        if not isinstance(row, dict):
            raise _not_a_row(path, number, f"a {type(row).__name__}")
        for key, value in row.items():
            if key in ROW_KEYS and (not isinstance(value, ROW_KEYS[key]) or isinstance(value, bool)):
                raise _not_a_row(path, number, f"{key} = {value!r:.40}")
        for key in keys:
            if row.get(key) is None:
                raise _not_a_row(path, number, f"a row without '{key}'")
        pairs.append((line.decode(), row))
    return pairs


class GrowingSum:
    """The SHA-256 of a file that only grows, in time proportional to what is new.

    Args:
        path: The file; none is an empty one.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._sum = hashlib.sha256()

    def hexdigest(self) -> str:
        """Give the sum of what the file holds now."""
        if self._path.exists():
            with self._path.open("rb") as file:
                file.seek(self._offset)
                news = file.read()
            self._offset += len(news)
            self._sum.update(news)
        return self._sum.hexdigest()


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
    except (SafetensorError, *UNREADABLE) as error:
        do = "take a whole copy of it; it may have been cut off"
        raise CheckpointError(str(path), expected="a safetensors file", got=fault(error), do=do) from error
