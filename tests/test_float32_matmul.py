"""How products of float32 are made is chosen in four ways, and the kernels learn of each."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from ctypes import c_int64
from pathlib import Path

import pytest
import torch
from samples import normal

import pkg
from pkg import _float32_matmul, _loader

# `from torch import ...` in a program's first lines, before it imports pkg.
KEPT_BY_NAME = """
from torch import set_float32_matmul_precision as kept
import pkg
kept("high")
print(pkg._float32_matmul.way_in_use())
"""
WAYS = """
import pkg
print(pkg.get_float32_matmul(), pkg._float32_matmul.way_in_use())
"""

without_tiles = pytest.mark.skipif(
    not _float32_matmul.has_tiles(),
    reason="this processor, or the CPU library in use, has no tile registers (Intel AMX)",
)


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    torch.set_float32_matmul_precision("highest")
    pkg.set_float32_matmul("pytorch")
    yield
    pkg.set_float32_matmul("pytorch")
    torch.set_float32_matmul_precision("highest")


def run(program: str, **variables: str) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if k != "PKG_FLOAT32_MATMUL"}
    return subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(pkg.__file__).parents[1],
        env=kept | variables,
        capture_output=True,
        text=True,
        check=False,
    )


def error() -> float:
    """Of a product of two matrices of float32, against float64, relative to its size."""
    a, b = normal(96, 96).float(), normal(96, 96, seed=1).float()
    exact = a.double() @ b.double()
    return float((pkg.ops.matmul(a, b).double() - exact).norm() / exact.norm())


def test_pytorch_decides_until_it_is_told_otherwise() -> None:
    assert pkg.get_float32_matmul() == "pytorch"
    for way in ("high", "medium", "highest"):
        torch.set_float32_matmul_precision(way)
        assert _float32_matmul.way_in_use() == way
    torch.set_float32_matmul_precision("medium")
    pkg.set_float32_matmul("highest")
    assert (pkg.get_float32_matmul(), _float32_matmul.way_in_use()) == ("highest", "highest")
    pkg.set_float32_matmul("pytorch")
    assert _float32_matmul.way_in_use() == "medium"


@pytest.mark.parametrize(
    ("precision", "way"), [("tf32", "high"), ("bf16", "medium"), ("ieee", "highest")]
)
def test_the_newer_setting_of_pytorch_is_followed(precision: str, way: str) -> None:
    torch.backends.mkldnn.matmul.fp32_precision = precision
    assert _float32_matmul.way_in_use() == way


def test_that_of_cuda_holds_for_cuda_alone() -> None:
    torch.backends.cuda.matmul.allow_tf32 = True
    assert _float32_matmul.way_in_use() == "highest"


@pytest.mark.parametrize(
    ("change", "way"),
    [
        (lambda: None, "highest"),
        (lambda: torch.set_float32_matmul_precision("high"), "high"),
        (lambda: torch.set_float32_matmul_precision("medium"), "high"),
        (lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", True), "high"),
        (lambda: setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32"), "high"),
        (lambda: setattr(torch.backends.mkldnn.matmul, "fp32_precision", "tf32"), "highest"),
        (lambda: pkg.set_float32_matmul("fma"), "fma"),
        (lambda: pkg.set_float32_matmul("medium"), "medium"),
    ],
)
def test_every_setting_reaches_the_cuda_library(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[], None], way: str
) -> None:
    """Which is told how many products it makes for one."""
    told = []

    class Library:
        @staticmethod
        def pkg_choose_cuda_float32_products(products: c_int64) -> None:
            told.append(products.value)

    monkeypatch.setattr(_loader, "cuda_library", Library)
    pkg.set_float32_matmul("pytorch")
    change()
    assert _float32_matmul.way_in_use("cuda") == way
    products = {"fma": 0, "highest": 6, "high": 1, "medium": 1}
    assert told[-1] == _float32_matmul.CUDA_PRODUCTS[way] == products[way]


@without_tiles
def test_each_way_is_as_exact_as_it_says() -> None:
    """The bounds are those of the parts: 24 bits, 16 and 8."""
    bits = {"fma": 22, "highest": 22, "high": 15, "medium": 7}
    for way, least in bits.items():
        pkg.set_float32_matmul(way)
        assert 2.0 ** -(least + 4) < error() < 2.0**-least


@without_tiles
@pytest.mark.parametrize(
    "change",
    [
        lambda: pkg.set_float32_matmul("medium"),
        lambda: torch.set_float32_matmul_precision("medium"),
        lambda: setattr(torch.backends.mkldnn.matmul, "fp32_precision", "bf16"),
    ],
)
def test_every_setting_reaches_the_kernels(change: Callable[[], None]) -> None:
    exact = error()
    change()
    assert error() > 100 * exact


@without_tiles
def test_a_setting_of_one_thread_holds_for_all() -> None:
    exact = error()
    thread = threading.Thread(target=torch.set_float32_matmul_precision, args=("medium",))
    thread.start()
    thread.join()
    assert error() > 100 * exact


@without_tiles
@pytest.mark.tracing
def test_a_compiled_graph_follows_the_setting_as_it_runs() -> None:
    a, b = normal(96, 96).float(), normal(96, 96, seed=1).float()
    product = torch.compile(pkg.ops.matmul, backend="aot_eager", fullgraph=True)
    for way in ("highest", "medium", "fma", "high"):
        pkg.set_float32_matmul(way)
        assert torch.equal(product(a, b), pkg.ops.matmul(a, b))


@pytest.mark.tracing
def test_a_compiled_function_may_set_that_of_pytorch() -> None:
    @torch.compile(backend="eager")
    def run_it(x: torch.Tensor) -> torch.Tensor:
        torch.set_float32_matmul_precision("high")
        return x + 1

    assert torch.equal(run_it(torch.ones(2)), torch.full((2,), 2.0))
    assert _float32_matmul.way_in_use() == "high"


@pytest.mark.tracing
def test_a_compiled_function_is_told_to_set_ours_outside() -> None:
    @torch.compile(backend="eager", fullgraph=True)
    def run_it(x: torch.Tensor) -> torch.Tensor:
        pkg.set_float32_matmul("fma")
        return x + 1

    with pytest.raises(Exception, match="call it outside"):
        run_it(torch.ones(2))


def test_another_way_is_refused_in_words() -> None:
    with pytest.raises(ValueError, match="way is 'low'; it must be one of pytorch, fma, highest"):
        pkg.set_float32_matmul("low")
    assert pkg.get_float32_matmul() == "pytorch"


@pytest.mark.parametrize("way", ["fma", "highest", "high", "medium"])
def test_the_environment_decides_on_import(way: str) -> None:
    done = run(WAYS, PKG_FLOAT32_MATMUL=way.upper())
    assert done.stdout == f"{way} {way}\n", done.stderr


def test_an_empty_variable_is_none() -> None:
    assert run(WAYS, PKG_FLOAT32_MATMUL="").stdout == "pytorch highest\n"


def test_the_environment_is_refused_in_words() -> None:
    done = run(WAYS, PKG_FLOAT32_MATMUL="six")
    assert "ImportError: PKG_FLOAT32_MATMUL is 'six'; it must be one of fma, highest" in done.stderr


def test_what_was_set_before_the_import_counts() -> None:
    done = run(f"import torch; torch.set_float32_matmul_precision('medium')\n{WAYS}")
    assert done.stdout == "pytorch medium\n", done.stderr


def test_a_function_of_pytorch_that_was_kept_by_name_is_followed() -> None:
    assert run(KEPT_BY_NAME).stdout == "high\n"


def test_a_second_import_of_the_package_leaves_one_function_around_that_of_pytorch() -> None:
    _float32_matmul.follow_pytorch()
    for name in _float32_matmul._SETTERS:
        setter = getattr(torch._C, name)
        assert not hasattr(setter._before_pkg, "_before_pkg")
