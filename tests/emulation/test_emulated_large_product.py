"""Products of float32 and float64 by large tiles, run by the emulator, against float64."""

from __future__ import annotations

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

TILES = {torch.float64: (128, 128), torch.float32: (256, 128)}  # rows, columns
DEPTH = 16  # of a panel, of which three are stages
DTYPES = pytest.mark.parametrize("dtype", TILES, ids=name_of)


def check(emulator: Emulator, a: Tensor, b: Tensor, blocks: int = 3) -> Tensor:
    result = emulated_matmul(emulator, a, b, blocks=blocks, large_tiles=True)
    assert_product(result, a, b)
    return result


@DTYPES
def test_sizes_around_every_tile_boundary(cuda_emulator: Emulator, dtype: torch.dtype) -> None:
    tile_rows, tile_columns = TILES[dtype]
    for rows in around(tile_rows):
        check(cuda_emulator, make(rows, 5, dtype=dtype), make(5, 3, dtype=dtype))
    for columns in around(tile_columns):
        check(cuda_emulator, make(2, 5, dtype=dtype), make(5, columns, dtype=dtype))
    for depth in [0, 1, *around(DEPTH), *around(2 * DEPTH), *around(4 * DEPTH)]:
        check(cuda_emulator, make(3, depth, dtype=dtype), make(depth, 6, dtype=dtype))


@DTYPES
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_whole_and_of_partial_panels(
    cuda_emulator: Emulator, dtype: torch.dtype, layout: str
) -> None:
    tile_rows, tile_columns = TILES[dtype]
    for rows, columns, depth in ((tile_rows, tile_columns, 36), (24, 40, 20)):
        a = arrange(make(rows, depth, dtype=dtype), layout)
        b = arrange(make(depth, columns, dtype=dtype), layout)
        check(cuda_emulator, a, b)
        check(cuda_emulator, a, b.contiguous())
        check(cuda_emulator, a.contiguous(), b)


@DTYPES
@pytest.mark.parametrize("blocks", [1, 2, 100])
def test_batches_broadcast(cuda_emulator: Emulator, dtype: torch.dtype, blocks: int) -> None:
    a = make(3, 1, 2, 7, 9, dtype=dtype)
    check(cuda_emulator, a, make(4, 1, 9, 130, dtype=dtype), blocks)
    check(cuda_emulator, a, make(4, 2, 130, 9, dtype=dtype).transpose(-1, -2), blocks)


@DTYPES
def test_sums_are_those_of_small_tiles(cuda_emulator: Emulator, dtype: torch.dtype) -> None:
    """Every sum is of the same products in the same order."""
    a, b = make(300, 70, dtype=dtype), make(70, 200, dtype=dtype)
    assert torch.equal(check(cuda_emulator, a, b), emulated_matmul(cuda_emulator, a, b))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@DTYPES
def test_special_values_stay_in_their_row(
    cuda_emulator: Emulator, value: float, dtype: torch.dtype
) -> None:
    a, b = torch.ones(5, 19, dtype=dtype), torch.ones(19, 6, dtype=dtype)
    a[2, 18] = value
    result = emulated_matmul(cuda_emulator, a, b, large_tiles=True)
    torch.testing.assert_close(result, a @ b, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("dtype", "activation"),
    [
        *((torch.float32, each) for each in ("none", "relu", "gelu", "gelu_tanh", "silu")),
        (torch.float64, "gelu"),
    ],
)
def test_linear(cuda_emulator: Emulator, dtype: torch.dtype, activation: str) -> None:
    rows, columns = (extent + 3 for extent in TILES[dtype])
    input, weight = make(rows, 35, dtype=dtype), make(columns, 35, dtype=dtype)
    for bias in (None, make(columns, dtype=dtype)):
        output, kept = emulated_linear(
            cuda_emulator, input, weight, bias, activation, True, large_tiles=True
        )
        assert_linear(output, input, weight, bias, activation)
        assert kept is not None
        assert_linear(kept, input, weight, bias, "none")


def pays_large_product(
    emulator: Emulator, dtype: torch.dtype, sizes: tuple[int, int, int, int]
) -> bool:
    """Whether for batch, rows, columns and multiprocessors."""
    pays = torch.full((1,), 77)
    emulator.run("pays_large_product", ["pays"], pays=pays, type=name_of(dtype), sizes=sizes)
    assert pays in (0, 1)
    return bool(pays)


@pytest.mark.parametrize(
    ("dtype", "sizes", "pays"),
    [
        # Of one round of small tiles large ones are as slow as two.
        (torch.float32, (1, 128, 128), False),
        (torch.float32, (1, 1024, 1024), False),
        (torch.float32, (1, 2048, 1024), False),
        (torch.float32, (1, 2048, 2048), True),
        (torch.float32, (1, 4096, 4096), True),
        (torch.float32, (1, 100, 40000), False),  # half of each tile's rows
        (torch.float32, (400, 128, 128), False),
        (torch.float32, (400, 256, 128), True),
        (torch.float64, (1, 64, 64), False),
        (torch.float64, (1, 1024, 1024), False),
        (torch.float64, (1, 1536, 1536), True),
        (torch.float64, (1, 4096, 4096), True),
        (torch.float64, (1, 64, 40000), False),
        (torch.float64, (0, 64, 64), False),
    ],
)
def test_where_large_tiles_pay(
    cuda_emulator: Emulator, dtype: torch.dtype, sizes: tuple[int, int, int], pays: bool
) -> None:
    """On a device of 132 multiprocessors."""
    assert pays_large_product(cuda_emulator, dtype, (*sizes, 132)) == pays
