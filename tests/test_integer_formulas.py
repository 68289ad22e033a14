"""Elementwise operators of formulas that compare and divide integers, on the CPU.

That nvcc takes the formulas is tested too: the emulator's compiler is the host's, which may call
functions that a GPU does not have.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import integer_formulas
import pytest
import torch
from torch.utils import cpp_extension

from pkg import _build_flags

TESTS = Path(__file__).resolve().parent
COMPILER = os.environ.get("CXX", "c++").split()

pytestmark = [
    pytest.mark.checkout,
    pytest.mark.skipif(
        _build_flags.WINDOWS or shutil.which(COMPILER[0]) is None, reason="no compiler as GCC is"
    ),
]


def test_integers_are_computed_with_their_signs(tmp_path: Path) -> None:
    sources = [TESTS / "integer_formulas.cpp", TESTS.parent / "csrc/cpu/pointwise/pointwise.cpp"]
    library = tmp_path / "formulas.so"
    flags = [*_build_flags.cxx_flags(), *_build_flags.cpu_kernel_flags("baseline"), "-Werror"]
    flags += ["-O1", "-fPIC", "-shared", "-DPKG_NAMESPACE=pkg_formulas"]
    flags.append(f"-I{TESTS.parent / 'csrc'}")
    for path in cpp_extension.include_paths():
        flags += ["-isystem", path]
    libraries = [*(f"-L{path}" for path in cpp_extension.library_paths()), "-ltorch_cpu"]
    command = [*COMPILER, *flags, *map(str, sources), *libraries, "-o", str(library)]
    subprocess.run(command, check=True)
    torch.ops.load_library(library)
    integer_formulas.check(torch.ops.pkg_formulas)


@pytest.mark.long
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")
def test_nvcc_compiles_them(tmp_path: Path) -> None:
    source = tmp_path / "formulas.cu"
    source.write_text('#define PKG_ON_CUDA\n#include "integer_formulas.cpp"\n')
    flags = [*_build_flags.nvcc_flags(1), "-O0", "-arch=sm_80", "-Werror=all-warnings"]
    flags += ["-DPKG_NAMESPACE=pkg_formulas", f"-I{TESTS}", f"-I{TESTS.parent / 'csrc'}"]
    for path in cpp_extension.include_paths():
        flags += ["-isystem", path]
    subprocess.run(
        ["nvcc", *flags, "-c", str(source), "-o", str(tmp_path / "formulas.o")], check=True
    )
