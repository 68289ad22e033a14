"""What tools/check_wheel.py finds wrong with a wheel."""

from __future__ import annotations

import runpy
import zipfile
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[1] / "tools" / "check_wheel.py"
faults_of = runpy.run_path(str(TOOL))["faults_of"]

NAME = "pkg_kernels-0.1.0-cp311-cp311-manylinux_2_28_x86_64.whl"
INFO = "pkg_kernels-0.1.0.dist-info"
LIBRARIES = [
    f"pkg/{name}.cpython-311-x86_64-linux-gnu.so"
    for name in (
        "_C",
        *("_cpu_baseline", "_cpu_avx2", "_cpu_avx2_vnni"),
        *("_cpu_avx512", "_cpu_avx512_vnni", "_cpu_avx512_bf16"),
        "_cpu_amx",
    )
]
CUDA = "pkg/_cuda.cpython-311-x86_64-linux-gnu.so"
WHOLE = [
    *LIBRARIES,
    "pkg/__init__.py",
    f"{INFO}/METADATA",
    f"{INFO}/licenses/LICENSE",
    f"{INFO}/sboms/pkg-kernels.cdx.json",
]


def wheel(folder: Path, names: list[str], name: str = NAME, size: int = 1) -> Path:
    path = folder / name
    with zipfile.ZipFile(path, "w") as archive:
        for entry in names:
            archive.writestr(entry, b"\0" * size)
    return path


def test_a_whole_wheel_has_no_faults(tmp_path: Path) -> None:
    assert faults_of(wheel(tmp_path, WHOLE), False) == []
    for needs_cuda in (False, True):
        assert faults_of(wheel(tmp_path, [*WHOLE, CUDA]), needs_cuda) == []


def test_the_cuda_library_is_missed_where_it_must_be(tmp_path: Path) -> None:
    assert any("_cuda" in text for text in faults_of(wheel(tmp_path, WHOLE), True))


@pytest.mark.parametrize(
    ("names", "fault"),
    [
        (WHOLE[1:], "holds the libraries"),
        ([*WHOLE, CUDA.replace("_cuda", "_rocm")], "holds the libraries"),
        ([*WHOLE, "pkg_kernels.libs/libgomp-a34b3233.so.1.0.0"], "vendors"),
        ([*WHOLE, "pkg/libtorch_cpu.so"], "vendors"),
        ([*WHOLE, "pkg/cudart64_13.dll"], "vendors"),
        ([*WHOLE, "tests/test_mul.py"], "outside the package"),
        ([name for name in WHOLE if "LICENSE" not in name], "licenses/LICENSE is missing"),
        ([name for name in WHOLE if "sboms" not in name], "sboms/pkg-kernels.cdx.json is missing"),
    ],
)
def test_a_fault_is_found(tmp_path: Path, names: list[str], fault: str) -> None:
    assert any(fault in text for text in faults_of(wheel(tmp_path, names), False))


def test_an_unrepaired_and_a_fat_wheel(tmp_path: Path) -> None:
    unrepaired = wheel(tmp_path, WHOLE, NAME.replace("manylinux_2_28", "linux"))
    assert any("no manylinux tag" in text for text in faults_of(unrepaired, False))
    fat = wheel(tmp_path, WHOLE, size=2 << 20)
    assert any("more than 10" in text for text in faults_of(fat, False))
    assert faults_of(wheel(tmp_path, [*WHOLE, CUDA], size=2 << 20), True) == []
