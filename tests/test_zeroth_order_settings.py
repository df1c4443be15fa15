"""Tests of ``fedapps/zeroth_order_settings.py``: the choices are those of the mathematics, which it does not import."""

from __future__ import annotations

from enum import StrEnum

import pytest

from fedapps.errors import SettingsError
from fedapps.methods import METHODS, resolve_settings
from fedapps.settings import keys_of
from fedapps.zeroth_order.aggregate import Aggregation
from fedapps.zeroth_order.directions import Distribution
from fedapps.zeroth_order.probing import Difference
from fedapps.zeroth_order.rules import RULES
from fedapps.zeroth_order.scheme import HessianUpdate
from fedapps.zeroth_order_settings import HiSoMomentumSettings


@pytest.mark.parametrize(
    ("field", "enum"),
    [
        ("aggregation", Aggregation), ("distribution", Distribution), ("difference", Difference),
        ("hessian_update", HessianUpdate),
    ],
)  # fmt: skip
def test_choices_are_the_variants(field: str, enum: type[StrEnum]) -> None:
    assert keys_of(HiSoMomentumSettings)[field].choices == tuple(variant.value for variant in enum)


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
