"""The C library keeps memory that was freed, instead of giving it back to be mapped again.

A tensor on the CPU is a block of malloc's. glibc maps a block of its own for what is larger than a
threshold, and gives the end of its heap back to the system when more than twice that is free there.
The threshold begins at 128 KiB and becomes the size of the largest such block that was freed. So
the temporaries of a model, freed after each operator, go back and come again as pages that the
kernel has to clear at their first touch: 1.6 us for 4 KiB in a virtual machine with a Zen 4
processor, where AdamW's square roots of a million weights took 2.9 ms for what is 0.4 ms of memory
traffic.
"""

from __future__ import annotations

import ctypes
import functools
import sys

# glibc raises its threshold up to this (mallopt(3): DEFAULT_MMAP_THRESHOLD_MAX), and keeps twice as
# much; the block is smaller by the pages that the mapping is rounded up to.
LARGEST_THRESHOLD = 32 << 20
BLOCK = LARGEST_THRESHOLD - (8 << 10)


@functools.cache
def keep() -> None:
    """Has glibc keep blocks of up to 32 MiB, and up to 64 MiB of free memory, from now on.

    It frees one block of that size, which raises the thresholds as a tensor of that size would: no
    page of it is touched. Where the user has set a threshold (``MALLOC_TRIM_THRESHOLD_``,
    ``MALLOC_MMAP_THRESHOLD_``, ``GLIBC_TUNABLES``), that stays, as glibc has it; another allocator
    and another C library are left as they are.
    """
    if sys.platform != "linux":
        return
    library = ctypes.CDLL(None)  # whichever malloc the process has, a preloaded one too
    library.malloc.argtypes, library.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
    library.free.argtypes, library.free.restype = [ctypes.c_void_p], None
    library.free(library.malloc(BLOCK))
