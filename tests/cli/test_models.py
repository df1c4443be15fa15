"""Tests of ``fedapps/cli/models.py``."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path

import pytest

for needed in ("transformers", "gguf", "accelerate", "pip"):
    pytest.importorskip(needed)


@pytest.mark.slow
def test_list_and_get(
    call: Callable[..., str], own_module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDAPPS_MODELS", str(tmp_path / "models"))
    importlib.import_module("fedapps_language").offer_tiny(tmp_path / "wheels", monkeypatch)
    listed = call("models", "list")
    assert "two layers" in listed
    assert "CC0-1.0" in listed
    assert "not fetched" in listed
    assert f"folder   {tmp_path / 'models' / 'tiny'}" in call("models", "get", "tiny")
    assert str(tmp_path / "models" / "tiny") in call("models", "list")
    assert "tiny is there already" in call("models", "get", "tiny")
    assert "TaskError: fedapps models get: expected one of: tiny" in call("models", "get", "huge", code=1)
