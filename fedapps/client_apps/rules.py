"""What a node allows: its own configuration against the run config that a server sends.

A client takes its settings from the run config, which names tasks, methods, files, folders and amounts of work. The node's
operator says by ``--node-config`` which of them the node takes. Where server and clients are one user's processes, in
Flower's simulation and in process, everything is allowed. `docs/threat-model.md` says what this protects against.
"""

from __future__ import annotations

import difflib
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from logging import getLogger
from pathlib import Path
from typing import Any, Self

from flwr.app import Context, Message

from fedapps.compute import choose_device
from fedapps.errors import WITHHELD, FedAppsError, SettingsError
from fedapps.methods import METHODS, resolve_settings
from fedapps.results.settings_file import to_toml
from fedapps.settings import Settings, SettingsModel, default_of, is_path, key_of, keys_of, parse_toml_options, setting
from fedapps.tasks import TASKS, Task
from fedapps.tasks.base import DATA_VARIABLE, TaskKind
from fedapps.tasks.compressed import SUFFIXES
from fedapps.tasks.from_settings import load_task_of

logger = getLogger("flwr")

BUILT_IN = "built-in"
"""Stands for every built-in name in ``allow-tasks`` and ``allow-methods``."""

NODE_KEYS = ("partition-id", "num-partitions")
"""Keys of a node's configuration that are no rules."""

STEP_COUNTS = ("local_steps", "inner_steps", "num_probes")
"""Settings, shared ones and those of a method, that say how often a client repeats something in a round."""


class ClientError(FedAppsError):
    """What a server hears of an error on a node that is not its own."""


class NodeRules(SettingsModel):
    """The keys of a node's configuration; keys of another application beside them are left alone."""

    name: str = setting("", "what the node is called, its identity in runs where every node has data of its own")
    state_dir: str = setting(
        "", "folder that the client keeps its state in; empty = $FEDAPPS_STATE, else ~/.fedapps/clients"
    )
    trust_server: bool = setting(False, "whether server and node are one user's: then nothing below is checked")
    common_data: bool = setting(
        False, "whether this node's files are the same on all nodes, so that a run may cut them into partitions"
    )
    data_dir: str = setting("", "folder of this node's data files, in place of the run's data-dir")
    task_options: str = setting(
        "", "options of the task on this node, as TOML text, such as its own file, beside the run's"
    )
    allow_tasks: str = setting(
        BUILT_IN, "tasks, comma separated: names, module:Name, or built-in for all built-in ones"
    )
    allow_methods: str = setting(BUILT_IN, "methods, in the same form")
    data_dirs: str = setting(
        "", "folders, comma separated, that data-dir and task-options may name files in, beside $FEDAPPS_DATA"
    )
    max_local_epochs: int = setting(1000, "most local-epochs", ge=1)
    max_local_steps: int = setting(100_000, "most local-steps, inner-steps and num-probes", ge=1)
    max_batch_size: int = setting(0, "most examples in a batch; 0 = no bound", ge=0)
    max_compute_threads: int = setting(0, "most compute-threads; 0 = the processors of the machine", ge=0)
    resident_worker: bool = setting(
        False, "whether a process stays between the messages of a run, with model and data loaded"
    )
    resident_idle_minutes: float = setting(10.0, "minutes without a message after which that process ends", gt=0)
    devices: str = setting("", "devices, comma separated, such as cpu,cuda:1; empty = all")

    @classmethod
    def of(cls, node_config: Mapping[str, Any], place: str) -> Self:
        """Read a node's configuration.

        Args:
            node_config: Flower's.
            place: What error messages call it.

        Returns:
            The rules.

        Raises:
            SettingsError: A value is wrong, or a key is nearly one of these, so that a rule would be missed.
        """
        known = keys_of(cls)
        for key in node_config.keys() - known.keys() - set(NODE_KEYS):
            near = difflib.get_close_matches(key, [*known, *NODE_KEYS], n=1, cutoff=0.8)
            if near:
                raise SettingsError(
                    f"{place} '{key}'", expected="a known key", got="an unknown one", do=f"did you mean '{near[0]}'?"
                )
        given: dict[str, Any] = {key: node_config[key] for key in known if key in node_config}
        if _in_simulation():
            given = {"trust-server": True, "common-data": True, **given}
        return cls.from_keys(given, place)

    @classmethod
    def of_node(cls, context: Context) -> Self:
        """Read the configuration of a node; as `of`."""
        return cls.of(context.node_config, f"node {context.node_id}, node config")

    @property
    def state_folder(self) -> Path:
        """The folder that the node keeps its state in, where no run folder of the same user takes its place."""
        default = os.environ.get("FEDAPPS_STATE") or Path.home() / ".fedapps" / "clients"
        return Path(self.state_dir or default).expanduser()

    def resolve(self, run_config: Mapping[str, Any]) -> Settings:
        """Check and resolve a run config; nothing that it names is imported before it is allowed.

        Args:
            run_config: As the server sent it.

        Returns:
            The settings.

        Raises:
            SettingsError: The run config is wrong, or asks for what the node does not allow.
        """
        if self.trust_server:
            return self._on_own_data(resolve_settings(run_config))
        for key, rule, allowed, built_in in (
            ("task", "allow-tasks", self.allow_tasks, [row.name for row in TASKS]),
            ("method", "allow-methods", self.allow_methods, [row.name for row in METHODS]),
        ):
            name = run_config.get(key, default_of(keys_of(Settings)[key]))
            names = _items(allowed)
            if name not in names and not (BUILT_IN in names and name in built_in):
                raise _refused(key, f"one that the node allows ({allowed})", repr(name), rule)
        settings = self._on_own_data(resolve_settings(run_config))
        steps = [(name, getattr(part, name, 0)) for part in (settings, settings.own) for name in STEP_COUNTS]
        for key, value, rule, most in (
            ("local-epochs", settings.local_epochs, "max-local-epochs", self.max_local_epochs),
            *((key_of(name), value, "max-local-steps", self.max_local_steps) for name, value in steps),
            ("batch-size", settings.batch_size or sys.maxsize, "max-batch-size", self.max_batch_size or sys.maxsize),
            ("compute-threads", settings.compute_threads, "max-compute-threads",
             self.max_compute_threads or os.cpu_count() or 1),
        ):  # fmt: skip
            if value > most:
                got = "all of a client's examples" if value == sys.maxsize else str(value)
                raise _refused(key, f"at most {most} on this node", got, rule)
        return settings

    def _on_own_data(self, settings: Settings) -> Settings:
        """Refuse to cut up this node's own data, and put its folder and options in the place of the run's."""
        if settings.partition != "local" and not self.common_data:
            raise SettingsError(
                "setting 'partition'",
                expected="local on this node, whose data are its own",
                got=f"'{settings.partition}', by which it would train on one part of them only",
                do="run with --set partition=local (the default of --superlink), or start the node with common-data=true if"
                " all nodes have the same files",
            )
        update: dict[str, str] = {"data_dir": self.data_dir} if self.data_dir else {}
        if self.task_options:
            update["task_options"] = to_toml(
                parse_toml_options("task-options", settings.task_options) | self._own_options
            )
        return settings.model_copy(update=update)

    @property
    def _own_options(self) -> dict[str, Any]:
        return parse_toml_options("node config 'task-options'", self.task_options)

    def load_task(self, settings: Settings, agreed: Mapping[str, Any] | None = None) -> Task:
        """Load the task that the settings name, with files of the node's data folders only.

        Args:
            settings: What `resolve` gave.
            agreed: As for `load_task_of`.

        Returns:
            The task; nothing of its data is read yet.

        Raises:
            TaskError: As `load_task_of`.
            SettingsError: A file or folder lies elsewhere, or the device is not allowed.
        """
        task = load_task_of(settings, agreed)
        if self.trust_server:
            return task
        devices = _items(self.devices)
        if devices and task.kind != TaskKind.CONVEX and (device := choose_device(settings.device)) not in devices:
            raise _refused("device", f"one of {self.devices}", device, "devices")
        own = self._own_options
        named = [(key, getattr(task.options, name)) for name, key in _path_options(task) if key not in own]
        if settings.data_dir != self.data_dir:
            self._check_path("data-dir", settings.data_dir, [Path(settings.data_dir).expanduser()])
        for key, value in named:
            if value:
                self._check_path(f"task-options, {key}", value, task.places(value))
        return task

    def _check_path(self, key: str, value: str, places: list[Path]) -> None:
        """Refuse what leads out of the data folders; whether a file is there is told of these folders only."""
        folders = [
            Path(folder).expanduser().resolve() for folder in filter(None, [*_items(self.data_dirs), self.data_dir])
        ]
        if own := os.environ.get(DATA_VARIABLE):
            folders.append(Path(own).expanduser().resolve())
        given = Path(value).expanduser()
        leads_away = given.is_absolute() or ".." in given.parts
        for place in places:
            for suffix in SUFFIXES:
                path = Path(f"{place}{suffix}")
                inside = any(path.resolve().is_relative_to(folder) for folder in folders)
                if not inside and ((leads_away and not suffix) or path.exists()):
                    raise _refused(key, "a path in the data folders of the node", repr(value), "data-dirs")


