from __future__ import annotations

import json
import platform
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from fedapps.results import environment
from fedapps.results.environment import cpu_model, describe_environment, git_state


def test_versions_processor_device_and_checksums_are_named(tmp_path: Path) -> None:
    found = describe_environment(device="cpu", data_checksums={"a9a": "sha256:00ff"}, working_folder=tmp_path)
    assert found["python"] == platform.python_version()
    assert found["packages"]["numpy"] == version("numpy")
    assert found["packages"]["flwr"] == version("flwr")
    assert found["device"] == "cpu"
    assert found["data-checksums"] == {"a9a": "sha256:00ff"}
    assert found["cpu"]
    json.dumps(found)


def test_a_package_that_is_not_installed_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "PACKAGES", ("numpy", "surely-not-installed"))
    assert list(environment.installed_versions()) == ["numpy"]


def test_the_processor_is_named_without_procfs(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object, **__: object) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", missing)
    assert cpu_model() == (platform.processor() or platform.machine())


def test_describing_imports_no_torch() -> None:
    code = (
        "import sys; from fedapps.results.environment import describe_environment as d; "
        "import fedapps.results.report, fedapps.results.plots; d(device='cpu', data_checksums={}); "
        "sys.exit(any(name in sys.modules for name in ('torch', 'ray', 'flwr', 'matplotlib')))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_the_commit_and_whether_files_differ_from_it(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        identity = ("-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false")
        done = subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], capture_output=True, check=True)
        return done.stdout.decode().strip()

    git("init")
    assert git_state(tmp_path) is None, "no commit yet"
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "-m", "one", "--no-verify")
    (tmp_path / "result").write_text("not tracked")
    assert git_state(tmp_path) == {"commit": git("rev-parse", "HEAD"), "modified": False}
    (tmp_path / "file").write_text("2")
    assert git_state(tmp_path) == {"commit": git("rev-parse", "HEAD"), "modified": True}


def test_no_commit_outside_a_repository_or_without_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert git_state(tmp_path) is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_state(tmp_path) is None
