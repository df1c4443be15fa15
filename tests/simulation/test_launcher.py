"""Runs of a small app in Flower's engines end with the truth, and without a trace."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from flwr.common.config import parse_config_args
from flwr.supercore.utils import simulation_config_from_json

from fedapps.errors import LaunchError
from fedapps.simulation import launcher
from fedapps.simulation.app_folder import Components
from fedapps.simulation.flower_cli import RunInfo
from fedapps.simulation.launcher import Outcome, RunStatus, run_on_superlink, run_simulation

from .deployment import loopback_deployment

# The app asks all nodes for their partition, writes what it learns, and ends as it is told.
APP = """
import json, os, time
from pathlib import Path

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

# Flower looks for plain assignments in the source.
server = ServerApp()
client = ClientApp()

@server.main()
def main(grid, context):
    config = context.run_config
    nodes = []
    while len(nodes) < config["nodes"]:
        time.sleep(0.1)
        nodes = list(grid.get_node_ids())
    messages = [Message(RecordDict(), message_type="query", dst_node_id=node) for node in nodes]
    replies = [dict(reply.content["reply"]) for reply in grid.send_and_receive(messages)] if nodes else []
    parent = Path(f"/proc/{os.getppid()}/stat").read_text().rsplit(")", 1)[1].split()
    known = {"replies": replies, "home": os.environ["FLWR_HOME"], "superlink": int(parent[1])}
    part = Path(config["out"] + ".part")
    part.write_text(json.dumps(known))
    part.rename(config["out"])
    print("the server was here")
    if config["ending"] == "raise":
        raise RuntimeError("failed on purpose")
    if config["ending"] == "hang":
        time.sleep(600)

@client.query()
def query(message, context):
    from of_the_caller import NAME

    reply = {"name": NAME, "threads": os.environ["OMP_NUM_THREADS"], "process": os.getpid()}
    reply["partition"] = context.node_config["partition-id"]
    return Message(RecordDict({"reply": ConfigRecord(reply)}), reply_to=message)
"""
COMPONENTS = Components("small_app:server", "small_app:client")
ENVIRONMENT = {"OMP_NUM_THREADS": "1"}

SCRIPT = """
import sys
from pathlib import Path
from fedapps.simulation.app_folder import Components
from fedapps.simulation.launcher import run_simulation

components = Components("small_app:server", "small_app:client")
config = {"ending": "hang", "nodes": 1, "out": sys.argv[2]}
environment = {"OMP_NUM_THREADS": "1"}
run_simulation(config, num_clients=1, python_path=[Path(sys.argv[1])], environment=environment, components=components)
"""


@pytest.fixture
def modules(tmp_path: Path) -> Path:
    """A folder of the caller's with the app and a module that it needs."""
    folder = tmp_path / "modules"
    folder.mkdir()
    (folder / "small_app.py").write_text(APP)
    (folder / "of_the_caller.py").write_text('NAME = "mine"\n')
    return folder


