"""Calling the command line."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from typer.testing import CliRunner

from fedapps.cli import cli


@pytest.fixture
def call() -> Callable[..., str]:
    """Call the command line as a user does, and give what it prints."""

    def call(*arguments: str, code: int = 0) -> str:
        result = CliRunner().invoke(cli, list(arguments), env={"COLUMNS": "250"})
        assert result.exit_code == code, result.output
        return result.output

    return call


@pytest.fixture
def sites(own_module: str) -> list[str]:
    """Options of a small task with three clients; the learning rate comes last."""
    return [
        "--task", f"{own_module}:Sites", "--engine", "inprocess", "--clients", "3", "--rounds", "2",
        "--partition", "column", "--set", "partition-column=site", "--set", "task-options='sizes = \"8,8,8\"'",
        "--set", "validation-fraction=0.2", "--set", "local-epochs=1", "--set", "lr=0.1",
    ]  # fmt: skip
