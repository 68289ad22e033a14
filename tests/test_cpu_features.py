"""Which CPU library a processor gets, for processors that are not at hand."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

CSRC = Path(__file__).resolve().parents[1] / "csrc"

pytestmark = pytest.mark.skipif(shutil.which("c++") is None, reason="compiles a program")

NEHALEM = {"sse42", "popcnt"}
SANDY_BRIDGE = NEHALEM | {"avx", "os_saves_ymm"}
HASWELL = SANDY_BRIDGE | {"avx2", "fma", "f16c", "bmi1", "bmi2", "lzcnt", "movbe"}
KNIGHTS_LANDING = HASWELL | {"avx512f", "avx512cd", "os_saves_zmm"}
ALDER_LAKE = HASWELL | {"avx_vnni"}  # Gracemont and what follows both too
SKYLAKE_X = KNIGHTS_LANDING | {"avx512bw", "avx512dq", "avx512vl"}
CASCADE_LAKE = SKYLAKE_X | {"avx512_vnni"}  # Ice Lake too
COOPER_LAKE = CASCADE_LAKE | {"avx512_bf16"}  # Zen 4 too
ZEN_5 = COOPER_LAKE | {"avx_vnni"}
SAPPHIRE_RAPIDS = ZEN_5 | {"amx_tile", "amx_bf16", "amx_int8", "os_saves_tiles"}

LEVELS = ("baseline", "avx2", "avx2_vnni", "avx512", "avx512_vnni", "avx512_bf16", "amx")
BASELINE = LEVELS[:1]
AVX2 = LEVELS[:2]
AVX512 = ("baseline", "avx2", "avx512")

# The libraries that each runs, of which it gets the last.
PROCESSORS = {
    "Core 2 of 2006": (set(), ()),
    "SSE4.2 without POPCNT": ({"sse42"}, ()),
    "Nehalem": (NEHALEM, BASELINE),
    "Sandy Bridge": (SANDY_BRIDGE, BASELINE),
    "Piledriver: FMA without AVX2": (SANDY_BRIDGE | {"fma", "f16c", "bmi1", "lzcnt"}, BASELINE),
    "Haswell": (HASWELL, AVX2),
    "Haswell whose system does not save YMM": (HASWELL - {"os_saves_ymm"}, BASELINE),
    "Knights Landing": (KNIGHTS_LANDING, AVX2),
    "Alder Lake": (ALDER_LAKE, (*AVX2, "avx2_vnni")),
    "Alder Lake whose system does not save YMM": (ALDER_LAKE - {"os_saves_ymm"}, BASELINE),
    "Skylake-X": (SKYLAKE_X, AVX512),
    "Skylake-X whose system does not save ZMM": (SKYLAKE_X - {"os_saves_zmm"}, AVX2),
    "Cascade Lake": (CASCADE_LAKE, (*AVX512, "avx512_vnni")),
    "BF16 without VNNI": (SKYLAKE_X | {"avx512_bf16"}, AVX512),
    "Cooper Lake": (COOPER_LAKE, (*AVX512, "avx512_vnni", "avx512_bf16")),
    "Zen 5": (ZEN_5, LEVELS[:-1]),
    "Sapphire Rapids": (SAPPHIRE_RAPIDS, LEVELS),
    "Sapphire Rapids whose system gives no tiles": (
        SAPPHIRE_RAPIDS - {"os_saves_tiles"},
        LEVELS[:-1],
    ),
}

M1 = {"dotprod"}  # Neoverse N1 and Cortex-A76 too
NEOVERSE_V1 = M1 | {"bf16"}  # Neoverse N2, Apple's M2 too
ARM_PROCESSORS = {
    "Cortex-A72": (set(), BASELINE),
    "M1": (M1, (*BASELINE, "neon_dotprod")),
    "Neoverse V1": (NEOVERSE_V1, (*BASELINE, "neon_dotprod", "neon_bf16")),
    "BF16 without dot products of bytes": ({"bf16"}, BASELINE),
}


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prints the levels that a processor with the features named in its arguments runs."""
    folder = tmp_path_factory.mktemp("features")
    header = (CSRC / "python" / "cpu_features.h").read_text()
    setters = ""
    for architecture, expected in (("x86", SAPPHIRE_RAPIDS), ("arm", NEOVERSE_V1)):
        struct = header.partition(f"struct {architecture.capitalize()}Features {{")[2]
        fields = re.findall(r"^  bool (\w+) = false;", struct.partition("};")[0], re.MULTILINE)
        assert set(fields) == expected
        for field in fields:
            setters += f'    if (name == "{field}") {architecture}.{field} = true;\n'
    source = f"""
#include <iostream>
#include "python/cpu_features.h"
int main(int count, char** arguments) {{
  pkg::X86Features x86;
  pkg::ArmFeatures arm;
  for (int i = 2; i < count; ++i) {{
    const std::string_view name = arguments[i];
{setters}
  }}
  if (std::string_view(arguments[1]) == "arm") {{
    for (const auto capability : pkg::kArmCapabilities) {{
      if (pkg::runs(arm, capability)) std::cout << pkg::capability_name(capability) << '\\n';
    }}
  }} else {{
    for (const auto capability : pkg::kX86Capabilities) {{
      if (pkg::runs(x86, capability)) std::cout << pkg::capability_name(capability) << '\\n';
    }}
  }}
}}
"""
    (folder / "program.cpp").write_text(source)
    sources = [folder / "program.cpp", CSRC / "python" / "cpu_features.cpp"]
    command = ["c++", "-std=c++20", f"-I{CSRC}", *sources, "-o", folder / "program"]
    subprocess.run(command, check=True)
    return folder / "program"


def levels_of(program: Path, features: set[str], architecture: str = "x86") -> tuple[str, ...]:
    command = [program, architecture, *features]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return tuple(printed.split())


@pytest.mark.parametrize("name", PROCESSORS)
def test_a_processor_runs_its_libraries(program: Path, name: str) -> None:
    features, expected = PROCESSORS[name]
    assert levels_of(program, features) == expected


@pytest.mark.parametrize("name", ARM_PROCESSORS)
def test_a_processor_of_arm_runs_its_libraries(program: Path, name: str) -> None:
    features, expected = ARM_PROCESSORS[name]
    assert levels_of(program, features, "arm") == expected


@pytest.mark.parametrize("missing", sorted(SAPPHIRE_RAPIDS))
def test_every_feature_is_asked_for(program: Path, missing: str) -> None:
    lost = {
        "sse42": set(LEVELS),
        "popcnt": set(LEVELS),
        "avx_vnni": {"avx2_vnni"},
        "avx512_vnni": {"avx512_vnni", "avx512_bf16", "amx"},
        "avx512_bf16": {"avx512_bf16", "amx"},
        **{key: {"amx"} for key in ("amx_tile", "amx_bf16", "amx_int8", "os_saves_tiles")},
    }
    is_avx512 = missing.startswith("avx512") or missing == "os_saves_zmm"
    default = {level for level in LEVELS[1:] if not (is_avx512 and level.startswith("avx2"))}
    expected = tuple(level for level in LEVELS if level not in lost.get(missing, default))
    assert levels_of(program, SAPPHIRE_RAPIDS - {missing}) == expected
