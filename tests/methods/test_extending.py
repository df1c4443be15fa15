"""docs/extending.md: its method is what the page says, and passes the tests that the page names."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ..simulation.runs import short_run

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("own_module")]

TESTS = Path(__file__).resolve().parents[1]
METHOD = "fednova:METHOD"


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    page = TESTS.parent.joinpath("docs", "extending.md").read_text(encoding="utf-8")
    [code] = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    own = tmp_path / "own"
    own.mkdir()
    (own / "fednova.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(str(own))
    return own


def test_the_methods_code_is_as_short_as_promised(file: Path) -> None:
    text = (file / "fednova.py").read_text()
    code = [line for line in text.partition("METHOD = ")[0].splitlines() if line.strip() and '"""' not in line]
    assert 20 <= len(code) <= 40


def test_it_is_the_papers_algorithm(file: Path, tmp_path: Path) -> None:
    """Clients of 6, 18 and 9 examples in batches of 6 take 1, 3 and 2 steps."""
    config: dict[str, Any] = {
        "task": "fedapps_testing:Lines", "task-options": "sizes = '6,18,9'\nclients = 3", "lr": 0.1, "num-server-rounds": 1,
        "client-test-fraction": 0.0, "client-evaluation": "none",
    }  # fmt: skip
    ends = [
        short_run(tmp_path / f"{i}", {**config, "method": "fedavg", "batch-size": 6}, faults=only(i)).model["weights"]
        for i in range(3)
    ]
    found = short_run(tmp_path / "run", {**config, "method": METHOD, "batch-size": 6}).model["weights"]
    p, tau = np.full(3, 1 / 3), np.array([1, 3, 2])
    expected = (p @ tau) * sum(p[i] * ends[i] / tau[i] for i in range(3))
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    same = [
        short_run(tmp_path / f"all-{i}", {**config, "method": method, "batch-size": 0, "num-server-rounds": 3}).model
        for i, method in enumerate(("fedavg", METHOD))
    ]
    np.testing.assert_allclose(same[0]["weights"], same[1]["weights"], rtol=1e-12)


def only(partition: int) -> dict[tuple[int, int], Any]:
    from ..server_apps.test_run import empty

    return {(1, other): empty for other in range(3) if other != partition}


def test_it_passes_the_common_tests(file: Path) -> None:
    path = os.pathsep.join([str(file), *filter(None, [os.environ.get("PYTHONPATH", "")])])
    places = ["server_apps/test_run.py", "strategies/test_hostile_replies.py", "strategies/test_bounds.py"]
    done = subprocess.run(
        [
            sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", str(TESTS.parent / "pyproject.toml"),
            "-k", "fednova", *(str(TESTS / place) for place in places), str(TESTS / "methods" / "test_promises.py"),
        ],
        env={**os.environ, "FEDAPPS_TEST_METHODS": METHOD, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed.group(1)) >= 6
    assert "skipped" not in done.stdout
