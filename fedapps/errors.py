"""Exceptions of the project. Every message says where, what was expected, what came, and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import ClassVar

WITHHELD = "what only the log of that machine tells"
"""Stands for the content of a file in an error that leaves the machine."""


class FedAppsError(Exception):
    """Base of every error that this project raises on purpose.

    Args:
        where: The place, for example ``"layer 'fc1', client 3"``; may be empty. Without the rest, the whole message.
        expected: What would have been right.
        got: What came.
        do: What the reader can do about it, where that is not plain from the rest.
    """

    READS_FILES: ClassVar[bool] = False
    """Whether what came may be the content of a file, which stays on its machine."""

    def __init__(self, where: str = "", *, expected: str = "", got: str = "", do: str = "") -> None:
        super().__init__(explain(where, expected=expected, got=got, do=do) if expected else where)
        self.where, self.expected, self.got, self.do = where, expected, got, do

    def outside(self) -> str:
        """Say what another machine may know: of errors that read files, all but what came."""
        if not self.READS_FILES:
            return str(self)
        if not self.expected:
            return WITHHELD
        return explain(self.where, expected=self.expected, got=WITHHELD, do=self.do)


class SettingsError(FedAppsError, ValueError):
    """A setting is unknown, has the wrong type, or is out of range."""


class MessageError(FedAppsError, ValueError):
    """A message lacks a record or carries one of the wrong form."""


class CurvatureError(FedAppsError, ArithmeticError):
    """A curvature block cannot be built or solved."""


class TaskError(FedAppsError, ValueError):
    """A task, its data or its partition cannot be used as asked."""

    READS_FILES = True


class RosterError(FedAppsError):
    """The nodes that are connected do not fit the run."""


class RoundFailedError(FedAppsError):
    """Rounds failed and the failure policy ends the run."""


class CheckpointError(FedAppsError):
    """A run folder cannot be resumed as asked."""

    READS_FILES = True


class LaunchError(FedAppsError):
    """A run could not be started, or what it was started on went away."""


def explain(where: str, *, expected: str, got: str, do: str = "") -> str:
    """Compose an error message in the project's one form; `FedAppsError` does it for its own.

    Args:
        where: The place; may be empty.
        expected: What would have been right.
        got: What came.
        do: What the reader can do about it; may be empty.

    Returns:
        ``"<where>: expected <expected>, got <got>; <do>"``, without what is empty.
    """
    place, advice = f"{where}: " if where else "", f"; {do}" if do else ""
    return f"{place}expected {expected}, got {got}{advice}"


def did_you_mean(name: str, known: Iterable[str], otherwise: str = "") -> str:
    """Advise somebody who gave a name that is not known.

    Args:
        name: What was given.
        known: The names that would have been right.
        otherwise: The advice where none of them is near.

    Returns:
        ``"did you mean '<nearest>'?"``, or the other advice.
    """
    near = difflib.get_close_matches(name, sorted(known), n=1)
    return f"did you mean '{near[0]}'?" if near else otherwise


def import_advice(error: Exception, module: str) -> str:
    """Advise somebody whose own module cannot be imported, be it here or on a node.

    Args:
        error: What the import raised.
        module: The module's full name.

    Returns:
        What to install, and on which machines; or that the module itself is wrong.
    """
    if not isinstance(error, ModuleNotFoundError):
        return "correct the module"
    machines = "on a SuperLink: on its machine and on every SuperNode's"
    if f"{module}.".startswith(f"{error.name}."):
        return (
            f"check the spelling, put the folder that holds '{error.name}' on the Python path, or install it ({machines}, "
            "unless the run is started in that folder: then it is shipped with the run)"
        )
    return f"install '{error.name}', which it imports ({machines})"
