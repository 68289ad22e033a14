"""matmul and linear by products of warpgroups, on the emulator, against PyTorch in float64."""

from __future__ import annotations

import itertools

import pytest
import torch
from emulator import Emulator
from test_emulated_linear import assert_linear, emulated_linear
from test_emulated_matmul import (
    around,
    assert_product,
    emulated_matmul,
    make,
    name_of,
    product_fields,
)
from torch import Tensor

HALVES = [torch.bfloat16, torch.float16]
WIDTHS = [128, 256]
STAGES = {128: 6, 256: 4}
PANEL = 64  # steps of halves


def bulk(*shape: int, dtype: torch.dtype = torch.bfloat16, by_columns: bool = False) -> Tensor:
    """A matrix that can be copied in bulk: dense lines of whole vectors, of which it is a part."""
    *batch, rows, columns = shape
    if by_columns:
        return bulk(*batch, columns, rows, dtype=dtype).mT
    vector = 16 // dtype.itemsize
    pitch = (columns + vector) // vector * vector
    return make(*batch, rows, pitch, dtype=dtype)[..., :columns]


def check(emulator: Emulator, a: Tensor, b: Tensor, tile_columns: int, **options: int) -> None:
    out_dtype = torch.int32 if a.dtype == torch.int8 else None
    result = emulated_matmul(emulator, a, b, out_dtype, tile_columns=tile_columns, **options)
    assert_product(result, a, b)


@pytest.mark.parametrize("tile_columns", WIDTHS)
def test_sizes_around_every_boundary(cuda_emulator: Emulator, tile_columns: int) -> None:
    """Of boxes, of tiles, of panels, and of all stages."""
    sizes = [(rows, 8, 3) for rows in (1, *around(64), *around(128))]
    sizes += [(2, 8, columns) for columns in (*around(64), *around(tile_columns))]
    sizes += [(3, depth, 6) for depth in (1, *around(PANEL), *around(STAGES[tile_columns] * PANEL))]
    for rows, depth, columns in sizes:
        check(cuda_emulator, bulk(rows, depth), bulk(depth, columns), tile_columns)


@pytest.mark.parametrize("a_by_columns", [False, True])
@pytest.mark.parametrize("b_by_columns", [False, True])
@pytest.mark.parametrize("tile_columns", WIDTHS)
def test_majors(
    cuda_emulator: Emulator, a_by_columns: bool, b_by_columns: bool, tile_columns: int
) -> None:
    """Every part of a tile; one block goes on with its stages from tile to tile."""
    depth = (STAGES[tile_columns] + 1) * PANEL + 5
    a = bulk(130, depth, by_columns=a_by_columns)
    b = bulk(depth, tile_columns + 9, by_columns=b_by_columns)
    check(cuda_emulator, a, b, tile_columns, blocks=1)


@pytest.mark.parametrize("tile_columns", WIDTHS)
def test_int8(cuda_emulator: Emulator, tile_columns: int) -> None:
    a = bulk(140, 150, dtype=torch.int8)
    b = bulk(150, tile_columns + 3, dtype=torch.int8, by_columns=True)
    check(cuda_emulator, a, b, tile_columns, blocks=2)
    check(cuda_emulator, a, b, tile_columns, split_depth=128)


def test_int8_wraps_at_no_size(cuda_emulator: Emulator) -> None:
    a = bulk(65, 257, dtype=torch.int8).fill_(-128)
    b = bulk(257, 3, dtype=torch.int8, by_columns=True).fill_(-128)
    check(cuda_emulator, a, b, 128)


@pytest.mark.parametrize("out_dtype", [None, torch.float32])
def test_float16(cuda_emulator: Emulator, out_dtype: torch.dtype | None) -> None:
    a, b = bulk(70, 100, dtype=torch.float16), bulk(100, 136, dtype=torch.float16)
    assert_product(emulated_matmul(cuda_emulator, a, b, out_dtype, tile_columns=128), a, b)


def test_batches(cuda_emulator: Emulator) -> None:
    """A matrix for each index, the same for all, and batches of two dimensions; few blocks."""
    shared = bulk(70, 20)
    for a, b in [
        (bulk(5, 66, 70), bulk(5, 70, 20, by_columns=True)),
        (bulk(5, 66, 70, by_columns=True), shared),
        (bulk(66, 70), bulk(2, 3, 70, 20)),
        (bulk(2, 3, 66, 70), shared[None, None]),
    ]:
        check(cuda_emulator, a, b, 128, blocks=2)


def test_every_tile_in_groups_of_rows(cuda_emulator: Emulator) -> None:
    """More rows of tiles than a group has, the last of which is not whole."""
    check(cuda_emulator, bulk(17 * 128 + 1, 8), bulk(8, 300), 128, blocks=4)


@pytest.mark.parametrize("tile_columns", WIDTHS)
def test_divided_products(cuda_emulator: Emulator, tile_columns: int) -> None:
    """A last part that is whole, one of a panel less, and one of a step."""
    for depth in (4 * PANEL, 3 * PANEL, 2 * PANEL + 1):
        a, b = bulk(2, 66, depth), bulk(2, depth, 137)
        check(cuda_emulator, a, b, tile_columns, split_depth=2 * PANEL)


