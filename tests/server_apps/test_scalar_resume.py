"""Scalar-only runs that go on where they stopped."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from fedapps.errors import CheckpointError

from ..simulation import runs
from .scalar_runs import METHODS, journal_of, tiny
from .test_run import empty

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("own_module")]


@pytest.mark.parametrize("method", METHODS)
def test_three_rounds_and_a_resume_are_six_rounds(tmp_path: Path, method: str) -> None:
    """Nothing is lost by a stop: model and journal, to the byte."""
    config = {"method": method, "fraction-train": 0.67, f"{method}.fingerprint-every": 2}
    straight = tiny(tmp_path / "straight", config)
    tiny(tmp_path / "halves", {**config, "num-server-rounds": 3})
    halves = tiny(tmp_path / "halves", {**config, "resume": True})
    runs.assert_same_model(straight.model, halves.model)
    assert journal_of(straight) == journal_of(halves)
    assert straight.folder.initial_path.read_bytes() == halves.folder.initial_path.read_bytes()


def test_a_resume_cuts_off_rounds_beyond_the_checkpoint_and_a_torn_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clients' replica in this process has applied the rounds that are cut off, and another round 3 comes."""
    straight = tiny(tmp_path / "straight", {"num-server-rounds": 5})
    tiny(tmp_path / "run", {"num-server-rounds": 2})
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    longer = tiny(tmp_path / "run", {"num-server-rounds": 4, "resume": True}, faults={(3, 0): empty})
    with (tmp_path / "copy" / "journal.jsonl").open("ab") as stream:
        stream.write(b"".join(journal_of(longer).splitlines(keepends=True)[3:]) + b'{"round": 5, "fir')
    resumed = tiny(tmp_path / "copy", {"num-server-rounds": 5, "resume": True})
    assert journal_of(resumed) == journal_of(straight)
    assert journal_of(resumed).splitlines()[3] != journal_of(longer).splitlines()[3]
    runs.assert_same_model(resumed.model, straight.model)


def test_a_resume_without_its_journal_is_refused(tmp_path: Path) -> None:
    run = tiny(tmp_path / "run", {"num-server-rounds": 3})
    lines = journal_of(run).splitlines(keepends=True)
    run.folder.journal_path.write_bytes(b"".join(lines[:3]))
    with pytest.raises(CheckpointError, match=r"journal\.jsonl with checksum"):
        tiny(tmp_path / "run", {"num-server-rounds": 4, "resume": True})
    with pytest.raises(CheckpointError, match=r"expected 3 rounds of .*got 2"):
        tiny(tmp_path / "run", {"num-server-rounds": 4, "resume": True, "accept-changes": True})
