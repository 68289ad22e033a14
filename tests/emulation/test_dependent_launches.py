"""Kernels that begin while the one before still runs (csrc/cuda/device/dependent_launch.cuh).

The emulator runs one kernel after the other. That all threads wait it does see; what one of them
reads before it waits would be there all the same, and is not on a GPU.
"""

from __future__ import annotations

import re

from emulator import ROOT

WAIT = "wait_for_kernel_before();"
FIRST = re.compile(rf"\) \{{\n  {re.escape(WAIT)}\n")


def waits() -> dict[str, tuple[int, int]]:
    """Of each CUDA source: how often a kernel waits, and how often that is its first statement."""
    texts = {
        str(path.relative_to(ROOT)): path.read_text() for path in ROOT.glob("csrc/cuda/**/*.cu*")
    }
    return {
        name: (text.count(WAIT), len(FIRST.findall(text)))
        for name, text in texts.items()
        if WAIT in text
    }


def test_kernels_wait_before_all_else() -> None:
    found = waits()
    assert found
    late = [name for name, (count, first) in found.items() if count != first]
    assert late == []
