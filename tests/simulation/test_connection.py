"""The connections of Flower's configuration, as Flower reads them."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedapps.errors import LaunchError
from fedapps.simulation.connection import Connection, read_connection

CONFIG = """
[superlink]
default = "study"

[superlink.study]
address = "superlink.example.org:8443"
root-certificates = "~/study/ca.crt"

[superlink.dev]
address = "127.0.0.1:8000"
insecure = true

[superlink.local]
address = ":local:"
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "config.toml").write_text(CONFIG)
    return {"FLWR_HOME": str(tmp_path)}


def test_a_connection_is_read_by_name_or_by_default(environment: dict[str, str]) -> None:
    study = Connection("study", "superlink.example.org:8443", Path.home() / "study" / "ca.crt", insecure=False)
    assert read_connection("study", environment) == read_connection("", environment) == study
    assert read_connection("dev", environment) == Connection("dev", "127.0.0.1:8000", None, insecure=True)


@pytest.mark.parametrize("name", ["other", "local", "default"])
def test_a_name_that_is_no_superlinks_is_refused(environment: dict[str, str], name: str) -> None:
    """One that Flower starts itself would stay behind."""
    with pytest.raises(LaunchError, match=rf"connection '{name}': expected one of .*config\.toml.*\(dev, study\)"):
        read_connection(name, environment)


@pytest.mark.parametrize(
    ("content", "message"), [("superlink = 3", "none with an address"), ("[superlink", "expected TOML")]
)
def test_a_configuration_that_says_nothing(tmp_path: Path, content: str, message: str) -> None:
    environment = {"FLWR_HOME": str(tmp_path)}
    with pytest.raises(LaunchError, match="none with an address of its own"):
        read_connection("study", environment)
    (tmp_path / "config.toml").write_text(content)
    with pytest.raises(LaunchError, match=message):
        read_connection("study", environment)
