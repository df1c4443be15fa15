"""Settings: one parser for both ends, with errors that name the key and the nearest known one."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest

from fedapps.errors import SettingsError
from fedapps.methods import METHODS, Method, get_method, method_groups, resolve_settings
from fedapps.settings import default_config, flatten, learning_rate, setting


def test_the_defaults_resolve_for_every_method() -> None:
    for method in METHODS:
        settings = resolve_settings({**default_config(method_groups()), "method": method.name}, "torch")
        assert "auto" not in {v for k, v in flatten(settings, method.group).items() if k != "device"}


def test_flatten_and_parse_are_inverse() -> None:
    settings = resolve_settings({"method": "fedpm", "fedpm.damping": 0.5, "seed": 2**63 - 1}, "torch")
    assert resolve_settings(flatten(settings, "fedpm"), "torch") == settings


@pytest.mark.parametrize(
    ("key", "value", "match"),
    [
        ("num-server-round", 3, "did you mean 'num-server-rounds'"),
        ("fedpm.dampin", 0.1, r"did you mean 'fedpm\.damping'"),
        ("num-server-rounds", "abc", "expected a value of type int, got 'abc'"),
        ("num-server-rounds", True, "expected a value of type int, got True"),
        ("num-server-rounds", 0, ">= 1, got 0"),
        ("num-server-rounds", 2.5, "expected a value of type int, got 2.5"),
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


@dataclass(frozen=True, kw_only=True)
class OwnSettings:
    strength: float = setting(1.5, "a strength", above=0)
    mode: str = setting("slow", "a mode", choices=("slow", "fast"))


OWN = Method(
    name="own", title="Own", family="test", mixing="mean", travels_down="model", travels_up="model",
    client_state="none", paper="none", strategy="fedapps.strategies.fedavg:FedAvg",
    client="fedapps.client_apps.fedavg:train", own_settings=OwnSettings, tuned={"torch": {"lr": 0.2}},
)  # fmt: skip


def test_an_own_method_takes_its_options_from_toml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedapps.methods.load_object", lambda reference, what: OWN)
    settings = resolve_settings({"method": "my.mod:OWN", "method-options": 'mode = "fast"'}, "torch")
    assert settings.own == OwnSettings(strength=1.5, mode="fast")
    assert settings.lr == 0.2
    with pytest.raises(SettingsError, match="did you mean 'strength'"):
        resolve_settings({"method": "my.mod:OWN", "method-options": "strenght = 2"}, "torch")
    with pytest.raises(SettingsError, match="expected TOML text"):
        resolve_settings({"method": "my.mod:OWN", "method-options": "mode = fast"}, "torch")


def test_a_method_reference_that_does_not_exist_is_named() -> None:
    with pytest.raises(SettingsError, match=r"my_pkg\.nothing:METHOD.*Python path"):
        resolve_settings({"method": "my_pkg.nothing:METHOD"}, "torch")
    with pytest.raises(SettingsError, match=r"expected a fedapps\.methods\.Method, got type"):
        resolve_settings({"method": "fedapps.methods:Method"}, "torch")
