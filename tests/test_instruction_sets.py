"""No library holds an instruction that is newer than its own level: disassembles each of them."""

from __future__ import annotations

import importlib.machinery
import platform
import sys
from collections import Counter
from pathlib import Path

import pytest
from built_libraries import BUILT

import pkg

iced_x86 = pytest.importorskip("iced_x86")

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64", reason="reads ELF files of x86-64"
)

FOLDER = Path(pkg.__file__).parent
SUFFIX = importlib.machinery.EXTENSION_SUFFIXES[0]

# What each level may use, in the words of the decoder; each holds the one before it. Those of the
# levels x86-64-v2, v3 and v4 are of the psABI, which names the instruction sets that they promise.
_V2 = {
    *("INTEL8086", "INTEL8086_ONLY", "INTEL186", "INTEL286", "INTEL386", "INTEL486", "X64"),
    *("FPU", "FPU287", "FPU387", "CMOV", "CX8", "FXSR", "MMX", "MULTIBYTENOP", "PAUSE", "TSC"),
    *("CPUID", "SSE", "SSE2", "SSE3", "SSSE3", "SSE4_1", "SSE4_2", "POPCNT", "CMPXCHG16B"),
    # endbr64, where the compiler marks targets of jumps: an older processor does nothing there.
    "CET_IBT",
}
_V3 = _V2 | {"AVX", "AVX2", "FMA", "F16C", "BMI1", "BMI2", "LZCNT", "MOVBE"}
_V4 = _V3 | {"AVX512F", "AVX512BW", "AVX512CD", "AVX512DQ", "AVX512VL"}
# xgetbv, executed only where the processor says that it has it (csrc/python/cpu_features.cpp).
_GUARDED = {"_C": {"XSAVE"}}

ALLOWED = {
    "_C": _V2,
    "_cpu_baseline": _V2,
    "_cpu_avx2": _V3,
    "_cpu_avx2_vnni": _V3 | {"AVX_VNNI"},
    "_cpu_avx512": _V4,
    "_cpu_avx512_vnni": _V4 | {"AVX512_VNNI"},
    "_cpu_avx512_bf16": _V4 | {"AVX512_VNNI", "AVX512_BF16"},
    "_cpu_amx": _V4 | {"AVX512_VNNI", "AVX512_BF16", "AMX_TILE", "AMX_BF16", "AMX_INT8"},
}

# And what it was compiled for.
USED = {
    "_cpu_avx2": {"AVX2", "FMA"},
    "_cpu_avx2_vnni": {"AVX_VNNI"},
    "_cpu_avx512": {"AVX512F"},
    "_cpu_avx512_vnni": {"AVX512_VNNI"},
    "_cpu_avx512_bf16": {"AVX512_VNNI", "AVX512_BF16"},
    "_cpu_amx": {"AMX_TILE", "AMX_BF16", "AMX_INT8"},
}


def code_of(library: Path) -> list[tuple[int, bytes]]:
    """The executable sections: address and contents."""
    from elftools.elf.constants import SH_FLAGS
    from elftools.elf.elffile import ELFFile

    with library.open("rb") as file:
        return [
            (section["sh_addr"], section.data())
            for section in ELFFile(file).iter_sections()
            if section["sh_flags"] & SH_FLAGS.SHF_EXECINSTR
        ]


def instruction_sets_of(library: Path) -> dict[str, str]:
    """Every instruction set that the library uses, with one of its instructions."""
    names = {
        value: name
        for name, value in vars(iced_x86.CpuidFeature).items()
        if isinstance(value, int) and not name.startswith("_")
    }
    examples: dict[int, object] = {}
    invalid: Counter[str] = Counter()
    for address, code in code_of(library):
        for instruction in iced_x86.Decoder(64, code, ip=address):
            if instruction.is_invalid:
                invalid["bytes that are no instruction"] += 1
            # As `rep bsf` the same bytes are bsf on every older processor. GCC writes it for a
            # number that is not zero (std::countr_zero behind its test): both count the same.
            if instruction.mnemonic == iced_x86.Mnemonic.TZCNT:
                continue
            for feature in instruction.cpuid_features():
                examples.setdefault(feature, instruction.copy())
    assert not invalid, invalid
    return {names[feature]: f"{text:x} {text}" for feature, text in examples.items()}


LIBRARIES = ["_C", *(f"_cpu_{level}" for level in BUILT)]


@pytest.mark.parametrize("name", LIBRARIES)
def test_no_library_is_ahead_of_its_level(name: str) -> None:
    found = instruction_sets_of(FOLDER / f"{name}{SUFFIX}")
    allowed = ALLOWED[name] | _GUARDED.get(name, set())
    beyond = {key: text for key, text in found.items() if key not in allowed}
    assert not beyond


def test_each_level_uses_what_it_was_compiled_for() -> None:
    # Else the test above would pass for five copies of one library.
    for name in LIBRARIES:
        assert instruction_sets_of(FOLDER / f"{name}{SUFFIX}").keys() >= USED.get(name, set())
