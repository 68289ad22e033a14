"""The program that runs the CUDA kernels on the CPU, built once."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import emulator
import pytest
import torch

FOLDER = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What runs here is compiled for a minute first."""
    for item in items:
        if item.path.is_relative_to(FOLDER):
            item.add_marker(pytest.mark.long)


@pytest.fixture(scope="session")
def cuda_emulator() -> emulator.Emulator:
    reason = emulator.missing_compiler()
    if reason is not None:
        pytest.skip(reason)
    return emulator.Emulator(emulator.build())


@pytest.fixture(scope="session")
def emulated_operators() -> torch._ops._OpNamespace:
    """The CUDA operators, host code and kernels, for CPU tensors."""
    reason = emulator.missing_compiler()
    if reason is not None:
        pytest.skip(reason)
    torch.ops.load_library(emulator.build_operators())
    return getattr(torch.ops, emulator.NAMESPACE)


@pytest.fixture
def launched_threads(emulated_operators: torch._ops._OpNamespace) -> Callable[[], int]:
    """How many threads a block of the last launch had, by which kernels are told."""
    function: Callable[[], int] = ctypes.CDLL(
        str(emulator.build_operators())
    ).pkg_emulated_launched_threads
    return function
