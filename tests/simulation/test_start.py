"""A run from its settings to its results: what ends it, what is read of it while it goes on."""

from __future__ import annotations

import logging
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedapps.errors import CheckpointError, FedAppsError, LaunchError, RoundFailedError, SettingsError
from fedapps.methods import resolve_settings
from fedapps.results.log_copy import FolderCopy, SentRunFolder
from fedapps.results.run_folder import RunFolder
from fedapps.results.summary import RunStatus
from fedapps.simulation import launcher
from fedapps.simulation import start as module_under_test
from fedapps.simulation.launcher import Outcome
from fedapps.simulation.reaper import members
from fedapps.simulation.start import Engine, Start, Tail, logged_to, start

from . import runs

INPROCESS = Start(engine=Engine.INPROCESS, num_clients=3)
ENDLESS = [
    sys.executable, "-c", "from fedapps.cli import main; main()", "run", "--method", "fedavg", "--task", "digits-mlp",
    "--engine", "inprocess", "--clients", "2", "--partition", "iid", "--set", "local-steps=1", "--rounds", "100000",
]  # fmt: skip

own_module = pytest.mark.usefixtures("own_module")


def waited(condition: Callable[[], Any], seconds: float = 60.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


# Signals -------------------------------------------------------------------------------------------------


def endless_run(out: Path, *before: str) -> subprocess.Popen[bytes]:
    """A run in a session of its own; it has finished a round."""
    process = subprocess.Popen(
        [*before, *ENDLESS, "--out", str(out)], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    waited(lambda: rounds_of(out) > 2 or process.poll() is not None)
    assert process.poll() is None
    return process


def rounds_of(out: Path) -> int:
    return sum(path.read_bytes().count(b"\n") for path in out.glob("*/metrics.jsonl"))


def assert_stopped(out: Path, process: subprocess.Popen[bytes]) -> None:
    assert process.wait(timeout=30) == 130
    assert members({process.pid}) == set()
    [folder] = out.iterdir()
    summary = RunFolder.open(folder).read_summary()
    assert summary is not None
    assert summary["status"] == "stopped"
    assert summary["rounds"] >= 1


@pytest.mark.engine
@pytest.mark.usefixtures("default_signals")
@pytest.mark.skipif(shutil.which("nohup") is None, reason="there is no nohup")
def test_nohup_lets_a_run_survive_a_hang_up_and_sigterm_ends_it_cleanly(tmp_path: Path) -> None:
    process = endless_run(tmp_path, "nohup")
    process.send_signal(signal.SIGHUP)
    before = rounds_of(tmp_path)
    waited(lambda: rounds_of(tmp_path) > before + 2)
    process.send_signal(signal.SIGTERM)
    assert_stopped(tmp_path, process)


@pytest.mark.engine
@pytest.mark.usefixtures("default_signals")
def test_a_hang_up_ends_a_run_cleanly(tmp_path: Path) -> None:
    process = endless_run(tmp_path)
    process.send_signal(signal.SIGHUP)
    assert_stopped(tmp_path, process)


@pytest.mark.usefixtures("default_signals")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_a_signal_interrupts_and_is_put_back(number: signal.Signals) -> None:
    with pytest.raises(KeyboardInterrupt), module_under_test._signals_interrupt():
        signal.raise_signal(number)
    assert signal.getsignal(number) is signal.SIG_DFL


@pytest.mark.usefixtures("default_signals")
def test_what_is_ignored_outside_stays_ignored() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with module_under_test._signals_interrupt():
        signal.raise_signal(signal.SIGHUP)
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


@own_module
def test_a_run_in_another_thread_leaves_signals_alone(tmp_path: Path) -> None:
    ended = []
    thread = threading.Thread(target=lambda: ended.append(start({**runs.SITES}, INPROCESS, tmp_path)))
    thread.start()
    thread.join()
    assert [end.status for end in ended] == [RunStatus.COMPLETED]


# Outcomes ------------------------------------------------------------------------------------------------


@own_module
def test_a_run_says_where_its_folder_is_and_gives_every_row(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = []
    ended = start({**runs.SITES}, INPROCESS, tmp_path, rows.append)
    assert (ended.status, ended.reason) == (RunStatus.COMPLETED, "")
    assert ended.folder is not None
    assert ended.folder.parent == tmp_path
    assert rows == RunFolder.open(ended.folder).read_metrics()
    more = start({**runs.SITES, "num-server-rounds": 3, "run-dir": str(ended.folder), "resume": True}, INPROCESS, None,
                 (resumed := []).append)  # fmt: skip
    assert more.folder == ended.folder
    assert {row["round"] for row in resumed} == {3}
    assert "round 3/3" in (ended.folder / "flower.log").read_text()


@own_module
def test_a_run_that_fails_ends_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise RoundFailedError("round 1: nobody came")

    monkeypatch.setattr(module_under_test, "run_inprocess", fail)
    ended = start({**runs.SITES}, INPROCESS, tmp_path)
    assert ended.status is RunStatus.FAILED
    assert ended.reason == "RoundFailedError: round 1: nobody came"


@own_module
def test_an_interrupt_is_noted_in_the_summary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(config: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        RunFolder(Path(config["run-dir"])).write_settings(config)
        raise KeyboardInterrupt

    monkeypatch.setattr(module_under_test, "run_inprocess", interrupt)
    with pytest.raises(KeyboardInterrupt):
        start({**runs.SITES}, INPROCESS, tmp_path)
    [folder] = tmp_path.iterdir()
    assert (RunFolder.open(folder).read_summary() or {})["status"] == "stopped"


HANGING = {
    "task": "fedapps_testing:HangingSites", "task-options": 'sizes = "6,7,6"', "batch-size": 0, "num-server-rounds": 1,
    "validation-fraction": 0.0,
}  # fmt: skip


@own_module
@pytest.mark.slow
def test_a_client_that_hangs_is_given_up_and_named(tmp_path: Path) -> None:
    """A set round-timeout holds without workers, too; and an interrupt after the end leaves the end as it is."""
    started = time.monotonic()
    ended = start({**runs.SITES, **HANGING, "round-timeout": 10.0}, INPROCESS, tmp_path)
    assert time.monotonic() - started < 90
    assert ended.status is RunStatus.COMPLETED
    assert "1 was still busy" in ended.note.replace("1, 2", "1")  # The one behind it in the queue may be named, too.
    assert ended.folder is not None
    folder = RunFolder.open(ended.folder)
    [trained] = [row for row in folder.read_metrics() if row["phase"] == "train"]
    assert "no reply within 10 s" in trained["refused"]["1"]
    module_under_test._note_stop(folder)
    assert (folder.read_summary() or {})["status"] == "completed"


@own_module
@pytest.mark.parametrize(
    ("given", "workers", "expected"), [(4.0, None, 1), (4.0, 0, 0), (3600.0, None, 0), (3600.0, 3, 3)]
)
def test_a_time_out_needs_a_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: float, workers: int | None, expected: int
) -> None:
    used: list[int] = []
    monkeypatch.setattr(module_under_test, "run_inprocess", lambda *_, workers: used.append(workers) or [])
    start(
        {**runs.SITES, "round-timeout": given}, Start(engine=Engine.INPROCESS, num_clients=3, workers=workers), tmp_path
    )
    assert used == [expected]


@own_module
@pytest.mark.parametrize(
    ("change", "clients", "match"),
    [
        ({"device": "cuda:7"}, 3, "setting 'device': expected a device of this machine"),
        ({"partition": "iid", "partition-column": ""}, 10**6, "training example.* for each of 1000000 clients"),
        ({}, 4, "4"),
    ],
    ids=["no such device", "more clients than examples", "another number than the column has"],
)
@pytest.mark.parametrize("engine", Engine)
def test_what_cannot_work_here_is_said_before_anything_is_made(
    tmp_path: Path, change: dict[str, Any], clients: int, match: str, engine: Engine
) -> None:
    with pytest.raises(FedAppsError, match=match):
        start({**runs.SITES, **change}, Start(engine=engine, num_clients=clients), tmp_path)
    assert list(tmp_path.iterdir()) == []


@own_module
def test_a_refused_resume_starts_nothing_and_touches_nothing(tmp_path: Path) -> None:
    ended = start({**runs.SITES}, INPROCESS, tmp_path)
    assert ended.folder is not None
    folder = RunFolder.open(ended.folder)
    before = {path: path.read_bytes() for path in ended.folder.rglob("*") if path.is_file()}
    config = {**runs.SITES, "num-server-rounds": 3, "run-dir": str(folder.path), "resume": True}
    with folder.locked(), pytest.raises(CheckpointError, match="expected a run that no process works on"):
        start(config, Start(num_clients=3), None)
    with pytest.raises(CheckpointError, match=r"lr = 0\.7 where it was 0\.1"):
        start({**config, "lr": 0.7}, Start(num_clients=3), None)
    assert {path: path.read_bytes() for path in before if path.name != ".lock"} == {
        path: data for path, data in before.items() if path.name != ".lock"
    }


@own_module
def test_an_engine_that_goes_away_is_an_error_that_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = start({**runs.SITES}, INPROCESS, tmp_path)
    config = {**runs.SITES, "num-server-rounds": 3, "run-dir": str(ended.folder), "resume": True}

    def gone(*args: Any, **kwargs: Any) -> None:
        raise LaunchError("flower-superlink: exit code -9")

    monkeypatch.setattr(module_under_test, "run_simulation", gone)
    with pytest.raises(LaunchError, match=f"exit code -9\n.*fedapps run --resume {ended.folder}"):
        start(config, Start(num_clients=3), None)
    # One without a checkpoint leaves neither advice nor an empty folder.
    with pytest.raises(LaunchError, match=r"exit code -9$"):
        start({**runs.SITES}, Start(num_clients=3), tmp_path)
    assert list(tmp_path.iterdir()) == [ended.folder]
    # The server app alone was killed: the summary on file is that of the part before, and not its word.
    killed = Outcome(launcher.RunStatus.FAILED, "1", "heartbeat lost", "")
    monkeypatch.setattr(module_under_test, "run_simulation", lambda *args, **kwargs: killed)
    after = start(config, Start(num_clients=3), None)
    assert after.status is RunStatus.FAILED
    assert after.reason.startswith("heartbeat lost\n")
    assert after.reason.endswith(f"fedapps run --resume {ended.folder}")


@own_module
def test_wrong_settings_and_a_run_without_a_place_start_nothing(tmp_path: Path) -> None:
    with pytest.raises(SettingsError):
        start({**runs.SITES, "lr": -1.0}, INPROCESS, tmp_path)
    with pytest.raises(LaunchError, match="--out"):
        start({**runs.SITES}, INPROCESS, None)
    assert list(tmp_path.iterdir()) == []


# Rows and log --------------------------------------------------------------------------------------------


def test_rows_are_read_once_and_whole(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, method="fedavg", task="digits", seed=0)
    rows: list[Any] = []
    tail = Tail(folder, rows.append)
    for text in ("", '{"round": 1}\n', '{"round": 2}\n{"rou', 'nd": 3}\n', ""):
        with folder.metrics_path.open("a") as file:
            file.write(text)
        tail.look()
    assert rows == [{"round": n} for n in (1, 2, 3)]


@pytest.mark.parametrize(
    "left", ['{"round": 2, "torn', '{"round": 2, "phase": "train", "old": "' + "x" * 99 + '"}\n{"ro']
)
def test_a_resume_after_a_kill_is_read_from_the_row_after_its_checkpoint(tmp_path: Path, left: str) -> None:
    """The rows that a resume cuts off are not new, and those that grow beyond their place are read from their beginning."""
    folder = RunFolder.create(tmp_path, method="fedavg", task="digits", seed=0)
    folder.append_metrics({"round": 1, "phase": "train"})
    with folder.metrics_path.open("a") as file:
        file.write(left)
    rows: list[Any] = []
    tail = Tail(folder, rows.append, after=1)
    tail.look()
    folder.truncate_after(1)
    news = [{"round": n, "phase": "evaluate", "loss": 0.25} for n in (2, 3, 4)]
    for row in news:
        folder.append_metrics(row)
    tail.look()
    assert rows == news


def test_flowers_log_goes_to_the_file_and_comes_back(tmp_path: Path) -> None:
    logger = logging.getLogger("flwr")
    before = list(logger.handlers)

    def fail() -> None:
        with logged_to(tmp_path / "log"):
            logger.error("a line")
            raise RuntimeError("on the way")

    with pytest.raises(RuntimeError, match="on the way"):
        fail()
    assert (tmp_path / "log").read_text().rstrip().endswith("ERROR a line")
    assert logger.handlers == before


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The settings that would go to a SuperLink."""
    sent: list[dict[str, Any]] = []

    def launch(config: dict[str, Any], **how: Any) -> Outcome:
        sent.append(config)
        raise LaunchError("nowhere")

    monkeypatch.setattr(module_under_test, "run_on_superlink", launch)
    return sent


@pytest.mark.parametrize(
    ("given", "expected"), [({}, "local"), ({"partition": "auto"}, "local"), ({"partition": "iid"}, "iid")]
)
def test_on_a_superlink_every_node_has_its_own_data_unless_a_cut_is_asked_for(
    sent: list[dict[str, Any]], given: dict[str, str], expected: str
) -> None:
    with pytest.raises(LaunchError, match="nowhere"):
        start({"method": "fedavg", "task": "digits", **given}, Start(superlink="lab"), None)
    assert sent[0]["partition"] == expected
    if expected == "local":
        assert (sent[0]["validation-fraction"], sent[0]["client-evaluation"]) == (0.0, "last")


@pytest.mark.parametrize("partition", ["local", "iid"])
@pytest.mark.parametrize(("given", "expected"), [({}, "last"), ({"client-evaluation": "every"}, "every")])
def test_on_a_superlink_clients_measure_once_unless_more_is_asked_for(
    sent: list[dict[str, Any]], partition: str, given: dict[str, str], expected: str
) -> None:
    with pytest.raises(LaunchError, match="nowhere"):
        start({"method": "fedclup", "task": "digits", "partition": partition, **given}, Start(superlink="lab"), None)
    assert sent[0]["client-evaluation"] == expected


def test_the_copy_of_a_run_is_resumed_where_its_server_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill left two rows here; the server goes on after the first, and only what is new is shown."""
    config = {"method": "fedavg", "task": "digits", "partition": "local", "run-dir": "/srv/runs/one"}
    here = RunFolder(tmp_path)
    here.write_settings(config)
    for done in (1, 2):
        here.append_metrics({"round": done, "phase": "train", "lr": 0.1})
    there = SentRunFolder(tmp_path / "server", most=1e6, write=lambda text: stream.open("a").write(text))
    stream = tmp_path / "stream"
    there.path.mkdir()
    there.append_metrics({"round": 1, "phase": "train", "lr": 0.1})
    stream.unlink()
    sent: list[dict[str, Any]] = []

    def launch(config: dict[str, Any], *, copy: FolderCopy, on_poll: Callable[[], None], **how: Any) -> Outcome:
        def look() -> None:
            copy.look(stream)
            on_poll()

        sent.append(config)
        assert here.is_followed()
        resumed = SentRunFolder(there.path, most=1e6, write=there.write)
        on_poll()
        resumed.send_start()
        resumed.truncate_after(1)
        look()
        for done in (2, 3):
            resumed.append_metrics({"round": done, "phase": "train", "lr": 0.1})
            look()
        return Outcome(launcher.RunStatus.FAILED, "1", "No heartbeat", "")

    monkeypatch.setattr(module_under_test, "run_on_superlink", launch)
    rows: list[dict[str, Any]] = []
    given = {**config, "run-dir": str(tmp_path), "resume": True}
    ended = start(given, Start(superlink="lab"), None, rows.append)
    assert (sent[0]["run-dir"], sent[0]["resume"]) == ("/srv/runs/one", True)
    assert [row["round"] for row in rows] == [2, 3]
    assert [row["round"] for row in here.read_metrics()] == [1, 2, 3]
    assert ended.reason.endswith(f"go on with: fedapps run --resume {tmp_path} --superlink lab")
    assert f":{there.path}" in ended.note
    assert not here.is_followed()


def test_local_data_are_refused_where_all_clients_run_here(tmp_path: Path) -> None:
    with pytest.raises(
        SettingsError, match=r"'partition': expected a split.*'local', which is for nodes of a SuperLink"
    ):
        start({"method": "fedavg", "task": "digits", "partition": "local"}, Start(engine=Engine.INPROCESS), tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_server_without_data_holds_none_out() -> None:
    with pytest.raises(SettingsError, match="'validation-fraction': expected 0 with partition = local"):
        resolve_settings({"method": "fedavg", "task": "digits", "partition": "local", "validation-fraction": 0.2})
