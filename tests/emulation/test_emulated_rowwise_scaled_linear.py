"""The kernels of rowwise_scaled_linear and quantize_rowwise, run on the CPU by the emulator."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import rowwise_scaled_samples as shared
import torch
from emulator import EmulationError, Emulator
from samples import around
from test_emulated_matmul import FLOATS, name_of
from torch import Tensor

import pkg
from pkg.testing import Sample
from pkg.testing.tolerance import expect

TILE, SLICE = 128, 128  # of the kernel: rows and columns, and values of the summed dimension
FEW_ROWS, FEW_COLUMNS, TURN = 16, 32, 8 * SLICE  # of that for few rows: what its warps take at once
# The longest stretch that is summed without a shift, and the longest of the sums of few rows.
MOST = 1023 * SLICE
MOST_OF_FEW = 2 * 511 * TURN
KINDS = ["s8s4", "s4s4"]
WAYS = ["tiles", "few_rows"]
TILES_OF_WARPGROUPS = [128, 256]  # rows
Operators = torch._ops._OpNamespace


def reference(kind: str, input: Tensor, *rest: Tensor | torch.dtype | None) -> Tensor:
    return shared.reference(pkg.ops.unpack_int4(input) if kind == "s4s4" else input, *rest)


def emulated(
    emulator: Emulator,
    kind: str,
    input: Tensor,
    input_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype | None = None,
    blocks: int = 3,
    way: str = "tiles",
    split_slices: int = 0,
    tile_rows: int = 0,
) -> Tensor:
    """By warpgroups where their tiles have so many rows."""
    out_dtype = out_dtype or input_scale.dtype
    output = torch.full((*input.shape[:-1], len(weight)), 77, dtype=out_dtype)
    emulator.run(
        f"rowwise_scaled_linear_{kind}",
        ["output"],
        blocks,
        way=way,
        split_slices=split_slices,
        tile_rows=tile_rows,
        type=name_of(input_scale.dtype),
        out_type=name_of(out_dtype),
        input=input,
        input_stride=input.stride(-1),
        rows_of=input.shape[:-1],
        input_strides=input.stride()[:-1],
        scale_strides=input_scale.stride(),
        input_scale=input_scale,
        weight=weight,
        weight_strides=weight.stride(),
        weight_scale=weight_scale,
        weight_scale_stride=weight_scale.stride(0),
        bias=bias,
        bias_stride=0 if bias is None else bias.stride(0),
        output=output,
        columns=len(weight),
        bytes=weight.shape[1],
    )
    return output


def assert_right(kind: str, result: Tensor, sample: Sample) -> None:
    (expected,) = expect(lambda each: [reference(kind, *each.args)], sample)
    expected.compare(result, f"rowwise_scaled_linear_{kind} of {sample}")


def assert_exact(emulator: Emulator, kind: str, sample: Sample, **options: int | str) -> None:
    """The sums, scaled by one, in float64."""
    input, row, weight, column, *_ = sample.args
    ones = (torch.ones_like(each, dtype=torch.float64) for each in (row, column))
    arguments = (input, next(ones), weight, next(ones), None)
    result = emulated(emulator, kind, *arguments, **options)
    assert torch.equal(result, reference(kind, *arguments))


def widened(lines: Tensor, width: int) -> Tensor:
    """The same bytes in lines that lie further apart, between others."""
    wide = torch.full((*lines.shape[:-1], width), 0x55, dtype=torch.int8)
    return wide[..., : lines.shape[-1]].copy_(lines)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
def test_dtypes(cuda_emulator: Emulator, kind: str, way: str, dtype: torch.dtype) -> None:
    inner = 96 if way == "few_rows" else 70
    for with_bias in (True, False):
        sample = shared.call((9,), inner, 130, kind == "s4s4", with_bias).converted(dtype)
        assert_right(kind, emulated(cuda_emulator, kind, *sample.args, way=way), sample)
    for out_dtype in FLOATS:
        for columns in (5, 8):
            sample = shared.call((3,), 32, columns, kind == "s4s4", out_dtype=out_dtype)
            sample = sample.converted(dtype)
            assert_right(kind, emulated(cuda_emulator, kind, *sample.args, way=way), sample)


@pytest.mark.parametrize("kind", KINDS)
def test_sizes_around_every_tile_boundary(cuda_emulator: Emulator, kind: str) -> None:
    sizes = [(rows, 10, 3) for rows in around(TILE)]
    sizes += [(2, 10, columns) for columns in around(TILE)]
    sizes += [(3, inner, 6) for inner in (0, 2, 30, 32, 34, 62, 64, 66, 6 * SLICE)]
    sizes += [(3, SLICE * slices + more, 6) for slices in (1, 2, 4) for more in (-2, 0, 2, 32)]
    sizes += [(0, 6, 3), (3, 6, 0)]
    for rows, inner, columns in sizes:
        sample = shared.call((rows,), inner, columns, kind == "s4s4").converted(torch.float32)
        assert_right(kind, emulated(cuda_emulator, kind, *sample.args), sample)


@pytest.mark.parametrize("kind", KINDS)
def test_few_rows_are_those_of_the_tiles(cuda_emulator: Emulator, kind: str) -> None:
    sizes = [(rows, 96, 40) for rows in (1, 2, 7, 8, 9, 15, FEW_ROWS)]
    sizes += [(3, 64, columns) for columns in (0, 1, 8, *around(FEW_COLUMNS), 3 * FEW_COLUMNS + 1)]
    inners = (32, SLICE - 32, SLICE, SLICE + 32, TURN - 32, TURN, TURN + 32, 2 * TURN)
    sizes += [(11, inner, 7) for inner in (*inners, 2 * TURN + 32, 4 * TURN + 96)]
    for rows, inner, columns in sizes:
        sample = shared.call((rows,), inner, columns, kind == "s4s4").converted(torch.float32)
        result = emulated(cuda_emulator, kind, *sample.args, way="few_rows")
        assert torch.equal(result, emulated(cuda_emulator, kind, *sample.args))
        assert_right(kind, result, sample)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
def test_operands_of_whole_vectors_in_any_place(
    cuda_emulator: Emulator, kind: str, way: str
) -> None:
    """Lines that 16 bytes at a time are copied of, the last of which may be fewer."""
    sample = shared.call((2, 3, 2), 416, 36, kind == "s4s4").converted(torch.float32)
    input, row, weight, *rest = sample.args
    for transposed in (False, True):
        lines = widened(input.transpose(0, 2) if transposed else input, 480)
        turned = row.transpose(0, 2) if transposed else row
        other = Sample((lines, turned, widened(weight, 256), *rest))
        assert_right(kind, emulated(cuda_emulator, kind, *other.args, way=way), other)
    if way == "tiles":
        for less in (1, 7, 15):
            per_value = 1 if kind == "s4s4" else 2
            fewer = input[..., : input.shape[-1] - per_value * less]
            other = Sample((widened(fewer, 480), row, widened(weight[:, :-less], 256), *rest))
            assert_right(kind, emulated(cuda_emulator, kind, *other.args), other)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("blocks", [1, 2, 100])
def test_batches_and_layouts(cuda_emulator: Emulator, kind: str, blocks: int) -> None:
    sample = shared.call((2, 3, 7), 40, 260, kind == "s4s4").converted(torch.float32)
    input, row, weight, column, bias, _ = sample.args
    input = input.permute(3, 2, 0, 1).contiguous().permute(2, 3, 1, 0)
    weight = weight.mT.contiguous().mT
    column, bias = (torch.stack([each, each], dim=1)[:, 0] for each in (column, bias))
    other = Sample((input, row.mT.contiguous().mT, weight, column, bias, None))
    assert_right(kind, emulated(cuda_emulator, kind, *other.args, blocks=blocks), other)
    for start in (0, 1, 4, 8, 15):  # addresses of every alignment
        shifted = torch.empty(start + weight.numel(), dtype=torch.int8)[start:]
        shifted = shifted.view(weight.shape).copy_(weight)
        other = Sample((sample.args[0], row, shifted, column, bias, None))
        assert_right(kind, emulated(cuda_emulator, kind, *other.args, blocks=blocks), other)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
def test_the_grid_changes_nothing(cuda_emulator: Emulator, kind: str, way: str) -> None:
    sample = shared.call((13,), 4 * SLICE + 32, 140, kind == "s4s4").converted(torch.float16)
    results = [
        emulated(cuda_emulator, kind, *sample.args, blocks=blocks, way=way) for blocks in (1, 3, 50)
    ]
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("split_slices", [1, 2, 5])
def test_parts_of_the_summed_dimension(
    cuda_emulator: Emulator, kind: str, split_slices: int
) -> None:
    for dtype in (torch.float64, torch.bfloat16):
        sample = shared.call((9,), 4 * SLICE + 34, 133, kind == "s4s4").converted(dtype)
        result = emulated(cuda_emulator, kind, *sample.args, split_slices=split_slices)
        assert torch.equal(result, emulated(cuda_emulator, kind, *sample.args))
        assert_right(kind, result, sample)
    # More columns than a block scales at once.
    sample = shared.call((1,), 2 * SLICE, 515, kind == "s4s4").converted(torch.float32)
    result = emulated(cuda_emulator, kind, *sample.args, split_slices=split_slices)
    assert_right(kind, result, sample)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
def test_every_pair_of_values(cuda_emulator: Emulator, kind: str, way: str) -> None:
    assert_exact(cuda_emulator, kind, every_pair(kind), way=way)


def every_pair(kind: str) -> Sample:
    """Each value of a row meets each of the weight, in every place of a vector of 16 bytes."""
    least, most = (-8, 7) if kind == "s4s4" else (-128, 127)
    values = torch.arange(4096) // 16 % (most - least + 1) + least
    weight = torch.stack([torch.arange(4096).add(shift) % 16 - 8 for shift in range(16)])
    rows = values[None].to(torch.int8)
    return Sample(
        (
            pkg.ops.pack_int4(rows) if kind == "s4s4" else rows,
            torch.ones(1),
            pkg.ops.pack_int4(weight.to(torch.int8)),
            torch.ones(16),
        )
    )


def of_one_value(
    kind: str, inner: int, left: int, right: int, rows: int = 1, columns: int = 2
) -> Sample:
    values = torch.full((rows, inner), left, dtype=torch.int8)
    weight = pkg.ops.pack_int4(torch.full((columns, inner), right, dtype=torch.int8))
    packed = pkg.ops.pack_int4(values) if kind == "s4s4" else values
    return Sample((packed, torch.ones(rows), weight, torch.ones(columns)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
def test_sums_are_exact_at_the_ends_of_the_range(
    cuda_emulator: Emulator, kind: str, way: str
) -> None:
    for left in (-8, 7) if kind == "s4s4" else (-128, 127):
        for right in (-8, 7):
            assert_exact(cuda_emulator, kind, of_one_value(kind, 1024, left, right, 2), way=way)


def test_sums_are_exact_in_a_stretch_as_long_as_it_can_be(cuda_emulator: Emulator) -> None:
    """Of the least values, whose products are the largest; and in a part beyond it."""
    assert_exact(cuda_emulator, "s8s4", of_one_value("s8s4", MOST + 2 * SLICE, -128, -8))


@pytest.mark.parametrize("kind", KINDS)
def test_sums_of_few_rows_are_exact_in_longer_stretches(cuda_emulator: Emulator, kind: str) -> None:
    """A warp's own values are more than a stretch has."""
    left = -8 if kind == "s4s4" else -128
    sample = of_one_value(kind, MOST_OF_FEW + 3 * TURN, left, -8)
    assert_exact(cuda_emulator, kind, sample, way="few_rows")


