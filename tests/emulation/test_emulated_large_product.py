"""Products of float32 and float64 by copied panels, run by the emulator, against float64."""

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

# Rows, columns, stages.
LARGE = {torch.float64: (128, 128, 3), torch.float32: (256, 128, 3)}
SMALL = {torch.float64: (32, 32, 4), torch.float32: (32, 64, 4)}
TILES = {"large": LARGE, "small": SMALL}
DEPTH = 16  # of a panel
DTYPES = pytest.mark.parametrize("dtype", LARGE, ids=name_of)
KINDS = pytest.mark.parametrize("tiles", TILES)


def check(
    emulator: Emulator, a: Tensor, b: Tensor, tiles: str, blocks: int = 3, split_depth: int = 0
) -> Tensor:
    result = emulated_matmul(emulator, a, b, blocks=blocks, tiles=tiles, split_depth=split_depth)
    assert_product(result, a, b)
    return result


@KINDS
@DTYPES
def test_sizes_around_every_tile_boundary(
    cuda_emulator: Emulator, dtype: torch.dtype, tiles: str
) -> None:
    tile_rows, tile_columns, stages = TILES[tiles][dtype]
    for rows in around(tile_rows):
        check(cuda_emulator, make(rows, 5, dtype=dtype), make(5, 3, dtype=dtype), tiles)
    for columns in around(tile_columns):
        check(cuda_emulator, make(2, 5, dtype=dtype), make(5, columns, dtype=dtype), tiles)
    for depth in [0, 1, *around(DEPTH), *around(2 * DEPTH), *around((stages + 1) * DEPTH)]:
        check(cuda_emulator, make(3, depth, dtype=dtype), make(depth, 6, dtype=dtype), tiles)


@KINDS
@DTYPES
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_whole_and_of_partial_panels(
    cuda_emulator: Emulator, dtype: torch.dtype, layout: str, tiles: str
) -> None:
    tile_rows, tile_columns, _ = TILES[tiles][dtype]
    for rows, columns, depth in ((tile_rows, tile_columns, 36), (24, 40, 20)):
        a = arrange(make(rows, depth, dtype=dtype), layout)
        b = arrange(make(depth, columns, dtype=dtype), layout)
        check(cuda_emulator, a, b, tiles)
        check(cuda_emulator, a, b.contiguous(), tiles)
        check(cuda_emulator, a.contiguous(), b, tiles)


@KINDS
@DTYPES
@pytest.mark.parametrize("blocks", [1, 2, 100])
def test_batches_broadcast(
    cuda_emulator: Emulator, dtype: torch.dtype, blocks: int, tiles: str
) -> None:
    a = make(3, 1, 2, 7, 9, dtype=dtype)
    check(cuda_emulator, a, make(4, 1, 9, 130, dtype=dtype), tiles, blocks)
    check(cuda_emulator, a, make(4, 2, 130, 9, dtype=dtype).transpose(-1, -2), tiles, blocks)


@KINDS
@DTYPES
def test_sums_are_those_of_other_tiles(
    cuda_emulator: Emulator, dtype: torch.dtype, tiles: str
) -> None:
    """Every sum is of the same products in the same order."""
    a, b = make(300, 70, dtype=dtype), make(70, 200, dtype=dtype)
    assert torch.equal(check(cuda_emulator, a, b, tiles), emulated_matmul(cuda_emulator, a, b))


@DTYPES
def test_parts_of_small_tiles_are_added_up(cuda_emulator: Emulator, dtype: torch.dtype) -> None:
    a, b = make(2, 40, 150, dtype=dtype), make(150, 70, dtype=dtype)
    for split_depth in (DEPTH, 3 * DEPTH, 9 * DEPTH):
        check(cuda_emulator, a, b, "small", split_depth=split_depth)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@KINDS
@DTYPES
def test_special_values_stay_in_their_row(
    cuda_emulator: Emulator, value: float, dtype: torch.dtype, tiles: str
) -> None:
    a, b = torch.ones(5, 19, dtype=dtype), torch.ones(19, 6, dtype=dtype)
    a[2, 18] = value
    result = emulated_matmul(cuda_emulator, a, b, tiles=tiles)
    torch.testing.assert_close(result, a @ b, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("dtype", "activation"),
    [
        *((torch.float32, each) for each in ("none", "relu", "gelu", "gelu_tanh", "silu")),
        (torch.float64, "gelu"),
    ],
)
@KINDS
def test_linear(cuda_emulator: Emulator, dtype: torch.dtype, activation: str, tiles: str) -> None:
    rows, columns = (extent + 3 for extent in TILES[tiles][dtype][:2])
    input, weight = make(rows, 35, dtype=dtype), make(columns, 35, dtype=dtype)
    for bias in (None, make(columns, dtype=dtype)):
        output, kept = emulated_linear(
            cuda_emulator, input, weight, bias, activation, True, tiles=tiles
        )
        assert_linear(output, input, weight, bias, activation)
        assert kept is not None
        assert_linear(kept, input, weight, bias, "none")


KIND_OF = ("large", "block", "small")


MOST_BYTES = 227 * 1024  # of shared memory, that a block may have on 9.0


def plan_panels(
    emulator: Emulator, dtype: torch.dtype, sizes: tuple[int, ...], most_bytes: int = MOST_BYTES
) -> tuple[str, int]:
    """The tiles, and panels of a part, for batch, rows, columns, depth and multiprocessors."""
    plan = torch.full((2,), 77)
    emulator.run(
        "plan_panels", ["plan"], plan=plan, type=name_of(dtype), sizes=(*sizes, most_bytes)
    )
    return KIND_OF[int(plan[0])], int(plan[1])


@pytest.mark.parametrize(
    ("dtype", "sizes", "tiles"),
    [
        (torch.float32, (1, 64, 64, 64), "small"),
        (torch.float32, (1, 256, 256, 256), "small"),
        (torch.float32, (512, 32, 32, 32), "small"),
        (torch.float32, (1, 16, 3072, 768), "small"),
        (torch.float32, (1, 2048, 1024, 1024), "block"),
        (torch.float32, (1, 2048, 2048, 2048), "large"),
        (torch.float32, (1, 4096, 4096, 4096), "large"),
        (torch.float32, (400, 256, 128, 256), "large"),
        (torch.float64, (1, 64, 64, 64), "small"),
        (torch.float64, (1, 256, 256, 256), "small"),
        (torch.float64, (1, 1024, 1024, 1024), "block"),
        (torch.float64, (1, 4096, 4096, 4096), "large"),
        (torch.float64, (0, 64, 64, 64), "block"),
    ],
)
def test_which_tiles_are_taken(
    cuda_emulator: Emulator, dtype: torch.dtype, sizes: tuple[int, ...], tiles: str
) -> None:
    """On a device of 132 multiprocessors."""
    assert plan_panels(cuda_emulator, dtype, (*sizes, 132))[0] == tiles


def test_what_few_small_tiles_leave_idle_parts_fill(cuda_emulator: Emulator) -> None:
    assert plan_panels(cuda_emulator, torch.float32, (1, 256, 256, 1024, 132)) == ("small", 8)
    assert plan_panels(cuda_emulator, torch.float32, (1, 2048, 2048, 64, 132)) == ("large", 4)


def test_tiles_that_a_block_has_no_memory_for_are_not_taken(cuda_emulator: Emulator) -> None:
    sizes = (1, 4096, 4096, 64, 132)
    assert plan_panels(cuda_emulator, torch.float64, sizes, 101376) == ("large", 4)
    assert plan_panels(cuda_emulator, torch.float64, sizes, 101375) == ("block", 8)
