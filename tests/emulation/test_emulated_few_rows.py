"""matmul and linear of few rows by the kernel of their own, against PyTorch in float64."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import references
import torch
from emulator import Emulator
from test_emulated_linear import ACTIVATIONS, assert_linear, emulated_linear
from test_emulated_matmul import FLOATS, around, assert_product, make, name_of
from torch import Tensor

LAYOUTS = ["along_depth", "along_columns"]
WARPS = 8
SHIFTS = {"along_depth": (0, 1, 2, 3), "along_columns": (3,)}  # of the warps that share columns


def vector_of(dtype: torch.dtype) -> int:
    return 16 // dtype.itemsize


def turn_of(dtype: torch.dtype, layout: str) -> int:
    """Steps of a warp's turn."""
    return 32 * vector_of(dtype) if layout == "along_depth" else 32


def warp_columns(dtype: torch.dtype, layout: str) -> int:
    return 4 if layout == "along_depth" else 4 * vector_of(dtype)


def most_rows(dtype: torch.dtype, layout: str) -> int:
    """As many as have 128 bytes of sums in a lane, and eight."""
    columns = 4 if layout == "along_depth" else vector_of(dtype)
    return min(8, 128 // max(4, dtype.itemsize) // columns)


def weight_of(*shape: int, dtype: torch.dtype, layout: str, spare: int = 1) -> Tensor:
    """(depth, columns) that lie along one of them, vectors before the next line begins."""
    *batch, depth, columns = shape
    if layout == "along_depth":
        return weight_of(*batch, columns, depth, dtype=dtype, layout="", spare=spare).mT
    vector = vector_of(dtype)
    pitch = (columns + vector - 1) // vector * vector + spare * vector
    return make(*batch, depth, pitch, dtype=dtype)[..., :columns]


def few_rows(
    emulator: Emulator,
    a: Tensor,
    b: Tensor,
    layout: str,
    share_shift: int = 3,
    out_dtype: torch.dtype | None = None,
    blocks: int = 3,
    split_depth: int = 0,
) -> Tensor:
    """``a @ b`` of operands whose batches broadcast."""
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    a = a.expand(*batch, *a.shape[-2:])
    b = b.expand(*batch, *b.shape[-2:])
    c = torch.full((*batch, a.shape[-2], b.shape[-1]), 77, dtype=out_dtype or a.dtype)
    emulator.run(
        "matmul_few_rows",
        ["c"],
        blocks,
        c=c,
        output_type=name_of(c.dtype),
        split_depth=split_depth,
        layout=layout,
        share_shift=share_shift,
        **problem(a, b),
    )
    return c


def problem(a: Tensor, b: Tensor) -> dict[str, Tensor | str | int | tuple[int, ...]]:
    """Of operands that have the batch's dimensions."""
    return {
        "a": a,
        "b": b,
        "input_type": name_of(a.dtype),
        "rows": a.shape[-2],
        "columns": b.shape[-1],
        "depth": a.shape[-1],
        "batch": tuple(a.shape[:-2]),
        "a_strides": a.stride()[-2:],
        "b_strides": b.stride()[-2:],
        "a_batch_strides": a.stride()[:-2],
        "b_batch_strides": b.stride()[:-2],
    }


def check(
    emulator: Emulator,
    rows: int,
    depth: int,
    columns: int,
    dtype: torch.dtype,
    layout: str,
    *rest: int,
) -> None:
    a = make(rows, depth, dtype=dtype)
    b = weight_of(depth, columns, dtype=dtype, layout=layout)
    assert_product(few_rows(emulator, a, b, layout, *rest), a, b)


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_number_of_rows(cuda_emulator: Emulator, dtype: torch.dtype, layout: str) -> None:
    depth, columns = turn_of(dtype, layout) + vector_of(dtype), warp_columns(dtype, layout) + 1
    for rows in range(1, most_rows(dtype, layout) + 1):
        check(cuda_emulator, rows, depth, columns, dtype, layout)


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sizes_around_every_boundary(
    cuda_emulator: Emulator, dtype: torch.dtype, layout: str
) -> None:
    """Of a lane's steps, of a warp's, of the stages; of a lane's columns, a warp's, a block's."""
    turn, vector = turn_of(dtype, layout), vector_of(dtype)
    step = vector if layout == "along_depth" else 1
    for shift in SHIFTS[layout]:
        all_warps = turn << shift
        depths = [0, step, turn - step, turn, turn + step, all_warps - step, all_warps + step]
        depths += [3 * all_warps, 4 * all_warps + step] if shift < 2 else []
        for depth in depths:
            check(cuda_emulator, 3, depth, 6, dtype, layout, shift)
        block = warp_columns(dtype, layout) * (WARPS >> shift)
        for columns in {1, *around(4), *around(vector), *around(block)}:
            check(cuda_emulator, 2, 3 * vector, columns, dtype, layout, shift)


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
def test_stages_are_filled_again(cuda_emulator: Emulator, dtype: torch.dtype) -> None:
    """By one block, for several columns, with turns that are not whole ones of the stages."""
    for layout, turns in itertools.product(LAYOUTS, (5, 8)):
        depth = turns * turn_of(dtype, layout) * (1 if layout == "along_depth" else WARPS)
        b = weight_of(depth, 67, dtype=dtype, layout=layout)
        a = make(1, depth, dtype=dtype)
        shift = SHIFTS[layout][0]
        assert_product(few_rows(cuda_emulator, a, b, layout, shift, blocks=1), a, b)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("blocks", [1, 2, 100])
def test_batches_broadcast(cuda_emulator: Emulator, layout: str, blocks: int) -> None:
    dtype = torch.float32
    a = make(3, 1, 2, 3, 24, dtype=dtype)
    for shape in ((4, 1), (2,), (1, 1, 1)):
        b = weight_of(*shape, 24, 37, dtype=dtype, layout=layout)
        assert_product(few_rows(cuda_emulator, a, b, layout, blocks=blocks), a, b)
    a = make(2, 1, 4, 24, dtype=dtype).expand(2, 3, 4, 24)
    assert_product(few_rows(cuda_emulator, a, b[0, 0], layout, blocks=blocks), a, b[0, 0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=name_of)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_halves_into_float32(cuda_emulator: Emulator, dtype: torch.dtype, layout: str) -> None:
    a, b = make(4, 320, dtype=dtype), weight_of(320, 37, dtype=dtype, layout=layout)
    assert_product(few_rows(cuda_emulator, a, b, layout, out_dtype=torch.float32), a, b)


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_parts_are_added_up(cuda_emulator: Emulator, dtype: torch.dtype, layout: str) -> None:
    """A last part that is whole, and one that is shorter."""
    part = turn_of(dtype, layout)
    for depth, columns in ((3 * part, 40), (2 * part + vector_of(dtype), 7)):
        a = make(2, 1, 3, depth, dtype=dtype)
        b = weight_of(2, depth, columns, dtype=dtype, layout=layout)
        result = few_rows(cuda_emulator, a, b, layout, split_depth=part)
        assert_product(result, a, b)


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
def test_rows_at_any_address(cuda_emulator: Emulator, dtype: torch.dtype) -> None:
    """Of a weight along columns its vectors alone are aligned."""
    a = make(3, 40, dtype=dtype)[:, 3:]
    b = weight_of(37, 21, dtype=dtype, layout="along_columns")
    assert_product(few_rows(cuda_emulator, a, b, "along_columns"), a, b)


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
def test_one_line_of_a_weight(cuda_emulator: Emulator, dtype: torch.dtype) -> None:
    """Whose step to a next one would lead to where no vector begins."""
    vector = vector_of(dtype)
    a, b = make(2, 3 * vector, dtype=dtype), make(3 * vector, 1, dtype=dtype)
    assert_product(few_rows(cuda_emulator, a, b, "along_depth"), a, b)
    for columns in (vector, vector + 1):
        a, b = make(2, 1, dtype=dtype), make(1, columns, dtype=dtype)
        assert_product(few_rows(cuda_emulator, a, b, "along_columns"), a, b)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_special_values_stay_in_their_row_and_column(
    cuda_emulator: Emulator, layout: str, value: float
) -> None:
    a = torch.ones(3, 12)
    b = weight_of(12, 6, dtype=torch.float32, layout=layout).abs_()
    a[1, 8] = value
    b[7, 5] = -value
    result = few_rows(cuda_emulator, a, b, layout)
    assert torch.equal(result.isnan(), (a @ b).isnan())
    torch.testing.assert_close(result, a @ b, equal_nan=True)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sums_are_short(cuda_emulator: Emulator, layout: str) -> None:
    """Of 4096 terms a lane adds up 128 or fewer: the bound that cuda/gemm/few_rows.cuh gives."""
    a, b = torch.rand(1, 4096), weight_of(4096, 20, dtype=torch.float32, layout=layout)
    for shift in SHIFTS[layout]:
        result = few_rows(cuda_emulator, a, b, layout, shift)
        exact = a.double() @ b.double()
        in_a_row = 4096 / 32 + 5 + 8
        bound = 1.01 * in_a_row * 2.0**-24 * (a.double() @ b.double().abs())
        assert ((result - exact).abs() <= bound).all()


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_linear(cuda_emulator: Emulator, activation: str, layout: str) -> None:
    """Any activation by one kernel, with the bias and its argument kept."""
    input = make(3, 40, dtype=torch.float32)
    weight = weight_of(40, 37, dtype=torch.float32, layout=layout).mT
    for bias in (None, make(37, dtype=torch.float32), make(74, dtype=torch.float32)[::2]):
        for keep, shift in itertools.product((False, True), SHIFTS[layout]):
            output, kept = emulated_linear(
                cuda_emulator,
                input,
                weight,
                bias,
                activation,
                keep,
                layout=layout,
                share_shift=shift,
            )
            assert_linear(output, input, weight, bias, activation)
            if kept is not None:
                assert_linear(kept, input, weight, bias, "none")


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_linear_of_each_dtype(cuda_emulator: Emulator, dtype: torch.dtype, layout: str) -> None:
    input = make(2, 4, 264, dtype=dtype)
    weight = weight_of(264, 37, dtype=dtype, layout=layout).mT
    bias = make(37, dtype=dtype)
    options = {"layout": layout, "share_shift": 3, "blocks": 2}
    output, kept = emulated_linear(cuda_emulator, input, weight, bias, "gelu", True, **options)
    assert_linear(output, input, weight, bias, "gelu")
    assert kept is not None
    assert_linear(kept, input, weight, bias, "none")


def layout_of(emulator: Emulator, a: Tensor, b: Tensor) -> str:
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    a = a.expand(*batch, *a.shape[-2:])
    b = b.expand(*batch, *b.shape[-2:])
    found = torch.full((1,), 77)
    emulator.run("few_rows_layout", ["found"], found=found, c=None, **problem(a, b))
    return ["none", *LAYOUTS][int(found)]


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
def test_which_products_have_few_rows(cuda_emulator: Emulator, dtype: torch.dtype) -> None:
    def found(a: Tensor, b: Tensor) -> str:
        return layout_of(cuda_emulator, a, b)

    for layout in LAYOUTS:
        b = weight_of(512, 64, dtype=dtype, layout=layout)
        most = most_rows(dtype, layout)
        for rows in (1, most):
            assert found(make(rows, 512, dtype=dtype), b) == layout
        assert found(make(most + 1, 512, dtype=dtype), b) == "none"
        assert found(make(512, 1, dtype=dtype).mT, b) == layout
        assert found(make(512, 2, dtype=dtype).mT, b) == "none"
        assert found(make(0, 512, dtype=dtype), b) == "none"
        assert found(make(1, 512, dtype=dtype), b[:, :0]) == "none"
        assert found(make(1, 512, dtype=dtype), b[:, :1]) == layout
        for batch in ((), (3,), (2, 1)):
            many = weight_of(3, 512, 64, dtype=dtype, layout=layout)
            assert found(make(*batch, 1, 512, dtype=dtype), many) == layout
    weight = make(64, 513, dtype=dtype)
    rows = make(1, 512, dtype=dtype)
    assert found(rows, weight[:, 1:].mT) == "none"
    assert found(rows, make(512, 65, dtype=dtype)[:, 1:]) == "none"
    aligned = make(64, 512, dtype=dtype)
    assert found(make(1, 513, dtype=dtype)[:, 1:], aligned.mT) == "none"
    assert found(make(1, 513, dtype=dtype)[:, 1:], aligned.mT.contiguous()) == "along_columns"
    assert found(rows[:, 1:], aligned[:, 1:].mT) == "none"
    assert found(make(3, 1, 513, dtype=dtype)[..., :512], aligned.mT) == "none"
    # Halves need a turn of all that share a column.
    for layout in LAYOUTS:
        short = weight_of(248, 64, dtype=dtype, layout=layout)
        expected = "none" if dtype.itemsize == 2 else layout
        assert found(make(1, 248, dtype=dtype), short) == expected


def plan_of(emulator: Emulator, layout: str, *sizes: int) -> tuple[int, int]:
    found = torch.zeros(2, dtype=torch.int64)
    emulator.run("plan_of_few_rows", ["found"], found=found, layout=layout, sizes=sizes)
    shift, split_depth = found.tolist()
    return shift, split_depth


def test_how_a_product_is_shared_out(cuda_emulator: Emulator) -> None:
    """For 264 blocks at a time: the fewest turns one after the other."""

    def plan(*sizes: int) -> tuple[int, int]:
        return plan_of(cuda_emulator, "along_depth", *sizes, 264)

    assert plan(1, 4096, 4096) == (1, 0)  # 256 blocks of eight turns
    assert plan(1, 14336, 4096) == (0, 0)
    assert plan(1, 1024, 4096) == (3, 0)
    assert plan(32, 8192, 256) == (0, 0)
    shift, split_depth = plan(1, 1, 1 << 20)
    assert shift == 3
    assert split_depth % (8 * 256) == 0
    assert 2 <= (1 << 20) / split_depth <= 32
    assert plan_of(cuda_emulator, "along_columns", 1, 14336, 4096, 264) == (3, 0)
    assert plan_of(cuda_emulator, "along_columns", 1, 64, 8192, 264) == (3, 1024)
    assert plan_of(cuda_emulator, "along_columns", 1, 4096, 4096, 264) == (3, 0)  # 128 blocks
    assert plan_of(cuda_emulator, "along_columns", 0, 64, 8192, 264)[1] == 0


Accesses = Callable[[Emulator], None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name_of)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_weight_is_copied_once(
    cuda_emulator: Emulator, dtype: torch.dtype, layout: str
) -> None:
    """Sixteen bytes a lane, in whole sectors, without conflicts of banks."""
    for shift in SHIFTS[layout]:
        turns = 3 if layout == "along_depth" else 3 * WARPS
        a = make(2, turns * turn_of(dtype, layout), dtype=dtype)
        b = weight_of(a.shape[1], 128, dtype=dtype, layout=layout, spare=2)
        few_rows(cuda_emulator, a, b, layout, shift)
        counted = cuda_emulator.counters
        size = b.numel() * b.element_size()
        assert counted.copied_bytes == size == 32 * counted.copied_sectors
        assert counted.copies * 512 >= size
        assert counted.copy_cycles == 4 * counted.copies


def test_exact_linear_has_the_bias_of_its_column(cuda_emulator: Emulator) -> None:
    """Of a batch, whose blocks of the same columns follow one another."""
    input, bias = torch.ones(3, 1, 4), torch.arange(70.0)
    weight = weight_of(4, 70, dtype=torch.float32, layout="along_depth").mT.fill_(1)
    output, _ = emulated_linear(cuda_emulator, input, weight, bias, "relu", layout="along_depth")
    expected = references.linear(input.double(), weight.double(), bias.double(), "relu")
    assert torch.equal(output.double(), expected)
