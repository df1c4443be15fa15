"""The registry: one row a method, one module a family. Adding a method is adding a row.

A row names its strategy and its client as ``module:attribute``, so that listing the methods imports neither torch nor
the strategies. A method of one's own is a `Method` in one's own module, given as ``method = "my_pkg.my_mod:METHOD"``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedapps.errors import SettingsError, did_you_mean
from fedapps.methods import first_order, personalised, second_order, zeroth_order
from fedapps.methods.row import Method, load_object
from fedapps.settings import Scalar, Settings, SettingsModel, default_of, keys_of, parse
from fedapps.tasks import task_group
from fedapps.tasks import task_kind as kind_of

__all__ = ["METHODS", "TUNED", "Method", "get_method", "load_object", "method_groups", "resolve_settings"]

METHODS: tuple[Method, ...] = (
    *second_order.METHODS,
    *first_order.METHODS,
    *personalised.METHODS,
    *zeroth_order.METHODS,
)
"""Every built-in method, in the order in which lists show them."""

_EVERY_TASK: Mapping[str, Scalar] = {
    "partition": "dirichlet", "partition-column": "", "client-test-fraction": 0.0, "client-validation-fraction": 0.0,
    "client-evaluation": "none", "local-steps": 0,
}  # fmt: skip
_OWN_CLIENTS: Mapping[str, Scalar] = {"partition": "column", "partition-column": "client", "client-test-fraction": 0.0}

_LOCAL: Mapping[str, Scalar] = {
    "validation-fraction": 0.0, "client-test-fraction": 0.2, "client-validation-fraction": 0.1, "client-evaluation": "last",
}  # fmt: skip
"""Where every node has data of its own the server has none, and clients measure."""

_EXAMPLE: Mapping[str, str] = {"torch": "digits-mlp", "convex": "a9a"}

TUNED: Mapping[str, Mapping[str, Scalar]] = {
    "convex": {**_EVERY_TASK, "weighting": "uniform", "local-epochs": 1, "batch-size": 0, "validation-fraction": 0.0},
    "torch": {**_EVERY_TASK, "weighting": "examples", "local-epochs": 5, "batch-size": 32, "validation-fraction": 0.1},
    # A round of all of SST-2 would be hundreds of steps, and a tenth of it for validation minutes of evaluation.
    "language": {"local-steps": 10, "batch-size": 16, "validation-fraction": 0.0},
    "squad": {"partition": "iid"},
    # One file has no test set: something must be held out, or a run would measure nothing.
    "table": {"validation-fraction": 0.2},
    "table-regression": {"partition": "iid"},
    "synthetic-linear": _OWN_CLIENTS,
    "synthetic-logistic": _OWN_CLIENTS,
}
"""Kind of task -> values of the shared keys that are ``"auto"``, for every method that says nothing else.

Group of tasks, or task -> values that it asks for, whatever the method says for its kind.
"""


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
                f"method '{name}'",
                expected="a fedapps.methods.Method",
                got=type(method).__name__,
                do="name the row, not the strategy",
            )
        return method
    rows = {row.name: row for row in METHODS}
    if name not in rows:
        raise SettingsError(
            "setting 'method'",
            expected="one of " + ", ".join(rows),
            got=repr(name),
            do=did_you_mean(name, rows, "see `fedapps methods`"),
        )
    return rows[name]


def method_groups() -> dict[str, type[SettingsModel]]:
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
    method, task = get_method(_text(run_config, "method")), _text(run_config, "task")
    if task_kind is None:
        task_kind = kind_of(task)
    if task_kind not in method.task_kinds:
        others = [row for row in METHODS if task_kind in row.task_kinds]
        near = next((row for row in others if row.family == method.family), others[0])
        raise SettingsError(
            f"method '{method.name}'",
            expected=f"a {' or '.join(method.task_kinds)} task",
            got=f"'{task}', a {task_kind} task" + (f": {method.kinds_because}" if method.kinds_because else ""),
            do=f"take the method nearest to it, {near.name}, or another task, such as {_EXAMPLE[method.task_kinds[0]]}",
        )
    tuned: dict[str, Scalar] = {}
    for name in (task_kind, task_group(task), task):
        tuned |= {**TUNED.get(name, {}), **method.tuned.get(name, {})}
    if run_config.get("partition") == "local":
        tuned |= _LOCAL
    if _text(run_config, "preset") == "paper":
        if not method.published:
            raise SettingsError(
                f"setting 'preset' of method '{method.name}'",
                expected="'' for a method without a published setting here",
                got="'paper'",
                do="leave it out; it is there for " + ", ".join(row.name for row in METHODS if row.published),
            )
        for name in ("", task_kind, task_group(task)):
            tuned |= method.published.get(name, {})
    settings = parse(run_config, groups=method_groups(), group=method.group, own_class=method.own_settings, tuned=tuned)
    for key, value in (("local-momentum", settings.local_momentum), ("weight-decay", settings.weight_decay)):
        if value and not method.plain_steps:
            raise SettingsError(
                f"setting '{key}'",
                expected=f"0: clients of '{method.name}' take no plain gradient steps",
                got=f"{value:g}",
                do="leave it out; it is for " + ", ".join(row.name for row in METHODS if row.plain_steps),
            )
    return settings


def _text(run_config: Mapping[str, Any], key: str) -> str:
    value = run_config.get(key, default_of(keys_of(Settings)[key]))
    if not isinstance(value, str):
        raise SettingsError(f"setting '{key}'", expected="a name", got=repr(value), do="give it as a string")
    return value
