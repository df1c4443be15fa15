"""Settings: from a Flower run config to typed, checked values, by the same models on both ends.

Every key is declared once, as a field of a pydantic model: shared keys in `Settings`, keys of one method in the class
that its registry row names (``fedpm.damping`` is field ``damping`` of group ``fedpm``), keys of ``task-options`` in the
task's class ``Options``. The default run config of `pyproject.toml` and the table of the docs are generated from them.

Flower checks neither types nor ranges and does not name an unknown key; `parse` does, before training starts. A run
config holds only scalars: an absent value is ``""`` and a key that the registry tunes for each method and task is
``"auto"``, which is resolved before the model sees it.
"""

from __future__ import annotations

import functools
import json
import math
import tomllib
from collections.abc import Callable, Collection, Mapping
from enum import Enum, EnumType
from typing import Any, ClassVar, Literal, Self, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic.fields import FieldInfo

from fedapps.defences import Defence
from fedapps.errors import FedAppsError, SettingsError, did_you_mean

Scalar = bool | int | float | str
"""What a Flower run config can hold."""

AUTO = "auto"
"""Value in the run config of a key whose value the registry supplies for each method and task."""


def setting(default: Any, about: str, *, tuned: bool = False, path: bool = False, **bounds: Any) -> Any:
    """Declare a key: a field of a settings class, annotated bool, int, float, str, a ``Literal`` of strings or a ``StrEnum``.

    Args:
        default: Value where nothing else is said; ``...`` for a key without one.
        about: Meaning, with unit; shown in the settings table.
        tuned: Whether the registry has a value for each method and task: the run config then holds ``"auto"``.
        path: Whether it may name a file or a folder, which a node reads only where its own configuration allows it.
        **bounds: ``gt``, ``ge``, ``lt`` or ``le`` of a number.

    Returns:
        A field of pydantic.
    """
    return Field(default, description=about, json_schema_extra={"tuned": tuned, "path": path}, **bounds)


