"""Settings: the same models on both ends, with errors that name the key and the nearest known one."""

from __future__ import annotations

import json
import math
import pickle
from pathlib import Path
from typing import Literal

import pytest
from pydantic import field_validator, model_validator

from fedapps.errors import SettingsError
from fedapps.methods import METHODS, Method, get_method, method_groups, resolve_settings
from fedapps.results.settings_file import from_toml
from fedapps.settings import (
    RoundSettings,
    Settings,
    SettingsModel,
    bounds_of,
    default_config,
    flatten,
    is_tuned,
    keys_of,
    learning_rate,
    parse_toml_options,
    setting,
    toml_float,
)


def test_the_defaults_resolve_for_every_method() -> None:
    for method in METHODS:
        settings = resolve_settings({**default_config(method_groups()), "method": method.name}, "torch")
        assert "auto" not in {v for k, v in flatten(settings, method.group).items() if k != "device"}


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_flatten_and_parse_are_inverse(method: Method) -> None:
    settings = resolve_settings({"method": method.name, "lr": 0.5, "seed": 2**63 - 1}, "torch")
    flat = flatten(settings, method.group)
    assert {type(value) for value in flat.values()} <= {bool, int, float, str}
    assert resolve_settings(flat, "torch") == settings == pickle.loads(pickle.dumps(settings))


@pytest.mark.parametrize(
    ("key", "value", "match"),
    [
        ("num-server-round", 3, "did you mean 'num-server-rounds'"),
        ("fedpm.dampin", 0.1, r"did you mean 'fedpm\.damping'"),
        ("num-server-rounds", "abc", "expected a value of type int, got 'abc'"),
        ("num-server-rounds", True, "expected a value of type int, got True"),
        ("num-server-rounds", 0, ">= 1, got 0"),
        ("num-server-rounds", 2.5, "expected a value of type int, got 2.5"),
        ("num-server-rounds", "2", "expected a value of type int, got '2'.*for example num-server-rounds = 10"),
        ("num-server-rounds", toml_float("1e3"), "expected a value of type int, got 1000.0 .*with an exponent"),
        ("num-server-rounds", 2**63, "'num-server-rounds': expected an integer of at most 64 bits"),
        ("fedpm.refresh", 0, "setting 'fedpm.refresh': expected a finite number >= 1, got 0"),
        ("lr", True, "expected a value of type float or 'auto', got True"),
        ("lr", "0.1", "expected a value of type float or 'auto', got '0.1'"),
        ("lr", math.inf, "expected a finite number > 0, got inf"),
        ("lr", 10**400, "expected a value of type float or 'auto', got 1000"),
        ("fedpm.estimate", 3, "setting 'fedpm.estimate': expected a value of type str or 'auto', got 3"),
        ("lr", "fast", "expected a value of type float or 'auto', got 'fast'"),
        ("lr", math.nan, "expected a finite number > 0, got nan"),
        ("lr", 0.0, "> 0, got 0.0"),
        ("seed", -1, ">= 0"),
        ("seed", 2**63, "<= 9223372036854775807, got 9223372036854775808"),
        ("partition", "dirichlett", "did you mean 'dirichlet'"),
        ("resume", "yes", "expected a value of type bool, got 'yes'"),
        ("method", "fedmp", "did you mean 'fedpm'"),
        ("method", 3, "expected a name, got 3"),
        ("localnewton.damping", 0.3, "does not belong to method 'fedpm'"),
        ("method-options", "a = 1", "expected '' for a method without options"),
        ("own", 1, "setting 'own': expected a known key"),
    ],
)
def test_a_wrong_setting_is_named(key: str, value: object, match: str) -> None:
    with pytest.raises(SettingsError, match=match):
        resolve_settings({"method": "fedpm", key: value}, "torch")


def test_keys_of_other_methods_may_stay_at_their_defaults() -> None:
    assert resolve_settings({**default_config(method_groups()), "method": "fedavg"}, "torch").own is None


