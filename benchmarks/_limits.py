"""The limits of the machine, by the micro-benchmarks of ``csrc/cpu/runtime/machine_limits.cpp``.

A machine is not the same all the time: its clock rises and falls, and others use its memory and its
processors. What disturbs a micro-benchmark makes it slower, never faster. So limits are measured
again in turns with each case that is held to one, and the best counts: of arithmetic the best of
the whole run, since the processor stays the same one; of memory the best beside the case, since
what it gives depends on who else uses it, also other systems on the same machine.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import torch
from torch.utils.benchmark.utils.timer import timer

import pkg

MEMORY = "memory"
ARITHMETIC = ("float64", "float32", "bfloat16", "int8", "int4")
# What a case is held to, and the ways to do it: a measured limit, and how many of its operations
# stand for one of the case. The fastest way counts.
WAYS: dict[str, Mapping[str, int]] = {
    **{name: {name: 1} for name in (*ARITHMETIC, MEMORY)},
    # Values may be split into parts of bfloat16, three of float32 and two of float16, of which six
    # and four products are made (csrc/cpu/tiles/scheme.h); half precision may be converted.
    "float32": {"float32": 1, "bfloat16": 6},
    "bfloat16": {"bfloat16": 1, "float32": 1},
    "float16": {"float32": 1, "bfloat16": 4},
    # By the remainders for fifteen moduli, and leading bits (csrc/cpu/residues/scheme.h).
    "float64": {"float64": 1, "int8": 16},
    # Weights of four bits may be multiplied as they are or widened.
    "int8 by int4": {"int4": 1, "int8": 1},
    # An input may be cut into digits of eight bits, three of float32 and two of half precision
    # (csrc/cpu/int4/limbs.h).
    "float32 by int4": {"float32": 1, "int4": 3, "int8": 3},
    "bfloat16 by int4": {"bfloat16": 1, "float32": 1, "int4": 2, "int8": 2},
    "float16 by int4": {"float32": 1, "int4": 2, "int8": 2},
}
# How often a limit is measured: at the start, and in each turn beside a case.
AT_START = {"arithmetic": 20, MEMORY: 5}
IN_TURN = {"arithmetic": 3, MEMORY: 2}


def meaning(limit: str) -> str:
    """What a limit is the limit of, in words."""
    if limit == MEMORY:
        return "reading memory"
    names = {name: f"multiply-add of {name}" for name in ARITHMETIC}
    names["int4"] = "multiply-add of int8 with int4"

    def in_words(way: str, each: int) -> str:
        if limit == "float64":
            pieces = "remainders"
        else:
            pieces = "products of parts" if way == "bfloat16" else "digits"
        return names[way] + (f" in {each} {pieces}" if each > 1 else "")

    words = [in_words(way, each) for way, each in WAYS[limit].items()]
    return words[0] if len(words) == 1 else f"the fastest of {', '.join(words)}"


@cache
def cache_bytes(folder: Path = Path("/sys/devices/system/cpu")) -> int:
    """What the last caches of all processors of this process hold together; 0 if not known."""
    sizes: dict[tuple[int, str], int] = {}
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ()
    for processor in allowed:
        for index in (folder / f"cpu{processor}" / "cache").glob("index*"):
            try:
                level, kind, size, shared = (
                    (index / name).read_text().strip()
                    for name in ("level", "type", "size", "shared_cpu_list")
                )
            except OSError:
                continue
            if kind != "Instruction":
                units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
                number = int(size.rstrip("KMG")) * units.get(size[-1], 1)
                sizes[int(level), shared] = number
    last = max((level for level, _ in sizes), default=0)
    return sum(size for (level, _), size in sizes.items() if level == last)


# Of so much, at most a fourth is still in a cache from the time before.
LEAST_BEYOND_CACHES, TIMES_CACHES = 256 << 20, 4


def beyond_caches(device: torch.device | None = None) -> int:
    """Bytes that are far more than the caches hold: what goes round them comes from memory.

    Args:
        device: whose caches; the processor's unless said otherwise.
    """
    if device is not None and device.type == "cuda":
        caches: int = torch.cuda.get_device_properties(device).L2_cache_size
    else:
        caches = cache_bytes()
    return max(LEAST_BEYOND_CACHES, TIMES_CACHES * caches)


def _library() -> ctypes.CDLL:
    # Compiled on import, binding and kernels are one library.
    library = ctypes.CDLL(pkg._C.__file__)
    if not hasattr(library, "pkg_arithmetic_limit"):
        file = pkg._loader.library_file(f"_cpu_{pkg._loader.cpu_capability}")
        library = ctypes.CDLL(str(file))
    library.pkg_arithmetic_limit.argtypes = [ctypes.c_char_p, ctypes.c_int32]
    library.pkg_arithmetic_limit.restype = ctypes.c_double
    library.pkg_reading_limit.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32]
    library.pkg_reading_limit.restype = ctypes.c_double
    return library


class Limits:
    """What the loaded CPU library could reach with PyTorch's present number of threads.

    Attributes:
        rates: the best that was seen, by name: GFLOP/s (int8: 1e9 operations a second) of the
            arithmetic that products of each dtype are done in, and GB/s of reading, as ``memory``.
    """

    def __init__(self, memory_bytes: int | None = None) -> None:
        """Measure it.

        Args:
            memory_bytes: to read; more than the caches hold unless said otherwise.
        """
        self._library = _library()
        self._memory = torch.ones(memory_bytes or beyond_caches(), dtype=torch.uint8, device="cpu")
        self.rates: dict[str, float] = {}
        # The better of two: new threads need a while to spread over the cores.
        for _ in range(2):
            for name in (*ARITHMETIC, MEMORY):
                self.measure(name, AT_START)

    def measure(self, name: str, repetitions: Mapping[str, int]) -> float:
        """Measure one limit again; what it is now. A better rate is remembered."""
        if name == MEMORY:
            memory = self._memory
            rate = self._library.pkg_reading_limit(
                memory.data_ptr(), memory.numel(), repetitions[MEMORY]
            )
        else:
            rate = self._library.pkg_arithmetic_limit(name.encode(), repetitions["arithmetic"])
        self.rates[name] = max(rate / 1e9, self.rates.get(name, 0.0))
        for limit, ways in WAYS.items():
            if all(way in self.rates for way in ways):
                self.rates[limit] = max(self.rates[way] / each for way, each in ways.items())
        return float(rate / 1e9)

    def beside(self, limit: str) -> Beside:
        """What measures a limit again in turns with a case."""
        return Beside(self, limit)


class Beside:
    """Measures a limit each time it is called, and keeps the best."""

    def __init__(self, limits: Limits, limit: str) -> None:
        self._limits, self._limit = limits, limit
        self._memory = 0.0

    def __call__(self, number: int) -> float:
        """Take a turn, whatever the number; the seconds that it took."""
        begin = timer()
        for way in WAYS[self._limit]:
            rate = self._limits.measure(way, IN_TURN)
            if way == MEMORY:
                self._memory = max(self._memory, rate)
        return float(timer() - begin)

    @property
    def rate(self) -> float:
        """The limit beside the case."""
        return self._memory if self._limit == MEMORY else self._limits.rates[self._limit]
