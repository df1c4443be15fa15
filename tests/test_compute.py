"""Threads, devices and random draws."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

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


@pytest.mark.parametrize("mode", [0, 1, 2])
@pytest.mark.parametrize("loaded", [True, False], ids=["compiler loaded", "compiler not loaded"])
def test_deterministic_algorithms_are_put_back_as_they_were(
    monkeypatch: pytest.MonkeyPatch, mode: int, loaded: bool
) -> None:
    """A non-deterministic operation warns inside, and does afterwards what it did before: nothing, warn or raise."""
    monkeypatch.delenv("TORCHINDUCTOR_DETERMINISTIC", raising=False)
    monkeypatch.delitem(sys.modules, "torch._inductor.config", raising=False)
    compiler = SimpleNamespace(deterministic=False)
    if loaded:
        monkeypatch.setitem(sys.modules, "torch._inductor.config", compiler)
    torch.set_deterministic_debug_mode(mode)
    try:
        with pinned(1):
            assert torch.is_deterministic_algorithms_warn_only_enabled()
            assert compiler.deterministic is loaded
            assert os.environ["TORCHINDUCTOR_DETERMINISTIC"] == "1"  # read by a compiler that is loaded from here on
            # Loaded meanwhile, if it was not.
            monkeypatch.setitem(sys.modules, "torch._inductor.config", compiler)
            compiler.deterministic = True
            with pinned(2):
                pass
            assert torch.is_deterministic_algorithms_warn_only_enabled()
            assert compiler.deterministic
        assert torch.get_deterministic_debug_mode() == mode
        assert not compiler.deterministic
        assert "TORCHINDUCTOR_DETERMINISTIC" not in os.environ
    finally:
        torch.set_deterministic_debug_mode(0)


@pytest.mark.slow
def test_neither_torchs_compiler_nor_flwr_datasets_is_loaded_where_nothing_needs_it() -> None:
    """Each takes about two seconds, in every process of a run."""
    code = (
        "import sys, torch; from fedapps.compute import pinned\n"
        "from fedapps.tasks.partitioning import *; import numpy as np\n"
        "with pinned(1):\n"
        "    for kind in (PartitionKind.IID, PartitionKind.COLUMN):\n"
        "        partition_indices(np.arange(6), 3, PartitionConfig(kind, column='c'), 0, {'c': np.arange(6) // 2})\n"
        "print([m for m in ('torch._inductor', 'torch._dynamo', 'flwr_datasets', 'datasets') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"


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
