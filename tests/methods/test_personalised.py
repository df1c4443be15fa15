"""Tests of ``fedapps/methods/personalised.py``."""

from __future__ import annotations

import pytest

from fedapps.errors import SettingsError
from fedapps.methods import resolve_settings
from fedapps.methods.personalised import FedClupSettings
from fedapps.personalization.fedclup import Stale
from fedapps.settings import default_config


def test_a_word_of_python_is_a_key() -> None:
    own = resolve_settings({"method": "fedclup", "fedclup.lambda": 0.3, "fedclup.stale": "replies"}, "torch").own
    assert own == resolve_settings({"method": "fedclup", "fedclup.lambda": 0.3}, "torch").own.model_copy(
        update={"stale": Stale.REPLIES}
    )
    assert own.lambda_ == FedClupSettings(lambda_=0.3).lambda_ == 0.3
    with pytest.raises(SettingsError, match=r"setting 'fedclup\.lambda': expected a finite number > 0, got 0"):
        resolve_settings({"method": "fedclup", "fedclup.lambda": 0}, "torch")
    with pytest.raises(SettingsError, match="setting 'lambda_': expected a finite number > 0, got -1"):
        FedClupSettings(lambda_=-1)


def test_a_variant_is_given_by_its_text_or_itself() -> None:
    assert FedClupSettings(stale="reuse-models").stale is FedClupSettings(stale=Stale.REUSE_MODELS).stale  # type: ignore[arg-type]
    with pytest.raises(
        SettingsError, match="'stale': expected one of reuse, reuse-models, replies, got 'reused'; did you"
    ):
        FedClupSettings(stale="reused")  # type: ignore[arg-type]
    assert default_config({"fedclup": FedClupSettings})["fedclup.stale"] == "reuse"


def test_patterns_are_separated_by_commas() -> None:
    assert FedClupSettings(personal=" head.* , tail,").patterns == ["head.*", "tail"]
