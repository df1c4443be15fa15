"""Tiny models of three families, and a data folder with a few rows in every format."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

REAL_FOLDER = os.environ.get("FEDAPPS_DATA", "")
"""Read before the tests hide it."""

ROWS = Path(__file__).parents[2] / "data" / "language"


@pytest.fixture(autouse=True)
def _no_data_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEDAPPS_DATA", raising=False)


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Family -> folder with a tiny model of it."""
    path = Path(__file__).parents[2] / "helpers" / "fedapps_language.py"
    spec = importlib.util.spec_from_file_location("fedapps_language_of_the_session", path)
    assert spec is not None
    assert spec.loader is not None
    helper: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(helper)
    folders: dict[str, Path] = {}

    def of(family: str) -> Path:
        if family not in folders:
            folders[family] = helper.tiny_folder(tmp_path_factory.mktemp(family), family)
        return folders[family]

    return of


@pytest.fixture
def rows() -> Path:
    """Data folder with a few rows in every format."""
    return ROWS
