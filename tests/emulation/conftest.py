"""The program that runs the CUDA kernels on the CPU, built once."""

from __future__ import annotations

import emulator
import pytest
import torch


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