class SettingsModel(BaseModel):
    """Base of the classes whose fields are settings.

    An integer is accepted where a float is expected, and ``2.0`` where an integer is; nothing else is converted. A
    ``field_validator`` of a subclass refuses a value by ``ValueError(expected, do)``, the second of which may be left out.

    Args:
        place: What error messages call a value, such as ``setting``; empty where a program gives it by its Python name.
        prefix: What stands before each key in them, such as ``fedpm.``.
        **values: Field name -> value.

    Raises:
        SettingsError: An unknown name, a wrong type, or a value that is not finite, out of range or not among the choices.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, validate_default=True, protected_namespaces=()
    )

    ERROR: ClassVar[type[FedAppsError]] = SettingsError
    """What is raised."""

    def __init__(self, place: str = "", prefix: str = "", /, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise _first_fault(type(self), error, place, prefix) from None

    @classmethod
    def from_keys(
        cls,
        given: Mapping[str, Any],
        place: str,
        prefix: str = "",
        tuned: Mapping[str, Scalar] | None = None,
        **more: Any,
    ) -> Self:
        """Read values by their kebab-case keys.

        Args:
            given: Key without prefix -> value; what is left out takes its default.
            place: As for the class.
            prefix: As for the class.
            tuned: Values for the keys that are ``"auto"``.
            **more: Values of fields that are no keys.

        Returns:
            The settings; nothing in them is ``"auto"`` any more.

        Raises:
            SettingsError: As for the class.
        """
        fields, names = keys_of(cls), {key_of(name): name for name in cls.model_fields}
        for key, value in given.items():
            if key not in fields:
                raise _unknown(cls, f"{place} '{prefix}{key}'", key, fields)
            if not (is_tuned(fields[key]) and value == AUTO):
                more[names[key]] = value
        for key, value in (tuned or {}).items():
            if key in fields and is_tuned(fields[key]):
                more.setdefault(names[key], value)
        return cls(place, prefix, **more)

    @field_validator("*", mode="wrap")
    @classmethod
    def _accept(cls, value: Any, check: Callable[[Any], Any], info: ValidationInfo) -> Any:
        kind: Any = cls.model_fields[str(info.field_name)].annotation
        if kind is int and isinstance(value, float) and value.is_integer() and not isinstance(value, WithExponent):
            value = int(value)
        elif isinstance(kind, EnumType) and value in list(kind):
            value = kind(value)
        value = check(value)
        if type(value) is int and not -(2**63) <= value < 2**63:
            raise ValueError("an integer of at most 64 bits")
        return value


class RoundSettings(SettingsModel):
    """How a strategy runs its rounds, whatever the method.

    Example:
        >>> RoundSettings(fraction_train=0.5, weighting="uniform").weight(90)
        1.0
    """

    seed: int = setting(0, "seed of every random draw", ge=0, le=2**63 - 1)
    fraction_train: float = setting(1.0, "share of the clients sampled in a round (at least one)", gt=0, le=1)
    weighting: Literal["examples", "uniform"] = setting("examples", "weights p_i of the clients", tuned=True)
    min_replies: float = setting(
        0.2,
        "replies a round needs (quorum), else it changes nothing: a number of clients, or below 1 a share of those asked",
        gt=0,
    )
    on_failure: Literal["tolerate", "fail-fast"] = setting(
        "tolerate", "tolerate goes on with the other clients, fail-fast ends the run"
    )
    round_timeout: float = setting(3600.0, "seconds that a round waits for replies", gt=0)
    node_wait: float = setting(120.0, "seconds to wait at the start for all clients to connect", ge=0)
    min_available_nodes: int = setting(
        2,
        "nodes that must be there before the first round, where each has data of its own or none is asked who it is; more may "
        "come later",
        ge=1,
    )
    max_consecutive_failed_rounds: int = setting(3, "rounds below the quorum in a row that end the run", ge=1)
    second_node: Literal["used", "refused"] = setting(
        "used",
        "what becomes of a second node for a partition, where nodes have no keys: used in place of the first, or refused",
    )
    fold_buffer_mb: float = setting(
        256.0, "MB of replies ahead of their turn kept in memory; more waits in a scratch file", ge=0
    )
    max_message_mb: float = setting(2000.0, "largest message to send, MB of payload", gt=0)
    max_update_ratio: float = setting(
        100.0, "a reply is refused whose norm is more than so many times the median of the last rounds; 0 = never", ge=0
    )
    defence: Defence = setting(
        Defence.NONE, "how replies are made safe against clients that lie, before they are averaged"
    )
    defence_share: float = setting(
        0.2, "share of the clients that trimmed-mean and multi-krum assume to lie, rounded up", ge=0, lt=0.5
    )
    defence_norm: float = setting(1.0, "longest update that clip leaves, in multiples of the median norm", gt=0)

    @field_validator("min_replies")
    @classmethod
    def _whole_from_one(cls, value: float) -> float:
        if value > 1 and not value.is_integer():
            raise ValueError("a share below 1, or a whole number of clients")
        return value

    def quorum(self, num_sampled: int) -> int:
        """Give the number of replies that a round needs.

        Args:
            num_sampled: Clients that are asked.

        Returns:
            ``min-replies``, or that share of them, rounded up.
        """
        return math.ceil(self.min_replies * num_sampled) if self.min_replies < 1 else int(self.min_replies)

    def weight(self, num_examples: float) -> float:
        """Give the weight of a reply, up to the common factor that renormalisation cancels.

        Args:
            num_examples: Examples that the client trained on.

        Returns:
            ``n_i`` or 1.
        """
        return float(num_examples) if self.weighting == "examples" else 1.0


class _Run(SettingsModel):
    """What is run; a base of its own so that these keys come first in every list."""

    method: str = setting("fedpm", "name of a method, or my_pkg.my_mod:METHOD for one of your own")
    task: str = setting("digits", "name of a task, or my_pkg.my_mod:MyTask for one of your own")
    preset: Literal["", "paper"] = setting(
        "",
        "paper = the published setting of the method, for what is left out or auto; empty = what was found to work here",
    )
    num_server_rounds: int = setting(10, "rounds in all, those before a resume included", ge=1)


class Settings(RoundSettings, _Run):
    """The resolved settings of a run, the same on the server and on every client."""

    local_epochs: int = setting(1, "passes over a client's data in a round", ge=1, tuned=True)
    local_steps: int = setting(0, "local steps K in a round; 0 = count local-epochs instead", ge=0, tuned=True)
    batch_size: int = setting(0, "examples in a batch; 0 = all of a client's", ge=0, tuned=True)
    lr: float = setting(..., "client learning rate eta", gt=0, tuned=True)
    lr_schedule: Literal["constant", "exponential", "cosine"] = setting(
        "constant",
        "learning rate over rounds: constant, exponential (lr * lr-decay^(round-1)) or cosine (to 0 over all rounds)",
    )
    lr_decay: float = setting(0.99, "factor a round of the exponential schedule", gt=0, le=1)
    local_momentum: float = setting(
        0.0, "momentum of clients' plain gradient steps, sum form, from zero in every round", ge=0, le=0.999
    )
    weight_decay: float = setting(0.0, "added to clients' plain gradients, times the parameters (an L2 penalty)", ge=0)
    device: str = setting("auto", "auto, cpu, cuda or cuda:<index>")
    compute_threads: int = setting(1, "threads of torch and BLAS in every handler", ge=1, le=1024)
    partition: Literal["dirichlet", "iid", "classes", "column", "local"] = setting(
        "dirichlet",
        "how the training data is split: dirichlet, iid, classes (k a client) or column; local = every node of a SuperLink "
        "has data of its own (auto there)",
        tuned=True,
    )
    alpha: float = setting(0.1, "concentration of the Dirichlet split", gt=0)
    classes_per_client: int = setting(2, "classes a client for partition = classes", ge=1)
    partition_column: str = setting("", "column whose values are the clients, for partition = column", tuned=True)
    partition_min_size: int = setting(1, "least examples a client of the Dirichlet split", ge=1)
    validation_fraction: float = setting(
        0.0, "share of the training data kept on the server for validation", ge=0, le=0.9, tuned=True
    )
    client_validation_fraction: float = setting(
        0.0, "share of a client's data kept for validation on the client", ge=0, le=0.9, tuned=True
    )
    client_test_fraction: float = setting(
        0.0, "share of a client's data kept for testing on the client", ge=0, le=0.9, tuned=True
    )
    evaluate_every: int = setting(
        1, "rounds between evaluations on the server (the last round is always evaluated); 0 = never", ge=0
    )
    client_evaluation: Literal["none", "last", "every"] = setting(
        "none",
        "when clients evaluate the global model, and their personal one if they have it: none, last or every round",
        tuned=True,
    )
    data_dir: str = setting("", "folder with data files; empty = the environment variable FEDAPPS_DATA")
    task_options: str = setting("", "options of the task, as TOML text")
    method_options: str = setting("", "options of a method of your own, as TOML text")
    run_dir: str = setting(
        "", "absolute path of the run folder; empty = a new one in FEDAPPS_RUNS (commands: --out, --resume)"
    )
    collect_mb: float = setting(
        0.0,
        "MB of models, journal, ledger and checkpoint that a server app sends to the command that follows the run, beside "
        "settings, metrics and summary; 0 = its run folder stays on its machine (64 with --superlink)",
        ge=0,
    )
    resume: bool = setting(False, "go on from the checkpoint in run-dir")
    accept_changes: bool = setting(
        False, "go on although settings, version, data or journal differ from the checkpoint's"
    )
    own: Any = Field(None, exclude=True)
    """The settings of the method: an instance of the class that its registry row names, or None.

    Such a class may have a method ``check_with(settings)``, for what its keys and the shared ones must fulfil together.
    """

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.partition == "local" and self.validation_fraction:
            raise SettingsError(
                "setting 'validation-fraction'",
                expected="0 with partition = local: the server has no data",
                got=f"{self.validation_fraction:g}",
                do="set client-validation-fraction instead",
            )
        check_with = getattr(self.own, "check_with", None)
        if check_with is not None:
            check_with(self)
        return self

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


def key_of(name: str) -> str:
    """Give the key of a field: kebab-case; a word of Python such as ``lambda`` has an underscore at its field's end."""
    return name.rstrip("_").replace("_", "-")


