"""``fedapps init``: a project of one's own for Flower's ``flwr run``, with a task to change and every setting."""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path
from typing import Annotated

import typer

import fedapps
from fedapps.cli.common import told
from fedapps.errors import SettingsError
from fedapps.methods import method_groups
from fedapps.results.settings_file import to_toml
from fedapps.settings import default_config
from fedapps.simulation.app_folder import Components

PYPROJECT = """\
[project]
name = "{name}"
version = "0.1.0"
description = "A federation of one's own, run by fedapps"
license = "Apache-2.0"
# Install these yourself, on the SuperLink's machine and on every SuperNode's, and start the SuperLink with
# --disable-runtime-dependency-installation: else it installs them anew for every run.
dependencies = ["fedapps>={version}"]

[tool.flwr.app]
publisher = "me"

[tool.flwr.app.components]
serverapp = "{serverapp}"
clientapp = "{clientapp}"

# Every setting with its default: Flower takes no other key from --run-config. What is changed here holds for all runs.
# Leave the keys of a method (fedclup.lambda) as they are and give them with a run: another method refuses them.
[tool.flwr.app.config]
{config}"""

TASK = '''\
"""The task: where the data come from, and what the model is. This one tells two made-up classes apart."""

import numpy as np

from fedapps.tasks import Data, setting
from fedapps.tasks.convex_task import ConvexTask


class MyTask(ConvexTask):
    """Logistic regression; for a torch model derive from fedapps.tasks.torch_task.TorchTask and add build_model()."""

    class Options(ConvexTask.Options):
        """What --run-config task-options='examples = 1000' changes; a node changes it by --node-config, for itself."""

        examples: int = setting(200, "number of examples", ge=10)
        noise: float = setting(1.0, "deviation of the inputs from the middle of their class", gt=0)

    def load(self) -> tuple[Data, Data]:
        """Give training and test data: inputs (n, d), and targets -1 or +1. On a SuperNode read that node's own file here."""
        random = np.random.default_rng(0)
        y = np.where(np.arange(self.options.examples) % 2, 1, -1)
        X = 0.5 * y[:, None] + self.options.noise * random.normal(size=(len(y), 5))
        data = Data(X, y)
        return data.take(np.arange(len(y) // 5, len(y))), data.take(np.arange(len(y) // 5))
'''

README = """\
# {name}

`{module}.py` holds the task, `pyproject.toml` every setting with its default.

Here, with simulated clients (the simulation needs `pip install 'fedapps[simulation]'`):

```bash
export FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1
flwr run . --stream --run-config 'num-server-rounds=5'
flwr run . --stream --run-config 'method="fedclup" fedclup.export=true'
```

On a SuperLink whose nodes have data of their own (the connection `lab` of `~/.flwr/config.toml`):

```bash
flower-supernode ... --node-config 'name="ward-7" allow-tasks="{module}:MyTask" state-dir="/var/lib/fedapps"'
flwr run . lab --stream --run-config 'partition="local"'
```

Results are in `$FEDAPPS_RUNS` or `~/fedapps-runs` of the machine that the SuperLink runs on. The same task by fedapps'
own command, which ships `{module}.py` with the run and brings the results here:

```bash
fedapps run --task {module}:MyTask --engine inprocess
fedapps run --task {module}:MyTask --superlink lab
```
"""


def init(directory: Annotated[Path, typer.Argument(help="Folder of the project; made if missing.")]) -> None:
    """Write a project of one's own: a task to change, every setting, and how to run them with `flwr run`."""
    with told() as console:
        for path in write_project(directory.absolute()):
            console.print(f"wrote    {path}", soft_wrap=True)
        module, place = _module(directory.absolute()), shlex.quote(str(directory))
        console.print(f"next     cd {place} && fedapps run --task {module}:MyTask --engine inprocess", soft_wrap=True)


def write_project(folder: Path) -> list[Path]:
    """Write the project; its module has the folder's name.

    Args:
        folder: Absolute path; made if missing.

    Returns:
        The files.

    Raises:
        SettingsError: One of them is there already, or the name is taken by a module that is installed.
    """
    module = _module(folder)
    components = Components()
    config = to_toml({**default_config(method_groups()), "task": f"{module}:MyTask"})
    files = {
        "pyproject.toml": PYPROJECT.format(
            name=module.replace("_", "-"), version=fedapps.__version__, serverapp=components.serverapp,
            clientapp=components.clientapp, config=config,
        ),
        f"{module}.py": TASK,
        ".gitignore": "runs/\n__pycache__/\n",  # Flower's bundles leave these out, too.
        "README.md": README.format(name=module.replace("_", "-"), module=module),
    }  # fmt: skip
    for name in files:
        if (folder / name).exists():
            raise SettingsError(
                str(folder / name), expected="no such file yet", got="one", do="choose a new folder, or move it away"
            )
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    return [folder / name for name in files]


def _module(folder: Path) -> str:
    """Make the name of a Python module of a folder's name."""
    name = re.sub(r"[^a-z0-9]+", "_", folder.name.lower()).strip("_")
    if not name.isidentifier() or (importlib.util.find_spec(name) is not None and not (folder / f"{name}.py").exists()):
        raise SettingsError(
            f"project '{folder.name}'",
            expected="a name that begins with a letter and is no installed module's, since the project's module has it, too",
            got=repr(name),
            do="choose another folder",
        )
    return name
