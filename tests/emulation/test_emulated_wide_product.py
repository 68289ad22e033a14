"""Products of halves and bytes in wide tiles, run by the emulator, against float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from emulator import Emulator
from test_emulated_linear import assert_linear, emulated_linear
from test_emulated_matmul import (
    LAYOUTS,
    around,
    arrange,
    assert_product,
    emulated_matmul,
    make,
    name_of,
)
from torch import Tensor

Operators = torch._ops._OpNamespace
ROWS, COLUMNS, STAGES = 128, 256, 3
WIDE_THREADS = 256
DEPTHS = {torch.float16: 64, torch.bfloat16: 64, torch.int8: 128}  # of a stage
DTYPES = pytest.mark.parametrize("dtype", DEPTHS, ids=name_of)
HALVES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=name_of)


def multiply(emulator: Emulator, a: Tensor, b: Tensor, tiles: str = "wide") -> Tensor:
    out_dtype = torch.int32 if a.dtype == torch.int8 else torch.float32
    return emulated_matmul(emulator, a, b, out_dtype, tiles=tiles)


def check(emulator: Emulator, a: Tensor, b: Tensor) -> None:
    assert_product(multiply(emulator, a, b), a, b)


@DTYPES
def test_sizes_around_every_tile_boundary(cuda_emulator: Emulator, dtype: torch.dtype) -> None:
    for rows in around(ROWS):
        check(cuda_emulator, make(rows, 5, dtype=dtype), make(5, 3, dtype=dtype))
    for columns in around(COLUMNS):
        check(cuda_emulator, make(2, 5, dtype=dtype), make(5, columns, dtype=dtype))
    stage = DEPTHS[dtype]
    for depth in [0, 1, *around(stage), *around(2 * stage), *around((STAGES + 1) * stage)]:
        check(cuda_emulator, make(3, depth, dtype=dtype), make(depth, 6, dtype=dtype))


@DTYPES
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_whole_and_of_partial_stages(
    cuda_emulator: Emulator, dtype: torch.dtype, layout: str
) -> None:
    for rows, columns, depth in ((ROWS, COLUMNS, 80), (24, 40, 48)):
        a = arrange(make(rows, depth, dtype=dtype), layout)
        b = arrange(make(depth, columns, dtype=dtype), layout)
        check(cuda_emulator, a, b)
        check(cuda_emulator, a, b.contiguous())
        check(cuda_emulator, a.contiguous(), b)


@DTYPES
def test_sums_are_those_of_other_tiles(cuda_emulator: Emulator, dtype: torch.dtype) -> None:
    """Every sum is of the same products in the same order."""
    a, b = make(2, 140, 150, dtype=dtype), make(150, 300, dtype=dtype)
    check(cuda_emulator, a, b)
    assert torch.equal(*(multiply(cuda_emulator, a, b, tiles) for tiles in ("wide", "block")))


@pytest.mark.parametrize("tiles", ["wide", "block"])
@pytest.mark.parametrize("rows", [16, 18, 33])
def test_every_tile_of_more_rows_than_are_walked_together(
    cuda_emulator: Emulator, rows: int, tiles: str
) -> None:
    """Of two matrices; the emulator refuses an element that is written twice, or by none."""
    a = make(2, rows * ROWS - 1, 1, dtype=torch.bfloat16)
    b = make(2, 1, 2 * COLUMNS + 1, dtype=torch.bfloat16)
    assert_product(emulated_matmul(cuda_emulator, a, b, tiles=tiles, blocks=7), a, b)


@HALVES
def test_linear(cuda_emulator: Emulator, dtype: torch.dtype) -> None:
    input, weight = make(ROWS + 3, 70, dtype=dtype), make(COLUMNS + 3, 70, dtype=dtype)
    for bias in (None, make(COLUMNS + 3, dtype=dtype)):
        output, kept = emulated_linear(
            cuda_emulator, input, weight, bias, "gelu", True, tiles="wide"
        )
        assert_linear(output, input, weight, bias, "gelu")
        assert kept is not None
        assert_linear(kept, input, weight, bias, "none")


@DTYPES
def test_where_they_are_taken(
    emulated_operators: Operators,
    launched_threads: Callable[[], int],
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
) -> None:
    """By fewer turns of 3 multiprocessors, where a block may have the memory, if not divided."""
    out_dtype = torch.int32 if dtype == torch.int8 else None

    def is_wide(rows: int, columns: int, depth: int = 16) -> bool:
        a, b = make(rows, depth, dtype=dtype), make(depth, columns, dtype=dtype)
        result = emulated_operators.matmul(a, b, out_dtype=out_dtype)
        assert_product(result, a, b)
        return launched_threads() == WIDE_THREADS

    monkeypatch.setenv("PKG_EMULATED_CAPABILITY", "90")
    monkeypatch.setenv("PKG_CUDA_WARPGROUPS", "0")
    assert is_wide(2 * ROWS, COLUMNS)
    assert is_wide(ROWS, 3 * COLUMNS)
    assert not is_wide(ROWS, COLUMNS)
    assert not is_wide(2 * ROWS + 1, COLUMNS // 2)
    monkeypatch.setenv("PKG_EMULATED_CAPABILITY", "86")
    assert not is_wide(2 * ROWS, COLUMNS)