@functools.cache  # every message of a run resolves its settings
def keys_of(cls: type[SettingsModel], prefix: str = "") -> dict[str, FieldInfo]:
    """List the keys that a settings class declares.

    Args:
        cls: The class.
        prefix: What to put before each key, such as ``fedpm.``.

    Returns:
        Key -> field, in the order of declaration.
    """
    return {prefix + key_of(name): field for name, field in cls.model_fields.items() if not field.exclude}


def all_keys(groups: Mapping[str, type[SettingsModel]]) -> dict[str, FieldInfo]:
    """List the keys of a run config: the shared ones, then those of each method.

    Args:
        groups: Group -> settings class of every built-in method.

    Returns:
        Key -> field.
    """
    return keys_of(Settings) | {
        key: field for name, cls in groups.items() for key, field in keys_of(cls, f"{name}.").items()
    }


def is_tuned(field: FieldInfo) -> bool:
    """Tell whether the registry has a value of this field for each method and task."""
    return isinstance(field.json_schema_extra, dict) and field.json_schema_extra.get("tuned") is True


def is_path(field: FieldInfo) -> bool:
    """Tell whether a field may name a file or a folder."""
    return isinstance(field.json_schema_extra, dict) and field.json_schema_extra.get("path") is True


def default_of(field: FieldInfo) -> Scalar:
    """Give the value of a field in the default run config, ``"auto"`` if it is tuned."""
    default: Scalar = AUTO if is_tuned(field) else field.default
    return default.value if isinstance(default, Enum) else default


