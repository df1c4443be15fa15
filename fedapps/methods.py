"""The registry: one row a method. Adding a method is adding a row.

A row names its strategy and its client as ``module:attribute``, so that listing the methods imports neither torch nor
the strategies. A method of one's own is a `Method` in one's own module, given as ``method = "my_pkg.my_mod:METHOD"``.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fedapps import settings as settings_module
from fedapps.errors import SettingsError, explain
from fedapps.settings import Scalar, Settings, setting


@dataclass(frozen=True, kw_only=True)
class SecondOrderSettings:
    """Settings of the clients that take second-order steps.

    Attributes:
        damping: Added to the diagonal of every curvature block, ``P = A + damping I``; 0 is meant for convex models.
        estimate: How a FOOF block ``A`` is estimated: ``last-batch`` (the paper) or ``average`` (exponential average
            over the round's batches). The full Hessian of a convex model is always exact.
        decay: Weight of the past in the exponential average.
    """

    damping: float = setting("auto", "added to the diagonal of each curvature block", minimum=0)
    estimate: str = setting(
        "average",
        "FOOF block from the last batch (the paper) or an exponential average over the round's batches",
        choices=("average", "last-batch"),
    )
    decay: float = setting(0.9, "weight of the past in the exponential average", minimum=0, maximum=0.999)


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
        layout: ``module:function`` that names the tensors which a task's model would have preconditioned; ``""`` for
            methods without curvature.
        group: Prefix of the method's own keys; ``""`` if it has none or takes them from ``method-options``.
        own_settings: Class of the method's own settings, or None.
        tuned: Task name (or ``convex`` or ``torch``, by kind of task) -> values for the keys that are ``"auto"``.
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
    layout: str = ""
    group: str = ""
    own_settings: type | None = None
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

    def preconditioned(self, task: Any) -> tuple[str, ...]:
        """Name the tensors that this method would precondition.

        Args:
            task: The task.

        Returns:
            Parameter names; none for methods without curvature.
        """
        if not self.layout:
            return ()
        names: tuple[str, ...] = load_object(self.layout, what=f"layout of method '{self.name}'")(task)
        return names


TUNED: Mapping[str, Mapping[str, Scalar]] = {
    "convex": {"weighting": "uniform", "local-epochs": 1, "batch-size": 0, "validation-fraction": 0.0},
    "torch": {"weighting": "examples", "local-epochs": 5, "batch-size": 32, "validation-fraction": 0.1},
}
"""Kind of task -> values of the shared keys that are ``"auto"``, for every method that says nothing else."""

_SECOND_ORDER_TUNED: Mapping[str, Mapping[str, Scalar]] = {
    "convex": {"lr": 1.0, "damping": 0.0},
    "torch": {"lr": 0.1, "damping": 0.1},
}

METHODS: tuple[Method, ...] = (
    Method(
        name="fedpm",
        title="FedPM",
        family="second order",
        mixing="preconditioned: (sum p_i P_i)^-1 sum p_i P_i theta_i",
        travels_down="model",
        travels_up="P_i (upper triangles) and P_i (theta_i - theta)",
        client_state="none",
        paper="Federated Preconditioned Mixing, AAAI 2026, arXiv 2511.09100",
        strategy="fedapps.strategies.fedpm:FedPM",
        client="fedapps.client_apps.second_order:train_fedpm",
        layout="fedapps.client_apps.second_order:preconditioned_names",
        group="fedpm",
        own_settings=SecondOrderSettings,
        tuned=_SECOND_ORDER_TUNED,
    ),
    Method(
        name="localnewton",
        title="LocalNewton",
        family="second order",
        mixing="simple mean of theta_i",
        travels_down="model",
        travels_up="model",
        client_state="none",
        paper="Gupta et al. 2021, arXiv 2105.07320",
        strategy="fedapps.strategies.localnewton:LocalNewton",
        client="fedapps.client_apps.second_order:train_localnewton",
        layout="fedapps.client_apps.second_order:preconditioned_names",
        group="localnewton",
        own_settings=SecondOrderSettings,
        tuned=_SECOND_ORDER_TUNED,
    ),
    Method(
        name="fedavg",
        title="FedAvg",
        family="first order",
        mixing="simple mean of theta_i (Flower's own strategy)",
        travels_down="model",
        travels_up="model",
        client_state="none",
        paper="McMahan et al., AISTATS 2017, arXiv 1602.05629",
        strategy="fedapps.strategies.fedavg:FedAvg",
        client="fedapps.client_apps.first_order:train",
        tuned={"convex": {"lr": 1.0}, "torch": {"lr": 0.3}},
    ),
)


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
    except (ImportError, AttributeError, ValueError) as error:
        raise SettingsError(
            explain(
                what,
                expected="an importable module:attribute",
                got=f"{reference!r} ({error})",
                do="check the spelling and that its folder is on the Python path",
            )
        ) from error


def get_method(name: str) -> Method:
    """Look up a method.

    Args:
        name: Name of a built-in method, or ``my_pkg.my_mod:METHOD``.

    Returns:
        Its row.

    Raises:
        SettingsError: There is no such method.
    """
    if ":" in name:
        method = load_object(name, what=f"method '{name}'")
        if not isinstance(method, Method):
            raise SettingsError(
                explain(
                    f"method '{name}'",
                    expected="a fedapps.methods.Method",
                    got=type(method).__name__,
                    do="name the row, not the strategy",
                )
            )
        return method
    rows = {row.name: row for row in METHODS}
    if name not in rows:
        near = difflib.get_close_matches(name, rows, n=1)
        raise SettingsError(
            explain(
                "setting 'method'",
                expected="one of " + ", ".join(rows),
                got=repr(name),
                do=f"did you mean '{near[0]}'?" if near else "see `fedapps methods`",
            )
        )
    return rows[name]


def method_groups() -> dict[str, type]:
    """Map each group of method keys to its settings class."""
    return {row.group: row.own_settings for row in METHODS if row.group and row.own_settings}


def resolve_settings(run_config: Mapping[str, Any], task_kind: str | None = None) -> Settings:
    """Check a run config and fill in the values that are ``"auto"``.

    Args:
        run_config: Flat kebab-case keys.
        task_kind: ``torch`` or ``convex``; looked up from the task if not given.

    Returns:
        The settings of the run.

    Raises:
        SettingsError: As `fedapps.settings.parse`.
    """
    defaults = settings_module.default_config({})
    method = get_method(_text(run_config, "method", defaults))
    task = _text(run_config, "task", defaults)
    if task_kind is None:
        from fedapps.tasks import task_kind as kind_of

        task_kind = kind_of(task)
    tuned = {**TUNED[task_kind], **method.tuned.get(task_kind, {}), **method.tuned.get(task, {})}
    own = (
        set()
        if method.own_settings is None
        else {key.name for key in settings_module.keys_of(method.own_settings).values()}
    )
    return settings_module.parse(
        run_config,
        groups=method_groups(),
        group=method.group,
        own_class=method.own_settings,
        tuned={f"{method.group}.{k}" if method.group and k in own else k: v for k, v in tuned.items()},
    )


def _text(run_config: Mapping[str, Any], key: str, defaults: Mapping[str, Scalar]) -> str:
    value = run_config.get(key, defaults[key])
    if not isinstance(value, str):
        raise SettingsError(explain(f"setting '{key}'", expected="a name", got=repr(value), do="give it as a string"))
    return value
