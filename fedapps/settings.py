"""Settings: from a Flower run config to typed, checked values, by the same parser on both ends.

Every key is declared once, as a field of a frozen dataclass: shared keys in `Settings`, keys of one method in the
class that its registry row names (``fedpm.damping`` is field ``damping`` of group ``fedpm``). The default run config
of `pyproject.toml` is generated from these declarations (`default_config`).

Flower checks neither types nor ranges and does not name an unknown key; `parse` does, before training starts. A run
config holds only scalars: an absent value is ``""`` and a key that the registry tunes for each method and task is
``"auto"``.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast, get_type_hints

from fedapps.errors import SettingsError, did_you_mean

Scalar = bool | int | float | str
"""What a Flower run config can hold."""

AUTO = "auto"
"""Default of a key whose value the registry supplies for each method and task."""


@dataclass(frozen=True)
class Key:
    """One key of the run config.

    Attributes:
        name: Kebab-case name, with the group in front (``fedpm.damping``).
        kind: The Python type of a value: int, float, bool or str.
        default: Value in the default run config; ``"auto"`` if the registry supplies it.
        about: Meaning, with unit.
        minimum: Least value allowed.
        maximum: Greatest value allowed.
        above: Value that a number must exceed.
        choices: The strings allowed, if not any.
    """

    name: str
    kind: type
    default: Scalar
    about: str
    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    choices: tuple[str, ...] = ()


def setting(default: Scalar, about: str, **limits: Any) -> Any:
    """Declare a field of a settings class.

    Args:
        default: Value in the default run config, or ``"auto"``.
        about: Meaning, with unit; shown in the settings table.
        **limits: ``minimum``, ``maximum``, ``above`` or ``choices``, as in `Key`.

    Returns:
        A dataclass field without a Python default: values come from `parse`.
    """
    return field(metadata={"default": default, "about": about, **limits})


@dataclass(frozen=True, kw_only=True)
class RoundSettings:
    """stub"""

    fraction_train: float = 1.0
    weighting: str = "examples"
    seed: int = 0
    min_replies: int = 1
    on_failure: str = "tolerate"
    round_timeout: float = 3600.0
    node_wait: float = 120.0
    max_consecutive_failed_rounds: int = 3
    fold_buffer_mb: float = 256.0
    max_message_mb: float = 2000.0

    def weight(self, num_examples: int) -> float:
        """Stub"""
        return float(num_examples) if self.weighting == "examples" else 1.0


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The resolved settings of a run, the same on the server and on every client.

    Field names are the run-config keys with ``_`` for ``-``. `own` holds the settings of the method.
    """

    method: str = setting("fedpm", "name of a method, or my_pkg.my_mod:METHOD for one of your own")
    task: str = setting("digits", "name of a task, or my_pkg.my_mod:MyTask for one of your own")
    num_server_rounds: int = setting(10, "rounds in all, those before a resume included", minimum=1)
    seed: int = setting(0, "seed of every random draw", minimum=0, maximum=2**63 - 1)
    fraction_train: float = setting(1.0, "share of the clients sampled in a round (at least one)", above=0, maximum=1)
    weighting: str = setting(AUTO, "weights p_i of the clients", choices=("examples", "uniform"))
    local_epochs: int = setting(AUTO, "passes over a client's data in a round", minimum=1)
    local_steps: int = setting(AUTO, "local steps K in a round; 0 = count local-epochs instead", minimum=0)
    batch_size: int = setting(AUTO, "examples in a batch; 0 = all of a client's", minimum=0)
    lr: float = setting(AUTO, "client learning rate eta", above=0)
    lr_schedule: str = setting(
        "constant",
        "learning rate over rounds: constant, exponential (lr * lr-decay^(round-1)) or cosine (to 0 over all rounds)",
        choices=("constant", "exponential", "cosine"),
    )
    lr_decay: float = setting(0.99, "factor a round of the exponential schedule", above=0, maximum=1)
    device: str = setting("auto", "auto, cpu, cuda or cuda:<index>")
    compute_threads: int = setting(1, "threads of torch and BLAS in every handler", minimum=1)
    partition: str = setting(
        AUTO,
        "how the training data is split: dirichlet, iid, classes (k a client) or column",
        choices=("dirichlet", "iid", "classes", "column"),
    )
    alpha: float = setting(0.1, "concentration of the Dirichlet split", above=0)
    classes_per_client: int = setting(2, "classes a client for partition = classes", minimum=1)
    partition_column: str = setting(AUTO, "column whose values are the clients, for partition = column")
    partition_min_size: int = setting(1, "least examples a client of the Dirichlet split", minimum=1)
    validation_fraction: float = setting(
        AUTO, "share of the training data kept on the server for validation", minimum=0, maximum=0.9
    )
    client_validation_fraction: float = setting(
        AUTO, "share of a client's data kept for validation on the client", minimum=0, maximum=0.9
    )
    client_test_fraction: float = setting(
        AUTO, "share of a client's data kept for testing on the client", minimum=0, maximum=0.9
    )
    evaluate_every: int = setting(
        1,
        "rounds between evaluations on the server (the last round is always evaluated); 0 = never",
        minimum=0,
    )
    client_evaluation: str = setting(
        AUTO,
        "when clients evaluate the global model, and their personal one if they have it: none, last or every round",
        choices=("none", "last", "every"),
    )
    data_dir: str = setting("", "folder with data files; empty = the environment variable FEDAPPS_DATA")
    min_replies: int = setting(1, "replies a round needs (quorum), else it changes nothing", minimum=1)
    on_failure: str = setting(
        "tolerate",
        "tolerate goes on with the other clients, fail-fast ends the run",
        choices=("tolerate", "fail-fast"),
    )
    round_timeout: float = setting(3600.0, "seconds that a round waits for replies", above=0)
    node_wait: float = setting(120.0, "seconds to wait at the start for all clients to connect", minimum=0)
    max_consecutive_failed_rounds: int = setting(3, "rounds below the quorum in a row that end the run", minimum=1)
    fold_buffer_mb: float = setting(
        256.0,
        "MB of replies ahead of their turn kept in memory; more waits in a scratch file",
        minimum=0,
    )
    max_message_mb: float = setting(2000.0, "largest message to send, MB of payload", above=0)
    task_options: str = setting("", "options of the task, as TOML text")
    method_options: str = setting("", "options of a method of your own, as TOML text")
    run_dir: str = setting("", "absolute path of the run folder; empty = a new one in FEDAPPS_RUNS")
    resume: bool = setting(False, "go on from the checkpoint in run-dir")
    own: Any = None
    """The settings of the method: an instance of the class that its registry row names, or None.

    Such a class may have a method ``check_with(settings)``, for what its keys and the shared ones must fulfil together.
    """

    def __post_init__(self) -> None:
        check_with = getattr(self.own, "check_with", None)
        if check_with is not None:
            check_with(self)

    weight = RoundSettings.weight

    @property
    def exports(self) -> bool:
        """Whether clients write their personal models after the last round."""
        return bool(getattr(self.own, "export", False))

    def clients_evaluate(self, server_round: int) -> bool:
        """Tell whether clients evaluate after a round.

        Args:
            server_round: The round.

        Returns:
            Whether they do; after the last round also if they are to write their personal models.
        """
        last = server_round == self.num_server_rounds
        return self.client_evaluation == "every" or (last and (self.client_evaluation == "last" or self.exports))


