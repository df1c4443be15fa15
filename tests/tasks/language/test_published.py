"""Where fetched models lie, and what is offered."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedapps.tasks.language.published import MODELS_VARIABLE, PUBLISHED, Published, models_folder, published


def test_models_are_found_by_name() -> None:
    assert [published(model.name) for model in PUBLISHED] == list(PUBLISHED)
    assert published("gpt-5") is None


@pytest.mark.parametrize("model", PUBLISHED, ids=lambda model: model.name)
def test_what_is_offered_is_one_file_of_one_version(model: Published) -> None:
    """A package without an exact version, or a file without a checksum, could change under the user."""
    assert "==" in model.package
    assert len(bytes.fromhex(model.sha256)) == 32
    assert model.licence


def test_the_users_own_folder_comes_before_the_cache_and_that_before_the_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv(MODELS_VARIABLE, raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert models_folder() == tmp_path / ".cache" / "fedapps" / "models"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert models_folder() == tmp_path / "cache" / "fedapps" / "models"
    monkeypatch.setenv(MODELS_VARIABLE, "~/mine")
    assert models_folder() == tmp_path / "mine"
