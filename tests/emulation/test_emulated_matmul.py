"""Every matmul kernel, run on the CPU by the emulator, against PyTorch in float64."""

from __future__ import annotations

import itertools

import pytest
import torch
from emulator import Argument, Emulator

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
TILES = {torch.float64: (64, 64, 8), torch.float32: (128, 128, 8)}  # rows, columns, depth
WIDE = (128, 128, 64)


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def shape_of_product(a: torch.Tensor, b: torch.Tensor) -> tuple[int, ...]:
    """Of ``a @ b``, whose batches broadcast."""
    return (*torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])


def product_fields(a: torch.Tensor, b: torch.Tensor) -> dict[str, Argument]:
    """What a request says of the operands of ``a @ b``, whose batches broadcast."""
    *batch, rows, columns = shape_of_product(a, b)
    a = a.expand(*batch, *a.shape[-2:])
    b = b.expand(*batch, *b.shape[-2:])
    return {
        "a": a,
        "b": b,
        "rows": rows,
        "columns": columns,
        "depth": a.shape[-1],
        "batch": batch,
        "a_strides": a.stride()[-2:],
        "b_strides": b.stride()[-2:],
        "a_batch_strides": a.stride()[:-2],
        "b_batch_strides": b.stride()[:-2],
    }


def emulated_matmul(
    emulator: Emulator,
    a: torch.Tensor,
    b: torch.Tensor,
    out_dtype: torch.dtype | None = None,
    blocks: int = 3,
    split_depth: int = 0,
    tile_columns: int = 0,
    multiplied_as: str | None = None,
    tiles: str = "block",
) -> torch.Tensor:
    """``a @ b`` of operands of at least two dimensions, whose batches broadcast.

    With a ``split_depth`` the summed dimension is divided into parts of so many steps, with
    ``tile_columns`` of 128 or 256 warpgroups multiply tiles of so many. float32 may be
    ``multiplied_as`` ``"tf32"``; float32 and float64 may be by ``tiles`` that are ``"large"``
    or ``"small"``, halves and bytes by ``"wide"`` ones.
    """
    c = torch.full(shape_of_product(a, b), 77, dtype=out_dtype or a.dtype)
    emulator.run(
        "matmul_warpgroups" if tile_columns else "matmul",
        ["c"],
        blocks,
        c=c,
        input_type=multiplied_as or name_of(a.dtype),
        output_type=name_of(c.dtype),
        split_depth=split_depth,
        tile_columns=tile_columns,
        tiles=tiles,
        **product_fields(a, b),
    )
    return c


def assert_product(result: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """The bound of any order of summation: depth units of roundoff of the sum of magnitudes.

    Higham, Accuracy and Stability of Numerical Algorithms, section 3.1; and one rounding of the
    result to its dtype.
    """
    if result.dtype == torch.int32:
        assert torch.equal(result, (a.long() @ b.long()).int())
        return
    exact = a.double() @ b.double()
    magnitude = a.double().abs() @ b.double().abs()
    wide = torch.float64 if a.dtype == torch.float64 else torch.float32
    bound = 1.01 * a.shape[-1] * torch.finfo(wide).eps / 2 * magnitude
    bound += torch.finfo(result.dtype).eps / 2 * (exact.abs() + bound)
    bound += torch.finfo(result.dtype).smallest_normal
    # The reference, in float64, has errors of its own.
    if a.dtype == torch.float64:
        bound *= 2
    assert ((result.double() - exact).abs() <= bound).all()


def make(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    if dtype == torch.int8:
        return torch.randint(-128, 128, shape, dtype=dtype)
    return torch.randn(shape).to(dtype)


def around(extent: int) -> list[int]:
    return [extent - 1, extent, extent + 1]


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
def test_sizes_around_every_tile_boundary(cuda_emulator: Emulator, dtype: torch.dtype) -> None:
    tile_rows, tile_columns, tile_depth = TILES.get(dtype, WIDE)
    for rows in around(tile_rows):
        a, b = make(rows, 5, dtype=dtype), make(5, 3, dtype=dtype)
        assert_product(emulated_matmul(cuda_emulator, a, b), a, b)
    for columns in around(tile_columns):
        a, b = make(2, 5, dtype=dtype), make(5, columns, dtype=dtype)
        assert_product(emulated_matmul(cuda_emulator, a, b), a, b)
    for depth in [*around(tile_depth), *around(2 * tile_depth)]:
        a, b = make(3, depth, dtype=dtype), make(depth, 6, dtype=dtype)
        assert_product(emulated_matmul(cuda_emulator, a, b), a, b)


@pytest.mark.parametrize("sizes", [*itertools.product([0, 1, 4], repeat=3)], ids=str)
def test_empty_and_single(cuda_emulator: Emulator, sizes: tuple[int, int, int]) -> None:
    rows, depth, columns = sizes
    a = make(rows, depth, dtype=torch.float32)
    b = make(depth, columns, dtype=torch.float32)
    assert_product(emulated_matmul(cuda_emulator, a, b), a, b)


LAYOUTS = ("rows", "columns", "step", "misaligned", "expanded", "padded")


def arrange(matrix: torch.Tensor, layout: str) -> torch.Tensor:
    """A matrix of that size which lies otherwise."""
    (rows, columns), dtype = matrix.shape, matrix.dtype
    if layout == "columns":
        return matrix.t().contiguous().t()
    if layout == "step":
        return make(2 * rows, 3 * columns, dtype=dtype)[::2, ::3]
    if layout == "misaligned":
        return make(rows * columns + 1, dtype=dtype)[1:].view(rows, columns)
    if layout == "expanded":
        return make(rows, 1, dtype=dtype).expand(rows, columns)
    if layout == "padded":
        return make(rows, columns + 8, dtype=dtype)[:, 4:-4]
    return matrix


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int8], ids=name_of)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(cuda_emulator: Emulator, dtype: torch.dtype, layout: str) -> None:
    a = arrange(make(24, 32, dtype=dtype), layout)
    b = arrange(make(32, 40, dtype=dtype), layout)
    out_dtype = torch.int32 if dtype == torch.int8 else None
    assert_product(emulated_matmul(cuda_emulator, a, b, out_dtype), a, b)
    for first, second in [(a, b.contiguous()), (a.contiguous(), b)]:
        result = emulated_matmul(cuda_emulator, first, second, out_dtype)
        assert_product(result, first, second)


