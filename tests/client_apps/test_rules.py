"""What a node allows a server: names, files, amounts; and that no error tells it what a file holds."""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MessageType, RecordDict

from fedapps.client_apps import app
from fedapps.client_apps.rules import ClientError, NodeRules
from fedapps.client_apps.work import unpack_work
from fedapps.errors import SettingsError
from fedapps.methods import METHODS
from fedapps.settings import is_path, keys_of
from fedapps.tasks import TASKS, task_class

DATA = Path(__file__).parents[1] / "data"
SECRET = "hunter2"


def context_of(config: dict[str, Any], **node_config: Any) -> Context:
    node = {
        "partition-id": 0,
        "num-partitions": 2,
        "common-data": True,
        **{key.replace("_", "-"): v for key, v in node_config.items()},
    }
    return Context(run_id=1, node_id=7, node_config=node, state=RecordDict(), run_config=config)


def resolve(config: dict[str, Any], **node_config: Any) -> Any:
    return NodeRules.of_node(context_of(config, **node_config)).resolve(config)


def load(config: dict[str, Any], **node_config: Any) -> Any:
    rules = NodeRules.of_node(context_of(config, **node_config))
    return rules.load_task(rules.resolve(config))


def options(**values: str) -> dict[str, Any]:
    text = "\n".join(f"{key} = {json.dumps(value)}" for key, value in values.items())
    return {"task": "libsvm", "method": "fedavg", "task-options": text}


def query(config: dict[str, Any], **node_config: Any) -> Message:
    message = Message(RecordDict({"config": ConfigRecord({})}), dst_node_id=7, message_type=MessageType.QUERY)
    return app(message, context_of(config, **node_config))


@pytest.mark.parametrize("key", ["task", "method"])
@pytest.mark.parametrize("name", ["fedapps_never:Thing", "fedapps.tasks.digits:DigitsTask", "never", "", 3])
def test_only_built_in_names_are_allowed_and_nothing_else_is_imported(key: str, name: Any, tmp_path: Path) -> None:
    (tmp_path / "fedapps_never.py").write_text("raise AssertionError('imported')")
    sys.path.insert(0, str(tmp_path))
    try:
        with pytest.raises(SettingsError, match=f"setting '{key}': expected one that the node allows"):
            resolve({key: name})
    finally:
        sys.path.remove(str(tmp_path))


@pytest.mark.parametrize("task", [row.name for row in TASKS if row.kind == "convex"])
def test_every_built_in_task_is_allowed(task: str) -> None:
    assert resolve({"task": task, "method": "fedavg"}).task == task


@pytest.mark.parametrize("method", [row.name for row in METHODS])
def test_every_built_in_method_is_allowed_with_its_own_defaults(method: str) -> None:
    assert resolve({"task": "digits", "method": method}).method == method


def test_a_node_may_allow_less_or_more(own_module: str) -> None:
    mine = {"task": f"{own_module}:Lines", "method": f"{own_module}:MEMORY", "lr": 0.1}
    rules = {"allow_tasks": f"built-in, {own_module}:Lines", "allow_methods": f"{own_module}:MEMORY"}
    assert resolve({**mine, "method": f"{own_module}:MEMORY", "task": "digits"}, **rules).task == "digits"
    with pytest.raises(SettingsError, match="setting 'method'"):
        resolve({"task": "digits", "method": "fedavg"}, **rules)
    with pytest.raises(SettingsError, match="setting 'task'"):
        resolve({"task": "digits"}, allow_tasks="a9a,w8a")


@pytest.mark.parametrize(
    ("config", "node_config", "key", "rule"),
    [
        ({"local-epochs": 10**9}, {}, "local-epochs", "max-local-epochs"),
        ({"local-steps": 10**9}, {}, "local-steps", "max-local-steps"),
        ({"method": "pfedme", "pfedme.inner-steps": 10**9}, {}, "inner-steps", "max-local-steps"),
        ({"method": "hiso", "hiso.num-probes": 10**9}, {}, "num-probes", "max-local-steps"),
        ({"compute-threads": 1 + (os.cpu_count() or 1)}, {}, "compute-threads", "max-compute-threads"),
        ({"compute-threads": 2}, {"max_compute_threads": 1}, "compute-threads", "max-compute-threads"),
        ({"batch-size": 33}, {"max_batch_size": 32}, "batch-size", "max-batch-size"),
        ({"batch-size": 0}, {"max_batch_size": 32}, "batch-size", "max-batch-size"),
    ],
)
def test_work_is_bounded(config: dict[str, Any], node_config: dict[str, Any], key: str, rule: str) -> None:
    with pytest.raises(SettingsError, match=f"setting '{key}': expected at most .*'{rule}'"):
        resolve({"task": "digits", **config}, **node_config)
    assert resolve({"task": "digits", **config}, trust_server=True)


