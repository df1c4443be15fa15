"""The thin Flower app that carries a run's resolved settings to a SuperLink."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedapps import __version__
from fedapps.errors import LaunchError
from fedapps.settings import Scalar
from fedapps.simulation.own_modules import OwnModule

_KEY = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")
_INT_RANGE = range(-(2**63), 2**63)

# No dependencies are declared: a SuperLink that installs them for each run would look for this
# package, and a newer torch, in an index. The SuperLink's environment has what it needs.
_TEMPLATE = """\
[project]
name = "fedapps-run"
version = "{version}"
description = "One run of fedapps, with its resolved settings"
license = "Apache-2.0"

[tool.flwr.app]
publisher = "fedapps"

[tool.flwr.app.components]
serverapp = {serverapp}
clientapp = {clientapp}

[tool.flwr.app.config]
{config}
"""


@dataclass(frozen=True)
class Components:
    """References to the two apps, as ``module:attribute``."""

    serverapp: str = "fedapps.server_apps:app"
    clientapp: str = "fedapps.client_apps:app"


def write_app_folder(
    folder: Path,
    run_config: Mapping[str, Scalar],
    *,
    components: Components | None = None,
    modules: Sequence[OwnModule] = (),
) -> None:
    """Write a Flower app that consists of settings and the user's own modules; the rest of its code is what is installed.

    The folder holds no other Python file: Flower puts it first on the path, where a package would hide
    the installed one.

    Args:
        folder: Where to write; made if missing.
        run_config: Every setting with its value; dots in a key make groups.
        components: The two apps; by default those of this package.
        modules: The user's own modules.

    Raises:
        LaunchError: A key or value cannot be carried by Flower.
    """
    components = components or Components()
    _check_groups(run_config)
    lines = [f"{_checked_key(key)} = {_toml(key, value)}" for key, value in run_config.items()]
    folder.mkdir(parents=True, exist_ok=True)
    text = _TEMPLATE.format(
        version=__version__,
        serverapp=_toml("serverapp", components.serverapp),
        clientapp=_toml("clientapp", components.clientapp),
        config="\n".join(lines),
    )
    (folder / "pyproject.toml").write_text(text, encoding="utf-8")
    for module in modules:
        module.copy_to(folder)


def _checked_key(key: str) -> str:
    if _KEY.fullmatch(key):
        return key
    raise _refusal(key, "letters, digits, '-', '_' and single dots", repr(key), "rename it")


def _check_groups(run_config: Mapping[str, Scalar]) -> None:
    for key in run_config:
        for position, character in enumerate(key):
            if character == "." and key[:position] in run_config:
                got = f"both '{key[:position]}' and '{key}'"
                raise _refusal(key, "a key that is a value or a group", got, "rename one")


def _toml(key: str, value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and value in _INT_RANGE:
        return str(value)
    if isinstance(value, float):
        return repr(float(value))
    if isinstance(value, str):
        # JSON's escapes are TOML's too, save for one character that JSON leaves as it is.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    expected = "a bool, float, text, or an integer of 64 bits"
    raise _refusal(key, expected, f"{value!r} of type {type(value).__name__}", "convert it")


def _refusal(key: str, expected: str, got: str, do: str) -> LaunchError:
    return LaunchError(f"setting '{key}'", expected=expected, got=got, do=do)
