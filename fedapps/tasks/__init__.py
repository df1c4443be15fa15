"""Tasks by name: the registry, and loading a built-in task or one of one's own.

Importing this package imports neither torch nor scikit-learn; a task's module is imported when the task is loaded.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from fedapps.errors import TaskError, did_you_mean
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
    """One row of the registry.

    Attributes:
        name: Value of the setting ``task``.
        target: ``module:class``.
        kind: What the model is.
        about: The task in one line.
        source: Where the data comes from, and how it gets here.
        licence: Licence of the data, as stated.
        download: Whether the user must fetch a file first.
        group: Tasks that share tuned settings; ``""`` if the task shares them with all of its kind only.
    """

    name: str
    target: str
    kind: TaskKind
    about: str
    source: str
    licence: str
    download: bool
    group: str = ""


TASKS: tuple[TaskInfo, ...] = (
    TaskInfo(
        name="digits",
        target="fedapps.tasks.digits:DigitsTask",
        kind=TaskKind.TORCH,
        about="handwritten digits, 1,797 images of 8 x 8 pixels in 10 classes, small CNN",
        source="UCI Optical Recognition of Handwritten Digits, bundled with scikit-learn",
        licence="CC BY 4.0",
        download=False,
    ),
    TaskInfo(
        name="digits-mlp",
        target="fedapps.tasks.digits:DigitsMlpTask",
        kind=TaskKind.TORCH,
        about="the same digits, small MLP: for methods that need many cheap passes",
        source="UCI Optical Recognition of Handwritten Digits, bundled with scikit-learn",
        licence="CC BY 4.0",
        download=False,
    ),
    TaskInfo(
        name="mnist",
        target="fedapps.tasks.images:MnistTask",
        kind=TaskKind.TORCH,
        about="handwritten digits, 60,000 images of 28 x 28 pixels in 10 classes, simple CNN",
        source="LeCun, Cortes & Burges: IDX files in the data folder, or downloaded by torchvision",
        licence="none stated by the authors (often given as CC BY-SA 3.0)",
        download=False,
    ),
    TaskInfo(
        name="cifar10",
        target="fedapps.tasks.images:Cifar10Task",
        kind=TaskKind.TORCH,
        about="photographs, 50,000 images of 32 x 32 pixels in 10 classes, simple CNN or ResNet-18",
        source="Krizhevsky 2009: cifar10_subset.npz in the data folder, or all of it downloaded by torchvision",
        licence="none stated; the authors ask to be cited",
        download=False,
    ),
    TaskInfo(
        name="cifar100",
        target="fedapps.tasks.images:Cifar100Task",
        kind=TaskKind.TORCH,
        about="photographs, 50,000 images of 32 x 32 pixels in 100 classes, ResNet-18 or simple CNN",
        source="Krizhevsky 2009: cifar100_subset.npz in the data folder, or all of it downloaded by torchvision",
        licence="none stated; the authors ask to be cited",
        download=False,
    ),
    TaskInfo(
        name="sst2",
        target="fedapps.tasks.language.task:Sst2Task",
        kind=TaskKind.TORCH,
        about="film reviews, 67,349 sentences in 2 classes (sentiment), answered by a language model",
        source="SST-2 (GLUE): sst2/train.tsv, dev.tsv in the data folder, or nyu-mll/glue of the hub",
        licence="none stated by GLUE / SST",
        download=False,
        group="language",
    ),
    TaskInfo(
        name="qqp",
        target="fedapps.tasks.language.task:QqpTask",
        kind=TaskKind.TORCH,
        about="pairs of questions in 2 classes (asking the same or not), answered by a language model",
        source="Quora Question Pairs: qqp/train.jsonl, dev.jsonl in the data folder, or nyu-mll/glue of the hub",
        licence="Quora terms of service (non-commercial use)",
        download=False,
        group="language",
    ),
    TaskInfo(
        name="rte",
        target="fedapps.tasks.language.task:RteTask",
        kind=TaskKind.TORCH,
        about="pairs of texts, 2,490 in 2 classes (entailment or not), answered by a language model",
        source="RTE (GLUE): rte/train.jsonl, dev.jsonl in the data folder, or nyu-mll/glue of the hub",
        licence="none stated by GLUE",
        download=False,
        group="language",
    ),
    TaskInfo(
        name="cb",
        target="fedapps.tasks.language.task:CbTask",
        kind=TaskKind.TORCH,
        about="pairs of texts, 250 in 3 classes (entailment, contradiction, neither), answered by a language model",
        source="CommitmentBank (SuperGLUE): superglue_small/cb_*.jsonl in the data folder, or aps/super_glue of the hub",
        licence="none stated (research use)",
        download=False,
        group="language",
    ),
    TaskInfo(
        name="boolq",
        target="fedapps.tasks.language.task:BoolqTask",
        kind=TaskKind.TORCH,
        about="yes-or-no questions about a passage, answered by a language model",
        source="BoolQ (SuperGLUE): superglue_small/boolq_*.jsonl in the data folder, or aps/super_glue of the hub",
        licence="CC BY-SA 3.0",
        download=False,
        group="language",
    ),
    TaskInfo(
        name="wic",
        target="fedapps.tasks.language.task:WicTask",
        kind=TaskKind.TORCH,
        about="a word in two sentences, 2 classes (same sense or not), answered by a language model",
        source="WiC (SuperGLUE): superglue_small/wic_*.jsonl in the data folder, or aps/super_glue of the hub",
        licence="CC BY-NC 4.0",
        download=False,
        group="language",
    ),
    TaskInfo(
        name="squad",
        target="fedapps.tasks.language.squad:SquadTask",
        kind=TaskKind.TORCH,
        about="questions about a passage, answered by a language model in its own words (F1 and exact match)",
        source="SQuAD v1.1: squad/train_subset.jsonl, dev_subset.jsonl in the data folder, or rajpurkar/squad of the hub",
        licence="CC BY-SA 4.0",
        download=False,
        group="language",
    ),
    TaskInfo(
        name="a9a",
        target="fedapps.tasks.libsvm:A9aTask",
        kind=TaskKind.CONVEX,
        about="census income, 32,561 examples with 123 features, L2-regularised logistic regression",
        source="UCI Adult, LIBSVM form: files a9a and a9a.t in the data folder",
        licence="CC BY 4.0",
        download=True,
    ),
    TaskInfo(
        name="w8a",
        target="fedapps.tasks.libsvm:W8aTask",
        kind=TaskKind.CONVEX,
        about="web pages, 49,749 examples with 300 features, L2-regularised logistic regression",
        source="Platt, LIBSVM form: file w8a in the data folder",
        licence="none stated",
        download=True,
    ),
    TaskInfo(
        name="libsvm",
        target="fedapps.tasks.libsvm:LibsvmTask",
        kind=TaskKind.CONVEX,
        about="any LIBSVM file with two classes (options file, test-file), L2-regularised logistic regression",
        source="a file of your own",
        licence="that of the file",
        download=True,
    ),
    TaskInfo(
        name="synthetic-linear",
        target="fedapps.tasks.synthetic:SyntheticLinearTask",
        kind=TaskKind.CONVEX,
        about="linear regression whose clients' true parameters differ by R and are known (options clients, examples, ...)",
        source="drawn from the seed (arXiv 2410.08934, experiments)",
        licence="none needed",
        download=False,
    ),
    TaskInfo(
        name="synthetic-logistic",
        target="fedapps.tasks.synthetic:SyntheticLogisticTask",
        kind=TaskKind.CONVEX,
        about="logistic regression whose clients' true parameters differ by R and are known",
        source="drawn from the seed (arXiv 2410.08934, experiments)",
        licence="none needed",
        download=False,
    ),
)
"""The built-in tasks."""

MAX_LOADED = 4
"""Most tasks that `load_task` keeps in a process; the one that was used longest ago is dropped first."""

_loaded: OrderedDict[tuple[type[Task], str], Task] = OrderedDict()


def task_kind(name: str) -> TaskKind:
    """Tell the kind of a task; for a built-in one without importing it.

    Args:
        name: A name, or ``my_pkg.my_mod:MyTask``.

    Returns:
        The kind.

    Raises:
        TaskError: There is no such task.
    """
    return next((row.kind for row in TASKS if row.name == name), None) or task_class(name).kind


def task_group(name: str) -> str:
    """Tell which tasks a task shares tuned settings with.

    Args:
        name: A name, or ``my_pkg.my_mod:MyTask``.

    Returns:
        Their group; ``""`` if there is none.
    """
    return next((row.group for row in TASKS if row.name == name), "")


def task_class(name: str) -> type[Task]:
    """Import the class of a task.

    Args:
        name: A name, or ``my_pkg.my_mod:MyTask``.

    Returns:
        The class.

    Raises:
        TaskError: There is no such task, it cannot be imported, or it is not a complete subclass of `Task`.
    """
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

    Args:
        name: A name, or ``my_pkg.my_mod:MyTask`` for one of one's own.
        config: What the settings say about the task.

    Returns:
        The task.

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
        absent = isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}.")
        advice = "put the folder that holds it on the Python path (PYTHONPATH)" if absent else "correct the module"
        raise TaskError(
            f"task '{name}'",
            expected=f"a module '{module_name}' with a class '{attribute}'" if own else "the packages it needs",
            got=f"{type(error).__name__}: {error}",
            do=advice if own else "install fedapps[torch]",
        ) from error
    if not hasattr(module, attribute):
        raise TaskError(
            f"task '{name}'",
            expected=f"a class '{attribute}' in module '{module_name}' ({module.__file__})",
            got="no such attribute",
            do=did_you_mean(attribute, dir(module), "name a class that the module defines"),
        )
    return getattr(module, attribute)
