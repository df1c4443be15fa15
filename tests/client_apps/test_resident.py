"""The resident worker: one a node, whose answer is bit for bit the ClientApp's own, whatever happens to it."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, Context, Message, MessageType, RecordDict

from fedapps.client_apps import app, resident, resident_worker
from fedapps.client_apps.resident import WorkerError, identity, in_resident_worker
from fedapps.client_apps.rules import ClientError, NodeRules
from fedapps.messages.schema import pack
from fedapps.private_files import private_folder

TASK = '''
import os, time
from pathlib import Path
from fedapps.tasks.synthetic import SyntheticLinearTask

class Task(SyntheticLinearTask):
    """Writes who loads it, and hangs once where a file says so."""
    def load(self):
        place = Path(os.environ["FEDAPPS_TEST_PLACE"])
        with open(place / "loads", "a") as file:
            file.write(f"{os.getpid()}\\n")
        if (place / "hang").exists():
            (place / "hang").unlink()
            time.sleep(600)
        if (place / "fail").exists():
            raise ExceptionGroup("no text makes", [OSError("this")])
        return super().load()
'''
CONFIG = {"task": "resident_task:Task", "method": "fedavg", "lr": 0.1, "task-options": "clients = 2"}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a task's module, on the path; every process that the test left is ended by its id."""
    (tmp_path / "resident_task.py").write_text(TASK)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "resident_task", raising=False)
    monkeypatch.setenv("FEDAPPS_TEST_PLACE", str(tmp_path))
    monkeypatch.setattr("fedapps.tasks._loaded", type(sys.modules["fedapps.tasks"]._loaded)())
    return tmp_path


@pytest.fixture
def started() -> Iterator[list[Any]]:
    """The worker processes that the test started; they are ended with it."""
    before = list(resident._started)
    resident._started.clear()
    yield resident._started
    for process in resident._started:
        process.kill()
        process.wait()
    resident._started[:] = before


def node(place: Path, run: int = 1, **config: Any) -> Context:
    given = {
        "partition-id": 0, "num-partitions": 2, "common-data": True, "resident-worker": True,
        "allow-tasks": "built-in,resident_task:Task", "state-dir": str(place / ("a long name " * 10) / "state"), **config,
    }  # fmt: skip
    return Context(run_id=run, node_id=7, node_config=given, state=RecordDict(), run_config=CONFIG)


def query() -> Message:
    content = RecordDict({"config": ConfigRecord({})})
    return Message(content, dst_node_id=7, message_type=MessageType.QUERY)


def train() -> Message:
    config = {"server-round": 3, "lr": 0.1, "last-folded": 0, "experiment": "e", "run-dir": ""}
    content = pack({"arrays": {"weights": np.linspace(-1, 1, 15)}, "config": config})
    return Message(content, dst_node_id=7, message_type=MessageType.TRAIN)


def said(reply: Message) -> bytes:
    return resident.message_to_proto(reply).content.SerializeToString(deterministic=True)


def folder_of(context: Context) -> Path:
    return NodeRules.of(context.node_config, "").state_folder / "workers" / "node-7"


def loads(place: Path) -> list[int]:
    return [int(line) for line in (place / "loads").read_text().split()]


def listens(folder: Path) -> bool:
    with resident.address(folder) as path, socket.socket(socket.AF_UNIX) as end:
        return end.connect_ex(path) == 0


@contextmanager
def serving(
    context: Context, answer: Callable[[Message, Context], Message], *, idle: float = 600.0, **other: Any
) -> Iterator[Path]:
    """A worker in a thread of this process, with an app of the test's."""
    folder = private_folder(folder_of(context))
    watch: Any = SimpleNamespace(client=lambda connection: nullcontext())
    mine = {**identity(context), **other}
    thread = threading.Thread(
        target=resident_worker.serve,
        args=(folder, mine, answer),
        kwargs={"idle_seconds": idle, "watch": watch},
        daemon=True,
    )
    thread.start()
    while not listens(folder):
        time.sleep(0.005)
    try:
        yield folder
    finally:
        resident._greet(folder, {})  # Another run's.
        thread.join(20)
    assert not thread.is_alive()


def marked(message: Message, context: Context) -> Message:
    """An app whose replies tell that the worker gave them, and what the context was there."""
    context.state["kept"] = ConfigRecord({"resident": context.node_config["resident-worker"]})
    return Message(RecordDict({"by": ConfigRecord({"worker": True, **message.content["config"]})}), reply_to=message)


def itself(message: Message, context: Context) -> Message:
    """An app whose replies tell that the client computed by itself."""
    return Message(RecordDict({"by": ConfigRecord({"worker": False})}), reply_to=message)


def by_worker(reply: Message) -> bool:
    return bool(reply.content["by"]["worker"])


