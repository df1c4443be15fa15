"""Tests of ``fedapps/results/replay.py`` and the commands of ``fedapps/cli/journal.py``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from fedapps.cli import cli
from fedapps.results.replay import replay, verify
from fedapps.results.storage import load_arrays, save_arrays
from fedapps.zeroth_order.errors import AstrayError, JournalError
from fedapps.zeroth_order.journal import BaseModel, Header, Journal
from fedapps.zeroth_order.layout import fingerprint, layout_of
from fedapps.zeroth_order.rules import apply_round, rule_of
from fedapps.zeroth_order.scheme import Record, Scheme

BASE = {
    "w": np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4), "n": np.array(7),
    "b": np.full(3, 0.5, np.float32),
}  # fmt: skip
SCHEME = Scheme(2**64 - 1, "hiso")


def reference(records: list[Record]) -> np.ndarray:
    theta, state = np.concatenate([BASE["w"].ravel(), BASE["b"]]), rule_of(SCHEME).init(15)
    for record in records:
        theta, state = apply_round(theta, state, record, SCHEME, offset=0)
    return theta


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A journal of rounds 1, 2 and 4 with a right fingerprint at 2, and its base model."""
    theta = {name: BASE[name] for name in ("w", "b")}
    layout = layout_of(theta)
    journal = Journal(Header(SCHEME, BaseModel("toy", None, fingerprint(layout, theta)), layout))
    for r in (1, 2, 4):
        journal.append(Record(r, 2 * r, 0.1 / r, 1e-3, 0.1, 1e-6, ((0.5 * r, -1.0), (2.0, 0.25)), 3))
    (tmp_path / "journal.jsonl").write_text(journal.to_text())
    save_arrays(tmp_path / "initial.safetensors", BASE)
    two = replay(tmp_path / "journal.jsonl", tmp_path / "initial.safetensors", 2)
    journal.records[1] = replace(journal.records[1], fingerprint=two.fingerprint)
    (tmp_path / "journal.jsonl").write_text(journal.to_text())
    return tmp_path / "journal.jsonl"


@pytest.mark.parametrize(("last", "applied"), [(None, 3), (4, 3), (3, 2), (2, 2), (1, 1), (0, 0)])
def test_a_round_is_the_reference(run: Path, last: int | None, applied: int) -> None:
    replayed = replay(run, run.parent / "initial.safetensors", last)
    expected = reference(Journal.read(run).records[:applied])
    assert np.concatenate([replayed.arrays["w"].ravel(), replayed.arrays["b"]]).tobytes() == expected.tobytes()
    assert list(replayed.arrays) == ["w", "n", "b"]
    assert replayed.arrays["n"] == 7


def test_fingerprints_are_confirmed_or_named(run: Path) -> None:
    base = run.parent / "initial.safetensors"
    assert verify(run, base) == [2]
    run.write_text(
        run.read_text().replace('"round": 1, "first-step": 2, "lr": 0.1', '"round": 1, "first-step": 2, "lr": 0.2')
    )
    with pytest.raises(AstrayError, match="replica at round 2: expected fingerprint"):
        verify(run, base)
    with pytest.raises(AstrayError, match="replica at round 2"):
        replay(run, base)


def change_of_base(name: str, value: np.ndarray) -> dict[str, np.ndarray]:
    return {**BASE, name: value}


@pytest.mark.parametrize(
    ("base", "match"),
    [
        (change_of_base("b", np.full(3, 0.25, np.float32)), "the base model 'toy' with fingerprint"),
        (change_of_base("b", np.full(4, 0.5, np.float32)), r"'b' \[4\] float32 in the place of 'b' \[3\]"),
        ({"w": BASE["w"]}, "expected the 2 tensors of the journal, got no tensor 'b'"),
    ],
    ids=["other weights", "another shape", "a tensor missing"],
)
def test_another_base_model_is_refused(run: Path, base: dict[str, np.ndarray], match: str) -> None:
    save_arrays(run.parent / "other.safetensors", base)
    with pytest.raises(JournalError, match=match):
        replay(run, run.parent / "other.safetensors")


def test_files_and_rounds_that_are_not_there_are_named(run: Path) -> None:
    with pytest.raises(JournalError, match=r"round from 0 to 4.*, got 5"):
        replay(run, run.parent / "initial.safetensors", 5)
    with pytest.raises(JournalError, match=r"none\.safetensors: .*round 1, got no file"):
        replay(run, run.parent / "none.safetensors")
    with pytest.raises(JournalError, match="expected a journal, got no file"):
        replay(run.parent / "none.jsonl", run.parent / "initial.safetensors")


def call(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(cli, list(arguments), env={"COLUMNS": "200"})
    assert result.exit_code == code, result.output
    return result.output


def test_the_commands(run: Path, tmp_path: Path) -> None:
    output = call("replay", str(run), "--out", str(tmp_path / "out"), "--round", "3")
    assert "round        3" in output
    np.testing.assert_array_equal(
        load_arrays(tmp_path / "out" / "model.safetensors")["w"].ravel(), reference(Journal.read(run).records[:2])[:12]
    )
    assert "note         'toy', which the journal names as its base, cannot be loaded here" in output
    assert "confirmed: the base model and the fingerprints of rounds 2" in call("journal", "verify", str(run))
    shown = call("journal", "show", str(run))
    assert "round 4: steps 8-9, P 2" in shown
    failed = call("replay", str(run), "--out", str(tmp_path / "none"), "--round", "9", code=1)
    assert "JournalError" in failed
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("base", ["digits-mlp", "my_pkg.my_mod:MyTask"])
def test_the_own_model_of_a_task_is_a_bare_file_without_a_word(run: Path, tmp_path: Path, base: str) -> None:
    run.write_text(run.read_text().replace('"id": "toy"', f'"id": "{base}"'))
    assert call("replay", str(run), "--out", str(tmp_path / "out")).startswith("round")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]
