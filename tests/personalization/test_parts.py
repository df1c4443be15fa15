"""Personal parts by name, module and pattern."""

from __future__ import annotations

import pytest

from fedapps.errors import SettingsError
from fedapps.personalization.parts import personal_names

NAMES = ("body.0.weight", "body.0.bias", "head.weight", "head.bias", "header")


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        pytest.param((), NAMES, id="nothing named: everything is personal"),
        pytest.param(("head",), ("head.weight", "head.bias"), id="a module, not what merely starts like it"),
        pytest.param(("header",), ("header",), id="a tensor"),
        pytest.param(("*.bias",), ("body.0.bias", "head.bias"), id="a pattern"),
        pytest.param(("head", "body"), NAMES[:4], id="several, in the model's order"),
    ],
)
def test_names_are_picked(patterns: tuple[str, ...], expected: tuple[str, ...]) -> None:
    assert personal_names(NAMES, patterns) == expected


def test_pattern_that_names_nothing_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"personal parts, 'classifier'.*body\.0\.weight"):
        personal_names(NAMES, ("head", "classifier"))
