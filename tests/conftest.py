"""What every test shares: devices, seeds, and the facts of the machine in the header."""

from __future__ import annotations

import ctypes
import os
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

# Several test processes share the cores: a thread that waits must not spin. Read when torch loads.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
import torch

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def pytest_report_header() -> list[str]:
    """Name what is under test: the same suite runs once for each instruction set."""
    import pkg

    asked = os.environ.get("PKG_CPU_CAPABILITY")
    capability = f"{pkg._loader.cpu_capability}{' (PKG_CPU_CAPABILITY)' if asked else ''}"
    devices = [torch.cuda.get_device_name() if name == "cuda" else name for name in DEVICES]
    return [
        f"pkg: {pkg.__file__}, CPU capability {capability}",
        f"torch: {torch.__version__}, {torch.get_num_threads()} threads, {', '.join(devices)}",
    ]


def pytest_configure(config: pytest.Config) -> None:
    """Name the marker for what need not run again for each instruction set."""
    config.addinivalue_line("markers", "checkout: of the sources, not of an installed package")
    config.addinivalue_line("markers", "long: compiles or takes long; `make test WHOLE=1` runs it")
    config.addinivalue_line("markers", "tracing: traces or transforms; alike at every CPU level")


def kind_of(item: pytest.Item) -> tuple[object, ...]:
    """What it has in common with the tests of which one stands for the others."""
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    kinds = (parameters.get("check"), parameters.get("device"))
    dtypes = (value for value in parameters.values() if isinstance(value, torch.dtype))
    return (item.nodeid.partition("[")[0], *kinds, *dtypes)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep one of every PKG_TEST_EVERY parameters of a test; each dtype, each check and device.

    And of the files with tests that are marked as long, these of one of every PKG_TEST_LONG_EVERY.
    The first is that of the number PKG_TEST_FIRST: runs with 0, 1 and so on have had all of them.
    A long test's parameters have their turns where its file has had one.
    """
    every, long_every = (
        int(os.environ.get(name, "1")) for name in ("PKG_TEST_EVERY", "PKG_TEST_LONG_EVERY")
    )
    first = int(os.environ.get("PKG_TEST_FIRST", "0"))
    is_long = [item.get_closest_marker("long") is not None for item in items]
    long_files = sorted({item.path for item, long in zip(items, is_long, strict=True) if long})
    passed_over = {
        path for i, path in enumerate(long_files) if i % long_every != first % long_every
    }
    kinds = [kind_of(item) for item in items]
    counts, seen = Counter(kinds), Counter[object]()
    kept, left_out = [], []
    for item, kind, long in zip(items, kinds, is_long, strict=True):
        turn = first // long_every if long else first
        is_kept = seen[kind] % every == turn % min(every, counts[kind])
        is_kept &= not long or item.path not in passed_over
        (kept if is_kept else left_out).append(item)
        seen[kind] += 1
    items[:] = kept
    if left_out:
        config.hook.pytest_deselected(items=left_out)


@pytest.fixture(scope="session", autouse=True)
def accelerate_measures_nothing() -> None:
    """A table for ``pkg.accelerate()`` that leaves all to PyTorch; none is measured."""
    import pkg

    if not hasattr(pkg._loader.cpu_library, "pkg_accelerate_ratios"):
        return  # a copy of the sources with a few kernels alone
    nothing = [0.0] * len(pkg._accelerate_routes.table())
    pkg._accelerate_table.put({"format": pkg._accelerate_table.FORMAT, "ratios": nothing})


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    """Each device present; a test that takes it runs once on every one."""
    return torch.device(request.param)


@pytest.fixture
def require_memory(device: torch.device) -> Callable[[int], None]:
    """Skip a test of large tensors where they would not fit beside what else is running."""

    def require(size: int) -> None:
        if device.type == "cuda":
            free = torch.cuda.mem_get_info(device)[0]
        else:
            lines = Path("/proc/meminfo").read_text().splitlines()
            free = next(int(line.split()[1]) for line in lines if "MemAvailable" in line) * 1024
        if free < 2 * size:
            pytest.skip(f"needs {size >> 30} GiB with as much again to spare")

    return require


@pytest.fixture(autouse=True)
def seed(request: pytest.FixtureRequest) -> int:
    """Seed PyTorch's generators from the name of the test: the same whatever runs before it."""
    value = zlib.crc32(request.node.nodeid.encode())
    torch.manual_seed(value)
    return value


@pytest.fixture
def unwritten_memory_is_not_zero() -> Iterator[None]:
    """glibc fills memory that it hands out: on the CPU what no kernel writes is no chance zero."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    perturb = -6  # M_PERTURB of malloc.h
    if mallopt is not None:
        mallopt(perturb, 0x80)
    yield
    if mallopt is not None:
        mallopt(perturb, 0)
