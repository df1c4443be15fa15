"""What a method is: one row of the registry, and how the objects that it names are imported."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fedapps.errors import SettingsError, import_advice
from fedapps.settings import Scalar, Settings, SettingsModel

if TYPE_CHECKING:
    from fedapps.curvature.layout import Layout


@dataclass(frozen=True, kw_only=True)
class Method:
    """One row of the registry.

    Attributes:
        name: Value of the setting ``method``.
        title: Name as the literature writes it.
        family: ``second order``, ``first order``, ...
        mixing: What the server does with the replies.
        travels_down: What a sampled client receives.
        travels_up: What it sends.
        client_state: What a client keeps over rounds.
        paper: Source, with arXiv id.
        strategy: ``module:class`` of the server's strategy, built with ``from_settings``.
        client: ``module:function`` that trains one client for one round.
        evaluate: ``module:function`` that measures the models of one client; ``""`` measures the global model.
        layout: ``module:function`` that says which tensors of a task's model would be preconditioned; ``""`` for methods
            without curvature.
        group: Prefix of the method's own keys; ``""`` if it has none or takes them from ``method-options``.
        own_settings: Class of the method's own settings, or None.
        task_kinds: Kinds of task that the method can train.
        kinds_because: Why not others, for the error.
        plain_steps: Whether clients take plain gradient steps, which have the settings ``local-momentum`` and
            ``weight-decay``.
        replicas: Whether ends hold replicas that draw the same directions: kernels are compared in the handshake, and the
            run folder holds a journal.
        published: The preset ``paper``: kind or group of tasks, or ``""`` for all -> values of keys that are ``"auto"``; empty
            for a method without one.
        tuned: Task name (or group of tasks, ``language``, or kind, ``convex`` or ``torch``) -> values for the keys that
            are ``"auto"``.
    """

    name: str
    title: str
    family: str
    mixing: str
    travels_down: str
    travels_up: str
    client_state: str
    paper: str
    strategy: str
    client: str
    evaluate: str = ""
    layout: str = ""
    group: str = ""
    own_settings: type[SettingsModel] | None = None
    task_kinds: tuple[str, ...] = ("torch", "convex")
    kinds_because: str = ""
    plain_steps: bool = False
    replicas: bool = False
    published: Mapping[str, Mapping[str, Scalar]] = field(default_factory=dict)
    tuned: Mapping[str, Mapping[str, Scalar]] = field(default_factory=dict)

    def load_strategy(self) -> Any:
        """Import the strategy class.

        Returns:
            The class that ``strategy`` names.

        Raises:
            SettingsError: It cannot be imported.
        """
        return load_object(self.strategy, what=f"strategy of method '{self.name}'")

    def load_client(self) -> Any:
        """Import the client function.

        Returns:
            The function that ``client`` names.

        Raises:
            SettingsError: It cannot be imported.
        """
        return load_object(self.client, what=f"client of method '{self.name}'")

    def load_evaluate(self) -> Any:
        """Import the function that measures the models of one client.

        Returns:
            The function that ``evaluate`` names; None if clients measure the global model only.

        Raises:
            SettingsError: It cannot be imported.
        """
        return load_object(self.evaluate, what=f"evaluation of method '{self.name}'") if self.evaluate else None

    def layout_of(self, task: Any, settings: Settings) -> str:
        """Say which tensors this method would precondition, as a `fedapps.curvature.layout.Layout` in JSON.

        Args:
            task: The task.
            settings: The settings of the run.

        Returns:
            The layout; ``""`` for methods without curvature.
        """
        if not self.layout:
            return ""
        layout: Layout = load_object(self.layout, what=f"layout of method '{self.name}'")(task, settings)
        return layout.to_json()


def load_object(reference: str, *, what: str) -> Any:
    """Import an object by reference.

    Args:
        reference: ``module:attribute``.
        what: What it is, for the error message.

    Returns:
        The object.

    Raises:
        SettingsError: The module or the attribute does not exist.
    """
    module, _, attribute = reference.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise SettingsError(
            what,
            expected="an importable module:attribute",
            got=f"{reference!r} ({error})",
            do=import_advice(error, module) if isinstance(error, ImportError) else "check the spelling",
        ) from error