@contextmanager
def no_process_left(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Everything that the block starts, works in `folder`; afterwards nothing does."""
    monkeypatch.chdir(folder)
    yield
    left = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if (entry / "cwd").readlink() == folder and int(entry.name) != os.getpid():
                left.append((entry / "cmdline").read_text())
        except OSError:
            continue
    assert left == []


def wait_for(path: Path, process: subprocess.Popen[str], seconds: float = 60.0) -> dict[str, Any]:
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert process.poll() is None, "the launcher has ended"
        assert time.monotonic() < deadline, f"{path.name} does not come"
        time.sleep(0.1)
    return dict(json.loads(path.read_text()))


@pytest.mark.engine
def test_a_simulation_that_fails_says_so_after_its_clients_have_worked(
    tmp_path: Path, modules: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    polls = []
    log = tmp_path / "flower.log"
    with no_process_left(tmp_path, monkeypatch):
        outcome = run_simulation(
            {"ending": "raise", "nodes": 3, "out": str(tmp_path / "out")},
            num_clients=3,
            actors=1,
            python_path=[modules],
            environment=ENVIRONMENT,
            on_poll=lambda: polls.append(log.stat().st_size),
            log_path=log,
            components=COMPONENTS,
        )

    assert outcome.status is RunStatus.FAILED
    assert "failed on purpose" in outcome.details
    assert "RuntimeError: failed on purpose" in outcome.log_tail
    learnt = json.loads((tmp_path / "out").read_text())
    replies = sorted(learnt["replies"], key=lambda reply: reply["partition"])
    assert [reply["partition"] for reply in replies] == [0, 1, 2]
    assert {(reply["name"], reply["threads"]) for reply in replies} == {("mine", "1")}
    assert len({reply["process"] for reply in replies}) == 1  # one actor
    assert not Path(learnt["home"]).exists()
    assert len(set(polls)) > 2  # the log grew meanwhile
    assert "the server was here" in log.read_text()
    assert outcome.run_id in (tmp_path / "superlink.log").read_text()


@pytest.mark.engine
@pytest.mark.usefixtures("default_signals")
def test_an_interrupted_simulation_is_gone_with_all_of_ray(
    tmp_path: Path, modules: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with no_process_left(tmp_path, monkeypatch):
        process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(modules), "out"], stderr=subprocess.PIPE, text=True
        )
        learnt = wait_for(tmp_path / "out", process)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30.0)
    assert errors.rstrip().endswith("KeyboardInterrupt")
    assert process.returncode != 0
    assert not Path(learnt["home"]).exists()


@pytest.mark.engine
def test_a_superlink_that_dies_is_an_error_with_its_log(
    tmp_path: Path, modules: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"

    def kill() -> None:
        if out.exists():
            os.kill(json.loads(out.read_text())["superlink"], signal.SIGKILL)

    with (
        no_process_left(tmp_path, monkeypatch),
        pytest.raises(LaunchError, match=r"flower-superlink: .* exit code -9; see .*superlink.log\n(.|\n)*StartRun"),
    ):
        run_simulation(
            {"ending": "hang", "nodes": 0, "out": str(out)},
            num_clients=1,
            python_path=[modules],
            on_poll=kill,
            log_path=tmp_path / "flower.log",
            components=COMPONENTS,
        )


@pytest.mark.engine
def test_runs_on_a_superlink_complete_fail_and_are_stopped(
    tmp_path: Path, modules: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(ending: str, on_poll: Callable[[], None] | None = None) -> Outcome:
        return run_on_superlink(
            {"ending": ending, "nodes": 2 if ending == "return" else 0, "out": str(tmp_path / ending)},
            connection=deployment.connection,
            python_path=[modules],
            environment=deployment.environment,
            on_poll=on_poll,
            components=COMPONENTS,
        )

    def interrupt() -> None:
        if (tmp_path / "hang").exists():
            raise KeyboardInterrupt

    with (
        no_process_left(tmp_path, monkeypatch),
        loopback_deployment(2, tmp_path, python_path=[modules]) as deployment,
    ):
        with ThreadPoolExecutor() as pool:
            completed, failed = pool.map(run, ["return", "raise"])
        with pytest.raises(KeyboardInterrupt):
            run("hang", interrupt)
        superlink_log = (tmp_path / "superlink.log").read_text()

    assert completed.status is RunStatus.COMPLETED
    replies = json.loads((tmp_path / "return").read_text())["replies"]
    assert sorted(reply["partition"] for reply in replies) == [0, 1]
    assert failed.status is RunStatus.FAILED
    assert "failed on purpose" in failed.details
    assert "ControlServicer.StopRun" in superlink_log


class BrokenStream:
    """A command line whose log stream breaks, and whose SuperLink is out of reach for a while."""

    def __init__(self, answers: list[RunInfo | LaunchError]) -> None:
        self._answers = iter(answers)
        self.followed: list[tuple[Path, int]] = []

    @contextmanager
    def follow(self, run_id: str, log_path: Path, offset: int) -> Iterator[subprocess.Popen[bytes]]:
        self.followed.append((log_path, offset))
        with subprocess.Popen(["true"]) as process:
            yield process

    def info(self, run_id: str) -> RunInfo:
        answer = next(self._answers)
        if isinstance(answer, LaunchError):
            raise answer
        return answer


def test_a_broken_log_stream_is_not_taken_for_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "_POLL_SECONDS", 0.01)
    log = tmp_path / "log"
    log.write_text("before")
    end = RunInfo("finished:stopped", "")
    cli = BrokenStream([RunInfo("running", ""), LaunchError("out of reach"), end])
    assert launcher._watch(cli, "17", log, None, None) is end  # type: ignore[arg-type]
    assert cli.followed == [(log, 6)] * 3


def test_a_superlink_out_of_reach_is_given_up_in_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "_POLL_SECONDS", 0.01)
    monkeypatch.setattr(launcher, "_PATIENCE_SECONDS", 0.1)
    cli = BrokenStream([LaunchError("out of reach")] * 1000)
    with pytest.raises(LaunchError, match="out of reach"):
        launcher._watch(cli, "17", tmp_path / "log", None, None)  # type: ignore[arg-type]


def test_patience_begins_when_contact_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of hours is not given up at the first failure."""
    monkeypatch.setattr(launcher, "_POLL_SECONDS", 0.05)
    monkeypatch.setattr(launcher, "_PATIENCE_SECONDS", 0.2)
    away, there, end = LaunchError("out of reach"), RunInfo("running", ""), RunInfo("finished:completed", "")
    cli = BrokenStream([there, there, there, there, there, away, there, there, there, away, away, end])
    assert launcher._watch(cli, "17", tmp_path / "log", None, None) is end  # type: ignore[arg-type]


class EndlessStream:
    """A command line whose run goes on for ever."""

    @contextmanager
    def follow(self, run_id: str, log_path: Path, offset: int) -> Iterator[subprocess.Popen[bytes]]:
        with subprocess.Popen(["sleep", "600"]) as process:
            yield process
            process.kill()


def test_a_client_that_hangs_does_not_keep_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server app has ended, and written how; the engine waits for its last client, but not for ever."""
    monkeypatch.setattr(launcher, "_POLL_SECONDS", 0.01)
    monkeypatch.setattr(launcher, "_GRACE_SECONDS", 0.2)
    endings = iter([None, None, *["completed"] * 1000])
    info = launcher._watch(EndlessStream(), "17", tmp_path / "log", None, None, lambda: next(endings))  # type: ignore[arg-type]
    outcome = launcher._outcome("17", info, tmp_path / "log")
    assert (outcome.status, outcome.busy, outcome.details) == (RunStatus.COMPLETED, True, "")


def test_without_ray_nothing_is_started_and_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(launcher, "SuperLink", None)
    with pytest.raises(LaunchError, match=r"pip install 'fedapps\[simulation\]'"):
        run_simulation({}, num_clients=2)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ((4, 3, 0.0), "num-supernodes=4 client-resources-num-cpus=1 init-args-num-cpus=3"),
        ((4, None, 0.0), "num-supernodes=4 client-resources-num-cpus=1 init-args-num-cpus=4"),
        ((100, None, 0.0), "num-supernodes=100 client-resources-num-cpus=1 init-args-num-cpus=8"),
        (
            (4, 2, 0.5),
            "num-supernodes=4 client-resources-num-cpus=1 init-args-num-cpus=2 client-resources-num-gpus=0.5",
        ),
    ],
    ids=["actors given", "one actor a client", "one actor a core", "shared GPU"],
)
def test_flower_is_told_the_size_of_the_simulation(
    options: tuple[int, int | None, float], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    text = launcher._federation_config(*options)
    assert text == expected
    # Flower refuses a key that it does not know.
    simulation_config_from_json({key.replace("-", "_"): value for key, value in parse_config_args([text]).items()})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        pytest.param(None, "got a name that is not among them .none with an address", id="no configuration"),
        pytest.param(
            '[superlink]\ndefault = "b"\n[superlink.b]\naddress = "b:1"\n[superlink.a]\naddress = "a:1"\n',
            r"got a name that is not among them \(a, b\)",
            id="others are named",
        ),
        pytest.param(
            '[superlink.lab]\naddress = ":local:"\n',
            r"SuperLink connection 'lab': .* add \[superlink.lab\]",
            id="one that Flower would start and leave behind",
        ),
        pytest.param("[superlink", "config.toml: expected TOML", id="not TOML"),
        pytest.param("a = " + "[" * 100_000, "config.toml: expected TOML", id="deep"),
    ],
)
def test_an_unknown_connection_is_refused_before_anything_is_sent(
    tmp_path: Path, config: str | None, message: str
) -> None:
    if config is not None:
        (tmp_path / "config.toml").write_text(config)
    environment: Mapping[str, str] = {"FLWR_HOME": str(tmp_path)}
    with pytest.raises(LaunchError, match=message):
        run_on_superlink({}, connection="lab", environment=environment)
