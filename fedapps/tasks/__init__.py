"""Tasks by name: the registry, and loading a built-in task or one of one's own.

Importing this package imports neither torch nor scikit-learn; a task's module is imported when the task is loaded.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fedapps.errors import TaskError, did_you_mean, import_advice
from fedapps.settings import setting
from fedapps.tasks.base import ClientData, Data, ServerData, Task, TaskConfig, TaskKind
from fedapps.tasks.partitioning import PartitionConfig, PartitionKind

__all__ = [
    "TASKS",
    "ClientData",
    "Data",
    "PartitionConfig",
    "PartitionKind",
    "ServerData",
    "Task",
    "TaskConfig",
    "TaskInfo",
    "TaskKind",
    "load_task",
    "setting",
    "task_class",
    "task_group",
    "task_kind",
]


@dataclass(frozen=True)
class TaskInfo:
    """One row of the registry."""

    name: str  # value of the setting ``task``
    target: str  # ``module:class``
    kind: TaskKind
    about: str  # the task in one line
    source: str  # where the data comes from, and how it gets here
    licence: str  # licence of the data, as stated
    download: bool  # whether the user must fetch a file first
    group: str  # tasks that share tuned settings; "" if the task shares them with all of its kind only


def _family(
    module: str,
    kind: TaskKind,
    *,
    group: str = "",
    download: bool = False,
    rows: Sequence[tuple[str, str, str, str, str]],
) -> tuple[TaskInfo, ...]:
    """Make rows of tasks that share a module and more; of each the name, the class, about, source and licence are given."""
    return tuple(
        TaskInfo(name, f"fedapps.tasks.{module}:{cls}", kind, about, source, licence, download, group)
        for name, cls, about, source, licence in rows
    )


_DIGITS = ("UCI Optical Recognition of Handwritten Digits, bundled with scikit-learn", "CC BY 4.0")
_TABLE = ("a file of your own", "that of the file")
_DRAWN = ("drawn from the seed (arXiv 2410.08934, experiments)", "none needed")

TASKS: tuple[TaskInfo, ...] = (
    *_family("digits", TaskKind.TORCH, rows=[
        ("digits", "DigitsTask",
         "handwritten digits, 1,797 images of 8 x 8 pixels in 10 classes, small CNN",
         *_DIGITS),
        ("digits-mlp", "DigitsMlpTask",
         "the same digits, small MLP: for methods that need many cheap passes",
         *_DIGITS),
    ]),
    *_family("images", TaskKind.TORCH, rows=[
        ("mnist", "MnistTask",
         "handwritten digits, 60,000 images of 28 x 28 pixels in 10 classes, simple CNN",
         "LeCun, Cortes & Burges: IDX files in the data folder, or downloaded by torchvision",
         "none stated by the authors (often given as CC BY-SA 3.0)"),
        ("cifar10", "Cifar10Task",
         "photographs, 50,000 images of 32 x 32 pixels in 10 classes, simple CNN or ResNet-18",
         "Krizhevsky 2009: cifar10_subset.npz in the data folder, or all of it downloaded by torchvision",
         "none stated; the authors ask to be cited"),
        ("cifar100", "Cifar100Task",
         "photographs, 50,000 images of 32 x 32 pixels in 100 classes, ResNet-18 or simple CNN",
         "Krizhevsky 2009: cifar100_subset.npz in the data folder, or all of it downloaded by torchvision",
         "none stated; the authors ask to be cited"),
    ]),
    *_family("language.task", TaskKind.TORCH, group="language", rows=[
        ("sst2", "Sst2Task",
         "film reviews, 67,349 sentences in 2 classes (sentiment), answered by a language model",
         "SST-2 (GLUE): sst2/train.tsv, dev.tsv in the data folder, or nyu-mll/glue of the hub",
         "none stated by GLUE / SST"),
        ("qqp", "QqpTask",
         "pairs of questions in 2 classes (asking the same or not), answered by a language model",
         "Quora Question Pairs: qqp/train.jsonl, dev.jsonl in the data folder, or nyu-mll/glue of the hub",
         "Quora terms of service (non-commercial use)"),
        ("rte", "RteTask",
         "pairs of texts, 2,490 in 2 classes (entailment or not), answered by a language model",
         "RTE (GLUE): rte/train.jsonl, dev.jsonl in the data folder, or nyu-mll/glue of the hub",
         "none stated by GLUE"),
        ("cb", "CbTask",
         "pairs of texts, 250 in 3 classes (entailment, contradiction, neither), answered by a language model",
         "CommitmentBank (SuperGLUE): superglue_small/cb_*.jsonl in the data folder, or aps/super_glue of the hub",
         "none stated (research use)"),
        ("boolq", "BoolqTask",
         "yes-or-no questions about a passage, answered by a language model",
         "BoolQ (SuperGLUE): superglue_small/boolq_*.jsonl in the data folder, or aps/super_glue of the hub",
         "CC BY-SA 3.0"),
        ("wic", "WicTask",
         "a word in two sentences, 2 classes (same sense or not), answered by a language model",
         "WiC (SuperGLUE): superglue_small/wic_*.jsonl in the data folder, or aps/super_glue of the hub",
         "CC BY-NC 4.0"),
    ]),
    *_family("language.squad", TaskKind.TORCH, group="language", rows=[
        ("squad", "SquadTask",
         "questions about a passage, answered by a language model in its own words (F1 and exact match)",
         "SQuAD v1.1: squad/train_subset.jsonl, dev_subset.jsonl in the data folder, or rajpurkar/squad of the hub",
         "CC BY-SA 4.0"),
    ]),
    *_family("libsvm", TaskKind.CONVEX, download=True, rows=[
        ("a9a", "A9aTask",
         "census income, 32,561 examples with 123 features, L2-regularised logistic regression",
         "UCI Adult, LIBSVM form: files a9a and a9a.t in the data folder", "CC BY 4.0"),
        ("w8a", "W8aTask",
         "web pages, 49,749 examples with 300 features, L2-regularised logistic regression",
         "Platt, LIBSVM form: file w8a in the data folder", "none stated"),
        ("libsvm", "LibsvmTask",
         "any LIBSVM file with two classes (options file, test-file), L2-regularised logistic regression",
         *_TABLE),
    ]),
    *_family("table", TaskKind.CONVEX, group="table", rows=[
        ("table", "TableTask",
         "any CSV or Parquet table with two classes (options file, label, ...), L2-regularised logistic regression",
         *_TABLE),
    ]),
    *_family("table_net", TaskKind.TORCH, group="table", rows=[
        ("table-net", "TableNetTask",
         "any CSV or Parquet table with two classes or more (options file, label, hidden, ...), small MLP",
         *_TABLE),
        ("table-regression", "TableRegressionTask",
         "any CSV or Parquet table whose label is a number, small MLP",
         *_TABLE),
    ]),
    *_family("synthetic", TaskKind.CONVEX, rows=[
        ("synthetic-linear", "SyntheticLinearTask",
         "linear regression whose clients' true parameters differ by R and are known (options clients, examples, ...)",
         *_DRAWN),
        ("synthetic-logistic", "SyntheticLogisticTask",
         "logistic regression whose clients' true parameters differ by R and are known",
         *_DRAWN),
    ]),
)  # fmt: skip
"""The built-in tasks."""

MAX_LOADED = 4
"""Most tasks that `load_task` keeps in a process; the one that was used longest ago is dropped first."""

_loaded: OrderedDict[tuple[type[Task], str], Task] = OrderedDict()


def task_kind(name: str) -> TaskKind:
    """Tell the kind of a task; for a built-in one without importing it.

    Raises:
        TaskError: There is no such task.
    """
    return next((row.kind for row in TASKS if row.name == name), None) or task_class(name).kind


def task_group(name: str) -> str:
    """Tell the group of a task, with which it shares tuned settings; ``""`` if there is none."""
    return next((row.group for row in TASKS if row.name == name), "")


def task_class(name: str) -> type[Task]:
    """Import the class of a task, by its name or as ``my_pkg.my_mod:MyTask``; it must be a complete subclass of `Task`."""
    row = next((row for row in TASKS if row.name == name), None)
    if row is None and ":" not in name:
        known = [row.name for row in TASKS]
        raise TaskError(
            f"task '{name}'",
            expected="one of " + ", ".join(known) + ", or my_pkg.my_mod:MyTask",
            got="an unknown name",
            do=did_you_mean(name, known, "see `fedapps tasks`"),
        )
    cls = _import(name, row.target if row else name)
    missing = sorted(getattr(cls, "__abstractmethods__", ()))
    if not (isinstance(cls, type) and issubclass(cls, Task)) or missing:
        raise TaskError(
            f"task '{name}'",
            expected="a subclass of fedapps.tasks.torch_task.TorchTask or fedapps.tasks.convex_task.ConvexTask",
            got=f"one that lacks {', '.join(missing)}" if missing else repr(cls),
            do="see the example in fedapps.tasks.torch_task",
        )
    return cls


def load_task(name: str, config: TaskConfig) -> Task:
    """Load a task; asked again in the same process for the same, give the same object, so that data is read once.

    Raises:
        TaskError: There is no such task, it cannot be imported, or an option is wrong.
    """
    task = task_class(name)(config, name)
    key = (type(task), repr((name, task.data_dir, dataclasses.replace(config, options=task.options.model_dump()))))
    task = _loaded.setdefault(key, task)
    _loaded.move_to_end(key)
    if len(_loaded) > MAX_LOADED:
        _loaded.popitem(last=False)
    return task


def _import(name: str, target: str) -> Any:
    module_name, _, attribute = target.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        own = target == name
        raise TaskError(
            f"task '{name}'",
            expected=f"a module '{module_name}' with a class '{attribute}'" if own else "the packages it needs",
            got=f"{type(error).__name__}: {error}",
            do=import_advice(error, module_name) if own else "install fedapps[torch]",
        ) from error
    if not hasattr(module, attribute):
        raise TaskError(
            f"task '{name}'",
            expected=f"a class '{attribute}' in module '{module_name}' ({module.__file__})",
            got="no such attribute",
            do=did_you_mean(attribute, dir(module), "name a class that the module defines"),
        )
    return getattr(module, attribute)
