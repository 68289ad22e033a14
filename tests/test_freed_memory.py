"""accelerate() has glibc keep freed memory: counted in page faults, in processes of their own."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="the thresholds are glibc's"
)

# Prints the page faults of ten steps with two temporaries of 4 MiB, then how many blocks of their
# own glibc maps for a tensor of 20 MiB, which is below its largest threshold and above its first.
PROGRAM = """
import ctypes, resource, torch, pkg
torch.set_num_threads(1)
{before}

class Information(ctypes.Structure):
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_int) for name in names.split()]

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def step():
    return (values.sqrt() / 3).sum()

library = ctypes.CDLL(None)
library.mallinfo.restype = Information
values = torch.rand(1 << 20)
mapped = library.mallinfo().hblks
large = torch.empty(20 << 20, dtype=torch.uint8)
mapped = library.mallinfo().hblks - mapped
for _ in range(3):
    step()
first = faults()
for _ in range(10):
    step()
print(faults() - first, mapped)
"""
PAGES_OF_ONE_TEMPORARY = (4 << 20) // os.sysconf("SC_PAGE_SIZE")


def faults_and_mapped(before: str, **environment: str) -> tuple[int, int]:
    """What the program prints that runs these lines first."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ("GLIBC_TUNABLES", "LD_PRELOAD") and not name.startswith("MALLOC_")
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(before=before)],
        env={**kept, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    faults, mapped = map(int, done.stdout.split())
    return faults, mapped


@pytest.mark.parametrize("before", ["pkg.accelerate()", "pkg.accelerate(lambda: None)"])
def test_temporaries_are_not_mapped_anew(before: str) -> None:
    faults, mapped = faults_and_mapped(before)
    assert faults < PAGES_OF_ONE_TEMPORARY
    assert mapped == 0


@pytest.mark.parametrize(
    "before", ["", "pkg.accelerate(False)", "pkg.accelerate(keep_memory=False)"]
)
def test_what_does_not_ask_for_it_changes_nothing(before: str) -> None:
    assert faults_and_mapped(before)[1] == 1


def test_the_user_s_own_threshold_stays() -> None:
    assert faults_and_mapped("pkg.accelerate()", MALLOC_TRIM_THRESHOLD_="131072")[1] == 1
