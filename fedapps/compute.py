"""Threads, devices and random draws, which make the same seed give the same bits in every engine; and memory."""

from __future__ import annotations

import ctypes
import functools
import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from threadpoolctl import ThreadpoolController

from fedapps.errors import SettingsError

COMPILER_DETERMINISTIC = "TORCHINDUCTOR_DETERMINISTIC"
"""What torch's compiler reads when it is loaded."""

Key = int
"""A part of the identity of a random draw: the seed, a round, a partition."""


def generator(*key: Key) -> np.random.Generator:
    """Make the random generator of one purpose.

    Args:
        *key: What the draw belongs to, such as seed, round and partition; different keys give independent streams.

    Returns:
        A generator that depends on nothing else.
    """
    return np.random.default_rng(list(key))


@contextmanager
def pinned(threads: int) -> Iterator[None]:
    """Pin the number of threads of BLAS, and of torch if it is loaded, and use deterministic algorithms.

    The order of a floating-point sum depends on the number of threads, so every handler computes with the same one.

    Args:
        threads: Threads for torch and BLAS.

    Yields:
        Nothing; torch's settings are put back at the end.
    """
    torch = sys.modules.get("torch")
    with _thread_pools(len(sys.modules)).limit(limits=threads):
        if torch is None:
            yield
            return
        before = torch.get_num_threads(), torch.get_deterministic_debug_mode()
        torch.set_num_threads(threads)
        # torch.use_deterministic_algorithms would import torch's compiler: seconds in each process that compiles nothing.
        torch.set_deterministic_debug_mode("warn")
        try:
            with _deterministic_compiler():
                yield
        finally:
            torch.set_num_threads(before[0])
            torch.set_deterministic_debug_mode(before[1])


@functools.lru_cache(maxsize=1)
def _thread_pools(num_modules: int) -> ThreadpoolController:  # noqa: ARG001 - a library comes with the module that needs it
    """Find the libraries that have threads; anew once modules were imported, since it takes milliseconds."""
    return ThreadpoolController()


@contextmanager
def _deterministic_compiler() -> Iterator[None]:
    """Let torch's compiler choose kernels without timing them, whether it is loaded or will be inside the block."""
    loaded: Any = sys.modules.get("torch._inductor.config")
    before = getattr(loaded, "deterministic", False), os.environ.get(COMPILER_DETERMINISTIC)
    if loaded is not None:
        loaded.deterministic = True
    os.environ[COMPILER_DETERMINISTIC] = "1"
    try:
        yield
    finally:
        compiler: Any = sys.modules.get("torch._inductor.config")
        if compiler is not None:
            compiler.deterministic = before[0]
        if before[1] is None:
            del os.environ[COMPILER_DETERMINISTIC]
        else:
            os.environ[COMPILER_DETERMINISTIC] = before[1]


def choose_device(setting: str) -> str:
    """Choose the device to compute on.

    Args:
        setting: ``auto``, ``cpu``, ``cuda`` or ``cuda:<index>``.

    Returns:
        The name of a device that is there.

    Raises:
        SettingsError: The device is unknown or absent.
    """
    kind, _, index = setting.partition(":")
    if kind not in ("auto", "cpu", "cuda") or (index and (kind != "cuda" or not index.isdigit())):
        raise SettingsError("setting 'device'", expected="auto, cpu, cuda or cuda:<index>", got=repr(setting))
    if kind == "cpu":
        return "cpu"
    import torch

    if torch.cuda.is_available() and (not index or int(index) < torch.cuda.device_count()):
        return "cuda" if kind == "auto" else setting
    if kind == "auto":
        return "cpu"
    raise SettingsError(
        "setting 'device'",
        expected="a device of this machine",
        got=f"{setting!r}, with {torch.cuda.device_count()} CUDA devices here",
        do="use device = auto or cpu",
    )


def free_memory() -> None:
    """Collect garbage, and give freed memory back to the system.

    glibc keeps what was freed below a block that is still in use, so without this the resident set of a server that takes many
    large replies grows beyond what it holds.
    """
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
