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
SKYLAKE_X = KNIGHTS_LANDING | {"avx512bw", "avx512dq", "avx512vl"}
CASCADE_LAKE = SKYLAKE_X | {"avx512_vnni"}  # Ice Lake too
COOPER_LAKE = CASCADE_LAKE | {"avx512_bf16"}  # Zen 4 and Zen 5 too
SAPPHIRE_RAPIDS = COOPER_LAKE | {"amx_tile", "amx_bf16", "amx_int8", "os_saves_tiles"}

PROCESSORS = {
    "Core 2 of 2006": (set(), "none"),
    "SSE4.2 without POPCNT": ({"sse42"}, "none"),
    "Nehalem": (NEHALEM, "baseline"),
    "Sandy Bridge": (SANDY_BRIDGE, "baseline"),
    "Piledriver: FMA without AVX2": (SANDY_BRIDGE | {"fma", "f16c", "bmi1", "lzcnt"}, "baseline"),
    "Haswell": (HASWELL, "avx2"),
    "Haswell whose system does not save YMM": (HASWELL - {"os_saves_ymm"}, "baseline"),
    "Knights Landing": (KNIGHTS_LANDING, "avx2"),
    "Skylake-X": (SKYLAKE_X, "avx512"),
    "Skylake-X whose system does not save ZMM": (SKYLAKE_X - {"os_saves_zmm"}, "avx2"),
    "Cascade Lake": (CASCADE_LAKE, "avx512_vnni"),
    "BF16 without VNNI": (SKYLAKE_X | {"avx512_bf16"}, "avx512"),
    "Cooper Lake": (COOPER_LAKE, "avx512_bf16"),
    "Sapphire Rapids": (SAPPHIRE_RAPIDS, "amx"),
    "Sapphire Rapids whose system gives no tiles": (
        SAPPHIRE_RAPIDS - {"os_saves_tiles"},
        "avx512_bf16",
    ),
}

M1 = {"dotprod"}  # Neoverse N1 and Cortex-A76 too
NEOVERSE_V1 = M1 | {"bf16"}  # Neoverse N2, Apple's M2 too
ARM_PROCESSORS = {
    "Cortex-A72": (set(), "baseline"),
    "M1": (M1, "neon_dotprod"),
    "Neoverse V1": (NEOVERSE_V1, "neon_bf16"),
    "BF16 without dot products of bytes": ({"bf16"}, "baseline"),
}


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prints the level of a processor with the features that its arguments name."""
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
  const auto best = std::string_view(arguments[1]) == "arm" ? pkg::best_capability(arm)
                                                            : pkg::best_capability(x86);
  std::cout << (best ? pkg::capability_name(*best) : "none");
}}
"""
    (folder / "program.cpp").write_text(source)
    sources = [folder / "program.cpp", CSRC / "python" / "cpu_features.cpp"]
    command = ["c++", "-std=c++20", f"-I{CSRC}", *sources, "-o", folder / "program"]
    subprocess.run(command, check=True)
    return folder / "program"


def level_of(program: Path, features: set[str], architecture: str = "x86") -> str:
    command = [program, architecture, *features]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("name", PROCESSORS)
def test_a_processor_gets_its_library(program: Path, name: str) -> None:
    features, expected = PROCESSORS[name]
    assert level_of(program, features) == expected


@pytest.mark.parametrize("name", ARM_PROCESSORS)
def test_a_processor_of_arm_gets_its_library(program: Path, name: str) -> None:
    features, expected = ARM_PROCESSORS[name]
    assert level_of(program, features, "arm") == expected


@pytest.mark.parametrize("missing", sorted(SAPPHIRE_RAPIDS))
def test_every_feature_is_asked_for(program: Path, missing: str) -> None:
    level = level_of(program, SAPPHIRE_RAPIDS - {missing})
    expected = {
        "sse42": "none",
        "popcnt": "none",
        "avx512_vnni": "avx512",
        "avx512_bf16": "avx512_vnni",
        "amx_tile": "avx512_bf16",
        "amx_bf16": "avx512_bf16",
        "amx_int8": "avx512_bf16",
        "os_saves_tiles": "avx512_bf16",
    }
    default = "avx2" if missing.startswith("avx512") or missing == "os_saves_zmm" else "baseline"
    assert level == expected.get(missing, default)
