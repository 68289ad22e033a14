"""The flags of pkg/_build_flags.py, and the lists elsewhere that have to agree with them."""

from __future__ import annotations

import itertools
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

from pkg import _build_flags, _loader, environment, jit

ROOT = Path(__file__).resolve().parents[1]
LEVELS = _loader.CPU_CAPABILITIES


@pytest.mark.checkout
def test_the_wheels_are_built_for_architectures_that_the_build_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (asked,) = re.findall(r'PKG_CUDA_ARCH_LIST = "(.*?)"', (ROOT / "pyproject.toml").read_text())
    monkeypatch.setenv("PKG_CUDA_ARCH_LIST", asked)
    assert _build_flags.package_cuda_architectures() == asked
    assert "-DPKG_CUDA_90A" in _build_flags.package_nvcc_flags(1)


@pytest.mark.skipif(sys.platform != "linux", reason="where the system is asked for tile registers")
def test_the_build_and_the_import_know_the_same_cpu_levels() -> None:
    assert tuple(_build_flags._X86_LEVELS) == _loader.X86_CAPABILITIES
    assert tuple(_build_flags._ARM_LEVELS) == _loader.ARM_CAPABILITIES
    for levels, targets in (
        (_loader.X86_CAPABILITIES, environment.X86_TARGETS),
        (_loader.ARM_CAPABILITIES, environment.ARM_TARGETS),
        (LEVELS, environment.CPU_TARGETS),
    ):
        assert tuple(f"_cpu_{level}" for level in levels) == targets


@pytest.mark.parametrize("architecture", ["X86", "Arm"])
def test_the_processor_is_asked_for_the_same_cpu_levels(architecture: str) -> None:
    folder = jit.source_folder() / "python"
    source = (folder / "cpu_features.cpp").read_text()
    names = dict(re.findall(r"case CpuCapability::(\w+):\s*return \"(\w+)\";", source))
    list_of_levels = f"k{architecture}Capabilities[]"
    header = (folder / "cpu_features.h").read_text().partition(list_of_levels)[2]
    listed = re.findall(r"CpuCapability::(\w+)", header.partition(";")[0])
    expected = getattr(_loader, f"{architecture.upper()}_CAPABILITIES")
    assert tuple(names[name] for name in listed) == expected


@pytest.mark.skipif(sys.platform != "linux", reason="where the system is asked for tile registers")
@pytest.mark.skipif(not _build_flags.X86_64, reason="asks about x86-64")
def test_pytorch_is_asked_for_the_same_cpu_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PKG_CPU_CAPABILITY", raising=False)
    monkeypatch.delitem(sys.modules, "pkg._C")
    asked = ("vnni", "avx512_bf16", "amx_tile")
    found = set()
    kinds = itertools.product(("DEFAULT", "AVX2", "AVX512"), *[(False, True)] * 4)
    for level, avx_vnni, *has in kinds:
        monkeypatch.setattr(jit, "_has_avx_vnni", lambda answer=avx_vnni: answer)
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda level=level: level)
        for instructions, answer in zip(asked, has, strict=True):
            name = f"_is_{instructions}_supported"
            monkeypatch.setattr(torch.cpu, name, lambda answer=answer: answer, raising=False)
        monkeypatch.setattr(torch.cpu, "_init_amx", lambda: True, raising=False)
        found.add(jit.best_capability())
    assert found == set(LEVELS)


@pytest.mark.checkout
def test_wheels_and_the_readme_have_the_same_cpu_levels() -> None:
    expected = runpy.run_path(str(ROOT / "tools" / "check_wheel.py"))["libraries_expected"]
    assert expected("p-manylinux_2_28_x86_64.whl") == {"_C", *environment.X86_TARGETS}
    assert expected("p-win_amd64.whl") == {"_C", *environment.X86_TARGETS} - {"_cpu_amx"}
    for system in ("manylinux_2_28_aarch64", "macosx_14_0_arm64"):
        assert expected(f"p-{system}.whl") == {"_C", *environment.ARM_TARGETS}
    lists = [
        line for line in (ROOT / "README.md").read_text().splitlines() if "`avx512_vnni`" in line
    ]
    assert lists
    for line in lists:
        named = tuple(re.findall(r"`(baseline|avx\w*|amx|neon\w*)`", line))
        assert named == (*_loader.X86_CAPABILITIES, *_loader.ARM_CAPABILITIES[1:])
