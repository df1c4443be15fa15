"""``fedapps compare``, and ``fedapps report`` on what it leaves."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Call = Callable[..., str]


@pytest.mark.slow
def test_compare_tunes_every_method_on_the_same_grid_and_records_it(
    call: Call, sites: list[str], tmp_path: Path
) -> None:
    output = call("compare", "--methods", "fedavg,fedpm", *sites[:-2], "--seeds", "0,1", "--lr-grid", "0.01,0.1",
                  "--target", "0.5", "--jobs", "2", "--out", str(tmp_path))  # fmt: skip
    [folder] = list(tmp_path.iterdir())
    record: dict[str, Any] = json.loads((folder / "compare.json").read_text())
    tuning = [(t["method"], t["lr"], t["seed"]) for t in record["trials"] if t["tuning"]]
    assert tuning == [("fedavg", 0.01, 0), ("fedavg", 0.1, 0), ("fedpm", 0.01, 0), ("fedpm", 0.1, 0)]
    for method in ("fedavg", "fedpm"):
        scores = {t["lr"]: t["score"] for t in record["trials"] if t["method"] == method and t["tuning"]}
        assert scores[record["chosen-lr"][method]] == max(scores.values())
        others = [t for t in record["trials"] if t["method"] == method and not t["tuning"]]
        assert [(t["seed"], t["lr"]) for t in others] == [(1, record["chosen-lr"][method])]
    assert {row["runs"] for row in record["table"]} == {2}
    assert (folder / "compare.png").stat().st_size > 10_000
    assert "rounds to 0.5" in output
    report = call("report", *(str(folder / t["folder"]) for t in record["trials"]), "--out", str(tmp_path / "report"))
    assert "fedpm" in report
    assert (tmp_path / "report" / "table.csv").exists()