@pytest.mark.parametrize(("value", "expected"), [(3, 3.0), (2.0, 2.0)])
def test_an_integer_is_a_float_where_one_is_expected(value: float, expected: float) -> None:
    lr = resolve_settings({"lr": value}, "torch").lr
    assert isinstance(lr, float)
    assert lr == expected


def test_an_integral_float_is_an_integer_where_one_is_expected() -> None:
    rounds = resolve_settings({"num-server-rounds": 4.0}, "torch").num_server_rounds
    assert isinstance(rounds, int)
    assert rounds == 4


def test_auto_values_come_from_the_registry_by_method_and_kind_of_task() -> None:
    assert resolve_settings({"method": "fedavg"}, "torch").lr == get_method("fedavg").tuned["torch"]["lr"]
    convex = resolve_settings({"method": "fedpm"}, "convex")
    assert (convex.lr, convex.own.damping, convex.weighting) == (1.0, 0.0, "uniform")
    assert resolve_settings({"method": "fedpm", "lr": 0.01}, "convex").lr == 0.01


@pytest.mark.parametrize("schedule", ["constant", "exponential", "cosine"])
def test_learning_rate_schedules(schedule: str) -> None:
    settings = resolve_settings({"lr": 0.8, "lr-schedule": schedule, "lr-decay": 0.5, "num-server-rounds": 4}, "torch")
    expected = {
        "constant": [0.8] * 4,
        "exponential": [0.8, 0.4, 0.2, 0.1],
        "cosine": [0.4 * (1 + math.cos(math.pi * t / 4)) for t in range(4)],
    }[schedule]
    assert [learning_rate(settings, r) for r in range(1, 5)] == pytest.approx(expected, rel=1e-15)


class OwnSettings(SettingsModel):
    strength: float = setting(1.5, "a strength", gt=0, tuned=True)
    mode: Literal["slow", "fast"] = setting("slow", "a mode")
    times: int = setting(1, "a number of times")

    @field_validator("times")
    @classmethod
    def _odd(cls, times: int) -> int:
        if times % 2 == 0:
            raise ValueError("an odd number", "add one")
        return times

    @model_validator(mode="after")
    def _not_too_often(self) -> OwnSettings:
        if self.mode == "fast" and self.times > 5:
            raise ValueError("fast is for 5 times at most")
        return self


OWN = Method(
    name="own", title="Own", family="test", mixing="mean", travels_down="model", travels_up="model",
    client_state="none", paper="none", strategy="fedapps.strategies.fedavg:FedAvg",
    client="fedapps.client_apps.fedavg:train", own_settings=OwnSettings,
    tuned={"torch": {"lr": 0.2, "strength": 0.7, "mode": "fast"}},
)  # fmt: skip


def test_an_own_method_takes_its_options_from_toml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedapps.methods.load_object", lambda reference, what: OWN)
    settings = resolve_settings({"method": "my.mod:OWN", "method-options": 'mode = "fast"'}, "torch")
    assert settings.own == OwnSettings(strength=0.7, mode="fast")
    plain = resolve_settings({"method": "my.mod:OWN"}, "torch")
    assert plain.own == OwnSettings(strength=0.7, mode="slow")  # only a key that says so is tuned
    assert settings.lr == 0.2
    assert resolve_settings(flatten(settings, ""), "torch") == settings


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ("strenght = 2", "setting 'strenght'.*did you mean 'strength'"),
        ("mode = fast", "setting 'method-options': expected TOML text"),
        ("strength = 0", "setting 'strength': expected a finite number > 0, got 0"),
        ("times = 1e0", "setting 'times': expected a value of type int, got 1.0 .*exponent"),
        ("times = 2.0", "setting 'times': expected an odd number, got 2.0; add one"),
        ('times = 7\nmode = "fast"', "OwnSettings: fast is for 5 times at most"),
        (3, "setting 'method-options': expected TOML text"),
    ],
)
def test_wrong_options_of_an_own_method_are_named(monkeypatch: pytest.MonkeyPatch, options: object, match: str) -> None:
    monkeypatch.setattr("fedapps.methods.load_object", lambda reference, what: OWN)
    with pytest.raises(SettingsError, match=match):
        resolve_settings({"method": "my.mod:OWN", "method-options": options}, "torch")


