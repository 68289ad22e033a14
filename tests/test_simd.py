"""The vectors that kernels are written with, compiled for each instruction set that runs here."""

from __future__ import annotations

import ctypes
import math
import os
import shutil
import subprocess
from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path

import mpmath
import pytest
import torch
from samples import FLOATING, SPECIAL
from torch import Tensor
from torch.utils import cpp_extension

import pkg
from pkg import _build_flags
from pkg.testing import ulp

TESTS = Path(__file__).resolve().parent
COMPILER = os.environ.get("CXX", "c++").split()
# What differs in the vectors: their width, and the conversion to bfloat16.
LEVELS = ["baseline", "avx2", "avx512", "avx512_bf16"]

pytestmark = [
    pytest.mark.checkout,
    pytest.mark.skipif(
        _build_flags.WINDOWS or shutil.which(COMPILER[0]) is None, reason="no compiler as GCC is"
    ),
]


class Functions:
    """The functions of simd_functions.cpp, on tensors."""

    def __init__(self, library: Path) -> None:
        self.library = ctypes.CDLL(str(library))

    def call(self, name: str, *arguments: Tensor | int | None) -> int:
        given = (
            ctypes.c_void_p(each.data_ptr()) if isinstance(each, Tensor) else each
            for each in arguments
        )
        result: int = self.library[name](*given)
        return result

    def map(self, name: str, x: Tensor) -> Tensor:
        result = torch.empty_like(x)
        self.call(f"{name}_{dtype_name(x.dtype)}", x, result, ctypes.c_int64(x.numel()))
        return result

    def lanes(self, dtype: torch.dtype) -> int:
        """Of the register that elements of this dtype are loaded into."""
        return self.call("vector_bytes") // computed_in(dtype).itemsize


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def computed_in(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype.itemsize == 2 else dtype


@pytest.fixture(scope="module", params=LEVELS)
def functions(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Functions:
    level: str = request.param
    if level not in pkg._C.cpu_capabilities():
        pytest.skip(f"{level} does not run here")
    library = tmp_path_factory.mktemp("simd") / "functions.so"
    flags = [*_build_flags.cxx_flags(), *_build_flags.cpu_kernel_flags(level), "-Werror"]
    flags += ["-fvisibility=default", "-fPIC", "-shared", f"-I{TESTS.parent / 'csrc'}"]
    for path in cpp_extension.include_paths():
        flags += ["-isystem", path]
    source = TESTS / "simd_functions.cpp"
    subprocess.run([*COMPILER, *flags, str(source), "-o", str(library)], check=True)
    return Functions(library)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=dtype_name)
def test_the_largest_lane(functions: Functions, dtype: torch.dtype) -> None:
    lanes = functions.lanes(dtype)
    function = functions.library[f"reduce_max_or_nan_{dtype_name(dtype)}"]
    function.restype = ctypes.c_float if dtype == torch.float32 else ctypes.c_double

    def largest(values: Tensor) -> float:
        result: float = function(ctypes.c_void_p(values.data_ptr()))
        return result

    for lane in range(lanes):
        values = -torch.arange(1, lanes + 1).to(dtype)
        assert largest(values.roll(lane)) == -1
        for special in (torch.inf, -torch.inf, torch.nan):
            changed = values.clone()
            changed[lane] = special
            wanted = changed.max()  # NaN where there is one
            result = torch.tensor(largest(changed), dtype=dtype)
            torch.testing.assert_close(result, wanted, rtol=0, atol=0, equal_nan=True)
    assert largest(torch.full((lanes,), -torch.inf, dtype=dtype)) == -torch.inf


@pytest.mark.parametrize("dtype", [*FLOATING, torch.int32], ids=dtype_name)
def test_a_part_of_a_register_and_a_fill(functions: Functions, dtype: torch.dtype) -> None:
    wide, lanes = computed_in(dtype), functions.lanes(dtype)
    values = torch.arange(1, lanes + 1).to(dtype)
    fills = [-7] if dtype == torch.int32 else [0.1, -torch.inf, torch.nan, -0.0]
    for count, number in product(range(lanes + 1), [None, *fills]):
        # Beyond the elements lie bits that no result may have.
        loaded = torch.full((lanes,), 99, dtype=dtype)
        loaded[:count] = values[:count]
        fill = None if number is None else torch.tensor(number, dtype=wide)
        result = torch.full((lanes,), 55, dtype=wide)
        functions.call(f"load_partial_{dtype_name(dtype)}", loaded, count, fill, result)
        expected = torch.full((lanes,), number or 0.0, dtype=wide)
        if number is not None:
            expected[:] = fill
        expected[:count] = values[:count].to(wide)
        assert torch.equal(result.view(torch.uint8), expected.view(torch.uint8)), (count, number)


@pytest.mark.parametrize("dtype", [*FLOATING, torch.int32], ids=dtype_name)
def test_what_is_left_of_a_run(functions: Functions, dtype: torch.dtype) -> None:
    lanes = functions.lanes(dtype)
    values = torch.arange(1, 2 * lanes + 1).to(dtype)
    for left in range(2 * lanes):
        count = min(left, lanes)
        loaded = torch.full((lanes,), 55, dtype=computed_in(dtype))
        stored = torch.zeros_like(values)
        name = f"copy_up_to_{dtype_name(dtype)}"
        functions.call(name, values, ctypes.c_int64(left), loaded, stored)
        expected = values.clone()
        expected[count:] = 0
        assert loaded.tolist() == expected[:lanes].tolist()
        expected[:count] += 1
        assert stored.tolist() == expected.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=dtype_name)