@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
@pytest.mark.parametrize("tile_columns", WIDTHS)
def test_linear(cuda_emulator: Emulator, dtype: torch.dtype, tile_columns: int) -> None:
    """The bias and the activation of every column, also where rows of the output are not whole."""
    for columns in (tile_columns + 8, tile_columns - 1):
        input, weight = bulk(2, 67, 70, dtype=dtype), bulk(columns, 70, dtype=dtype)
        bias = make(columns, dtype=dtype)
        output, kept = emulated_linear(
            cuda_emulator, input, weight, bias, "gelu", keep=True, tile_columns=tile_columns
        )
        assert_linear(output, input, weight, bias, "gelu")
        assert kept is not None
        assert_linear(kept, input, weight, bias, "none")


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_special_values_stay_in_their_row(cuda_emulator: Emulator, value: float) -> None:
    """Zeros behind the operands meet zeros."""
    a, b = bulk(5, 9), bulk(9, 6)
    a.fill_(1)
    b.fill_(1)
    a[2, 8] = value
    result = emulated_matmul(cuda_emulator, a, b, tile_columns=128)
    torch.testing.assert_close(result, a @ b, rtol=0, atol=0, equal_nan=True)


def found(emulator: Emulator, a: Tensor, b: Tensor) -> list[int]:
    """How the operands lie, 1 for rows or columns, 2 for steps, and how many matrices they are."""
    result = torch.zeros(4, dtype=torch.int64)
    emulator.run("bulk_operands", ["found"], found=result, **product_fields(a, b))
    return result.tolist()


def test_operands_that_are_copied_in_bulk(cuda_emulator: Emulator) -> None:
    dense = bulk(16, 24)
    assert found(cuda_emulator, dense, bulk(24, 8)) == [1, 2, 1, 1]
    assert found(cuda_emulator, dense.mT, bulk(16, 8, by_columns=True)) == [2, 1, 1, 1]
    assert found(cuda_emulator, bulk(2, 3, 16, 24), bulk(24, 8)) == [1, 2, 6, 1]
    assert found(cuda_emulator, bulk(2, 1, 16, 24)[:, 0], bulk(2, 24, 8)) == [1, 2, 2, 2]
    # One step, one row: the stride along it is none.
    assert found(cuda_emulator, make(40, 1, dtype=torch.bfloat16), bulk(1, 8))[0] == 2
    assert found(cuda_emulator, make(1, 7, dtype=torch.bfloat16), bulk(7, 8))[0] == 1


def test_operands_that_are_not(cuda_emulator: Emulator) -> None:
    dense = bulk(24, 8)
    make_half = torch.bfloat16
    for a in (
        make(16, 25, dtype=make_half)[:, 1:],  # not aligned, nor are its rows
        make(16, 25, dtype=make_half)[:, :24],
        make(16 * 24 + 1, dtype=make_half)[1:].view(16, 24),
        make(16, 48, dtype=make_half)[:, ::2],  # dense along nothing
        make(1, 24, dtype=make_half).expand(16, 24),
        make(3, 2, 16, 24, dtype=make_half).transpose(0, 1),  # no one step from matrix to matrix
        make(3, 1, 16, 24, dtype=make_half).expand(3, 2, 16, 24),
        make(0, 24, dtype=make_half),
        make(16, 24, dtype=make_half).expand(0, 16, 24),
    ):
        assert found(cuda_emulator, a, dense) == [0, 0, 0, 0]
    assert found(cuda_emulator, make(16, 0, dtype=make_half), make(0, 8, dtype=make_half))[0] == 0


def test_plans(cuda_emulator: Emulator) -> None:
    """The one of fewest cycles; parts fill the device and none is empty."""

    def plan(*sizes: int) -> tuple[int, int]:
        result = torch.zeros(2, dtype=torch.int64)
        cuda_emulator.run("plan_of_warpgroups", ["plan"], plan=result, sizes=sizes)
        columns, each = result.tolist()
        return columns, each

    # 132 multiprocessors: so many tiles of 256 columns, twice as many of 128, half as many.
    assert plan(1, 12 * 128, 11 * 256, 8, 132) == (256, 8)
    assert plan(1, 6 * 128, 11 * 256, 8, 132) == (128, 8)
    assert plan(1, 8192, 8192, 64, 132) == (256, 64)
    assert plan(1, 8192, 128, 64, 132) == (128, 32)  # 64 tiles in 2 parts
    assert plan(66, 128, 256, 15, 132) == (128, 15)
    assert plan(1, 1024, 1024, 256, 132) == (256, 64)  # 32 tiles in 4 parts
    assert plan(1, 1024, 1024, 16, 132) == (128, 16)  # two parts would take longer
    for rows, columns, panels in itertools.product((1, 128, 700), (1, 128, 900), (1, 15, 16, 100)):
        width, each = plan(1, rows, columns, panels, 132)
        assert width in WIDTHS
        assert 1 <= each <= panels
        if columns <= 128:
            assert width == 128