def kind_of(field: FieldInfo) -> type:
    """Give the type of a field in a run config: bool, int, float or str."""
    kind = field.annotation
    return str if choices_of(field) else kind if isinstance(kind, type) else object


def choices_of(field: FieldInfo) -> tuple[str, ...]:
    """Give the strings that a field may be; empty if it may be any, or is none."""
    kind = field.annotation
    if isinstance(kind, EnumType):
        return tuple(member.value for member in kind)
    return get_args(kind) if get_origin(kind) is Literal else ()


def bounds_of(field: FieldInfo) -> list[str]:
    """Give the bounds of a number, such as ``["> 0", "<= 1"]``."""
    signs = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
    return [
        f"{sign} {getattr(bound, name)}"
        for name, sign in signs.items()
        for bound in field.metadata
        if hasattr(bound, name)
    ]


def _unknown(cls: type[SettingsModel], where: str, name: str, known: Collection[str]) -> FedAppsError:
    expected = "one of " + ", ".join(known) if known else "nothing, since no key is declared"
    return cls.ERROR(where, expected=expected, got="an unknown key", do=did_you_mean(name, known, "remove it"))


def _first_fault(cls: type[SettingsModel], error: ValidationError, place: str, prefix: str) -> FedAppsError:
    """Say what pydantic found, in the project's form."""
    fault = error.errors(include_url=False)[0]
    cause = fault.get("ctx", {}).get("error")
    if isinstance(cause, FedAppsError):
        return cause
    if not fault["loc"]:
        return cls.ERROR(f"{cls.__name__}: {cause}")
    name, value = str(fault["loc"][0]), fault["input"]
    key = prefix + key_of(name) if place else name
    where = f"{place or 'setting'} '{key}'"
    field = cls.model_fields.get(name)
    if field is None:
        return _unknown(cls, where, name, cls.model_fields)
    got, do, choices = f"{value!r:.200}", "", choices_of(field)
    if cause is not None:
        expected, do = (*map(str, cause.args), "", "")[:2]
    elif choices and isinstance(value, str):
        expected, do = "one of " + ", ".join(choices), did_you_mean(value, choices)
    elif fault["type"].startswith(("finite", "greater", "less")):
        expected = "a finite number " + " and ".join(bounds_of(field))
    elif fault["type"].endswith(("_type", "literal_error", "is_instance_of")):
        expected = f"a value of type {kind_of(field).__name__}" + (" or 'auto'" if place and is_tuned(field) else "")
        kind = "float written with an exponent" if isinstance(value, WithExponent) else type(value).__name__
        got, do = f"{got} ({kind})", f"write for example {key} = {_example(field)} ({field.description})"
    elif fault["type"] == "missing":
        expected, got = f"a value of type {kind_of(field).__name__}", f"none; it is the {field.description}"
    else:
        expected = fault["msg"]
    return cls.ERROR(where, expected=expected.strip(), got=got, do=do)


