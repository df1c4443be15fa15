"""The command line as a whole."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from flwr.cli.build import build_fab_from_disk
from flwr.cli.config_utils import load_and_validate
from flwr.common.config import flatten_dict, get_fab_config

import fedapps
from fedapps.methods import METHODS, resolve_settings

Call = Callable[..., str]


def test_version(call: Call) -> None:
    assert call("--version").startswith("fedapps 0.")


@pytest.mark.slow
def test_the_package_runs_as_a_module() -> None:
    run = subprocess.run([sys.executable, "-m", "fedapps.cli", "--version"], capture_output=True, text=True, check=True)
    assert run.stdout == f"fedapps {fedapps.__version__}\n"


def test_a_project_of_ones_own_takes_every_setting_of_every_method(call: Call, tmp_path: Path) -> None:
    project = tmp_path / "Ward 7"
    told = call("init", str(project))
    assert all(f"wrote    {project / name}" in told for name in ("pyproject.toml", "ward_7.py", "README.md"))
    (project / "runs").mkdir()
    (project / "runs" / "metrics.jsonl").touch()
    assert load_and_validate(project / "pyproject.toml", check_module=False)[1] == []
    config = flatten_dict(get_fab_config(build_fab_from_disk(project))["tool"]["flwr"]["app"]["config"])
    assert config["task"] == "ward_7:MyTask"
    assert config["fedclup.export"] is False
    for method in METHODS:
        kind = method.task_kinds[0]
        settings = resolve_settings({**config, "method": method.name, "task": "a9a" if kind == "convex" else "digits"})
        assert settings.method == method.name
    assert b"metrics.jsonl" not in build_fab_from_disk(project)
    before = (project / "ward_7.py").read_text()
    assert "expected no such file yet" in call("init", str(project), code=1)
    assert (project / "ward_7.py").read_text() == before


@pytest.mark.parametrize("name", ["7", "numpy", "json", "fedapps"])
def test_a_project_whose_module_would_hide_another_is_refused(call: Call, tmp_path: Path, name: str) -> None:
    assert f"project '{name}': expected a name" in call("init", str(tmp_path / name), code=1)
    assert list(tmp_path.iterdir()) == []
