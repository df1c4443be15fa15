"""What is compared: methods, seeds and points of their grids on the same data, with something to choose by.

What the families hold out by default, each for its own models, is held out for all: in a comparison the largest of each share.
Where personalised methods meet others GlobalTrain takes part: the global model, chosen and measured as the personal ones are.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedapps.errors import SettingsError
from fedapps.methods import get_method, resolve_settings
from fedapps.results.personal import DATA_SETTINGS
from fedapps.results.storage import to_json
from fedapps.settings import AUTO, Scalar, Settings, flatten, keys_of
from fedapps.simulation.start import Start
from fedapps.tasks.from_settings import load_task_of

VALIDATION_SHARE = 0.1
"""Share of the training data (of each client's, for personal models) that a comparison with a grid holds out to choose by,
where neither user nor registry say another."""

PARTNER = "globaltrain"
"""What takes part where personalised methods meet others."""

OF_ONE_MACHINE = ("data-dir", "run-dir", "resume", "accept-changes", "collect-mb")
"""Settings that mean nothing elsewhere, and are left out of a record."""

SHARED = (*(key for key in DATA_SETTINGS if key not in ("task", "seed")), "client-evaluation", "evaluate-every")
"""Settings that say which examples are trained on and which are measured: one value each for all methods of a comparison."""

_SHARES = ("validation-fraction", "client-validation-fraction", "client-test-fraction")
_WHEN = ("none", "last", "every")
_FIRST_EXAMPLES = 8  # enough to see what a task measures

Point = Mapping[str, Scalar]
"""One point of a method's grid: key -> value."""


@dataclass(frozen=True)
class Plan:
    """What is to be compared."""

    run_config: Mapping[str, Any]
    methods: Sequence[str]
    seeds: Sequence[int]
    grid: Mapping[str, Sequence[Scalar]]
    how: Start
    target: float | None
    data: Mapping[str, Scalar] = field(default_factory=dict)  # settings that are the same for all methods
    about: Mapping[str, int] = field(default_factory=dict)  # how many examples the first seed's server and clients have
    notes: Sequence[str] = ()

    @property
    def points(self) -> dict[str, list[Point]]:
        """Method -> its points of the grid."""
        return {method: _points(self.grid, method, self.methods) for method in self.methods}

    @property
    def tunes(self) -> bool:
        """Whether anything is chosen."""
        return any(len(points) > 1 for points in self.points.values())

    def job(self, method: str, seed: int, point: Point) -> Job:
        """Give the run of a method with a seed and a point of its grid."""
        config = config_of({**self.run_config, **self.data, **point, "seed": seed}, method, self.methods)
        return Job(method, seed, point, config)


def config_of(run_config: Mapping[str, Any], method: str, methods: Sequence[str]) -> dict[str, Any]:
    """Give the settings of one method of a comparison.

    Args:
        run_config: Settings of all, with those of one method alone under its name.
        method: The method.
        methods: All methods that are compared.

    Returns:
        Its settings: keys of other methods of the comparison are left out, and a shared key under its name takes the place
        of the one for all.
    """
    shared = set(keys_of(Settings))
    mine: dict[str, Any] = {}
    for_all: dict[str, Any] = {"method": method}
    for key, value in run_config.items():
        name = key.removeprefix(f"{method}.")
        if name != key:
            mine[name if name in shared else key] = value
        elif not any(key.startswith(f"{other}.") for other in methods):
            for_all[key] = value
    return {**for_all, **mine, "method": method}


def make_plan(plan: Plan) -> Plan:
    """Complete what is to be compared: the data of all methods, and the partner where families meet.

    Raises:
        SettingsError: As `compare`.
    """
    personal = [m for m in plan.methods if _is_personal(m)]
    notes = []
    if personal and len(personal) < len(plan.methods):
        plan = replace(plan, methods=list(dict.fromkeys([*plan.methods, PARTNER])))
        notes.append(f"{PARTNER} takes part: the global model, chosen and measured as the personal models are")
    _refuse_other_data(plan)
    for method, points in plan.points.items():
        for point in points:
            # A wrong setting of the last method is told before the first has run.
            resolve_settings(config_of({**plan.run_config, **point}, method, plan.methods))
    plan = replace(plan, data=_shared_data(plan), notes=notes)
    plan = replace(plan, about=_about_data(plan))
    if len(set(map(len, plan.points.values()))) > 1:
        tried = ", ".join(f"{method} {len(points)}" for method, points in plan.points.items())
        plan = replace(plan, notes=[*notes, f"unequal budgets of tuning, in points tried: {tried}"])
    return plan


def _is_personal(method: str) -> bool:
    """Tell whether a method is about personal models, so that they choose its settings."""
    return get_method(method).family == "personalised"


def _refuse_other_data(plan: Plan) -> None:
    """Refuse data for one method alone: its numbers could not be compared."""
    for key in (*plan.run_config, *plan.grid):
        name = next((key.removeprefix(f"{m}.") for m in plan.methods if key.startswith(f"{m}.")), key)
        if name in (*SHARED, "seed", "task") and (name != key or key in plan.grid):
            raise SettingsError(
                f"setting '{key}'",
                expected="the same data for all methods and points of a comparison",
                got="values of one method alone" if name != key else "several values",
                do=f"set {name} once for all; compare other data in another comparison",
            )


def _shared_data(plan: Plan) -> dict[str, Scalar]:
    """Settle the settings that say which examples are trained on and which are measured, once for all methods.

    Of the shares that a method's family holds out by default the largest is held out for all.
    """
    resolved = {
        m: flatten(resolve_settings(config_of({**plan.run_config, **plan.points[m][0]}, m, plan.methods)), "")
        for m in plan.methods
    }
    shared: dict[str, Scalar] = {}
    for key in SHARED:
        values = [resolved[m][key] for m in plan.methods]
        if key in _SHARES:
            shared[key] = max(float(value) for value in values)
        elif key == "client-evaluation":
            shared[key] = max(map(str, values), key=_WHEN.index)
        elif len(set(values)) == 1:
            shared[key] = values[0]
        else:
            told = ", ".join(f"{m} {value!r}" for m, value in zip(plan.methods, values, strict=True))
            do = f"set {key} for all"
            raise SettingsError(f"setting '{key}'", expected="one value for all methods", got=told, do=do)
    if plan.tunes:
        for key, needed in (
            ("validation-fraction", not all(map(_is_personal, plan.methods))),
            ("client-validation-fraction", any(map(_is_personal, plan.methods))),
        ):
            if needed and shared[key] == 0 and plan.run_config.get(key, AUTO) == AUTO:
                shared[key] = VALIDATION_SHARE
    return shared


def _about_data(plan: Plan) -> dict[str, int]:
    """Count the examples of the first seed; refuse a grid where there is nothing to choose by.

    Raises:
        SettingsError: The validation data is empty, is never looked at, or the task does not measure its metric.
    """
    method = plan.methods[0]
    settings = resolve_settings(plan.job(method, plan.seeds[0], plan.points[method][0]).config)
    task = load_task_of(settings)
    server = task.server_data()
    clients = [task.client_data(p, plan.how.num_clients) for p in range(plan.how.num_clients)]
    about = {
        "clients": len(clients),
        "train": sum(len(client.train) for client in clients),
        "server-validation": len(server.validation),
        "server-test": len(server.test),
        "clients-validation": sum(len(client.validation) for client in clients),
        "clients-test": sum(len(client.test) for client in clients),
        "clients-with-test": sum(len(client.test) > 0 for client in clients),
    }
    if not plan.tunes:
        return about
    judges: list[tuple[str, str, str, bool, Any]] = []
    if not all(map(_is_personal, plan.methods)):
        seen = settings.evaluate_every > 0
        judges.append(("validation-fraction", "the server", "evaluate-every", seen, server.validation))
    if any(map(_is_personal, plan.methods)):
        seen = settings.client_evaluation != "none"
        most = max((client.validation for client in clients), key=len)
        judges.append(("client-validation-fraction", "the clients", "client-evaluation", seen, most))
    for key, who, when, seen, examples in judges:
        if not len(examples) or not seen:
            raise SettingsError(
                f"comparison with a grid, setting '{key if seen else when}'",
                expected=f"validation data of {who} to choose by",
                got=f"none at {key} = {plan.data[key]:g}" if seen else f"no look at it ({when} = {plan.data[when]})",
                do=f"raise {key}" if seen else f"set another {when}" + ", or compare without a grid",
            )
    examples = judges[0][-1]
    few = examples.take(np.arange(min(_FIRST_EXAMPLES, len(examples))))
    measured = task.evaluate(task.initial_arrays(settings.seed), few)
    if task.metric not in measured:
        raise SettingsError(
            f"task '{task.name}'",
            expected=f"its metric '{task.metric}' among what it measures, to choose by",
            got=", ".join(measured),
            do="set the attribute `metric` of the task's class to one of these",
        )
    return about


def _points(grid: Mapping[str, Sequence[Scalar]], method: str, methods: Sequence[str]) -> list[Point]:
    """List the combinations of the values of a method's keys; one empty point without any.

    Values of a shared key under the method's name take the place of those for all: ``ditto.lr`` of ``lr``.
    """
    others = tuple(f"{other}." for other in methods if other != method)
    keys = [key for key in grid if not key.startswith(others) and f"{method}.{key}" not in grid]
    return [dict(zip(keys, values, strict=True)) for values in itertools.product(*(grid[key] for key in keys))]


@dataclass(frozen=True)
class Job:
    """A run to make."""

    method: str
    seed: int
    point: Point
    config: dict[str, Any]

    @property
    def key(self) -> str:
        """What tells its run from others."""
        settings = resolve_settings(self.config)
        return settings_key(flatten(settings, get_method(settings.method).group))

    def going_on(self, folder: Path | None) -> Job:
        """Give the run that goes on in the folder of one that was broken off."""
        return self if folder is None else replace(self, config={**self.config, "run-dir": str(folder), "resume": True})


def settings_key(settings: Mapping[str, Any]) -> str:
    """Give what tells a run from others: its resolved settings, but for those of `OF_ONE_MACHINE`."""
    return to_json({key: settings[key] for key in sorted(settings) if key not in OF_ONE_MACHINE})


def describe(plan: Plan) -> str:
    """Say what all methods were trained and measured on."""
    data, about = plan.data, plan.about
    split = f"{data['partition']}" + (f" (alpha {data['alpha']:g})" if data["partition"] == "dirichlet" else "")
    shares = {key: f"{100 * float(data[key]):g} %" for key in _SHARES}
    return (
        f"All methods have the same data (examples of seed {plan.seeds[0]}): {about['clients']} clients, split {split}, with"
        f" {about['train']} examples to train on; the server {about['server-validation']} for validation"
        f" ({shares['validation-fraction']} of the training data) and {about['server-test']} for testing; the clients"
        f" {about['clients-validation']} for validation ({shares['client-validation-fraction']} of each) and"
        f" {about['clients-test']} for testing, which {about['clients-with-test']} of them have."
    )
