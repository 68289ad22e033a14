"""Products of float32 in TF32 by warpgroups, emulated: copies round as the copy engine does."""

from __future__ import annotations

import pytest
import torch
from emulator import EmulationError, Emulator
from test_emulated_matmul import around, product_fields, shape_of_product
from test_emulated_tf32 import rounded
from test_emulated_warpgroups import bulk
from torch import Tensor

PANEL = 32
STAGES = {128: 6, 256: 4}


def tf32_product(
    emulator: Emulator, a: Tensor, b: Tensor, tile_columns: int = 128, blocks: int = 3
) -> Tensor:
    """``a @ b`` of operands that are copied in bulk, or whose transposes are."""
    c = torch.full(shape_of_product(a, b), torch.nan)
    emulator.run(
        "matmul_tf32", ["c"], blocks, c=c, tile_columns=tile_columns, **product_fields(a, b)
    )
    return c


def check(emulator: Emulator, a: Tensor, b: Tensor, tile_columns: int = 128, **given: int) -> None:
    """Products of rounded operands are exact; a sum of n in any order errs by n units at most."""
    result = tf32_product(emulator, a, b, tile_columns, **given)
    a, b = rounded(a), rounded(b)
    bound = 1.01 * a.shape[-1] * torch.finfo(torch.float32).eps / 2 * (a.abs() @ b.abs())
    assert ((result.double() - a @ b).abs() <= bound).all()


def floats(*shape: int, by_columns: bool = False) -> Tensor:
    return bulk(*shape, dtype=torch.float32, by_columns=by_columns)


@pytest.mark.parametrize("tile_columns", [128, 256])
def test_sizes_around_every_boundary(cuda_emulator: Emulator, tile_columns: int) -> None:
    """Of boxes, of tiles, of panels, of all stages and of the tiles of a transpose."""
    sizes = [(rows, 8, 3) for rows in (1, *around(64), *around(128))]
    sizes += [(2, 8, columns) for columns in (*around(32), *around(tile_columns))]
    sizes += [(3, depth, 6) for depth in (1, 3, *around(PANEL), *around(4 * PANEL))]
    for rows, depth, columns in sizes:
        check(cuda_emulator, floats(rows, depth), floats(depth, columns), tile_columns)


@pytest.mark.parametrize("a_by_columns", [False, True])
@pytest.mark.parametrize("b_by_columns", [False, True])
@pytest.mark.parametrize("tile_columns", [128, 256])
def test_majors(
    cuda_emulator: Emulator, a_by_columns: bool, b_by_columns: bool, tile_columns: int
) -> None:
    """Neither operand is transposed, or either, or both; one block goes from tile to tile."""
    depth = (STAGES[tile_columns] + 1) * PANEL + 5
    a = floats(130, depth, by_columns=a_by_columns)
    b = floats(depth, tile_columns + 9, by_columns=b_by_columns)
    check(cuda_emulator, a, b, tile_columns, blocks=1)


def test_batches(cuda_emulator: Emulator) -> None:
    """A matrix for each index, the same for all, and batches of two dimensions; few blocks."""
    for a, b in [
        (floats(5, 66, 70), floats(5, 70, 20, by_columns=True)),
        (floats(5, 66, 70, by_columns=True), floats(70, 20)),
        (floats(66, 70), floats(2, 3, 70, 20)),
    ]:
        check(cuda_emulator, a, b, blocks=2)


def test_operands_of_any_alignment(cuda_emulator: Emulator) -> None:
    """Lines of rows or columns are transposed wherever they begin."""
    for columns in (37, 38, 40):
        check(cuda_emulator, floats(9, 41), torch.randn(41, 50)[:, 3 : 3 + columns])
        check(cuda_emulator, torch.randn(41, 50)[:, 3 : 3 + columns].mT, floats(41, 9))


def test_operands_that_are_left_to_warps(cuda_emulator: Emulator) -> None:
    """Neither their lines nor those of their transposes are dense and aligned."""
    for a in (torch.randn(9, 41), torch.randn(18, 80)[::2, ::2], torch.randn(9, 44)[:, 1:42]):
        with pytest.raises(EmulationError, match="neither be copied in bulk nor transposed"):
            tf32_product(cuda_emulator, a, floats(a.shape[-1], 5))
