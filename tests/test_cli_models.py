"""Tests of ``fedapps/cli_models.py``."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedapps.cli import cli

for needed in ("transformers", "gguf", "accelerate", "pip"):
    pytest.importorskip(needed)


def call(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(cli, ["models", *arguments], env={"COLUMNS": "250"})
    assert result.exit_code == code, result.output
    return result.output


def test_list_and_get(own_module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDAPPS_MODELS", str(tmp_path / "models"))
    importlib.import_module("fedapps_language").offer_tiny(tmp_path / "wheels", monkeypatch)
    listed = call("list")
    assert "two layers" in listed
    assert "CC0-1.0" in listed
    assert "not fetched" in listed
    assert f"folder   {tmp_path / 'models' / 'tiny'}" in call("get", "tiny")
    assert str(tmp_path / "models" / "tiny") in call("list")
    assert "tiny is there already" in call("get", "tiny")
    assert "TaskError: fedapps models get: expected one of: tiny" in call("get", "huge", code=1)
