"""How much memory the process holds now: what tests of leaks compare."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

_STATM = Path("/proc/self/statm")

needs_resident_bytes = pytest.mark.skipif(not _STATM.exists(), reason="reads Linux's /proc")


def resident_bytes() -> int:
    """Not the peak (``ru_maxrss``), which a leak below it leaves as it is."""
    return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
