"""The modules that a run takes along are the user's, whole, and no others."""

from __future__ import annotations

import zipfile
from io import BytesIO
from pathlib import Path

import pytest
from flwr.cli.build import build_fab_from_disk

from fedapps.errors import LaunchError
from fedapps.simulation import own_modules as module_under_test
from fedapps.simulation.app_folder import write_app_folder
from fedapps.simulation.own_modules import own_modules

PACKAGE = {
    "wards/__init__.py": "", "wards/tasks/beds.py": "X = 1\n", "wards/tasks/__init__.py": "", "wards/vocabulary.json": "{}",
    "wards/README.md": "# Wards", "wards/config.yaml": "a: 1",
}  # fmt: skip
LEFT = {"wards/beds.csv": "1,2\n", "wards/tasks/test_beds.py": ""}
NEVER = {"wards/__pycache__/beds.pyc": "", "wards/.secret/key.py": "", "other.py": "", "pyproject.toml": "[project]"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in (PACKAGE | LEFT | NEVER).items():
        path = tmp_path / "work" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "work" / ".gitignore").write_text("*\n")  # Results are ignored, say; a module that is named is wanted.
    return tmp_path / "work"


def test_flower_packs_all_files_that_are_listed_and_no_others(tmp_path: Path, folder: Path) -> None:
    (folder / "single.py").write_text("METHOD = 1\n")
    modules = own_modules({"task": "wards.tasks.beds:Beds", "method": "single:METHOD"}, [tmp_path, folder])
    assert [module.name for module in modules] == ["wards", "single"]
    assert set(modules[0].files) == PACKAGE.keys()
    assert set(modules[0].left) == LEFT.keys()
    told = modules[0].told()
    assert all(name in told for name in PACKAGE | LEFT)
    write_app_folder(tmp_path / "app", {"seed": 1}, modules=modules)
    with zipfile.ZipFile(BytesIO(build_fab_from_disk(tmp_path / "app"))) as bundle:
        assert set(bundle.namelist()) == {".info/CONTENT", "pyproject.toml", "single.py", *PACKAGE}
        assert bundle.read("wards/tasks/beds.py") == b"X = 1\n"


@pytest.mark.parametrize(
    "task", ["digits", "installed_package.tasks:X", "numpy.random:X", "fedapps.tasks.digits:Digits"]
)
def test_what_does_not_lie_in_the_working_folder_is_taken_to_be_installed(folder: Path, task: str) -> None:
    (folder / "fedapps").mkdir()
    (folder / "fedapps" / "__init__.py").touch()  # A checkout.
    assert own_modules({"task": task, "method": "fedavg"}, [folder]) == []


def test_a_package_of_a_task_and_a_method_goes_once(folder: Path) -> None:
    assert len(own_modules({"task": "wards.tasks.beds:Beds", "method": "wards.tasks:M"}, [folder, folder])) == 1


@pytest.mark.parametrize("name", ["build", "lib", "test_wards", "wards_test", "statistics"])
def test_a_name_that_would_be_left_out_or_hide_another_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / f"{name}.py").touch()
    with pytest.raises(LaunchError, match=f"task '{name}:X' in .*got '{name}'; rename the module"):
        own_modules({"task": f"{name}:X"}, [tmp_path])


def test_a_module_that_flower_leaves_out_of_a_package_is_refused(folder: Path) -> None:
    with pytest.raises(LaunchError, match="got 'wards/tasks/test_beds'"):
        own_modules({"task": "wards.tasks.test_beds:X"}, [folder])


def test_too_much_code_is_refused_by_its_largest_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_under_test, "MOST_BYTES", 1000)
    (folder / "wards" / "table.json").write_text(" " * 2000)
    with pytest.raises(LaunchError, match=r"at most 1\.00 kB of code.*of which wards/table\.json 2\.00 kB"):
        own_modules({"task": "wards.tasks.beds:Beds"}, [folder])
