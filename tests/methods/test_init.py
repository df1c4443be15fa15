"""Tests of ``fedapps/methods/__init__.py``."""

from __future__ import annotations

import subprocess
import sys

import pytest

from fedapps.errors import SettingsError
from fedapps.methods import method_groups, resolve_settings
from fedapps.settings import default_config, flatten


def test_listing_the_methods_imports_neither_torch_nor_flower() -> None:
    code = "import sys, fedapps.methods; sys.exit(', '.join({'torch', 'flwr', 'scipy'} & set(sys.modules)) or 0)"
    subprocess.run([sys.executable, "-c", code], check=True)


PUBLISHED = {
    "fedpm": {"weighting": "uniform", "estimate": "last-batch", "refresh": 1, "max_rows": 0, "max_width": 0},
    "decomfl": {
        "weighting": "uniform",
        "local_steps": 1,
        "batch_size": 32,
        "num_probes": 5,
        "mu": 1e-3,
        "difference": "forward",
    },
    "fedclup": {"batch_size": 0, "rule": "two-cases", "gamma_rule": "theory", "fraction_train": 1.0},
}


@pytest.mark.parametrize("method", PUBLISHED)
@pytest.mark.parametrize("written_out", [False, True], ids=["left out", "auto"])
def test_the_preset_paper_is_the_published_setting_and_stays_it(method: str, written_out: bool) -> None:
    """Flower hands over every key with its default; the resolved settings, which name the preset too, resolve to themselves."""
    given = default_config(method_groups()) if written_out else {}
    settings = resolve_settings({**given, "method": method, "preset": "paper", "task": "digits"})
    for name, value in PUBLISHED[method].items():
        assert getattr(settings, name, None) == value or getattr(settings.own, name) == value, name
    assert resolve_settings(flatten(settings, method)) == settings
    assert resolve_settings({"method": method, "task": "digits"}) != settings


def test_what_is_given_beside_the_preset_wins_over_it() -> None:
    settings = resolve_settings({"method": "fedpm", "preset": "paper", "task": "digits", "fedpm.refresh": 10})
    assert (settings.own.refresh, settings.own.estimate) == (10, "last-batch")
    assert resolve_settings({"method": "decomfl", "preset": "paper", "task": "sst2"}).lr == 1e-5


def test_a_method_without_a_published_setting_says_so() -> None:
    with pytest.raises(SettingsError, match=r"'preset' of method 'fedavg'.* it is there for fedpm, fedclup, decomfl"):
        resolve_settings({"method": "fedavg", "preset": "paper", "task": "digits"})
    with pytest.raises(SettingsError, match="setting 'preset'"):
        resolve_settings({"method": "fedpm", "preset": "papers", "task": "digits"})


def test_an_impossible_pair_names_the_nearest_possible_choice() -> None:
    with pytest.raises(
        SettingsError, match=r"'hiso': expected a torch task, got 'a9a', a convex task.*nearest.*digits"
    ):
        resolve_settings({"method": "hiso", "task": "a9a"})
