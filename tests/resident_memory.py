"""How much memory the process holds now: what tests of leaks compare."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path

import pytest

_STATM = Path("/proc/self/statm")

needs_resident_bytes = pytest.mark.skipif(not _STATM.exists(), reason="reads Linux's /proc")


def resident_bytes() -> int:
    """Not the peak (``ru_maxrss``), which a leak below it leaves as it is."""
    return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def least_growth(repeat: Callable[[], object], rounds: int = 3) -> int:
    """By how many bytes the process grows each time, where something leaks.

    The least of some rounds: what grows once is no leak, as a page of 2 MiB which the system puts
    together of small ones while the test runs.
    """
    growth = []
    for _ in range(rounds):
        gc.collect()
        before = resident_bytes()
        repeat()
        gc.collect()
        growth.append(resident_bytes() - before)
    return min(growth)
