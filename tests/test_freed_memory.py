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

# Prints the page faults of ten steps with two temporaries of 40 MiB, which is more than glibc keeps
# of itself, and how many blocks of their own it maps for a tensor of that size.
PROGRAM = """
import ctypes, resource, torch, pkg
torch.set_num_threads(1)

class Information(ctypes.Structure):
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_int) for name in names.split()]

library = ctypes.CDLL(None)
library.mallinfo.restype = Information
values = torch.rand(10 << 20)

def step():
    return (values.sqrt() / 3).sum()

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()

def mapped(megabytes=40):
    before = library.mallinfo().hblks
    large = torch.empty(megabytes << 20, dtype=torch.uint8)
    return library.mallinfo().hblks - before

{before}
for _ in range(5):
    step()
first = faults()
for _ in range(10):
    step()
print(faults() - first, mapped())
{after}
"""
PAGES_OF_ONE_TEMPORARY = (40 << 20) // os.sysconf("SC_PAGE_SIZE")
# Nearly all of both temporaries, ten times.
NOT_KEPT_FAULTS = 10 * PAGES_OF_ONE_TEMPORARY


def lines(before: str, after: str = "", **environment: str) -> list[list[int]]:
    """What the program prints that runs these lines before and after its steps."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ("GLIBC_TUNABLES", "LD_PRELOAD") and not name.startswith("MALLOC_")
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(before=before, after=after)],
        env={**kept, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return [[int(each) for each in line.split()] for line in done.stdout.splitlines()]


@pytest.mark.parametrize(
    "before", ["pkg.accelerate()", "with pkg.accelerate(): pass", "pkg.accelerate(lambda: None)()"]
)
def test_temporaries_are_not_mapped_anew(before: str) -> None:
    (found,) = lines(before)
    faults, mapped = found
    assert faults < NOT_KEPT_FAULTS / 2
    assert mapped == 0


@pytest.mark.parametrize(
    ("before", "environment"),
    [
        ("", {}),
        ("pkg.accelerate(False)", {}),
        ("pkg.accelerate(keep_memory=False)", {}),
        ("pkg.accelerate(lambda: None)", {}),
        ("pkg.accelerate()", {"MALLOC_TRIM_THRESHOLD_": "131072"}),
        ("pkg.accelerate()", {"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=131072"}),
    ],
)
def test_what_does_not_ask_for_it_changes_nothing(before: str, environment: dict[str, str]) -> None:
    (found,) = lines(before, **environment)
    faults, mapped = found
    assert faults > NOT_KEPT_FAULTS
    assert mapped == 1


def test_it_is_given_back() -> None:
    # Of a size that no hole in the heap has.
    program = "held = resident(); pkg.accelerate(False); print(held - resident(), mapped(2000))"
    _, found = lines("pkg.accelerate()", program)
    returned, mapped = found
    assert returned > 40 << 20
    assert mapped == 1


def test_what_is_turned_off_in_a_block_is_given_back_at_its_end() -> None:
    program = "held = resident(); block.__exit__(None, None, None)\n"
    program += "print(held - resident(), mapped(2000))"
    begin = "block = pkg.accelerate(); block.__enter__(); pkg.accelerate(False)"
    _, found = lines(begin, program)
    returned, mapped = found
    assert returned > 40 << 20
    assert mapped == 1
    (found,) = lines("with pkg.accelerate():\n    with pkg.accelerate(False): pass")
    assert found[1] == 0


def test_a_block_without_acceleration_ends_with_it() -> None:
    (found,) = lines("pkg.accelerate()\nwith pkg.accelerate(False): pass")
    assert found[1] == 0
