"""Tests of ``fedapps/methods/second_order.py``."""

from __future__ import annotations

import pytest

from fedapps.curvature.blocks import WireDtype
from fedapps.curvature.foof import Estimate
from fedapps.errors import SettingsError
from fedapps.methods import resolve_settings
from fedapps.methods.second_order import FedPMSettings, LocalNewtonSettings
from fedapps.settings import choices_of, keys_of


def test_choices_are_the_variants() -> None:
    keys = keys_of(FedPMSettings)
    assert set(choices_of(keys["estimate"])) == {variant.value for variant in Estimate}
    assert set(choices_of(keys["wire"])) == {variant.value for variant in WireDtype}


@pytest.mark.parametrize("text", ["1,0.5,,0.1", "1,-0.5", "0", "inf", "nan", "a"])
def test_steps_that_are_no_positive_numbers_are_refused(text: str) -> None:
    with pytest.raises(
        SettingsError, match=r"setting 'localnewton\.line-search': expected numbers > 0.*got '.*write it"
    ):
        resolve_settings({"method": "localnewton", "localnewton.line-search": text}, "torch")


def test_the_steps_are_read_in_their_order() -> None:
    assert LocalNewtonSettings(line_search="1, 0.5,2").steps == (1.0, 0.5, 2.0)
    assert LocalNewtonSettings().steps == ()


def test_a_factor_of_one_row_is_refused() -> None:
    with pytest.raises(
        SettingsError, match=r"setting 'fedpm\.factor-min-rows': expected 0 \(off\) or at least 2, got 1; raise it"
    ):
        resolve_settings({"method": "fedpm", "fedpm.factor-min-rows": 1}, "torch")
    with pytest.raises(SettingsError, match=r"setting 'factor_min_rows': expected 0 \(off\) or at least 2, got 1"):
        FedPMSettings(factor_min_rows=1)
    assert FedPMSettings(factor_min_rows=2).factor_min_rows == 2
