"""What scalar-only runs send, in bytes."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..simulation import runs
from .scalar_runs import payloads, sampled_as, tiny

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("own_module")]


def test_a_scalar_costs_four_bytes_each_way_beside_fixed_settings(tmp_path: Path) -> None:
    """Traffic is measured, not derived: K = 2 steps, P = 3 probes are 24 bytes up; more of them cost 4 bytes each."""
    few, many = (
        tiny(tmp_path / str(p), {"hiso.num-probes": p, "num-server-rounds": 3, "hiso.fingerprint-every": 0})
        for p in (3, 103)
    )
    fixed_up = payloads(few, "up", "scalars")[0] - 24
    assert 0 < fixed_up < 40
    for direction_, record, fixed in [("up", "scalars", 40), ("down", "journal", 300)]:
        small, large = payloads(few, direction_, record), payloads(many, direction_, record)
        # Rounds 2 and 3 of each client bring one record each: 6 scalars, or 206.
        added = [b - a for a, b in zip(small[6:], large[6:], strict=True)]
        assert all(800 <= extra <= 810 for extra in added), added
        assert all(size <= fixed + 8 * 6 for size in small), small
    assert payloads(few, "up", "arrays") == payloads(few, "down", "arrays") == [0] * 18


def test_a_round_costs_at_most_eight_bytes_a_scalar_each_way_and_a_missed_one_its_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a fingerprint after every round, which moves each scalar down twice; client 2 takes part in rounds 1 and 5."""
    sampled_as(monkeypatch, lambda r: [0, 1, 2] if r in (1, 5) else [0, 1])
    moved = [
        _moved(tiny(tmp_path / str(p), {"hiso.num-probes": p, "num-server-rounds": 5, "hiso.fingerprint-every": 1}))
        for p in (1, 101)
    ]
    scalars = 2 * 100  # more in a round: K = 2, 100 more probes
    missed = {(5, 2, "down"): 4}  # rounds 1 to 4, the first of which it has measured but not seen
    for key, size in moved[0].items():
        rounds = missed.get(key, 1)
        extra = moved[1][key] - size
        assert extra <= (8 + 4 * (rounds - 1)) * scalars + 12, key
        # Beside its scalars a round is fixed settings, and a missed one a record of the journal.
        fixed = size - (8 + 4 * (rounds - 1)) * 2
        assert fixed <= (720 if key[2] == "down" else 240) + 45 * (rounds - 1), (key, size)


def _moved(run: runs.Left) -> dict[tuple[int, int, str], int]:
    """Payload of all train messages of a client in a round beside `config`, by (round, client, direction)."""
    total: dict[tuple[int, int, str], int] = {}
    for row in run.folder.read_ledger():
        if row["kind"] == "train":
            key = (row["round"], row["partition"], row["direction"])
            total[key] = total.get(key, 0) + sum(size for name, size in row["payload"].items() if name != "config")
    return total


def test_traffic_does_not_depend_on_the_size_of_the_model(tmp_path: Path) -> None:
    """Beside `config`, which names the run's folder and task."""
    config = {"partition": "iid", "partition-column": "", "num-server-rounds": 2, "task-options": ""}
    small, large = (tiny(tmp_path / task, {**config, "task": task}) for task in ("digits-mlp", "digits"))
    sent = [
        [{name: size for name, size in row["payload"].items() if name != "config"} for row in run.folder.read_ledger()
         if row["kind"] == "train"]
        for run in (small, large)
    ]  # fmt: skip
    assert sent[0] == sent[1]
    assert max(sum(payload.values()) for payload in sent[0]) < 400
    assert sum(v.nbytes for v in large.model.values()) > 8 * sum(v.nbytes for v in small.model.values())