def test_lanes_are_interleaved_and_swapped(functions: Functions, dtype: torch.dtype) -> None:
    lanes = functions.lanes(dtype)
    values = torch.arange(2 * lanes).to(dtype)
    result = torch.empty_like(values)
    functions.call(f"interleave_{dtype_name(dtype)}", values, result)
    assert result.tolist() == values.view(2, lanes).T.flatten().tolist()
    swapped = torch.empty_like(values[:lanes])
    functions.call(f"swap_neighbours_{dtype_name(dtype)}", values[:lanes], swapped)
    assert swapped.tolist() == values[:lanes].view(-1, 2).flip(1).flatten().tolist()


def arguments(dtype: torch.dtype) -> Tensor:
    """Of every size, more of them where functions bend, and what is special."""
    limits = torch.finfo(dtype)
    exponents = torch.linspace(math.log2(limits.tiny * limits.eps), math.log2(limits.max), 801)
    sizes = torch.cat([torch.exp2(exponents.double()[:-1]), 1 + torch.linspace(-0.5, 1, 301)])
    small = torch.linspace(0, 25, 501)
    values = torch.cat([sizes, small.double(), torch.tensor(SPECIAL).double()])
    return torch.cat([values, -values]).to(dtype)


def sigmoid(x: object) -> object:
    return 1 / (1 + mpmath.exp(-x))


# What the headers promise, in units in the last place, and where: of infinities and NaN the next
# test tells.
FORMULAS: dict[str, tuple[Callable[[object], object], float, Callable[[Tensor], Tensor]]] = {
    "exp": (mpmath.exp, 1.5, lambda x: x.abs() < 700),
    "expm1_of_nonpositive": (mpmath.expm1, 2, lambda x: x <= 0),
    "log": (mpmath.log, 1, lambda x: x > 0),
    "sigmoid": (sigmoid, 3, lambda x: x.abs() < 700),
    "sqrt": (mpmath.sqrt, 0.5, lambda x: x >= 0),
    "tanh": (mpmath.tanh, 4, lambda x: x == x),
}


@cache
def exactly(name: str, dtype: torch.dtype) -> tuple[Tensor, list[object]]:
    """Arguments within a function's domain, and the results with many digits."""
    exact, _, domain = FORMULAS[name]
    x = arguments(dtype)
    x = x[domain(x) & x.isfinite()]
    with mpmath.workprec(160):
        return x, [exact(mpmath.mpf(value)) for value in x.tolist()]


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=dtype_name)
def test_an_elementary_function(functions: Functions, name: str, dtype: torch.dtype) -> None:
    x, expected = exactly(name, dtype)
    assert len(x) > 500
    most = FORMULAS[name][1]
    rounded = torch.tensor([float(each) for each in expected], dtype=torch.float64)
    units = ulp(rounded, dtype).tolist()
    results = functions.map(name, x).tolist()
    for value, result, exact, unit in zip(x.tolist(), results, expected, units, strict=True):
        if abs(exact) > torch.finfo(dtype).max:
            assert result == math.inf, value
        else:
            assert abs(exact - result) <= most * unit, (value, result)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=dtype_name)
def test_elementary_functions_of_what_is_special(functions: Functions, dtype: torch.dtype) -> None:
    inf, nan = math.inf, math.nan
    expected = {
        "abs": {0.0: 0.0, -inf: inf, inf: inf, nan: nan, -1.0: 1.0},
        "exp": {0.0: 1.0, -inf: 0.0, inf: inf, nan: nan},
        "expm1_of_nonpositive": {0.0: 0.0, -inf: -1.0, nan: nan},
        "log": {0.0: -inf, 1.0: 0.0, inf: inf, -1.0: nan, -inf: nan, nan: nan},
        "sigmoid": {0.0: 0.5, -inf: 0.0, inf: 1.0, nan: nan},
        "sqrt": {0.0: 0.0, 1.0: 1.0, inf: inf, -1.0: nan, -inf: nan, nan: nan},
        "tanh": {0.0: 0.0, inf: 1.0, -inf: -1.0, nan: nan},
    }
    for name, values in expected.items():
        x = torch.tensor(list(values), dtype=dtype)
        wanted = torch.tensor(list(values.values()), dtype=dtype)
        torch.testing.assert_close(functions.map(name, x), wanted, rtol=0, atol=0, equal_nan=True)
    zeros = torch.tensor([0.0, -0.0], dtype=dtype)
    assert functions.map("log", zeros).tolist() == [-inf, -inf]
    for name in ("sqrt", "tanh"):
        assert functions.map(name, zeros).signbit().tolist() == [False, True]
