"""What a run ran on: versions, processor, device, commit, checksums of the data."""

from __future__ import annotations

import functools
import importlib.metadata
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedapps import __version__

PACKAGES = ("flwr", "numpy", "scipy", "torch", "ray")
"""Packages whose version can change a result."""

# Metadata is read from a file in milliseconds, as long as a small round takes.
_version = functools.cache(importlib.metadata.version)


def describe_environment(
    *, device: str, data_checksums: Mapping[str, str], working_folder: Path | None = None
) -> dict[str, Any]:
    """Collect what somebody needs to repeat a run bit for bit. Imports none of the packages that it names.

    Args:
        device: Device of the run, for example ``"cpu"``.
        data_checksums: Name of a data file -> its checksum.
        working_folder: Folder whose git commit is recorded; None for the current one.

    Returns:
        The content of ``environment.json``. Equal models are promised on one processor type and one set of versions
        only, hence ``cpu``.
    """
    return {
        "fedapps": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": cpu_model(),
        "device": device,
        "packages": installed_versions(),
        "git": git_state(working_folder or Path.cwd()),
        "data-checksums": dict(data_checksums),
    }


def installed_versions() -> dict[str, str]:
    """Give the versions of the packages in `PACKAGES` that are installed."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = _version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def cpu_model() -> str:
    """Name the processor.

    Returns:
        The model name that Linux gives, else what Python knows of the machine.
    """
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def git_state(folder: Path) -> dict[str, Any] | None:
    """Give the commit that is checked out in a folder.

    Returns:
        ``{"commit": ..., "modified": whether tracked files differ from it}``; None outside a repository, without a
        commit or without git.
    """
    commit = _git(folder, "rev-parse", "--verify", "HEAD")
    if commit is None:
        return None
    return {"commit": commit, "modified": bool(_git(folder, "status", "--porcelain", "--untracked-files=no"))}


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
