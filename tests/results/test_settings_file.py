from __future__ import annotations

import math
from pathlib import Path

import pytest
from flwr.common.config import parse_config_args

from fedapps.errors import CheckpointError
from fedapps.results.settings_file import Scalar, from_toml, to_toml

SETTINGS: dict[str, Scalar] = {
    "method": "fedpm",
    "seed": 2**63 - 1,
    "lr": 1e-05,
    "big": 5e22,
    "one": 1.0,
    "resume": False,
    "data-dir": "",
    "fedpm.damping": 0.1,
    "zz": True,
    "fedpm.estimate": "average",
    "task-options": 'file = "a9a"\nrows = [1, 2]\ttab \\ back \x7f \x01 ä 🙂 \u2028',
    "own group.a key.x": -3,
}


def test_settings_come_back_with_values_and_types() -> None:
    back = from_toml(to_toml(SETTINGS))
    assert back == SETTINGS
    # A float that was written with an exponent remembers it.
    types = {key: float if isinstance(value, float) else type(value) for key, value in back.items()}
    assert types == {key: type(value) for key, value in SETTINGS.items()}
    assert math.isnan(float(from_toml(to_toml({"x": math.nan}))["x"]))


def test_flower_reads_the_file_as_a_run_config(tmp_path: Path) -> None:
    path = tmp_path / "settings.toml"
    path.write_text(to_toml(SETTINGS), encoding="utf-8")
    assert parse_config_args([str(path)]) == SETTINGS


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"a": 1, "a.b": 2}, r"'a\.b'.*none of whose tables is a setting"),
        ({"a.b.c": 2, "a": 1}, r"'a\.b\.c'"),
        ({"a..b": 1}, "without empty parts"),
        ({"": 1}, "without empty parts"),
        ({"a": [1]}, "expected an int, float, bool or str, got list"),
        ({"a": None}, "got NoneType"),
    ],
    ids=["a table that is a value", "the same, deeper", "empty part", "empty key", "list", "None"],
)
def test_what_a_run_config_cannot_hold_is_refused(settings: dict[str, Scalar], match: str) -> None:
    with pytest.raises(CheckpointError, match=match):
        to_toml(settings)
