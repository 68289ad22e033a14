"""The program that runs the CUDA kernels on the CPU, built once."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
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
def counting_emulator() -> emulator.Emulator:
    """The same program compiled so that plain loads and stores are counted."""
    reason = emulator.missing_compiler() or emulator.missing_announcements()
    if reason is not None:
        pytest.skip(reason)
    return emulator.Emulator(emulator.build(counting=True), counting=True)


@pytest.fixture(scope="session")
def library_of_operators() -> Path:
    """The CUDA operators, host code and kernels, for CPU tensors."""
    reason = emulator.missing_compiler()
    if reason is not None:
        pytest.skip(reason)
    return emulator.build_operators()


@pytest.fixture(scope="session")
def emulated_operators(library_of_operators: Path) -> torch._ops._OpNamespace:
    """Those operators, as PyTorch calls them."""
    torch.ops.load_library(library_of_operators)
    return getattr(torch.ops, emulator.NAMESPACE)


@pytest.fixture
def choose_float32_products(library_of_operators: Path) -> Iterator[Callable[[int], None]]:
    """Tells the operators how many products to make for one of float32, 0 afterwards."""
    library = ctypes.CDLL(str(library_of_operators))

    def choose(products: int) -> None:
        library.pkg_choose_cuda_float32_products(ctypes.c_int64(products))

    yield choose
    choose(0)


@pytest.fixture(scope="session")
def launched_threads(library_of_operators: Path) -> Callable[[], int]:
    """How many threads a block of the last launch had, by which kernels are told."""
    library = ctypes.CDLL(str(library_of_operators))
    function: Callable[[], int] = library.pkg_emulated_launched_threads
    return function


@pytest.fixture(scope="session")
def launched_kernel_type(library_of_operators: Path) -> Callable[[], bytes]:
    """The mangled type of the last launch's kernel, in which its parameters' types are named."""
    library = ctypes.CDLL(str(library_of_operators))
    function: Callable[[], bytes] = library.pkg_emulated_launched_kernel_type
    function.restype = ctypes.c_char_p  # type: ignore[attr-defined]
    return function
