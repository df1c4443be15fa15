"""A run folder comes through a log as it is, whatever else is in the log, and nothing else comes in its place."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedapps.results import log_copy
from fedapps.results.checkpoint import Checkpoint
from fedapps.results.log_copy import FolderCopy, SentRunFolder
from fedapps.results.run_folder import RunFolder

ROWS = [{"round": n, "phase": "train", "loss": 0.5**n} for n in range(1, 4)]
MODEL = {"weights": np.arange(6, dtype=np.float32).reshape(2, 3), "bias": np.float64(0.25).reshape(())}


class Ends:
    """The two ends of a log, in a file between them."""

    def __init__(self, root: Path, most: float = 1e6) -> None:
        self.stream = root / "stream"
        (root / "server").mkdir()
        (root / "caller").mkdir(exist_ok=True)
        self.sent = SentRunFolder(root / "server", most=most, write=self.write)
        self.here = RunFolder(root / "caller")
        self.log = self.here.path / "flower.log"
        self.copy = FolderCopy(self.here, self.log)

    def write(self, text: str) -> None:
        with self.stream.open("ab") as file:
            file.write(text.encode())

    def look(self) -> None:
        self.copy.look(self.stream)

    def run(self, rows: list[dict[str, Any]] = ROWS) -> None:
        """What a server app does."""
        self.sent.write_settings({"method": "fedavg", "run-dir": str(self.sent.path)})
        self.sent.write_environment({"versions": {"numpy": "2"}})
        for row in rows:
            self.sent.append_ledger({"round": row["round"], "payload-up": 8})
            self.sent.append_clients({"round": row["round"], "partition": 0, "num-examples": 3})
            self.sent.append_metrics(row)
        self.sent.write_model(MODEL)
        self.sent.save_checkpoint(
            Checkpoint(
                server_round=3, experiment="e", method="fedavg", task="digits", num_partitions=2, arrays=MODEL,
                strategy_arrays={}, strategy_state={}, last_folded={0: 3},
            )
        )  # fmt: skip
        self.sent.write_summary({"status": "completed", "rounds": 3, "totals": {"seconds": 1.0}, "final": {}})
        self.sent.send_rest()

    def files(self, folder: RunFolder) -> dict[str, bytes]:
        return {
            str(path.relative_to(folder.path)): path.read_bytes()
            for path in folder.path.rglob("*")
            if path.is_file() and path != self.log
        }


@pytest.fixture
def ends(tmp_path: Path) -> Ends:
    return Ends(tmp_path)


def test_a_whole_folder_comes_byte_for_byte_and_the_log_is_free_of_it(ends: Ends) -> None:
    ends.log.write_text("of the part before\n")
    ends.copy = FolderCopy(ends.here, ends.log)
    ends.write("INFO :  before\nINFO :  a line that ")
    ends.sent.send_start()
    ends.write("goes on\n")
    ends.run()
    ends.write("INFO :  after\n")
    ends.look()
    assert ends.files(ends.here) == ends.files(ends.sent)
    assert {"metrics.jsonl", "model.safetensors", "checkpoint/manifest.json"} <= ends.files(ends.here).keys()
    assert ends.log.read_text() == "of the part before\nINFO :  before\nINFO :  a line that goes on\nINFO :  after\n"
    assert ends.copy.told() == ""
    assert ends.here.load_checkpoint().server_round == 3


def test_rows_are_there_as_soon_as_the_server_has_written_them(ends: Ends) -> None:
    ends.sent.send_start()
    ends.sent.write_settings({"method": "fedavg"})
    for done in range(1, 4):
        ends.sent.append_ledger({"round": done})
        ends.sent.append_metrics(ROWS[done - 1])
        ends.look()
        assert ends.here.read_metrics() == ROWS[:done]
        assert len(ends.here.read_ledger()) == done
        assert ends.here.read_settings() == {"method": "fedavg"}
    assert "not all of the run folder" in ends.copy.told()  # Its server was killed, say.


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_a_log_that_comes_in_pieces_and_begins_anew_gives_the_same(tmp_path: Path, size: int) -> None:
    ends = Ends(tmp_path)
    ends.copy = FolderCopy(ends.here, ends.log, heading="shipped\n")
    ends.write("the beginning\n")
    ends.sent.send_start()
    ends.run()
    ends.write("the end\n")
    whole, growing = ends.stream.read_bytes(), tmp_path / "growing"
    for end in (len(whole) // 3, len(whole) // 2, len(whole)):  # The connection breaks twice.
        growing.unlink(missing_ok=True)
        ends.copy.restart()
        for start in range(0, end, size):
            with growing.open("ab") as file:
                file.write(whole[start : min(end, start + size)])
            ends.copy.look(growing)
    assert ends.files(ends.here) == ends.files(ends.sent)
    assert ends.log.read_text() == "shipped\nthe beginning\nthe end\n"
    assert ends.copy.told() == ""


def test_large_files_go_in_parts_and_beyond_the_limit_stay_with_their_place_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_copy, "MOST_PART", 1000)
    ends = Ends(tmp_path, most=9000)
    ends.sent.send_start()
    ends.sent.write_best({"w": np.random.default_rng(0).normal(size=1000)})
    ends.sent.write_initial({"w": np.random.default_rng(1).normal(size=100)})
    ends.run()
    lines = [line for line in ends.stream.read_text().splitlines() if '"best.safetensors"' in line]
    ends.look()
    left = ends.files(ends.sent).keys() - ends.files(ends.here).keys()
    assert "best.safetensors" in ends.files(ends.here)
    assert len(lines) == 1 + 1 + 8  # 8.1 kB in parts, and the checksum
    assert left, "the limit leaves nothing out"
    told = ends.copy.told()
    assert all(name in told for name in left)
    assert f"rsync -a {ends.copy._place}/ {ends.here.path}/" in told
    assert "collect-mb" in told
    for name, content in ends.files(ends.here).items():
        assert ends.files(ends.sent)[name] == content


def test_a_resume_cuts_the_copy_back_before_new_rows_come(tmp_path: Path) -> None:
    ends = Ends(tmp_path)
    ends.sent.send_start()
    ends.run()
    ends.look()
    inode = ends.here.metrics_path.stat().st_ino
    ends.stream.unlink()
    resumed = SentRunFolder(ends.sent.path, most=1e6, write=ends.write)
    copy = FolderCopy(ends.here, ends.log)
    resumed.send_start()
    resumed.write_settings({"num-server-rounds": 4})
    resumed.truncate_after(2)
    copy.look(ends.stream)
    assert copy.after == 2
    assert ends.here.read_metrics() == ROWS[:2]
    assert ends.here.metrics_path.stat().st_ino != inode  # `Tail` waits for another file.
    assert ends.here.read_summary() is None
    resumed.append_metrics({"round": 3, "phase": "train"})
    resumed.send_rest()
    copy.look(ends.stream)
    assert ends.here.read_metrics() == [*ROWS[:2], {"round": 3, "phase": "train"}]
    assert ends.here.read_settings() == {"num-server-rounds": 4}


# What others may have put into the log ---------------------------------------------------------------------


def record(**entries: Any) -> str:
    return f"\x1e{json.dumps(entries)}\n"


def packed(data: bytes) -> str:
    return base64.b85encode(zlib.compress(data)).decode()


def test_what_a_client_lets_the_server_log_is_text(ends: Ends) -> None:
    ends.sent.send_start()
    forged = record(key="0" * 32, n=1, file="summary.json", at=0, data=packed(b"{}"))
    ends.write(f"client 3: ValueError: {forged}")
    ends.write(record(n=1) + "\x1enot JSON\n\x1e" + "[" * 100_000 + "\n")
    ends.sent.append_metrics(ROWS[0])
    ends.look()
    assert sorted(ends.files(ends.here)) == ["metrics.jsonl"]
    assert forged[1:] in ends.log.read_text()
    assert "\x1e" not in ends.log.read_text()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        pytest.param(lambda r: {**r, "file": "../authorized_keys"}, "a file named '../authorized_keys'", id="path"),
        pytest.param(lambda r: {**r, "file": "/nowhere/passwd"}, "a file named", id="absolute"),
        pytest.param(lambda r: {**r, "file": "checkpoint/../../x"}, "a file named", id="out of a folder"),
        pytest.param(lambda r: {**r, "file": ["x"]}, "expected string", id="no name"),
        pytest.param(lambda r: {**r, "data": packed(bytes(2_000_000))}, "more than 1000000 bytes", id="a bomb"),
        pytest.param(lambda r: {**r, "data": "~~~~~"}, "", id="no base 85"),
        pytest.param(lambda r: {**r, "data": packed(b"x")[:-5]}, "", id="torn"),
        pytest.param(lambda r: {**r, "at": 3}, "", id="a gap in a file"),
        pytest.param(lambda r: {"key": r["key"], "n": 1}, "no key 'file'", id="nothing"),
    ],
)
def test_a_damaged_record_changes_nothing_and_is_told(
    tmp_path: Path, change: Callable[[dict[str, Any]], dict[str, Any]], told: str
) -> None:
    ends = Ends(tmp_path)
    ends.write(record(key="k", n=0, folder="/srv/run", host="h"))
    ends.write(record(**change({"key": "k", "n": 1, "file": "journal.jsonl", "at": 0, "data": packed(b"{}\n")})))
    ends.write(record(key="k", n=2, left={}))
    ends.look()
    assert ends.files(ends.here) == {}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["caller", "server", "stream"]
    assert "h:/srv/run" in ends.copy.told()
    assert told in ends.copy.told()


def test_a_file_with_another_checksum_is_no_file(ends: Ends) -> None:
    ends.write(record(key="k", n=0, folder="/srv/run", host="h"))
    ends.write(record(key="k", n=1, file="model.safetensors", at=0, data=packed(b"abc")))
    ends.write(record(key="k", n=2, file="model.safetensors", sha256="0" * 64))
    ends.write(record(key="k", n=3, left={}))
    ends.look()
    assert not ends.here.model_path.exists()
    assert "model.safetensors: checksum ba7816bf" in ends.copy.told()


def test_a_lost_record_is_seen_and_made_up_for_by_the_whole_log(ends: Ends) -> None:
    ends.sent.send_start()
    ends.run()
    whole = ends.stream.read_text()
    lines = whole.splitlines(keepends=True)
    ends.stream.write_text("".join(lines[:4] + lines[5:]))
    ends.look()
    assert ends.copy.lacks_records
    assert ends.copy.told()
    ends.copy.restart()
    ends.stream.write_text(whole)
    ends.look()
    assert not ends.copy.lacks_records
    assert ends.files(ends.here) == ends.files(ends.sent)
    assert ends.copy.told() == ""


# A folder that both sides have before them -------------------------------------------------------------------


def test_a_folder_is_followed_while_its_command_lives(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert not folder.is_followed()
    with folder.followed():
        assert folder.is_followed()
        assert folder.is_followed()
    assert not folder.is_followed()
    (tmp_path / ".followed").touch()  # As a command that was killed leaves it.
    assert not folder.is_followed()
    assert not RunFolder(tmp_path / "elsewhere").is_followed()
