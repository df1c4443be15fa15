"""The script that compares rounds to DeComFL's accuracy, on curves written here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

pytestmark = pytest.mark.skipif(not BENCHMARKS.is_dir(), reason="benchmarks are not part of the package")


def test_rounds_are_counted_to_the_first_evaluation_that_reaches_decomfls_end(tmp_path: Path) -> None:
    curves = {
        ("decomfl", 0): [0.5, 0.6, 0.8, 0.7], ("hiso", 0): [0.5, 0.71, 0.6, 0.9],
        ("decomfl", 1): [0.5, 0.5, 0.6, 0.9], ("hiso", 1): [0.5, 0.6, 0.7, 0.8],
    }  # fmt: skip
    cost = {"payload-down-mean": 2000.0, "payload-up-mean": 400.0, "best-global-server-test-accuracy-mean": 0.75}
    record = {
        "settings": {"task": "digits-mlp", "num-server-rounds": 30}, "methods": ["decomfl", "hiso"], "clients": 6,
        "seeds": [0, 1], "chosen": {"decomfl": {"decomfl.lr": 0.1}, "hiso": {"hiso.lr": 1, "hiso.nu": 0.01}},
        "table": [{"method": "decomfl", **cost, "best-accuracy-mean": 0.5}, {"method": "hiso", **cost}],
        "curves": [
            {"method": method, "seed": seed, "rounds": [0, 10, 20, 30], "test-accuracy": values}
            for (method, seed), values in curves.items()
        ] + [{"method": "hiso", "seed": 0, "rounds": [0], "test-accuracy": [1.0], "chosen": False}],
    }  # fmt: skip
    (tmp_path / "compare.json").write_text(json.dumps(record))
    command = [
        sys.executable,
        str(BENCHMARKS / "hiso_rounds.py"),
        str(tmp_path / "compare.json"),
        "--out",
        str(tmp_path),
    ]
    subprocess.run(command, check=True, capture_output=True)
    lines = (tmp_path / "hiso_rounds.md").read_text().splitlines()
    assert "| hiso | 0.900, 0.800 | 0.750 | 2.00 kB | 400 B |" in lines
    assert "| 0 | 0.700 | 20 | 10 | 2.00 |" in lines
    assert "| 1 | 0.900 | 30 | never | - |" in lines
    assert "Chosen by validation accuracy on seed 0: decomfl lr 0.1; hiso lr 1, nu 0.01." in lines