@pytest.mark.parametrize("text", ["1e3", "1E3", "1.0e+3"])
def test_a_number_with_an_exponent_is_a_float_only(text: str, tmp_path: Path) -> None:
    for number in (from_toml(f"a = {text}")["a"], parse_toml_options("task-options", f"a = {text}")["a"]):
        with pytest.raises(SettingsError, match="setting 'seed': expected a value of type int"):
            resolve_settings({"seed": number}, "torch")
        lr = resolve_settings({"lr": number}, "torch").lr
        assert type(lr) is float
        assert lr == 1000.0
        assert json.dumps(number) == "1000.0"
    assert resolve_settings({"seed": from_toml("a = 1000.0")["a"]}, "torch").seed == 1000


def test_a_program_gives_settings_by_their_python_names() -> None:
    rounds = RoundSettings(fraction_train=0.5, weighting="uniform")
    assert (rounds.seed, rounds.min_replies, rounds.weight(90)) == (0, 0.2, 1.0)
    assert RoundSettings().weight(90) == 90.0
    assert Settings(lr=0.1, local_steps=3).own is None
    with pytest.raises(SettingsError, match="setting 'lr': expected a value of type float, got none"):
        Settings()


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ({"fraction_train": 0.0}, "^setting 'fraction_train': expected a finite number > 0 and <= 1, got 0.0$"),
        ({"weighting": "auto"}, "^setting 'weighting': expected one of examples, uniform, got 'auto'$"),
        ({"weighting": 1}, "^setting 'weighting': expected a value of type str, got 1 "),
        ({"fold_buffer": 1}, "^setting 'fold_buffer': .*did you mean 'fold_buffer_mb'"),
        ({"fraction-train": 1.0}, "^setting 'fraction-train': .*did you mean 'fraction_train'"),
    ],
)
def test_a_wrong_value_of_a_program_is_named(values: dict[str, object], match: str) -> None:
    with pytest.raises(SettingsError, match=match):
        RoundSettings(**values)  # type: ignore[arg-type]


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        RoundSettings().seed = 1  # type: ignore[misc]


@pytest.mark.parametrize("method", [m for m in METHODS if m.own_settings], ids=lambda method: method.name)
def test_the_settings_of_a_method_stand_alone_and_every_tuned_key_is_tuned(method: Method) -> None:
    assert method.own_settings is not None
    method.own_settings()
    tuned = {key for key, field in keys_of(method.own_settings).items() if is_tuned(field)}
    for kind in method.task_kinds:
        assert tuned <= method.tuned[kind].keys()
    assert {key for values in method.tuned.values() for key in values} <= tuned | {
        key for key, field in keys_of(Settings).items() if is_tuned(field)
    }


def test_bounds_are_written_as_in_the_table() -> None:
    keys = keys_of(Settings)
    assert bounds_of(keys["seed"]) == [">= 0", "<= 9223372036854775807"]
    assert bounds_of(keys["fraction-train"]) == ["> 0", "<= 1"]
    assert bounds_of(keys["validation-fraction"]) == [">= 0", "<= 0.9"]
    assert bounds_of(keys["resume"]) == []


def test_a_method_reference_that_does_not_exist_is_named() -> None:
    with pytest.raises(SettingsError, match=r"my_pkg\.nothing:METHOD.*Python path"):
        resolve_settings({"method": "my_pkg.nothing:METHOD"}, "torch")
    with pytest.raises(SettingsError, match=r"expected a fedapps\.methods\.Method, got type"):
        resolve_settings({"method": "fedapps.methods:Method"}, "torch")
