"""The C library keeps memory that was freed, instead of giving it back to be mapped again.

A tensor on the CPU is a block of malloc's. glibc maps each block above a threshold anew and unmaps
it when it is freed; the threshold follows the sizes that are freed, up to 32 MiB. It also gives the
end of its heap back to the system where more than twice the threshold is free there. So gradients,
the temporaries of a model and its scores come as pages that the kernel has to clear at their first
touch, at every step: 1.6 us for 4 KiB in a virtual machine with a Zen 4 processor (2026-11-24,
PyTorch 2.13), 180 000 times in a training step of a GPT-2 of four layers 384 wide with its
vocabulary of 50257. The step took 760 ms; it takes 360 ms where memory is kept and nothing else is
changed but what :func:`pkg.accelerate` always does. Raising the thresholds to the most that glibc
allows (32 and 64 MiB) is not enough: 620 ms.
"""

from __future__ import annotations

import ctypes
import os
import sys

# mallopt(3). Nothing is mapped by itself, and the end of the heap is never given back. Afterwards
# the thresholds are those that glibc itself comes to in a process that frees a block of 32 MiB.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4
_KEPT = {_MMAP_MAX: 0, _TRIM_THRESHOLD: -1}
_GIVEN_BACK = {_MMAP_MAX: 1 << 16, _MMAP_THRESHOLD: 32 << 20, _TRIM_THRESHOLD: 64 << 20}
_OF_THE_USER = ("trim_threshold", "mmap_threshold", "mmap_max", "top_pad")

_is_kept = False


def keep() -> None:
    """Has glibc keep all memory that is freed, for the blocks that come next.

    What the user has set of it (``MALLOC_TRIM_THRESHOLD_`` and its kin, ``GLIBC_TUNABLES``) stays,
    and another C library is left as it is. Of another allocator it changes nothing.
    """
    global _is_kept
    if not _is_kept and _is_free():
        _is_kept = _set(_KEPT)


def give_back() -> None:
    """Returns the pages that are free to the system, if they were kept, and keeps no more."""
    global _is_kept
    if _is_kept:
        _set(_GIVEN_BACK)
        ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(0))
        _is_kept = False


def _is_free() -> bool:
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    return not any(
        f"MALLOC_{name.upper()}_" in os.environ or f"glibc.malloc.{name}" in tunables
        for name in _OF_THE_USER
    )


def _set(options: dict[int, int]) -> bool:
    if sys.platform != "linux":
        return False
    library = ctypes.CDLL(None)  # whichever malloc the process has; musl's has no mallopt
    if not hasattr(library, "mallopt") or not hasattr(library, "malloc_trim"):
        return False
    done = [library.mallopt(option, value) for option, value in options.items()]
    return all(done)
