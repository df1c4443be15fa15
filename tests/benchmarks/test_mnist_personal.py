"""The script that turns two comparisons into a table and a figure, on numbers written here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fedapps.results.run_folder import RunFolder
from fedapps.results.summary import client_statistics, summarise

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

pytestmark = pytest.mark.skipif(not BENCHMARKS.is_dir(), reason="benchmarks are not part of the package")


def comparison(root: Path, classes: int) -> Path:
    """FedCLUP and LocalTrain with two learning rates, of which 0.1 is the chosen one; LocalTrain's clients are 0.05 worse."""
    trials = []
    for method, test in (("fedclup", 0.9), ("localtrain", 0.85)):
        for lr in (0.1, 0.2):
            folder = RunFolder.create(root / "runs", method=method, task="mnist", seed=0)
            folder.write_settings({"method": method, "task": "mnist", "seed": 0, "num-server-rounds": 1, "lr": lr})
            accuracy = {
                p: {"personal-test-accuracy": test - 0.2 * (lr - 0.1), "personal-validation-accuracy": 0.5}
                for p in (0, 1)
            }
            for p, values in accuracy.items():
                folder.append_clients({"round": 1, "partition": p, "num-examples": 5, **values})
            bytes_ = {"payload-down": 1000, "payload-up": 3000}
            folder.append_metrics({"round": 1, "phase": "train", "seconds": 1.0, **bytes_})
            statistics = client_statistics(accuracy, {0: 5, 1: 5})
            folder.append_metrics({"round": 1, "phase": "client-evaluate", "seconds": 1.0, **statistics})
            folder.write_summary(summarise(folder.read_metrics(), status="completed"))
            trials.append({"method": method, "point": {"lr": lr}, "folder": str(folder.path.relative_to(root))})
    record = {
        "settings": {"classes-per-client": classes, "num-server-rounds": 1}, "seeds": [0], "trials": trials,
        "chosen": {"fedclup": {"lr": 0.1}, "localtrain": {"lr": 0.1}},
    }  # fmt: skip
    (root / "compare.json").write_text(json.dumps(record))
    return root


@pytest.mark.slow
def test_table_and_figure_hold_the_chosen_runs(tmp_path: Path) -> None:
    folders = [comparison(tmp_path / str(classes), classes) for classes in (2, 5)]
    command = [
        sys.executable,
        str(BENCHMARKS / "mnist_personal.py"),
        *map(str, folders),
        "--out",
        str(tmp_path / "out"),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    text = (tmp_path / "out" / "mnist_personal.md").read_text()
    assert text.count("| fedclup | accuracy | 2 | 0.9000 | 0.9000 |") == 2
    assert "## 2 classes a client" in text
    assert "on seed 0: fedclup lr 0.1; localtrain lr 0.1." in text
    assert "fedclup 1.00 kB down and 3.00 kB up" in text
    assert text.count("- fedclup over localtrain: +0.0500 on average, 2 clients better, 0 worse.") == 2
    assert (tmp_path / "out" / "mnist_personal.png").stat().st_size > 10_000
    for classes in (2, 5):
        assert json.loads((tmp_path / "out" / f"mnist_{classes}_classes.json").read_text())["seeds"] == [0]
        assert (tmp_path / "out" / f"mnist_{classes}_classes_gains.png").exists()