def test_a_message_and_its_context_go_there_and_back(place: Path) -> None:
    context = node(place)
    with serving(context, marked) as folder:
        message = train()
        reply = in_resident_worker(message, context, itself)
        assert dict(reply.content["by"]) == {"worker": True, **message.content["config"]}
        assert reply.metadata.dst_node_id == message.metadata.src_node_id
        assert context.state["kept"]["resident"] is False  # In the worker it is no worker's client.
        assert context.node_config["resident-worker"] is True
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert stat.S_IMODE((folder / "secret").stat().st_mode) == 0o600
    assert not (folder / "socket").exists()


def test_an_idle_worker_leaves(place: Path, log: Any) -> None:
    with serving(node(place), marked, idle=0.1) as folder:
        while (folder / "socket").exists():
            time.sleep(0.005)
    assert "idle for 0.1 s" in log.text


@pytest.mark.parametrize("config", [{"resident-worker": False}, {"resident-idle-minutes": 0.0}])
def test_without_a_worker_or_with_wrong_rules_the_app_answers(place: Path, config: dict[str, Any]) -> None:
    context = node(place, **config)
    assert not by_worker(in_resident_worker(train(), context, itself))
    assert not folder_of(node(place)).exists()


def test_a_client_computes_by_itself_where_the_secret_is_another(place: Path, log: Any) -> None:
    context = node(place)
    with serving(context, marked) as folder:
        secret = (folder / "secret").read_bytes()
        (folder / "secret").write_bytes(bytes(32))
        assert not by_worker(in_resident_worker(train(), context, itself))
        assert "AuthenticationError: digest sent was rejected; this message is computed without it" in log.text
        (folder / "secret").write_bytes(secret)
        assert by_worker(in_resident_worker(train(), context, itself))


def test_neither_end_talks_to_another_users_process(monkeypatch: pytest.MonkeyPatch, place: Path, log: Any) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    with serving(node(place), marked), monkeypatch.context() as patch:
        patch.setattr(resident.os, "geteuid", lambda: os.getuid() + 1)
        with theirs, pytest.raises(WorkerError, match=f"of user {os.getuid() + 1}, got one of user {os.getuid()}"):
            resident.greeting(ours)
        assert ours.fileno() == -1
        assert not by_worker(in_resident_worker(train(), node(place), itself))
    assert "WorkerError" in log.text


@pytest.mark.parametrize(
    "other", [{"versions": ["0.0.9"]}, {"run": 2}, {"node-config": {"partition-id": 1}}, {"package": "/elsewhere"}]
)
def test_a_worker_of_another_run_version_or_configuration_leaves(place: Path, other: dict[str, Any], log: Any) -> None:
    context = node(place)
    with serving(context, marked, **other) as folder:
        assert resident._greet(folder, identity(context)) is None
    assert f"that of another {next(iter(other))} leaves" in log.text
    with serving(context, marked):
        assert by_worker(in_resident_worker(train(), context, itself))


def test_what_worker_and_client_must_share_tells_runs_and_configurations_apart(place: Path) -> None:
    one = identity(node(place))
    assert one == identity(node(place))
    assert one != identity(node(place, run=2))
    assert one != identity(node(place, **{"task-options": "clients = 3"}))


def test_a_worker_that_cannot_start_is_tried_a_few_times_and_done_without(
    place: Path, started: list[Any], monkeypatch: pytest.MonkeyPatch, log: Any
) -> None:
    monkeypatch.setattr(resident, "_MAIN", "raise SystemExit(3)")
    monkeypatch.setattr(resident, "START_SECONDS", 30.0)
    assert not by_worker(in_resident_worker(train(), node(place), itself))
    assert len(started) == resident.MOST_STARTS
    assert "expected one that starts, got none" in log.text


def test_a_socket_that_a_killed_worker_left_is_no_obstacle(place: Path) -> None:
    context = node(place)
    folder = private_folder(folder_of(context))
    with resident.address(folder) as path, socket.socket(socket.AF_UNIX) as dead:
        dead.bind(path)
    assert (folder / "socket").exists()
    assert resident._greet(folder, identity(context)) is None
    with serving(context, marked):
        assert by_worker(in_resident_worker(train(), context, itself))


def test_who_says_nothing_holds_up_nobody(place: Path, monkeypatch: pytest.MonkeyPatch, log: Any) -> None:
    monkeypatch.setattr(resident, "GREETING_SECONDS", 0.3)
    context = node(place)
    with serving(context, marked) as folder, resident.address(folder) as path, socket.socket(socket.AF_UNIX) as silent:
        silent.connect(path)
        while "a client was not served: BlockingIOError" not in log.text:
            time.sleep(0.01)
        assert by_worker(in_resident_worker(train(), context, itself))
    with resident.address(folder) as path, socket.socket(socket.AF_UNIX) as silent:
        silent.bind(path)
        silent.listen()
        assert not by_worker(in_resident_worker(train(), context, itself))
    assert "resident worker: BlockingIOError" in log.text


