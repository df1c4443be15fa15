"""Every preset is a run config that the methods accept."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedapps.methods import resolve_settings
from fedapps.results.settings_file import from_toml
from fedapps.tasks.from_settings import load_task_of

CONFIGS = Path(__file__).parents[1] / "configs"
CIFAR = {"task": "cifar10", "num_server_rounds": 20, "local_epochs": 5, "batch_size": 64}
EXPECTED = {
    "digits_comparison": {"task": "digits", "alpha": 0.1, "num_server_rounds": 20, "batch_size": 32},
    "cifar10_dirichlet01": {**CIFAR, "alpha": 0.1},
    "cifar10_dirichlet1": {**CIFAR, "alpha": 1.0},
}


@pytest.mark.parametrize("name", EXPECTED)
@pytest.mark.parametrize("method", ["fedavg", "fedavgm", "fedprox", "fedadam", "localnewton", "fedpm"])
def test_a_preset_is_what_its_experiment_says(name: str, method: str) -> None:
    settings = resolve_settings({**from_toml((CONFIGS / f"{name}.toml").read_text(encoding="utf-8")), "method": method})
    assert {key: getattr(settings, key) for key in EXPECTED[name]} == EXPECTED[name]
    load_task_of(settings)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.toml")), ids=lambda path: path.stem)
def test_every_preset_resolves(path: Path) -> None:
    load_task_of(resolve_settings(from_toml(path.read_text(encoding="utf-8"))))