def assert_as_tiles(
    emulator: Emulator, kind: str, sample: Sample, tile_rows: int, **options: int
) -> None:
    """Warpgroups make the same sums, and of them the same bits."""
    result = emulated(emulator, kind, *sample.args, tile_rows=tile_rows, **options)
    assert torch.equal(result, emulated(emulator, kind, *sample.args))
    assert_right(kind, result, sample)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tile_rows", TILES_OF_WARPGROUPS)
@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
def test_warpgroups_of_every_dtype(
    cuda_emulator: Emulator, kind: str, tile_rows: int, dtype: torch.dtype
) -> None:
    for with_bias, out_dtype in zip((True, False, True, False), FLOATS, strict=True):
        sample = shared.call((70,), 96, 24, kind == "s4s4", with_bias, out_dtype=out_dtype)
        assert_as_tiles(cuda_emulator, kind, sample.converted(dtype), tile_rows)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tile_rows", TILES_OF_WARPGROUPS)
def test_warpgroups_of_sizes_around_every_boundary(
    cuda_emulator: Emulator, kind: str, tile_rows: int
) -> None:
    """Of boxes and tiles, of eight columns and 16, of vectors, slices and stages; few blocks."""
    sizes = [(rows, 32, 8) for rows in (1, *around(64), *around(tile_rows), 2 * tile_rows + 9)]
    sizes += [(9, 32, columns) for columns in (16, 24, 64, 72, TILE - 8, TILE, TILE + 8, 264)]
    sizes += [(3, 32 * steps, 16) for steps in (2, 3, 4, 5, 8, 9, 23, 24, 25, 32, 33, 37)]
    sizes += [(17 * tile_rows + 1, 32, TILE + 8)] if tile_rows == TILE else []
    for rows, inner, columns in sizes:
        sample = shared.call((rows,), inner, columns, kind == "s4s4").converted(torch.bfloat16)
        assert_as_tiles(cuda_emulator, kind, sample, tile_rows, blocks=2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tile_rows", TILES_OF_WARPGROUPS)
def test_parts_of_warpgroups(cuda_emulator: Emulator, kind: str, tile_rows: int) -> None:
    """The last of which is shorter."""
    for dtype in (torch.float64, torch.float16):
        sample = shared.call((67,), 4 * SLICE + 32, 136, kind == "s4s4").converted(dtype)
        for split_slices in (1, 2, 3):
            assert_as_tiles(cuda_emulator, kind, sample, tile_rows, split_slices=split_slices)


@pytest.mark.parametrize("kind", KINDS)
def test_warpgroups_of_lines_that_lie_apart(cuda_emulator: Emulator, kind: str) -> None:
    sample = shared.call((66,), 416, 40, kind == "s4s4").converted(torch.float32)
    input, row, weight, *rest = sample.args
    other = Sample((widened(input, 480), row[:, None].expand(66, 2)[:, 1], widened(weight, 256)))
    other = Sample((*other.args, *rest))
    assert_as_tiles(cuda_emulator, kind, other, 128)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tile_rows", TILES_OF_WARPGROUPS)
def test_every_pair_of_values_of_warpgroups(
    cuda_emulator: Emulator, kind: str, tile_rows: int
) -> None:
    assert_exact(cuda_emulator, kind, every_pair(kind), tile_rows=tile_rows)


def test_sums_of_warpgroups_are_exact_in_rows_as_long_as_they_can_be(
    cuda_emulator: Emulator,
) -> None:
    sample = of_one_value("s8s4", MOST, -128, -8, columns=8)
    assert_exact(cuda_emulator, "s8s4", sample, tile_rows=128)


WARPGROUP_THREADS = 384


@pytest.mark.parametrize("kind", KINDS)
def test_which_products_warpgroups_make(
    emulated_operators: Operators,
    launched_threads: Callable[[], int],
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    """Those of more than 64 rows, whose operands can be copied, where the device has them."""
    operator = getattr(emulated_operators, f"rowwise_scaled_linear_{kind}")
    is_packed = kind == "s4s4"

    def is_by_warpgroups(sample: Sample) -> bool:
        assert_right(kind, operator(*sample.args), sample)
        return launched_threads() == WARPGROUP_THREADS

    many = shared.call((65,), 96, 24, is_packed).converted(torch.bfloat16)
    input, row, weight, *rest = many.args
    assert not is_by_warpgroups(many)
    monkeypatch.setenv("PKG_EMULATED_CAPABILITY", "90")
    assert is_by_warpgroups(many)
    assert is_by_warpgroups(shared.call((5, 14), 96, 24, is_packed).converted(torch.float32))
    # Tiles of 256 rows: 3 multiprocessors take 4 tiles of 128 in two rounds.
    assert is_by_warpgroups(shared.call((257,), 96, 256, is_packed).converted(torch.float32))
    assert not is_by_warpgroups(shared.call((64,), 96, 24, is_packed).converted(torch.float32))
    assert not is_by_warpgroups(shared.call((65,), 96, 20, is_packed).converted(torch.float32))
    assert not is_by_warpgroups(shared.call((65,), 80, 24, is_packed).converted(torch.float32))
    assert not is_by_warpgroups(Sample((input.mT.contiguous().mT, row, weight, *rest)))
    assert not is_by_warpgroups(Sample((input, row, weight.mT.contiguous().mT, *rest)))
    apart = shared.call((13, 5), 96, 24, is_packed).converted(torch.bfloat16)
    turned, scales = (each.transpose(0, 1) for each in apart.args[:2])
    assert is_by_warpgroups(Sample((turned, scales, *apart.args[2:]))) == is_packed
    # The last kernel scales the sums.
    assert not is_by_warpgroups(shared.call((65,), 96, 24, is_packed).converted(torch.float64))
    long = shared.call((65,), 4096, 24, is_packed).converted(torch.bfloat16)
    assert not is_by_warpgroups(long)
    monkeypatch.setenv("PKG_CUDA_WARPGROUPS", "0")
    assert not is_by_warpgroups(many)


def emulated_quantized(
    emulator: Emulator, input: Tensor, bits: int, held: bool = False, blocks: int = 3
) -> tuple[Tensor, Tensor]:
    """By groups of threads that hold the rows, if ``held``."""
    *lead, inner = input.shape
    values = torch.full((*lead, inner if bits == 8 else inner // 2), 77, dtype=torch.int8)
    scales = torch.full(lead, 77, dtype=input.dtype)
    emulator.run(
        "quantize_rowwise",
        ["values", "scales"],
        blocks,
        held=held,
        type=name_of(input.dtype),
        input=input,
        stride=input.stride(-1),
        rows_of=lead,
        row_strides=input.stride()[:-1],
        values=values,
        scales=scales,
        inner=inner,
        bits=bits,
    )
    return values, scales


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
def test_quantised_rows_are_the_bits_of_the_cpu(
    cuda_emulator: Emulator, bits: int, dtype: torch.dtype
) -> None:
    inputs = [torch.randn(9, inner, dtype=torch.float64) for inner in (0, 2, 30, 32, 34, 64, 130)]
    inputs += [torch.randn(2, 3, 7, 40).double().permute(1, 0, 3, 2)[..., :6], torch.zeros(3, 4)]
    # Rows that are read 16 bytes at a time but written unaligned, and rows that are not.
    inputs += [torch.randn(9, 64)[:, :46], torch.randn(9 * 64 + 1)[1:].view(9, 64)]
    special = torch.ones(4, 70)
    special[1, 33], special[2, 5] = torch.nan, -torch.inf
    special[3, ::2] = -0.99  # within 1/16 of the others, which turns the scale's limit
    ties = shared.rows_near_ties(20, 130, bits)
    for input in (*inputs, special, ties):
        results = emulated_quantized(cuda_emulator, input.to(dtype), bits)
        assert_quantized(results, input.to(dtype), bits)


def assert_quantized(results: tuple[Tensor, Tensor], input: Tensor, bits: int) -> None:
    for actual, expected in zip(results, pkg.ops.quantize_rowwise(input, bits), strict=True):
        assert torch.equal(actual.double().nan_to_num(), expected.double().nan_to_num())


GROUPS = (32, 128, 256, 512)  # of threads that hold a row, 8 packets of 16 bytes each


def with_special_rows(input: Tensor) -> Tensor:
    """Rows of zeros, with a NaN, an infinity, and of sizes that no reciprocal is taken of."""
    rows = input.clone()
    rows[1] = 0
    for row, value in ((2, torch.nan), (3, -torch.inf)):
        rows[row, 7 * rows.shape[1] // 8] = value
    rows[4] *= 1e-30 if input.dtype != torch.float16 else 1e-4
    rows[5] *= 1e30 if input.dtype != torch.float16 else 1e4
    return rows


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
def test_rows_that_threads_hold(cuda_emulator: Emulator, bits: int, dtype: torch.dtype) -> None:
    """Of a packet less and more than each group holds, and of some in between."""
    packet = 16 // torch.empty((), dtype=dtype).element_size()
    counts = [1, 2, 31, 33, 100]
    counts += [8 * threads + more for threads in GROUPS for more in (-1, 0, 1)][:-1]
    for count in counts:
        input = torch.randn(7, packet * count, dtype=torch.float64).to(dtype)
        special = with_special_rows(input) if count > 1 else input
        results = emulated_quantized(cuda_emulator, special, bits, held=True)
        assert_quantized(results, special, bits)
    with pytest.raises(EmulationError, match="no group"):
        emulated_quantized(cuda_emulator, torch.zeros(1, 4097 * packet, dtype=dtype), bits, True)


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
def test_held_rows_may_lie_apart(cuda_emulator: Emulator, dtype: torch.dtype) -> None:
    """In whole packets; others are refused. Ties are rounded as they are elsewhere."""
    apart = torch.randn(5, 3, 1200, dtype=torch.float64).to(dtype).transpose(0, 1)[..., 16:1040]
    ties = shared.rows_near_ties(20, 1024, 8).to(dtype)
    for bits in (4, 8):
        for blocks in (1, 100):
            for input in (apart, ties):
                results = emulated_quantized(cuda_emulator, input, bits, True, blocks)
                assert_quantized(results, input, bits)
    refused = [apart[..., 1:1017], apart[..., :1023], apart.transpose(1, 2)[:2]]
    refused.append(torch.randn(4, 1029).to(dtype)[:, :1024])
    for input in refused:
        with pytest.raises(EmulationError, match="no group"):
            emulated_quantized(cuda_emulator, input, 8, held=True)


def test_which_rows_threads_hold(
    emulated_operators: Operators, launched_threads: Callable[[], int]
) -> None:
    """By the threads of a block, which are 128 too where rows are read twice."""

    def threads(input: Tensor) -> int:
        assert_quantized(emulated_operators.quantize_rowwise(input, 8), input, 8)
        return launched_threads()

    for columns, expected in (
        *((8192, 128), (8200, 256), (16384, 256), (16392, 512), (32768, 512), (32776, 128)),
        (8204, 128),
    ):
        assert threads(torch.randn(2, columns).bfloat16()) == expected
    rows = torch.randn(2, 8216).bfloat16()
    assert threads(rows[:, 8:8208]) == 256
    assert threads(rows[:, 4:8204]) == 128
    assert threads(torch.randn(8200, 2).bfloat16().mT) == 128


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
def test_the_operators_whole(emulated_operators: Operators, kind: str, dtype: torch.dtype) -> None:
    operator = getattr(emulated_operators, f"rowwise_scaled_linear_{kind}")
    for template in shared.samples(kind == "s4s4"):
        sample = template.converted(dtype)
        if template.values_only and (dtype != torch.float32 or sample.args[0].numel() > 20000):
            continue  # the kernels' tests have sizes of their own
        assert_right(kind, operator(*sample.args), sample)
    sample = shared.call((4, 3, 5), 8, 7, kind == "s4s4").converted(dtype)
    input, row, *rest = sample.args
    turned = Sample((input.transpose(0, 2), row.transpose(0, 2), *rest))
    assert_right(kind, operator(*turned.args), turned)


@pytest.mark.parametrize("kind", KINDS)
def test_zeros_have_the_signs_of_their_scales(emulated_operators: Operators, kind: str) -> None:
    operator = getattr(emulated_operators, f"rowwise_scaled_linear_{kind}")
    device = torch.device("cpu")
    shared.assert_zeros_have_the_signs_of_their_scales(operator, kind == "s4s4", device)


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
def test_the_quantising_operator_whole(emulated_operators: Operators, dtype: torch.dtype) -> None:
    for shape in ((), (3,), (4, 3, 5), (0,)):
        input = torch.randn(*shape, 34, dtype=torch.float64).to(dtype)
        for each in (input, input.transpose(0, -2) if input.dim() > 2 else input):
            for bits in (4, 8):
                results = emulated_operators.quantize_rowwise(each, bits)
                for actual, expected in zip(
                    results, pkg.ops.quantize_rowwise(each, bits), strict=True
                ):
                    assert torch.equal(actual, expected)
