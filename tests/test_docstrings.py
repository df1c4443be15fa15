"""The examples in docstrings do what they show."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

import fedapps

OPTIONAL = {"accelerate", "datasets", "gguf", "matplotlib", "numba", "peft", "ray", "sklearn", "torch", "torchvision",
            "transformers", "triton"}  # fmt: skip
PACKAGE = Path(fedapps.__file__).parent

MODULES = sorted(
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
    for path in PACKAGE.rglob("*.py")
    if ">>> " in path.read_text(encoding="utf-8")
)


def test_modules_with_examples_are_found() -> None:
    assert {"fedapps.curvature.foof", "fedapps.strategies.fedpm"} <= set(MODULES)


@pytest.mark.parametrize("name", MODULES)
def test_examples_do_what_they_show(name: str) -> None:
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in OPTIONAL:
            raise
        pytest.skip(f"{error.name} is not installed")
    found = doctest.testmod(module)
    assert found.attempted > 0
    assert found.failed == 0