def test_a_device_is_used_only_if_the_node_says_so() -> None:
    config = {"task": "digits", "method": "fedavg", "device": "cpu"}
    assert load(config, devices="cuda:1, cpu")
    with pytest.raises(SettingsError, match="setting 'device': expected one of cuda:1, got cpu"):
        load(config, devices="cuda:1")


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data folder, and beside it a file that no server shall read."""
    monkeypatch.delenv("FEDAPPS_DATA", raising=False)
    (tmp_path / "data" / "libsvm").mkdir(parents=True)
    (tmp_path / "data2").mkdir()
    for file in (tmp_path / "secret", tmp_path / "secret.gz", tmp_path / "data2" / "secret"):
        file.write_text(f"{SECRET} 1:1\n")
    shutil.copy(DATA / "libsvm" / "a9a.gz", tmp_path / "data" / "libsvm" / "a9a.gz")
    (tmp_path / "data" / "link").symlink_to(tmp_path / "secret")
    (tmp_path / "data" / "packed.gz").symlink_to(tmp_path / "secret.gz")
    (tmp_path / "data" / "libsvm" / "inner").symlink_to(tmp_path / "secret")
    return tmp_path


@pytest.mark.parametrize(
    "name",
    ["{}/secret", "../secret", "../data2/secret", "../absent", "/absent", "link", "packed", "inner", "~/secret", ".."],
)
@pytest.mark.parametrize("key", ["file", "test-file"])
def test_no_option_leads_out_of_the_data_folders(places: Path, name: str, key: str) -> None:
    """Not by an absolute path, ``..``, or a symbolic link; what is not there reads the same as what is."""
    config = {**options(**{"file": "a9a", key: name.format(places)}), "data-dir": str(places / "data")}
    with pytest.raises(SettingsError, match=f"'task-options, {key}': expected a path in the data folders"):
        load(config, data_dirs=str(places / "data"))


@pytest.mark.parametrize("folder", ["data2", "data/../data2", ".", "absent"])
def test_the_data_folder_of_a_run_lies_in_those_of_the_node(places: Path, folder: str) -> None:
    config = {**options(file="a9a"), "data-dir": str(places / folder)}
    with pytest.raises(SettingsError, match="setting 'data-dir': expected a path in the data folders"):
        load(config, data_dirs=str(places / "data"))
    with pytest.raises(SettingsError, match="setting 'data-dir'"):
        load(config)


def test_files_in_the_data_folders_are_read(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {**options(file="a9a"), "data-dir": str(places / "data")}
    assert len(load(config, data_dirs=f"/absent, {places / 'data'}").client_data(0, 2).train) > 0
    monkeypatch.setenv("FEDAPPS_DATA", str(places / "data"))
    assert load(options(file="libsvm/a9a"))
    assert load(options(file=str(places / "data" / "libsvm" / "a9a.gz")))


def test_a_language_model_is_a_path_only_in_the_data_folders(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    config = {"task": "sst2", "method": "fedavg", "task-options": f'model = "{places / "model"}"'}
    with pytest.raises(SettingsError, match="'task-options, model'"):
        load(config)
    assert load(config, data_dirs=str(places))
    monkeypatch.chdir(places)
    assert load({**config, "task-options": 'model = "facebook/opt-125m"'})
    with pytest.raises(SettingsError, match="'task-options, model'"):
        load({**config, "task-options": 'model = "data2"'})


def test_every_option_that_names_a_file_is_declared_so() -> None:
    """Of built-in tasks: those with ``file`` or ``model`` in their key, or ``file`` or ``folder`` in what it means."""
    for row in TASKS:
        for key, field in keys_of(task_class(row.name).Options).items():
            names = "file" in key or any(word in str(field.description) for word in ("folder", " file", ".gguf"))
            assert is_path(field) == (names and key != "num-features"), (row.name, key)


@pytest.mark.parametrize("key", ["alow-tasks", "data-dirz", "max-local-epoch", "partitionid"])
def test_a_rule_that_is_misspelt_is_not_missed(key: str) -> None:
    with pytest.raises(SettingsError, match=f"node 7, node config '{key}': .*did you mean"):
        NodeRules.of_node(context_of({}, **{key: 1}))


def test_keys_of_another_application_are_left_alone() -> None:
    assert NodeRules.of_node(context_of({}, sensor="x", db_path="/db")) == NodeRules(common_data=True)


def test_a_wrong_value_is_refused() -> None:
    with pytest.raises(SettingsError, match="node config 'max-local-epochs': expected"):
        NodeRules.of_node(context_of({}, max_local_epochs="many"))


def work(**node_config: Any) -> Any:
    config = {"task": "digits", "method": "fedclup"}
    content = RecordDict(
        {
            "arrays": ArrayRecord({}),
            "config": ConfigRecord(
                {"server-round": 1, "lr": 0.1, "last-folded": 0, "experiment": "e", **node_config.pop("entries", {})}
            ),
        }
    )
    message = Message(content, dst_node_id=7, message_type=MessageType.TRAIN)
    return unpack_work(message, context_of(config, **node_config))


def test_a_client_writes_into_its_state_folder_only(tmp_path: Path) -> None:
    """The run folder that a server names is one of this machine only where both are one user's."""
    entries = {"run-dir": str(tmp_path)}
    assert work(entries=entries, state_dir=str(tmp_path / "s")).store.folder == tmp_path / "s" / "e" / "client-0"
    assert work(entries=entries).store.folder == tmp_path / "state" / "e" / "client-0"  # FEDAPPS_STATE
    assert work(entries=entries, trust_server=True).store.folder == tmp_path / "clients" / "e" / "client-0"


