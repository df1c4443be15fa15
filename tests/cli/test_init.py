"""The command line as a whole."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest

import fedapps

Call = Callable[..., str]


def test_version(call: Call) -> None:
    assert call("--version").startswith("fedapps 0.")


@pytest.mark.slow
def test_the_package_runs_as_a_module() -> None:
    run = subprocess.run([sys.executable, "-m", "fedapps.cli", "--version"], capture_output=True, text=True, check=True)
    assert run.stdout == f"fedapps {fedapps.__version__}\n"