@functools.cache  # every message of a run resolves its settings
def keys_of(cls: type, group: str = "") -> dict[str, Key]:
    """List the keys that a settings class declares.

    Args:
        cls: A settings class.
        group: Prefix of its keys, or ``""``.

    Returns:
        Field name -> key, in the order of declaration.
    """
    hints = get_type_hints(cls)
    prefix = f"{group}." if group else ""
    return {
        f.name: Key(
            # A field whose key is a word of Python, such as `lambda`, has an underscore at its end.
            name=prefix + f.name.rstrip("_").replace("_", "-"),
            kind=hints[f.name],
            **f.metadata,
        )
        for f in dataclasses.fields(cls)
        if "about" in f.metadata
    }


def check_value(key: Key, value: object) -> Scalar:
    """Check a value against its key.

    An integer is accepted where a float is expected, and a float with an integral value where an integer is.

    Args:
        key: The key.
        value: What came.

    Returns:
        The value in the type of the key.

    Raises:
        SettingsError: Wrong type, not finite, outside the range or not among the choices.
    """
    where = f"setting '{key.name}'"
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if key.kind is float and number:
        value = float(cast(float, value))
    elif key.kind is int and isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, key.kind) or (key.kind is int and isinstance(value, bool)):
        hint = " or 'auto'" if key.default == AUTO else ""
        raise SettingsError(
            where,
            expected=f"a value of type {key.kind.__name__}{hint}",
            got=f"{value!r} ({type(value).__name__})",
            do=f"give for example {key.name}={_example(key)}",
        )
    if isinstance(value, int | float) and not isinstance(value, bool):
        _check_range(key, value, where)
    if key.choices and value not in key.choices:
        raise SettingsError(
            where,
            expected="one of " + ", ".join(key.choices),
            got=repr(value),
            do=did_you_mean(str(value), key.choices),
        )
    return cast(Scalar, value)


