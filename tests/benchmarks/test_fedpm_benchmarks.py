"""The scripts that measure FedPM's cost, bytes and memory run, and write what they say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(not BENCHMARKS.is_dir(), reason="benchmarks are not part of the package"),
]


def smoke(name: str, out: Path) -> dict[str, Any]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(BENCHMARKS / f"{name}.py"), "--smoke", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    record: dict[str, Any] = json.loads((out / f"{name}.json").read_text())
    assert "cpu" in record["environment"]
    return record


def test_cost(tmp_path: Path) -> None:
    record = smoke("fedpm_cost", tmp_path)
    assert set(record["steps"]["ratio"]) == {"1", str(record["steps"]["default-refresh"])}
    for shares in record["steps"]["shares"].values():
        assert sum(shares.values()) == pytest.approx(1, abs=0.2)
    assert [row["width"] for row in record["widths-ms"]] == [16, 32]


def test_bytes(tmp_path: Path) -> None:
    """62,006 parameters; widths 76, 151, 401, 121 and 85 of the simple CNN, whose last three see 4 rows here."""
    model = smoke("fedpm_bytes", tmp_path)["models"]["simple CNN"]
    curvature = {form: sizes["curvature"] for form, sizes in model["forms"].items()}
    triangles = {width: width * (width + 1) // 2 for width in (76, 151, 401, 121, 85)}
    assert model["fedavg"] == 4 * 62006
    assert curvature["triangle"] == 4 * sum(triangles.values())
    assert curvature["bfloat16"] == curvature["triangle"] // 2
    factors = triangles[76] + triangles[151] + sum(4 * width - 6 + 1 for width in (401, 121, 85))
    assert curvature["factor"] == 4 * factors
    assert all(sizes["total"] == curvature[form] + 4 * 62006 for form, sizes in model["forms"].items())


def test_memory(tmp_path: Path) -> None:
    record = smoke("fedpm_memory", tmp_path)
    assert [(row["order"], row["replies"]) for row in record["rows"]] == [
        (order, count) for order in ("in order", "reversed", "shuffled", "partition 0 last") for count in (2, 5)
    ]
    assert all(row["peak-bytes"] > 1e6 for row in record["rows"])


def test_refresh(tmp_path: Path) -> None:
    record = smoke("fedpm_refresh", tmp_path)
    assert [(row["refresh"], row["seed"], row["status"]) for row in record["runs"]] == [
        (1, 3, "completed"), (10, 3, "completed")
    ]  # fmt: skip
    assert record["difference"] == record["accuracy"]["10"]["mean"] - record["accuracy"]["1"]["mean"]
