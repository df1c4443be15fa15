"""Every preset is a run config that the methods accept."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedapps.methods import METHODS, resolve_settings
from fedapps.results.settings_file import from_toml
from fedapps.simulation.plan import config_of
from fedapps.tasks.from_settings import load_task_of

CONFIGS = Path(__file__).parents[1] / "configs"
CIFAR = {"task": "cifar10", "num_server_rounds": 20, "local_epochs": 5, "batch_size": 64}
PERSONAL = [method.name for method in METHODS if method.family == "personalised"]
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
    """For the methods that it names, or without any for the default one."""
    preset = from_toml(path.read_text(encoding="utf-8"))
    named = list(dict.fromkeys(key.partition(".")[0] for key in preset if "." in key))
    for method in named or [resolve_settings(preset).method]:
        load_task_of(resolve_settings(config_of(preset, method, named)))


@pytest.mark.parametrize("classes", [2, 5])
@pytest.mark.parametrize("method", PERSONAL)
def test_personalised_methods_have_the_same_gradients_of_a_round_on_mnist(classes: int, method: str) -> None:
    preset = from_toml((CONFIGS / f"mnist_{classes}_classes.toml").read_text(encoding="utf-8"))
    settings = resolve_settings(config_of(preset, method, PERSONAL))
    passes = {"pfedme": getattr(settings.own, "inner_steps", 1), "ditto": 2}.get(method, 1)
    assert settings.local_steps * passes == 20
    assert (settings.partition, settings.classes_per_client, settings.batch_size) == ("classes", classes, 16)
    options = load_task_of(settings).options
    assert (options.model, options.train_examples) == ("cnn", 4000)