def _check_range(key: Key, value: float, where: str) -> None:
    bounds = []
    if key.above is not None:
        bounds.append(f"> {key.above:g}")
    if key.minimum is not None:
        bounds.append(f">= {key.minimum:g}")
    if key.maximum is not None:
        bounds.append(f"<= {int(key.maximum) if key.kind is int else key.maximum}")
    inside = (
        math.isfinite(value)
        and (key.above is None or value > key.above)
        and (key.minimum is None or value >= key.minimum)
        and (key.maximum is None or value <= key.maximum)
    )
    if not inside:
        raise SettingsError(where, expected="a finite number " + " and ".join(bounds), got=repr(value))


def _example(key: Key) -> str:
    if key.default not in (AUTO, ""):
        return str(key.default).lower() if key.kind is bool else str(key.default)
    return {int: "1", float: "0.1", bool: "true", str: "text"}[key.kind]


def parse(
    run_config: Mapping[str, Any],
    *,
    groups: Mapping[str, type],
    group: str,
    own_class: type | None,
    tuned: Mapping[str, Scalar],
) -> Settings:
    """Turn a run config into checked settings.

    Args:
        run_config: Flat kebab-case keys, as Flower hands them over; keys that are left out take their default.
        groups: Group -> settings class of every built-in method.
        group: The group of the method of this run; ``""`` if it has none.
        own_class: Settings class of the method; None if it has none.
        tuned: Values for the keys that are ``"auto"``.

    Returns:
        The settings; nothing in them is ``"auto"`` any more.

    Raises:
        SettingsError: An unknown key (with the nearest known one), a wrong type, a value out of range, or a key of
            another method that differs from its default.
    """
    shared = keys_of(Settings)
    owned = keys_of(own_class, group) if own_class and group else {}
    foreign = {key.name: key for name, cls in groups.items() if name != group for key in keys_of(cls, name).values()}
    known = {key.name for key in (*shared.values(), *owned.values())} | set(foreign)
    _refuse_unknown(run_config, known)
    _refuse_foreign(run_config, foreign, str(run_config.get("method", "")))

    def read(keys: Mapping[str, Key], config: Mapping[str, Any]) -> dict[str, Any]:
        values = {}
        for name, key in keys.items():
            value = config.get(key.name, key.default)
            if value == AUTO and key.default == AUTO and key.name in tuned:
                value = tuned[key.name]
            values[name] = check_value(key, value)
        return values

    values = read(shared, run_config)
    from_options = own_class is not None and not group
    if values["method_options"] and not from_options:
        raise SettingsError(
            "setting 'method-options'",
            expected="'' for a method without options of its own",
            got=repr(values["method_options"]),
            do="remove it",
        )
    own = None
    if own_class is not None:
        own = own_class(
            **(_read_options(own_class, values["method_options"]) if from_options else read(owned, run_config))
        )
    return Settings(**values, own=own)


