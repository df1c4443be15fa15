"""A pool of worker processes that end when their parent does.

A worker of `concurrent.futures` finishes its task and then waits for ever when its parent was killed: nobody is left to
tell it to stop. Here each worker watches its parent and leaves, in the middle of a task too.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.connection import wait
from typing import Any


def worker_pool(workers: int, initializer: Callable[..., None] | None = None, *arguments: Any) -> ProcessPoolExecutor:
    """Make a pool of fresh interpreters, one task a process at a time.

    Threads are no choice here, since torch's generator is global, and neither is a fork of a process with threads.

    Args:
        workers: Number of processes, at least 1.
        initializer: Called in each process before its first task; it must be importable.
        *arguments: Its arguments, among which objects of `multiprocessing` that are shared with the processes.

    Returns:
        The pool; its processes start with the first task.
    """
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(workers, mp_context=context, initializer=_begin, initargs=(initializer, *arguments))


def kill_pool(pool: ProcessPoolExecutor) -> None:
    """End a pool at once, with what its workers are at; as `kill_workers` of Python 3.14.

    Args:
        pool: The pool; it takes no task any more.
    """
    for process in list((pool._processes or {}).values()):
        process.kill()
    pool.shutdown(cancel_futures=True)


def _begin(initializer: Callable[..., None] | None, *arguments: Any) -> None:
    _end_with_parent()
    if initializer is not None:
        initializer(*arguments)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is None:  # An initializer runs in a child only.
        return
    sentinel = parent.sentinel

    def watch() -> None:
        wait([sentinel])
        os._exit(1)

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()
