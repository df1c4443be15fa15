"""Tests of ``fedapps/tasks/__init__.py``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fedapps import tasks
from fedapps.errors import TaskError
from fedapps.tasks import TASKS, PartitionConfig, PartitionKind, TaskConfig, load_task, task_class

DATA = Path(__file__).parents[1] / "data"


@pytest.mark.parametrize("row", TASKS, ids=lambda row: row.name)
def test_every_row_can_be_imported_and_is_of_its_kind(row):
    assert task_class(row.name).kind == row.kind == tasks.task_kind(row.name)
    assert row.about
    assert row.source
    assert row.licence


def test_listing_and_convex_tasks_import_nothing_heavy():
    code = (
        "import sys, fedapps.tasks as t; t.task_kind('digits'); t.task_class('a9a'); t.task_class('table');"
        "print([m for m in ('torch', 'sklearn', 'datasets', 'flwr_datasets', 'pyarrow', 'flwr') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"


def test_a_task_is_loaded_once_a_process(monkeypatch):
    monkeypatch.setattr(tasks, "_loaded", type(tasks._loaded)())
    first = load_task("a9a", TaskConfig(data_dir=DATA))
    assert load_task("a9a", TaskConfig(data_dir=DATA, options={"num-features": 123})) is first  # 123 is the default
    for other in [
        TaskConfig(data_dir=DATA, seed=1),
        TaskConfig(data_dir=DATA, options={"regularisation": 0.5}),
        TaskConfig(data_dir=DATA, partition=PartitionConfig(PartitionKind.IID)),
        TaskConfig(data_dir=DATA, validation_fraction=0.5),
        TaskConfig(data_dir=DATA / "libsvm"),
    ]:
        assert load_task("a9a", other) is not first
    assert len(tasks._loaded) == tasks.MAX_LOADED
    assert load_task("a9a", TaskConfig(data_dir=DATA)) is not first  # dropped: used longest ago


def test_what_was_used_lately_is_kept(monkeypatch):
    monkeypatch.setattr(tasks, "_loaded", type(tasks._loaded)())
    first = load_task("a9a", TaskConfig(data_dir=DATA))
    for seed in range(1, 2 * tasks.MAX_LOADED):
        load_task("a9a", TaskConfig(data_dir=DATA, seed=seed))
        assert load_task("a9a", TaskConfig(data_dir=DATA)) is first


def test_the_data_folder_of_the_environment_is_part_of_what_is_asked_for(monkeypatch, tmp_path):
    monkeypatch.setenv("FEDAPPS_DATA", str(tmp_path))
    first = load_task("a9a", TaskConfig())
    monkeypatch.setenv("FEDAPPS_DATA", str(DATA))
    assert load_task("a9a", TaskConfig()) is not first


MODULES = {
    "empty.py": "",
    "broken.py": "import a_package_that_does_not_exist\n",
    "wrong.py": "def Function(): ...\nclass Plain: ...\n",
    "partial.py": "from fedapps.tasks.torch_task import TorchTask\nclass Partial(TorchTask):\n    def load(self): ...\n",
    "syntax.py": "class (:\n",
}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        pytest.param("digit", "task 'digit': expected one of digits, .*did you mean 'digits'", id="misspelt"),
        pytest.param("nothing-like-it", "an unknown name; see `fedapps tasks`", id="unknown"),
        pytest.param(
            "absent_pkg.mod:MyTask",
            "expected a module 'absent_pkg.mod' with a class 'MyTask', got ModuleNotFoundError.*Python path, or install it",
            id="no-package",
        ),
        pytest.param("tasks_pkg.absent:MyTask", "got ModuleNotFoundError.*check the spelling", id="no-module"),
        pytest.param(
            "tasks_pkg.broken:MyTask",
            "'a_package_that_does_not_exist'; install 'a_package_that_does_not_exist'",
            id="import-in-it-fails",
        ),
        pytest.param("tasks_pkg.syntax:MyTask", "got SyntaxError.*correct the module", id="syntax-error"),
        pytest.param("tasks_pkg.empty:MyTask", "a class 'MyTask' in module 'tasks_pkg.empty'", id="no-class"),
        pytest.param("tasks_pkg.wrong:Plaim", "did you mean 'Plain'", id="misspelt-class"),
        pytest.param("tasks_pkg.wrong:Plain", "a subclass of.*got <class 'tasks_pkg.wrong.Plain'>", id="other-class"),
        pytest.param("tasks_pkg.wrong:Function", "a subclass of.*got <function", id="function"),
        pytest.param("tasks_pkg.partial:Partial", "got one that lacks build_model", id="incomplete"),
        pytest.param(":MyTask", "expected a module '' with a class 'MyTask'", id="no-module-name"),
        pytest.param("tasks_pkg.empty:", "a class ''", id="no-class-name"),
    ],
)
def test_tasks_that_cannot_be_loaded(name, message, tmp_path, monkeypatch):
    (tmp_path / "tasks_pkg").mkdir()
    for file, text in MODULES.items():
        (tmp_path / "tasks_pkg" / file).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    for module in [m for m in sys.modules if m.startswith("tasks_pkg")]:
        monkeypatch.delitem(sys.modules, module)
    with pytest.raises(TaskError, match=message):
        load_task(name, TaskConfig())


def test_a_missing_package_of_a_built_in_task_says_what_to_install(monkeypatch):
    monkeypatch.delitem(sys.modules, "fedapps.tasks.digits", raising=False)
    monkeypatch.setitem(sys.modules, "fedapps.tasks.torch_task", None)
    with pytest.raises(TaskError, match=r"task 'digits'.*install fedapps\[torch\]"):
        task_class("digits")
