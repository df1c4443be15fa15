"""Tests of ``fedapps/methods/zeroth_order.py``: the choices are those of the mathematics."""

from __future__ import annotations

from enum import StrEnum

import numpy as np
import pytest

from fedapps.errors import SettingsError
from fedapps.methods import METHODS, resolve_settings
from fedapps.methods.zeroth_order import HiSoMomentumSettings
from fedapps.settings import choices_of, keys_of
from fedapps.zeroth_order.aggregate import Aggregation
from fedapps.zeroth_order.directions import Distribution
from fedapps.zeroth_order.probing import Difference
from fedapps.zeroth_order.rules import RULES
from fedapps.zeroth_order.scheme import HessianUpdate


@pytest.mark.parametrize(
    ("key", "enum"),
    [
        ("aggregation", Aggregation), ("distribution", Distribution), ("difference", Difference),
        ("hessian-update", HessianUpdate),
    ],
)  # fmt: skip
def test_choices_are_the_variants(key: str, enum: type[StrEnum]) -> None:
    assert choices_of(keys_of(HiSoMomentumSettings)[key]) == tuple(variant.value for variant in enum)


def test_every_scalar_only_method_is_an_update_rule() -> None:
    assert {method.name for method in METHODS if method.replicas} == set(RULES)


@pytest.mark.parametrize(
    ("key", "value", "match"),
    [
        ("hiso.nu", 1.5, "<= 1, got 1.5"),
        ("hiso.eps", 0.0, "> 0, got 0.0"),
        ("hiso.mu", 0.0, "> 0, got 0.0"),
        ("hiso.hessian-update", "every", "did you mean 'every-step'"),
        ("hiso.num-probes", 0, ">= 1, got 0"),
        ("decomfl.mu", 0.5, "does not belong to method 'hiso'"),
        ("seed", 2**63, "<= 9223372036854775807"),
    ],
)
def test_a_wrong_value_is_named(key: str, value: object, match: str) -> None:
    with pytest.raises(SettingsError, match=match):
        resolve_settings({"method": "hiso", key: value}, "torch")


def test_the_radius_decays_from_round_to_round() -> None:
    own = resolve_settings({"method": "fedzo", "fedzo.mu": 0.01, "fedzo.mu-decay": 0.5}, "torch").own
    assert [own.mu_of(r) for r in (1, 2, 3)] == [0.01, 0.005, 0.0025]


@pytest.mark.parametrize(
    ("method", "values", "match"),
    [
        ("hiso", {"hiso.mu": 1e-50}, "setting 'mu' of method 'hiso': .*float32.*got 1e-50"),
        ("decomfl", {"decomfl.mu": 1e39}, "setting 'mu' of method 'decomfl': .*got 1e\\+39"),
        ("hiso", {"hiso.eps": 1e-60}, "setting 'eps' of method 'hiso': .*got 1e-60"),
        ("hiso-momentum", {"hiso-momentum.eps": 1e39}, "setting 'eps' of method 'hiso-momentum': .*got 1e\\+39"),
        ("fedzo", {"fedzo.mu-decay": 0.5, "num-server-rounds": 500}, "setting 'mu-decay' .*in round 500"),
        ("hiso", {"hiso.mu-decay": 1e-9, "num-server-rounds": 60}, "setting 'mu-decay' .*a radius of 0 in round 60"),
    ],
)
def test_numbers_that_float32_does_not_hold_are_refused_before_training(
    method: str, values: dict[str, object], match: str
) -> None:
    with pytest.raises(SettingsError, match=match):
        resolve_settings({"method": method, **values}, "torch")


@pytest.mark.parametrize(
    "values",
    [
        {"hiso.mu": 1e-45}, {"hiso.nu": 0, "hiso.eps": 1e-60}, {"hiso.mu-decay": 0.5, "num-server-rounds": 140},
    ],
    ids=["smallest subnormal", "eps without use", "decay that float32 holds to the end"],
)  # fmt: skip
def test_numbers_that_float32_holds_pass(values: dict[str, object]) -> None:
    settings = resolve_settings({"method": "hiso", **values}, "torch")
    assert np.float32(settings.own.mu_of(settings.num_server_rounds)) > 0