def _example(field: FieldInfo) -> str:
    value = {int: 1, float: 0.1, bool: True, str: "text"}.get(kind_of(field)) if field.is_required() else field.default
    return json.dumps(value, default=str)


def parse(
    run_config: Mapping[str, Any],
    *,
    groups: Mapping[str, type[SettingsModel]],
    group: str,
    own_class: type[SettingsModel] | None,
    tuned: Mapping[str, Scalar],
) -> Settings:
    """Turn a run config into checked settings.

    Args:
        run_config: Flat kebab-case keys, as Flower hands them over; keys that are left out take their default.
        groups: Group -> settings class of every built-in method.
        group: The group of the method of this run; ``""`` if it has none.
        own_class: Settings class of the method; None if it has none.
        tuned: Key without group -> value, for the keys that are ``"auto"``.

    Returns:
        The settings; nothing in them is ``"auto"`` any more.

    Raises:
        SettingsError: An unknown key (with the nearest known one), a wrong type, a value out of range, or a key of
            another method that differs from its default.
    """
    prefix = f"{group}." if own_class and group else ""
    shared, owned = keys_of(Settings), keys_of(own_class, prefix) if own_class and prefix else {}
    known = all_keys(groups) | owned
    for key, value in run_config.items():
        if key not in known:
            do = did_you_mean(key, known, "see the settings table in the docs")
            raise SettingsError(f"setting '{key}'", expected="a known key", got="an unknown one", do=do)
        default = default_of(known[key])
        if key not in shared and key not in owned and value != default:
            raise SettingsError(
                f"setting '{key}'",
                expected=f"its default {default!r}, since it does not belong to method '{run_config.get('method', '')}'",
                got=repr(value),
                do=f"remove it or choose --method {key.split('.')[0]}",
            )
    options = run_config.get("method-options", "")
    if options and (own_class is None or prefix):
        raise SettingsError(
            "setting 'method-options'",
            expected="'' for a method without options of its own",
            got=repr(options),
            do="remove it",
        )
    own = None
    if own_class is not None:
        mine = {key.removeprefix(prefix): run_config[key] for key in owned if key in run_config}
        mine = mine if prefix else parse_toml_options("method-options", str(options))
        own = own_class.from_keys(mine, "setting", prefix, tuned)
    return Settings.from_keys(
        {key: run_config[key] for key in shared if key in run_config}, "setting", "", tuned, own=own
    )


class WithExponent(float):
    """A number that its text wrote with an exponent, such as ``1e3``: never an integer."""


def toml_float(text: str) -> float:
    """Read a number that is not written as an integer: the ``parse_float`` of every TOML text that holds settings.

    Args:
        text: The number.

    Returns:
        Its value, which remembers whether there was an exponent.
    """
    return WithExponent(text) if "e" in text.lower() else float(text)


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
        return tomllib.loads(text, parse_float=toml_float)
    except (ValueError, RecursionError) as error:
        raise SettingsError(
            f"setting '{setting_name}'",
            expected="TOML text such as 'name = \"value\"'",
            got=f"{text!r:.200} ({error})",
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
    flat = {key_of(name): value for name, value in settings.model_dump(mode="json").items()}
    if group:
        flat |= {f"{group}.{key_of(name)}": value for name, value in settings.own.model_dump(mode="json").items()}
    return flat


def default_config(groups: Mapping[str, type[SettingsModel]]) -> dict[str, Scalar]:
    """List every key with its default, as the run config of `pyproject.toml` holds it.

    Args:
        groups: Group -> settings class of every built-in method.

    Returns:
        Kebab-case key -> default.
    """
    return {key: default_of(field) for key, field in all_keys(groups).items()}


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
