"""Pages point to files, headings, modules and names that exist."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    [
        ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*/README.md"),
        *ROOT.glob("benchmarks/results/*.md"), *ROOT.glob("tests/data/*/README.md"),
    ]
)  # fmt: skip
FOLDERS = "|".join(["fedapps", "tests", "docs", "examples", "benchmarks", "configs", "scripts"])
PARTS = "|".join(path.name for path in (ROOT / "fedapps").iterdir() if (path / "__init__.py").exists())

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def prose(page: Path) -> str:
    """The page without its blocks of code."""
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """What the page's headings are called in an address: lower case, without punctuation, hyphens for spaces."""
    headings = re.findall(r"^#+ (.+)$", prose(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pages
def test_links_lead_to_files_and_headings(page: Path) -> None:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        if not there.exists() or (anchor and anchor not in anchors(there)):
            broken.append(target)
    assert broken == []


@pages
def test_files_that_are_named_exist(page: Path) -> None:
    """Paths from the project's folder, or from the package's."""
    named = re.findall(rf"`((?:{FOLDERS}|{PARTS})/[\w./-]*)`", prose(page))
    assert [path for path in named if not (ROOT / path).exists() and not (ROOT / "fedapps" / path).exists()] == []


@pages
def test_modules_and_names_can_be_imported(page: Path) -> None:
    missing = []
    for name in re.findall(r"`(fedapps(?:\.\w+)+)", prose(page)):
        try:
            resolve(name)
        except (ImportError, AttributeError):
            missing.append(name)
    assert missing == []


def resolve(name: str) -> object:
    """Import ``package.module.name.attribute``."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        module = ".".join(parts[:length])
        try:
            found: object = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name is None or not module.startswith(error.name):
                raise
            continue
        for attribute in parts[length:]:
            found = getattr(found, attribute)
        return found
    raise ModuleNotFoundError(name)
