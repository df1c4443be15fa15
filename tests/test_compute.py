"""Threads, devices and random draws."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from threadpoolctl import threadpool_info

from fedapps.compute import choose_device, free_memory, generator, pinned
from fedapps.errors import SettingsError


def test_a_generator_depends_on_its_key_alone() -> None:
    first = generator(1, 2, 3).random(4)
    np.random.seed(0)  # noqa: NPY002 - the global state is what must not matter
    np.testing.assert_array_equal(generator(1, 2, 3).random(4), first)
    for other in ((1, 2, 4), (1, 3, 2), (2, 2, 3)):
        assert not np.array_equal(generator(*other).random(4), first)


def test_threads_are_pinned_and_put_back_whatever_happens() -> None:
    before = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()

    def fail_inside() -> None:
        with pinned(1):
            assert torch.get_num_threads() == 1
            assert torch.are_deterministic_algorithms_enabled()
            assert {pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"} == {1}
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        fail_inside()
    assert (torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()) == before


@pytest.mark.parametrize("setting", ["gpu", "cuda:x", "cpu:0", ""])
def test_an_unknown_device_is_refused(setting: str) -> None:
    with pytest.raises(SettingsError, match="expected auto, cpu, cuda or cuda:<index>"):
        choose_device(setting)


def test_a_device_that_is_absent_is_refused_and_auto_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert choose_device("auto") == choose_device("cpu") == "cpu"
    with pytest.raises(SettingsError, match="with 0 CUDA devices here"):
        choose_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert (choose_device("auto"), choose_device("cuda:1")) == ("cuda", "cuda:1")
    with pytest.raises(SettingsError, match="'cuda:2'"):
        choose_device("cuda:2")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, and other systems return memory by themselves")
@pytest.mark.slow
def test_freed_memory_goes_back_to_the_system() -> None:
    """1,000 blocks of 100 kB lie below one that stays, so that the top of the heap cannot sink."""

    def resident() -> float:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6

    blocks = [b"x" * 100_000 for _ in range(1000)]
    kept = blocks[-1]
    blocks.clear()
    before = resident()
    free_memory()
    assert resident() < before - 50
    assert len(kept) == 100_000
