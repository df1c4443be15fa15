"""Where the server app writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedapps.errors import CheckpointError
from fedapps.methods import resolve_settings
from fedapps.results.log_copy import SentRunFolder
from fedapps.results.run_folder import RunFolder
from fedapps.server_apps.app import open_run_folder


def folder_of(**keys: Any) -> RunFolder:
    return open_run_folder(resolve_settings({"method": "fedavg", "task": "digits", **keys}))


def test_a_folder_that_is_the_callers_too_is_used_and_nothing_is_sent(tmp_path: Path) -> None:
    place = RunFolder(tmp_path / "run")
    place.path.mkdir()
    with place.followed():
        folder = folder_of(**{"run-dir": str(place.path), "collect-mb": 5.0})
        assert type(folder) is RunFolder
        assert folder == place
        folder.write_settings({})
        assert type(folder_of(**{"run-dir": str(place.path), "collect-mb": 5.0, "resume": True})) is RunFolder


def test_a_folder_on_the_callers_machine_is_left_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDAPPS_RUNS", str(tmp_path / "server"))
    folder = folder_of(**{"run-dir": str(tmp_path / "caller"), "collect-mb": 5.0})
    assert isinstance(folder, SentRunFolder)
    assert folder.most == 5e6
    assert folder.path.parent == tmp_path / "server"
    assert not (tmp_path / "caller").exists()
    folder.write_settings({})
    again = folder_of(**{"run-dir": str(folder.path), "collect-mb": 5.0, "resume": True})
    assert isinstance(again, SentRunFolder)
    assert again.path == folder.path


def test_without_a_caller_a_given_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    folder = folder_of(**{"run-dir": str(tmp_path / "run")})
    assert type(folder) is RunFolder
    assert folder.path == tmp_path / "run"
    with pytest.raises(CheckpointError, match="expected a folder with settings"):
        folder_of(**{"run-dir": str(tmp_path / "run"), "resume": True})