def errors_hold_no_content(message: Message, context: Context, app: Callable[[Message, Context], Message]) -> Message:
    """Let no error carry the content of a file to another user's server: a mod of the ClientApp.

    Args:
        message: What the server sent.
        context: Flower's context of the node.
        app: The handler.

    Returns:
        The reply.

    Raises:
        ClientError: In place of any other error; the node's log has that one whole.
    """
    try:
        return app(message, context)
    except Exception as error:
        if _trusts(context):
            raise
        logger.exception("node %d", context.node_id)
        if isinstance(error, FedAppsError):
            told = error.outside()
        else:
            last = traceback.extract_tb(error.__traceback__)[-1]
            told = f"{Path(last.filename).name}, line {last.lineno}, {WITHHELD}"
        raise ClientError(f"{type(error).__name__}: {told}") from None


def _trusts(context: Context) -> bool:
    """Tell whether the server is this user's, also where another rule is wrong."""
    return context.node_config.get("trust-server", _in_simulation()) is True


def _in_simulation() -> bool:
    """Tell whether this is an actor of Flower's simulation engine: no SuperNode runs its clients in Ray."""
    ray = sys.modules.get("ray")
    return bool(ray and ray.is_initialized() and ray.get_runtime_context().get_actor_id())


def _path_options(task: Task) -> list[tuple[str, str]]:
    fields = type(task.options).model_fields
    return [(name, key_of(name)) for name, declared in fields.items() if is_path(declared)]


def _items(text: str) -> list[str]:
    return [item for item in (part.strip() for part in text.split(",")) if item]


def _refused(key: str, expected: str, got: str, rule: str) -> SettingsError:
    do = f"change it, or have the node's operator change '{rule}' in --node-config"
    return SettingsError(f"setting '{key}'", expected=expected, got=got, do=do)
