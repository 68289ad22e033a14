"""The limits of the machine, by the micro-benchmarks of ``csrc/cpu/machine_limits.cpp``."""

from __future__ import annotations

import ctypes

import torch

import pkg

from ._case import BEYOND_CACHES

ARITHMETIC = ("float64", "float32", "bfloat16", "int8")


def _library() -> ctypes.CDLL:
    # Compiled on import, binding and kernels are one library.
    library = ctypes.CDLL(pkg._C.__file__)
    if not hasattr(library, "pkg_arithmetic_limit"):
        file = pkg._loader.library_file(f"_cpu_{pkg._loader.cpu_capability}")
        library = ctypes.CDLL(str(file))
    library.pkg_arithmetic_limit.argtypes = [ctypes.c_char_p]
    library.pkg_arithmetic_limit.restype = ctypes.c_double
    library.pkg_reading_limit.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32]
    library.pkg_reading_limit.restype = ctypes.c_double
    return library


class Limits:
    """What the loaded CPU library could reach with PyTorch's present number of threads."""

    def __init__(self, memory_bytes: int = BEYOND_CACHES) -> None:
        """Measure it.

        Args:
            memory_bytes: to read; more than the caches hold.
        """
        self._library = _library()
        self._memory = torch.ones(memory_bytes, dtype=torch.uint8)
        # GFLOP/s (int8: 1e9 operations a second) of the arithmetic that products of each dtype are
        # done in, and GB/s of reading, as "memory".
        self.rates: dict[str, float] = {}
        # The better of two: new threads need a while to spread over the cores.
        for _ in range(2):
            for dtype in ARITHMETIC:
                rate = self._library.pkg_arithmetic_limit(dtype.encode()) / 1e9
                self.rates[dtype] = max(rate, self.rates.get(dtype, 0))
            self.rates["memory"] = max(self._reading(5), self.rates.get("memory", 0))
        self.rates["float16"] = self.rates["float32"]  # converted

    def _reading(self, readings: int) -> float:
        memory = self._memory
        rate = self._library.pkg_reading_limit(memory.data_ptr(), memory.numel(), readings)
        return float(rate) / 1e9

    def reading_seconds(self, readings: int) -> float:
        """Seconds to read 1e9 bytes, by the best of some readings.

        What memory gives depends on who else uses it, also other systems on the same machine:
        measured in turns with what is compared with it.
        """
        return 1 / self._reading(readings)