@pytest.mark.parametrize("blocks", [1, 2, 100])
def test_batches_broadcast(cuda_emulator: Emulator, blocks: int) -> None:
    a = make(3, 1, 2, 7, 9, dtype=torch.float32)
    b = make(4, 1, 9, 130, dtype=torch.float32)
    assert_product(emulated_matmul(cuda_emulator, a, b, blocks=blocks), a, b)
    b = make(4, 2, 130, 9, dtype=torch.float32).transpose(-1, -2)
    assert_product(emulated_matmul(cuda_emulator, a, b, blocks=blocks), a, b)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=name_of)
def test_halves_into_float32(cuda_emulator: Emulator, dtype: torch.dtype) -> None:
    a, b = make(20, 300, dtype=dtype), make(300, 21, dtype=dtype)
    assert_product(emulated_matmul(cuda_emulator, a, b, torch.float32), a, b)


def test_int8_wraps_at_no_size(cuda_emulator: Emulator) -> None:
    a = torch.full((130, 257), -128, dtype=torch.int8)
    b = torch.full((257, 3), -128, dtype=torch.int8)
    assert_product(emulated_matmul(cuda_emulator, a, b, torch.int32), a, b)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_special_values_stay_in_their_row(cuda_emulator: Emulator, value: float) -> None:
    a = torch.ones(5, 9)
    b = torch.ones(9, 6)
    a[2, 8] = value
    torch.testing.assert_close(
        emulated_matmul(cuda_emulator, a, b), a @ b, rtol=0, atol=0, equal_nan=True
    )


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int8], ids=name_of)
def test_parts_of_a_divided_product_are_added_up(
    cuda_emulator: Emulator, dtype: torch.dtype
) -> None:
    out_dtype = torch.int32 if dtype == torch.int8 else None
    depth = TILES.get(dtype, WIDE)[2] * (2 if dtype == torch.int8 else 1)
    # A last part that is whole, that is shorter, and of one step; columns of any alignment.
    for steps, columns in ((3 * depth, 136), (2 * depth + 3, 7), (2 * depth + 1, 129)):
        a = make(2, 1, 5, steps, dtype=dtype)
        b = make(2, steps, columns, dtype=dtype)
        divided = emulated_matmul(cuda_emulator, a, b, out_dtype, split_depth=depth)
        assert_product(divided, a, b)


def test_a_product_is_divided_where_its_tiles_are_few(cuda_emulator: Emulator) -> None:
    """Parts fill the device and have so many panels at least; never more than there are."""

    def panels_of_split(*sizes: int) -> int:
        panels = torch.zeros(1, dtype=torch.int64)
        cuda_emulator.run("panels_of_split", ["panels"], panels=panels, sizes=sizes)
        return int(panels)

    for tiles, panels, blocks in itertools.product(
        (0, 1, 3, 36, 132, 133, 1000), (0, 1, 15, 16, 17, 64, 1000), (2, 264)
    ):
        for least in (2, 8):
            each = panels_of_split(tiles, panels, blocks, least)
            if each < panels:
                splits = -(-panels // each)
                assert each >= least
                assert 2 <= splits <= blocks // tiles
            else:
                assert each == panels
                assert tiles == 0 or 2 * tiles > blocks or panels < 2 * least