def _refuse_unknown(run_config: Mapping[str, Any], known: set[str]) -> None:
    for name in run_config:
        if name not in known:
            raise SettingsError(
                f"setting '{name}'",
                expected="a known key",
                got="an unknown one",
                do=did_you_mean(name, known, "see the settings table in the docs"),
            )


def _refuse_foreign(run_config: Mapping[str, Any], foreign: Mapping[str, Key], method: str) -> None:
    for name, key in foreign.items():
        if name in run_config and run_config[name] != key.default:
            raise SettingsError(
                f"setting '{name}'",
                expected=f"its default {key.default!r}, since it does not belong to method '{method}'",
                got=repr(run_config[name]),
                do=f"remove it or choose --method {name.split('.')[0]}",
            )


def _read_options(own_class: type, text: str) -> dict[str, Any]:
    keys = keys_of(own_class)
    by_name = {key.name: (name, key) for name, key in keys.items()}
    options = parse_toml_options("method-options", text)
    _refuse_unknown(options, set(by_name))
    return {name: check_value(key, options.get(key.name, key.default)) for name, key in keys.items()}


def parse_toml_options(setting_name: str, text: str) -> dict[str, Any]:
    """Read the TOML text of ``task-options`` or ``method-options``.

    Args:
        setting_name: The key that holds the text, for the error message.
        text: TOML, for example ``file = "a9a"``.

    Returns:
        The options.

    Raises:
        SettingsError: The text is not TOML.
    """
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(
            f"setting '{setting_name}'",
            expected="TOML text such as 'name = \"value\"'",
            got=f"{text!r} ({error})",
            do="quote strings and put one option on a line",
        ) from error


def flatten(settings: Settings, group: str) -> dict[str, Scalar]:
    """Write resolved settings as a flat run config.

    Args:
        settings: The settings.
        group: Group of the method's own keys; ``""`` if they are in ``method-options``.

    Returns:
        Kebab-case key -> value; `parse` gives the same settings back.
    """
    flat = {key.name: getattr(settings, name) for name, key in keys_of(Settings).items()}
    if group:
        own: type = type(settings.own)
        flat |= {key.name: getattr(settings.own, name) for name, key in keys_of(own, group).items()}
    return flat


def default_config(groups: Mapping[str, type]) -> dict[str, Scalar]:
    """List every key with its default, as the run config of `pyproject.toml` holds it.

    Args:
        groups: Group -> settings class of every built-in method.

    Returns:
        Kebab-case key -> default.
    """
    keys = [*keys_of(Settings).values()]
    keys += [key for group, cls in groups.items() for key in keys_of(cls, group).values()]
    return {key.name: key.default for key in keys}


def learning_rate(settings: Settings, server_round: int) -> float:
    r"""Give the client learning rate of a round.

    constant: :math:`\eta`; exponential: :math:`\eta\, d^{\,t-1}`; cosine: :math:`\eta (1 + \cos(\pi (t-1)/T)) / 2`.

    Args:
        settings: The settings.
        server_round: Round ``t``, from 1.

    Returns:
        The learning rate.
    """
    t = server_round - 1
    if settings.lr_schedule == "exponential":
        return settings.lr * float(settings.lr_decay**t)
    if settings.lr_schedule == "cosine":
        return settings.lr * (1 + math.cos(math.pi * t / settings.num_server_rounds)) / 2
    return settings.lr
