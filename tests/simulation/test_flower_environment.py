"""Flower's commands run quietly, on loopback, with the caller's folders on their path."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fedapps.errors import LaunchError
from fedapps.simulation.flower_environment import flower_environment, flower_program, log_tail


def test_folders_come_before_the_callers_path_and_are_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "/there/before")
    path = flower_environment([Path("mine"), Path("/other")])["PYTHONPATH"].split(os.pathsep)
    assert path == [str(tmp_path / "mine"), "/other", "/there/before"]
    monkeypatch.delenv("PYTHONPATH")
    assert flower_environment([Path("/other")])["PYTHONPATH"] == "/other"


def test_what_the_caller_sets_wins_and_a_foreign_ray_cluster_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "elsewhere:6379")
    variables = flower_environment(environment={"OMP_NUM_THREADS": "3", "FLWR_TELEMETRY_ENABLED": "1"})
    assert "RAY_ADDRESS" not in variables
    assert variables["OMP_NUM_THREADS"] == "3"
    assert variables["FLWR_TELEMETRY_ENABLED"] == "1"
    assert variables["FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION"] == "1"


def test_flowers_programs_are_found_even_where_the_path_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    folder = Path(flower_program("flower-superlink")).parent
    assert flower_environment()["PATH"] == str(folder)
    with pytest.raises(LaunchError, match="command 'flower-nonsense': expected an installed Flower"):
        flower_program("flower-nonsense")


def test_the_tail_of_a_log_has_no_colours(tmp_path: Path) -> None:
    path = tmp_path / "log"
    assert log_tail(path) == ""
    path.write_text("first\n\x1b[92mINFO\x1b[0m : second\nthird\n\n")
    assert log_tail(path, lines=2) == "INFO : second\nthird"
