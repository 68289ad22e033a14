"""The flags of pkg/_build_flags.py, and the lists elsewhere that have to agree with them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pkg import _build_flags

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.checkout
def test_the_wheels_are_built_for_architectures_that_the_build_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (asked,) = re.findall(r'PKG_CUDA_ARCH_LIST = "(.*?)"', (ROOT / "pyproject.toml").read_text())
    monkeypatch.setenv("PKG_CUDA_ARCH_LIST", asked)
    assert _build_flags.package_cuda_architectures() == asked
    assert "-DPKG_CUDA_90A" in _build_flags.package_nvcc_flags(1)
