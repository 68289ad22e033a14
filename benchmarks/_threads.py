"""Threads while timing: as many as asked for, on cores of their own."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch


def _allowed() -> set[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()


def _siblings(processor: int) -> str:
    """What the logical processors of one core have in common."""
    file = Path(f"/sys/devices/system/cpu/cpu{processor}/topology/thread_siblings_list")
    try:
        return file.read_text()
    except OSError:
        return str(processor)


def processors(threads: int, allowed: Iterable[int]) -> list[int]:
    """The logical processors for so many threads: each of another core as long as there are any."""
    first: dict[str, int] = {}
    others = []
    for processor in sorted(allowed):
        if first.setdefault(_siblings(processor), processor) != processor:
            others.append(processor)
    return [*first.values(), *others][:threads]


def place(process: int, on: Sequence[int]) -> None:
    """Give each thread of a process a logical processor: the main thread the first.

    The others take turns at the rest, in the order in which they were made: the threads of a pool
    are made together, so no two of a pool share a processor. Left to the system, two that work
    together may spend many milliseconds on the same one. Threads that are made later begin on the
    first: place again.
    """
    workers = sorted(set(_threads(process)) - {process})
    turns = itertools.cycle(on[1:] or on)
    for thread, processor in [(process, on[0]), *zip(workers, turns, strict=False)]:
        _bind(thread, {processor})


def in_use() -> list[int]:
    """The logical processors that this process's threads may run on, the main thread's first.

    None where the system has no affinity, or where threads are not bound.
    """
    if not hasattr(os, "sched_getaffinity"):
        return []
    found = {}
    for thread in (os.getpid(), *_threads(os.getpid())):
        with suppress(ProcessLookupError):
            found |= dict.fromkeys(sorted(os.sched_getaffinity(thread)))
    return list(found)[: torch.get_num_threads()]


def _threads(process: int) -> list[int]:
    return [int(entry.name) for entry in Path(f"/proc/{process}/task").iterdir()]


def _bind(thread: int, on: Iterable[int]) -> None:
    with suppress(ProcessLookupError):  # it may have ended
        os.sched_setaffinity(thread, on)


def blas_libraries() -> list[dict[str, Any]]:
    """Those that this process has loaded besides what PyTorch has within: version, kernels."""
    from threadpoolctl import threadpool_info

    wanted = ("internal_api", "version", "architecture", "threading_layer")
    found = (pool for pool in threadpool_info() if pool["user_api"] == "blas")
    return [{name: pool.get(name) for name in wanted} for pool in found]


@contextmanager
def pinned(threads: int) -> Iterator[list[int]]:
    """PyTorch and BLAS libraries with so many threads, on as many cores; as before afterwards.

    Yields:
        The logical processors; none where the system has no affinity.
    """
    # Here, since timing on a GPU needs none of it.
    from threadpoolctl import threadpool_limits

    before, allowed = torch.get_num_threads(), _allowed()
    chosen = processors(threads, allowed)
    torch.set_num_threads(threads)
    try:
        with threadpool_limits(threads, user_api="blas"):
            if chosen:
                torch.ones(1 << 20).sum()  # makes PyTorch's threads
                place(os.getpid(), chosen)
            yield chosen
    finally:
        torch.set_num_threads(before)
        if chosen:
            for thread in _threads(os.getpid()):
                _bind(thread, allowed)
