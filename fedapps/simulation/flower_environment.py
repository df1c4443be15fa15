"""What Flower's commands need around them: their programs, their environment, their logs."""

from __future__ import annotations

import os
import re
import shutil
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from fedapps.errors import LaunchError

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def flower_program(name: str) -> str:
    """Return the path of one of Flower's commands, that of this interpreter's environment first.

    Args:
        name: For example ``"flower-superlink"``.

    Returns:
        The absolute path.

    Raises:
        LaunchError: The command is not installed.
    """
    for folder in (Path(sys.executable).parent, Path(sysconfig.get_path("scripts"))):
        if (folder / name).is_file():
            return str(folder / name)
    found = shutil.which(name)
    if found is None:
        raise LaunchError(
            f"command '{name}'",
            expected=f"an installed Flower beside {sys.executable}",
            got="no such command",
            do="install it with: pip install 'flwr>=1.42,<2'",
        )
    return found


def flower_environment(
    python_path: Sequence[Path] = (), environment: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return the environment in which Flower's commands run.

    Args:
        python_path: Folders from which tasks and apps are imported, before ``PYTHONPATH``.
        environment: Variables that win over everything else.

    Returns:
        The caller's environment with what a quiet, self-contained Flower needs.
    """
    variables = dict(os.environ)
    variables.pop("RAY_ADDRESS", None)  # Ray would join that cluster instead of starting one.
    variables |= {
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        # Despite its name: without it Ray listens on the machine's public address.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    }
    # Flower finds its helper programs by name.
    folders = [str(Path(flower_program("flwr")).parent), os.environ.get("PATH", "")]
    variables["PATH"] = os.pathsep.join(filter(None, folders))
    modules = [*(str(Path(each).absolute()) for each in python_path)]
    modules += filter(None, [os.environ.get("PYTHONPATH", "")])
    variables["PYTHONPATH"] = os.pathsep.join(modules)
    return variables | dict(environment or {})


def log_tail(path: Path, lines: int = 30) -> str:
    """Return the last lines of a log file, without colours.

    Args:
        path: The file; it may be missing.
        lines: How many lines.

    Returns:
        The lines, joined.
    """
    with suppress(FileNotFoundError):
        text = path.read_text(encoding="utf-8", errors="replace")
        return "\n".join(_COLOURS.sub("", text).rstrip().splitlines()[-lines:])
    return ""
