"""A user's own modules, which a run on a SuperLink takes along: those that hold its task and its method."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from flwr.common.constant import FAB_EXCLUDE_PATTERNS

from fedapps.errors import LaunchError
from fedapps.results.units import human_bytes

MOST_BYTES = 5_000_000
"""Most bytes of a user's modules; Flower packs at most 10 MB."""

SUFFIXES = (".py", ".toml", ".md", ".yaml", ".yml", ".json", ".jsonl")
"""Files that Flower packs."""

NOT_PACKED = ("test_*.py", "*_test.py", "pyproject.toml")
"""Those that it leaves out, whatever they are for."""

MOST_NAMES = 20
"""Files that a list names."""


@dataclass(frozen=True)
class OwnModule:
    """A package or a file of the user's.

    Attributes:
        name: Its name, without dots.
        folder: The folder that holds it.
        files: Its files, relative to `folder`.
        left: Its other files, which Flower does not pack.
    """

    name: str
    folder: Path
    files: tuple[str, ...]
    left: tuple[str, ...] = ()

    def copy_to(self, folder: Path) -> None:
        """Copy it.

        Args:
            folder: Where to.
        """
        for name in self.files:
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(self.folder / name, target)

    def told(self) -> str:
        """Give one line for the run's log."""
        size = sum((self.folder / name).stat().st_size for name in self.files)
        left = f"; not packed by Flower: {_names(self.left)}" if self.left else ""
        return f"shipped with the run, from {self.folder}: {_names(self.files)} ({human_bytes(size)}){left}"


def own_modules(run_config: Mapping[str, Any], folders: Sequence[Path]) -> list[OwnModule]:
    """Find the modules that ``task`` and ``method`` name as ``my_pkg.my_mod:X``, if they lie in the user's folders.

    Args:
        run_config: The run config.
        folders: Where they are looked for, such as the working folder; what is not there is taken to be installed.

    Returns:
        A module each.

    Raises:
        LaunchError: One cannot be taken along: it is too large, or has a name that Flower or Python keep for others.
    """
    found: dict[str, OwnModule] = {}
    for key in ("task", "method"):
        reference = str(run_config.get(key, ""))
        module = reference.partition(":")[0]
        name = module.partition(".")[0]
        # A checkout of this package is no module of the user's: every machine has it installed.
        if ":" not in reference or name == __name__.partition(".")[0] or name in found:
            continue
        for folder in folders:
            files = sorted(_files_of(folder, name))
            if files:
                found[name] = _checked(key, reference, name, folder.absolute(), files)
                break
    return list(found.values())


def _files_of(folder: Path, name: str) -> Iterator[str]:
    if (folder / name).is_dir():
        for path in (folder / name).rglob("*"):
            parts = path.relative_to(folder).parts
            hidden = any(part.startswith(".") or part == "__pycache__" for part in parts)
            if path.is_file() and not path.is_symlink() and not hidden:
                yield "/".join(parts)
    elif (folder / f"{name}.py").is_file():
        yield f"{name}.py"


def _checked(key: str, reference: str, name: str, folder: Path, files: Sequence[str]) -> OwnModule:
    where = f"{key} '{reference}' in {folder}"
    packed = tuple(file for file in files if file.endswith(SUFFIXES) and not _is_left_out(file))
    named = reference.partition(":")[0].replace(".", "/")
    if name in sys.stdlib_module_names or f"{name}/**" in FAB_EXCLUDE_PATTERNS or _is_left_out(f"{named}.py"):
        raise LaunchError(
            where,
            expected="a name that is free in Python and in Flower's bundles",
            got=f"'{named}'",
            do="rename the module: not test_..., ..._test, build, lib, env or the like, nor one of Python's own",
        )
    sizes = {file: (folder / file).stat().st_size for file in packed}
    if sum(sizes.values()) > MOST_BYTES:
        largest = max(sizes, key=lambda file: sizes[file])
        raise LaunchError(
            where,
            expected=f"at most {human_bytes(MOST_BYTES)} of code to ship with the run",
            got=f"{human_bytes(sum(sizes.values()))}, of which {largest} {human_bytes(sizes[largest])}",
            do="keep data elsewhere, or install the package on the SuperLink's machine and on every SuperNode's, and start"
            " the run in another folder",
        )
    return OwnModule(name, folder, packed, tuple(file for file in files if file not in packed))


def _is_left_out(file: str) -> bool:
    return any(fnmatch(file.rpartition("/")[2], pattern) for pattern in NOT_PACKED)


def _names(files: Sequence[str]) -> str:
    more = f" and {len(files) - MOST_NAMES} more" if len(files) > MOST_NAMES else ""
    return ", ".join(files[:MOST_NAMES]) + more