@pytest.mark.parametrize(
    "parts", [(), (b"reply",), (b"reply", b"\xff", b""), (b"log", b"no json"), (b"more", b"", b"")]
)
def test_half_an_answer_is_none(place: Path, parts: tuple[bytes, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resident_worker, "_answer", lambda *_: parts)
    with serving(node(place), marked):
        assert not by_worker(in_resident_worker(train(), node(place), itself))


class OddError(Exception):
    def __init__(self, what: int, where: int) -> None:
        super().__init__(what, where)


@pytest.mark.parametrize(
    "error", [ClientError("TaskError: x: expected a, got b"), KeyError("k"), OddError(1, 2), ImportError("no\nmodule")]
)
def test_an_error_has_the_name_and_the_text_that_it_had(place: Path, error: Exception) -> None:
    def raises(message: Message, context: Context) -> Message:
        raise error

    with serving(node(place), raises), pytest.raises(Exception) as found:
        in_resident_worker(train(), node(place), itself)
    assert str(type(found.value)) == str(type(error))
    assert str(found.value) == str(error)
    assert "raise error" in found.value.__notes__[0]


def test_the_client_of_a_worker_imports_neither_torch_nor_the_task(place: Path) -> None:
    program = f"""
import sys
from flwr.app import *
from fedapps.client_apps import app
context = Context(1, 7, {node(place).node_config!r}, RecordDict(), {{}})
content = RecordDict({{"config": ConfigRecord({{"node": 7}})}})
print(app(Message(content, dst_node_id=7, message_type="train"), context).content["by"]["worker"])
print({{"torch", "transformers", "numba", "sklearn", "resident_task"}} & set(sys.modules))
"""
    before = "from flwr.supercore.task_identity import TaskIdentity as I; I.run_id = I.node_id = I.task_id = 1"
    with serving(node(place), marked):
        found = subprocess.run([sys.executable, "-c", before + program], capture_output=True, text=True, check=True)
    assert found.stdout.splitlines() == ["True", "set()"]


@pytest.mark.slow
def test_two_that_start_at_once_share_one_worker_that_gives_the_apps_bits(
    place: Path, started: list[Any], log: Any
) -> None:
    context, alone = node(place), node(place, **{"resident-worker": False})
    expected = [said(app(message, alone)) for message in (query(), train())]
    folder = private_folder(folder_of(context))
    started.extend(resident._start(folder, identity(context), 1.0) for _ in range(2))
    while not listens(folder):
        time.sleep(0.01)
    assert [said(app(message, context)) for message in (query(), train(), train())] == [*expected, expected[1]]
    assert len(started) == 2
    assert len(set(loads(place))) == 2  # This process, and one of the two.
    loser = next(process for process in started if process.pid not in loads(place))
    assert loser.wait(20) == 0
    # The node's rules, its words and its log are the same there.
    wrong = {**CONFIG, "batch-size": 10**9}
    contexts = [node(place, **{"resident-worker": on, "max-batch-size": 5}) for on in (False, True)]
    errors = []
    for each in contexts:
        each.run_config = wrong
        log.lines.clear()
        with pytest.raises(Exception, match="max-batch-size") as found:
            app(train(), each)
        errors.append((str(type(found.value)), str(found.value)))
        assert any(line.startswith("node 7") for line in log.lines)
    assert "SettingsError: setting 'batch-size'" in log.text  # Of the worker, with its traceback.
    assert errors[0] == errors[1]


@pytest.mark.slow
def test_a_worker_that_is_killed_within_a_message_leaves_it_to_the_client(
    place: Path, started: list[Any], log: Any
) -> None:
    expected = said(app(train(), node(place, **{"resident-worker": False})))
    from fedapps import tasks

    tasks._loaded.clear()
    (place / "loads").unlink()
    (place / "hang").touch()

    def kill() -> None:
        while not (place / "loads").exists() or (place / "hang").exists():
            time.sleep(0.005)
        os.kill(loads(place)[0], signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    assert said(app(train(), node(place))) == expected
    killer.join()
    assert loads(place) == [started[0].pid, os.getpid()]
    assert "EOFError: ; this message is computed without it" in log.text
    assert said(app(train(), node(place))) == expected
    assert loads(place)[2] == started[1].pid


@pytest.mark.slow
def test_a_worker_ends_with_its_client_and_with_the_process_that_starts_clients(
    place: Path, started: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    context = node(place)
    (place / "hang").touch()
    with resident._greeted_worker(private_folder(folder_of(context)), identity(context), 1.0) as connection:
        connection.send_bytes(resident.message_to_proto(train()).SerializeToString())
        connection.send_bytes(resident.context_to_proto(context).SerializeToString())
        while (place / "hang").exists() or not (place / "loads").exists():
            time.sleep(0.005)
        assert started[0].poll() is None
    assert started[0].wait(20) == 1
    with subprocess.Popen(["sleep", "600"]) as owner:
        monkeypatch.setattr(resident.os, "getppid", lambda: owner.pid)
        with resident._greeted_worker(folder_of(context), identity(context), 1.0):
            assert started[1].poll() is None
            owner.kill()
            assert started[1].wait(20) == 1
