"""The thin app carries every setting through Flower's own packing, unchanged."""

from __future__ import annotations

import math
import zipfile
from io import BytesIO
from pathlib import Path

import pytest
from flwr.cli.build import build_fab_from_disk
from flwr.cli.config_utils import load_and_validate
from flwr.common.config import flatten_dict, get_fab_config

from fedapps.errors import LaunchError
from fedapps.simulation.app_folder import Components, write_app_folder

SETTINGS = {
    "seed": 2**63 - 1,
    "smallest": -(2**63),
    "flag": False,
    "lr": 1e-05,
    "huge": 1e22,
    "endless": math.inf,
    "integral": 3.0,
    "empty": "",
    "text": "two words, \"quotes\", a \\ and 'more'\nsecond line\ttab \x7f \x00 é 漢",
    "fedpm.damping": 0.1,
    "fedpm.average": "examples",
    "a.b.c": 1,
}


def test_settings_survive_flowers_bundle(tmp_path: Path) -> None:
    write_app_folder(tmp_path / "app", SETTINGS)
    bundle = build_fab_from_disk(tmp_path / "app")
    app = get_fab_config(bundle)["tool"]["flwr"]["app"]
    unpacked = flatten_dict(app["config"])
    assert unpacked == SETTINGS
    assert {key: type(value) for key, value in unpacked.items()} == {
        key: type(value) for key, value in SETTINGS.items()
    }
    assert app["components"] == {"serverapp": "fedapps.server_apps:app", "clientapp": "fedapps.client_apps:app"}


def test_the_bundle_holds_no_code_that_could_hide_the_installed_package(tmp_path: Path) -> None:
    write_app_folder(tmp_path / "app", {"seed": 1})
    with zipfile.ZipFile(BytesIO(build_fab_from_disk(tmp_path / "app"))) as bundle:
        assert sorted(bundle.namelist()) == [".info/CONTENT", "pyproject.toml"]


def test_flower_accepts_the_folder_without_a_warning(tmp_path: Path) -> None:
    write_app_folder(tmp_path, {}, components=Components("json:loads", "json:dumps"))
    assert load_and_validate(tmp_path / "pyproject.toml", check_module=False)[1] == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        pytest.param(
            {"seed": 2**63}, "setting 'seed': expected .* of 64 bits, got 9223372036854775808", id="too large"
        ),
        pytest.param({"lrs": [0.1]}, r"setting 'lrs': expected .*, got \[0.1\] of type list", id="list"),
        pytest.param({"lr": None}, "got None of type NoneType", id="none"),
        pytest.param({"a b": 1}, "setting 'a b': expected letters", id="space in a key"),
        pytest.param({"a..b": 1}, "setting 'a..b': expected letters", id="empty group"),
        pytest.param({"a.b": 1, "a": 2}, "got both 'a' and 'a.b'", id="value and group"),
    ],
)
def test_what_flower_cannot_carry_is_refused(tmp_path: Path, settings: dict[str, object], message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        write_app_folder(tmp_path, settings)  # type: ignore[arg-type]
