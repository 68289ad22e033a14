"""The CPU libraries' sources are C++ to Clang too, by which macOS and Windows compile them."""

from __future__ import annotations

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from torch.utils.cpp_extension import include_paths

from pkg import _build_flags

CSRC = Path(__file__).resolve().parents[1] / "csrc"
CLANG = next(filter(None, map(shutil.which, ("clang++", "clang++-16", "clang++-14"))), None)

pytestmark = [
    pytest.mark.checkout,
    pytest.mark.skipif(CLANG is None or _build_flags.WINDOWS, reason="calls clang++"),
]


@pytest.mark.parametrize("level", _build_flags.cpu_levels())
def test_compiles_without_a_warning(level: str) -> None:
    command = [str(CLANG), "-fsyntax-only", "-Werror", f"-I{CSRC}", "-DPKG_NAMESPACE=pkg"]
    command += [*_build_flags.cxx_flags(), *_build_flags.cpu_kernel_flags(level)]
    for folder in include_paths():
        command += ["-isystem", folder]

    def errors(source: Path) -> str:
        done = subprocess.run([*command, source], capture_output=True, text=True, check=False)
        return done.stderr

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        assert not "".join(pool.map(errors, sorted((CSRC / "cpu").rglob("*.cpp"))))
