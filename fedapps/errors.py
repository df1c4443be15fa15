"""Exceptions of the project. Every message says where, what was expected, what came, and what to do."""

from __future__ import annotations


class FedAppsError(Exception):
    """Base of every error that this project raises on purpose."""


class SettingsError(FedAppsError, ValueError):
    """A setting is unknown, has the wrong type, or is out of range."""


class MessageError(FedAppsError, ValueError):
    """A message lacks a record or carries one of the wrong form."""


class CurvatureError(FedAppsError, ArithmeticError):
    """A curvature block cannot be built or solved."""


class TaskError(FedAppsError, ValueError):
    """A task, its data or its partition cannot be used as asked."""


class RosterError(FedAppsError):
    """The nodes that are connected do not fit the run."""


class RoundFailedError(FedAppsError):
    """Rounds failed and the failure policy ends the run."""


class CheckpointError(FedAppsError):
    """A run folder cannot be resumed as asked."""


class LaunchError(FedAppsError):
    """A run could not be started, or what it was started on went away."""


def explain(where: str, *, expected: str, got: str, do: str) -> str:
    """Compose an error message in the project's one form.

    Args:
        where: The place, for example ``"layer 'fc1', client 3"``; may be empty.
        expected: What would have been right.
        got: What came.
        do: What the reader can do about it.

    Returns:
        ``"<where>: expected <expected>, got <got>; <do>"``, without the place and its colon if that is empty.
    """
    place = f"{where}: " if where else ""
    return f"{place}expected {expected}, got {got}; {do}"