FILES = {
    "libsvm/x": ("libsvm", f"{SECRET} 1:1\n"),
    "libsvm/y": ("libsvm", f"1 1:1\n1 {SECRET}\n"),
    "libsvm/z": ("libsvm", "1 1:1\n-1 1:1\n1 1:1\n-1 1:1\n4711 2:1\n"),
    "mnist/train-images-idx3-ubyte": ("mnist", SECRET),
    "cifar10/cifar10_subset.npz": ("cifar10", SECRET),
}


@pytest.mark.parametrize("file", FILES)
def test_no_error_tells_a_server_what_a_file_holds(
    places: Path, file: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    task, text = FILES[file]
    folder = places / "data"
    for name in (
        "train-images-idx3-ubyte",
        "train-labels-idx1-ubyte",
        "t10k-images-idx3-ubyte",
        "t10k-labels-idx1-ubyte",
    ):
        (folder / "mnist").mkdir(exist_ok=True)
        (folder / "mnist" / name).write_text(text)
    (folder / file).parent.mkdir(exist_ok=True)
    (folder / file).write_text(text)
    config = options(file=file) if task == "libsvm" else {"task": task, "method": "fedavg"}
    config["data-dir"] = str(folder)
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    with pytest.raises(ClientError) as told:
        query(config, data_dirs=str(folder))
    hidden = SECRET[:4] if task != "libsvm" or SECRET in text else "4711"
    assert Path(file).name in str(told.value)
    assert "TaskError: file" in str(told.value)
    assert hidden not in str(told.value)
    assert told.value.__suppress_context__
    assert told.value.__cause__ is None
    assert hidden in caplog.text or task == "cifar10"
    with pytest.raises(Exception, match="file") as whole:
        query(config, data_dirs=str(folder), trust_server=True)
    assert type(whole.value).__name__ == "TaskError"


def test_an_error_that_is_not_ours_tells_a_server_its_kind_and_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise KeyError(SECRET)

    monkeypatch.setattr("fedapps.client_apps.rules.load_task_of", broken)
    with pytest.raises(ClientError, match=r"KeyError: test_rules\.py, line \d+") as told:
        query({"task": "digits", "method": "fedavg"})
    assert SECRET not in str(told.value)


def test_a_refusal_tells_the_server_what_was_refused() -> None:
    with pytest.raises(ClientError, match=r"SettingsError: setting 'task': expected one .*got 'os:x'; .*'allow-tasks'"):
        query({"task": "os:x"})


def test_a_node_refuses_to_have_its_own_data_cut_up() -> None:
    with pytest.raises(
        SettingsError, match=r"'partition': expected local on this node.*'dirichlet'.*one part.*common-data"
    ):
        resolve({"method": "fedavg", "task": "digits"}, common_data=False)
    assert resolve({"method": "fedavg", "task": "digits", "partition": "local"}, common_data=False).partition == "local"


def test_a_trusted_server_cannot_cut_up_a_nodes_own_data_either() -> None:
    with pytest.raises(SettingsError, match="'partition': expected local"):
        resolve({"method": "fedavg", "task": "digits"}, common_data=False, trust_server=True)


def test_a_node_has_its_own_file_whatever_the_run_names(tmp_path: Path) -> None:
    own = tmp_path / "own.svm"
    own.write_text("+1 1:1\n-1 2:1\n+1 1:2\n")
    config = {
        "method": "fedavg", "task": "libsvm", "partition": "local",
        "task-options": "file = 'theirs.svm'\nnum-features = 3\nregularisation = 0.5",
    }  # fmt: skip
    task = load(config, common_data=False, task_options=f"file = '{own}'")
    data = task.client_data(0, 2)
    assert (len(data.train), len(data.validation), len(data.test)) == (2, 0, 1)
    assert task.options.regularisation == 0.5
    assert task.client_data(1, 2).train.sha256() != ""


def test_a_nodes_own_folder_stands_in_for_the_runs(tmp_path: Path) -> None:
    (tmp_path / "libsvm").mkdir()
    (tmp_path / "libsvm" / "mine").write_text("+1 1:1\n-1 2:1\n")
    config = {
        "method": "fedavg",
        "task": "libsvm",
        "partition": "local",
        "task-options": "file = 'mine'",
        "data-dir": "/nowhere",
    }
    task = load(config, common_data=False, data_dir=str(tmp_path))
    assert len(task.client_data(0, 2).train) >= 1
