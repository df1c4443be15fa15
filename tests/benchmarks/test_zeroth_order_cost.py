"""The script that measures the cost of scalar-only clients runs, with and without the published code beside it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="the benchmark measures a language model")

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PUBLISHED = os.environ.get("DECOMFL_DIR")
CONFIGURED = 1200 * 32 + 66 * 32 + 2 * (4 * (32 * 32 + 32) + 2 * 32 * 64 + 64 + 32 + 4 * 32) + 2 * 32
"""Elements of the tiny model: embeddings, two layers, last normalisation."""

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(not BENCHMARKS.is_dir(), reason="benchmarks are not part of the package"),
    pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from Linux's /proc"),
]


def smoke(out: Path, *options: str, name: str = "zeroth_order_cost") -> tuple[dict[str, Any], str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    script = str(BENCHMARKS / "zeroth_order_cost.py")
    command = [sys.executable, script, "--smoke", "--threads", "1", "--out", str(out), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    record: dict[str, Any] = json.loads((out / f"{name}.json").read_text())
    return record, done.stdout


def test_cost_without_the_published_code(tmp_path: Path) -> None:
    """Of the tokens' embedding a probe displaces at most the 8 x 32 rows of the input and the 2 label words."""
    record, printed = smoke(tmp_path)
    assert "--decomfl names no folder" in printed
    assert set(record["ratios"]) == {"probe / two forwards"}
    assert record["environment"]["published"] is None
    client, memory = record["client"], record["memory"]
    assert client["elements"] == CONFIGURED
    rest = CONFIGURED - (1200 + 66) * 32
    assert rest < client["elements-displaced"] <= rest + (8 * 32 + 2 + 32) * 32
    assert client["split"]["updates"]["bytes"] == 16 * CONFIGURED
    assert (memory["parameters"], memory["largest-tensor"]) == (4 * CONFIGURED, 4 * 1200 * 32)
    assert memory["bound"] == memory["peak-of-forward"] + 4 * CONFIGURED + 4 * 1200 * 32


def test_catching_up_alone_leaves_the_other_record_as_it_is(tmp_path: Path) -> None:
    record, _ = smoke(tmp_path, "--catch-up", name="zeroth_order_catch_up")
    assert set(record["seconds"]) == {"hiso: 5 rounds", "decomfl: 5 rounds"}
    assert all(summary["median"] > 0 and summary["repetitions"] == 2 for summary in record["seconds"].values())
    assert not (tmp_path / "zeroth_order_cost.json").exists()


@pytest.mark.skipif(PUBLISHED is None, reason="DECOMFL_DIR names no checkout of github.com/ZidongLiu/DeComFL")
def test_cost_beside_the_published_code(tmp_path: Path) -> None:
    record, _ = smoke(tmp_path, "--decomfl", str(PUBLISHED))
    assert record["environment"]["published"]["commit"]
    for kind in ("Batch", "Paramwise"):
        for figure in ("client job", "steps only"):
            assert record["ratios"][f"round / published {kind}, {figure}"]["median"] > 0
        assert record["ratios"][f"hiso: 5 rounds of published {kind} / ours"]["median"] > 0


def test_a_folder_without_the_published_code_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / "zeroth_order_cost.py"), "--smoke", "--decomfl", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "cezo_fl/client.py is missing" in done.stderr
