"""What the project's own files say about each other."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.mark.skipif(not (ROOT / ".github").is_dir(), reason="a source archive has no files of the hosted CI")
def test_every_python_that_is_promised_is_tested() -> None:
    promised = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
    matrix = re.search(r"python: \[(.*)\]", (ROOT / ".github" / "workflows" / "ci.yml").read_text())
    assert matrix is not None
    assert re.findall(r"3\.\d+", matrix.group(1)) == promised
    assert PROJECT["requires-python"] == f">={promised[0]}"


def test_help_lists_every_target() -> None:
    text = (ROOT / "Makefile").read_text()
    [phony] = re.findall(r"^\.PHONY: (.*)$", text, flags=re.MULTILINE)
    assert re.findall(r"^([a-z]+):[^#\n]*## .+$", text, flags=re.MULTILINE) == phony.split()
