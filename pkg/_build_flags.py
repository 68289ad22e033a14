"""Compiler flags of the package: one source for setup.py and for pkg.jit.

Imports nothing of the package, since setup.py runs it before there is one.
"""

from __future__ import annotations

import os
import platform
import re
import sys

WINDOWS = sys.platform == "win32"
MACOS = sys.platform == "darwin"
X86_64 = platform.machine().lower() in {"x86_64", "amd64"}
ARM64 = platform.machine().lower() in {"aarch64", "arm64"}

# The oldest PyTorch whose stable ABI the libraries use: 2.10.
STABLE_ABI = ["-DTORCH_TARGET_VERSION=0x020a000000000000", "-DTORCH_STABLE_ONLY"]

# The instruction sets that a CPU library may use, from the least to the most demanding;
# csrc/python/cpu_features.cpp tells which of them a processor runs.
_X86_LEVELS = {
    "baseline": ["-march=x86-64-v2"],
    "avx2": ["-march=x86-64-v3"],
    "avx2_vnni": ["-march=x86-64-v3", "-mavxvnni"],
    "avx512": ["-march=x86-64-v4"],
    "avx512_vnni": ["-march=x86-64-v4", "-mavx512vnni"],
    "avx512_bf16": ["-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16"],
}
# Tile registers: csrc/python/cpu_features.cpp asks the system for them, on Linux alone.
if sys.platform == "linux":
    _X86_LEVELS["amx"] = [*_X86_LEVELS["avx512_bf16"], "-mamx-tile", "-mamx-bf16", "-mamx-int8"]
_ARM_LEVELS = {
    "baseline": ["-march=armv8-a"],
    "neon_dotprod": ["-march=armv8.2-a+dotprod"],
    "neon_bf16": ["-march=armv8.2-a+dotprod+bf16"],
}

# PTX of the oldest, for GPUs newer than both: that of 9.0a runs on 9.0 alone.
DEFAULT_CUDA_ARCHITECTURES = "8.0+PTX;9.0a"
_BEFORE_AMPERE = ("Kepler", "Maxwell", "Pascal", "Volta", "Turing")  # as PyTorch's list names them


def builds_cuda() -> bool:
    """Whether CUDA kernels are to be built where that can be done: what PKG_BUILD_CUDA says."""
    asked = os.environ.get("PKG_BUILD_CUDA", "1")
    if asked == "native":
        import torch

        return torch.version.cuda is not None and torch.cuda.is_available()
    return asked != "0"


def asked_cuda_architectures() -> str:
    """Compute capabilities asked for, as TORCH_CUDA_ARCH_LIST writes them; or nothing."""
    return os.environ.get("PKG_CUDA_ARCH_LIST") or os.environ.get("TORCH_CUDA_ARCH_LIST") or ""


def package_cuda_architectures() -> str:
    """Compute capabilities to build pkg's own kernels for.

    Raises:
        ValueError: one that lacks the instructions which they are written with.
    """
    asked = asked_cuda_architectures() or DEFAULT_CUDA_ARCHITECTURES
    for name in filter(None, re.split("[;, ]+", asked)):
        number = re.match(r"\d+", name)
        is_old = int(number[0]) < 8 if number else name.split("+")[0] in _BEFORE_AMPERE
        if is_old:
            raise ValueError(
                f"the CUDA architectures '{asked}' have {name}, and pkg's kernels are written for "
                "tensor cores and asynchronous copies, which there are from 8.0 (Ampere) on. Set "
                "PKG_CUDA_ARCH_LIST to those of your GPUs that are newer, or PKG_BUILD_CUDA=0"
            )
    return asked


def package_nvcc_flags(threads: int) -> list[str]:
    """Flags of pkg's own CUDA files."""
    return [*nvcc_flags(threads), *cuda_macros(package_cuda_architectures())]


def cuda_macros(architectures: str) -> list[str]:
    """Macros of what the host has to know of the device code."""
    return ["-DPKG_CUDA_90A"] if re.search(r"\b9\.0a\b", architectures) else []


def _words(flags: list[str]) -> list[str]:
    """Flags of GCC and Clang as this system's compiler takes them; on Windows it is clang-cl."""
    return [f"/clang:{flag}" for flag in flags] if WINDOWS else flags


def cpu_levels() -> dict[str, list[str]]:
    """Instruction sets of this system's processors, with their compiler flags."""
    if not X86_64:
        return _ARM_LEVELS if ARM64 and not WINDOWS else {"baseline": []}
    return {level: _words(flags) for level, flags in _X86_LEVELS.items()}


def cxx_flags() -> list[str]:
    """Flags of every C++ file."""
    if WINDOWS:
        return ["/std:c++20", "/O2", "/W3", "/EHsc", *STABLE_ABI]
    return ["-std=c++20", "-O3", "-g0", "-fvisibility=hidden", "-Wall", "-Wextra", *STABLE_ABI]


def cpu_kernel_flags(level: str) -> list[str]:
    """Further flags of the CPU kernels: an instruction set, and fused multiply-adds."""
    return [*cpu_levels()[level], *_words(["-ffp-contract=fast"])]


def nvcc_flags(threads: int) -> list[str]:
    """Flags of every CUDA file; ``threads`` architectures are compiled at a time."""
    host = [] if WINDOWS else ["-Xcompiler=-fvisibility=hidden,-Wall,-Wextra"]
    return ["-std=c++20", "-O3", f"--threads={threads}", *host, *STABLE_ABI, "-DUSE_CUDA"]
