"""The kernels of quantised layers, run on the CPU by the emulator, against float64."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import references
import torch
from emulator import Emulator
from quantised_samples import GROUP_SIZES, INNER_K_TILES, scales_and_zeros, values, words
from samples import FLOATING, normal
from test_emulated_matmul import make, name_of
from torch import Tensor

from pkg.testing import Sample
from pkg.testing.samples import same_bits
from pkg.testing.tolerance import expect


def emulated(
    emulator: Emulator,
    input: Tensor,
    packed: Tensor,
    pairs: Tensor,
    group_size: int,
    inner_k_tiles: int,
    bias: Tensor | None = None,
    blocks: int = 3,
    split_turns: int = 0,
    by_warpgroups: bool = False,
) -> Tensor:
    """With ``split_turns``, halves only, the summed dimension is divided into parts of so many.

    A turn of warpgroups is a slice of 128.
    """
    *batch, rows, depth = input.shape
    columns = packed.shape[0] * 8
    output = torch.full((*batch, rows, columns), 77, dtype=input.dtype)
    emulator.run(
        "int4_linear",
        ["output"],
        blocks,
        type=name_of(input.dtype),
        input=input,
        words=packed,
        scales_and_zeros=pairs,
        bias=bias,
        output=output,
        rows=rows,
        columns=columns,
        depth=depth,
        group_size=group_size,
        inner_k_tiles=inner_k_tiles,
        split_turns=split_turns,
        by_warpgroups=by_warpgroups,
        input_strides=input.stride()[-2:],
        bias_stride=bias.stride(0) if bias is not None else 0,
        batch=batch,
        batch_strides=input.stride()[:-2],
    )
    return output


def roundoff(dtype: torch.dtype) -> float:
    """Of the numbers that are summed."""
    return torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps / 2


def roundings(input: Tensor) -> int:
    """How many a term may pass on its way to the result.

    float32 and float64: the weight's and the product's; those of the other terms that a lane sums
    apart, up to 32, and of the other such sums; those of four lanes, and the bias. In half
    precision all may be one sum, scaled.
    """
    depth = input.shape[-1]
    if input.dtype in (torch.float32, torch.float64):
        of_lane = depth // 4
        return 2 + min(of_lane, 32) - 1 + math.ceil(of_lane / 32) - 1 + 2 + 1
    return depth + 4


def assert_right(
    result: Tensor,
    input: Tensor,
    packed: Tensor,
    pairs: Tensor,
    group_size: int,
    inner_k_tiles: int,
    bias: Tensor | None = None,
) -> None:
    """Each product of whole numbers and zeros, and each sum, may be off by a roundoff."""
    matrix = references.dequantized(packed, pairs.double(), group_size, inner_k_tiles)
    scales, zeros = pairs.double().repeat_interleave(group_size, 0).unbind(-1)
    largest = 8 * scales.abs() + zeros.abs()
    exact = input.double() @ matrix.mT
    magnitude = input.double().abs() @ largest
    if bias is not None:
        exact = exact + bias.double()
        magnitude = magnitude + bias.double().abs()
    bound = roundings(input) * roundoff(input.dtype) * magnitude
    if input.dtype == torch.float64:  # the reference has errors of its own
        bound += (input.shape[-1] + 1) * roundoff(input.dtype) * magnitude
    bound *= 1.01
    bound += torch.finfo(result.dtype).eps / 2 * (exact.abs() + bound)
    bound += torch.finfo(result.dtype).smallest_normal
    assert ((result.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("dtype", FLOATING, ids=name_of)
@pytest.mark.parametrize("inner_k_tiles", INNER_K_TILES)
@pytest.mark.parametrize("group_size", GROUP_SIZES)
def test_every_layout(
    cuda_emulator: Emulator, dtype: torch.dtype, inner_k_tiles: int, group_size: int
) -> None:
    """Few rows and many; every other slice of 128 steps is another team's."""
    for rows in (3, 19, 40):
        input, bias = make(rows, 768, dtype=dtype), make(40, dtype=dtype)
        packed = words(40, 768, inner_k_tiles)
        arguments = (packed, scales_and_zeros(40, 768, group_size), group_size, inner_k_tiles, bias)
        assert_right(emulated(cuda_emulator, input, *arguments), input, *arguments)


@pytest.mark.parametrize("dtype", FLOATING, ids=name_of)
def test_sizes_around_every_tile(cuda_emulator: Emulator, dtype: torch.dtype) -> None:
    sizes = [(rows, 32, 8) for rows in (0, 1, 3, 4, 5, 15, 16, 17, 31, 32, 33, 64, 65)]
    sizes += [(2, 32, columns) for columns in (0, 24, 32, 40, 120, 128, 136, 264)]
    sizes += [(17, 32, columns) for columns in (24, 136)]
    sizes += [(3, depth, 16) for depth in (0, 96, 128, 160, 256, 288, 640, 768, 800, 1056)]
    sizes += [(20, depth, 16) for depth in (96, 128, 160, 256, 384, 416, 512)]
    for rows, depth, columns in sizes:
        input = make(rows, depth, dtype=dtype)
        arguments = (words(columns, depth, 2), scales_and_zeros(columns, depth, 32), 32, 2)
        assert_right(emulated(cuda_emulator, input, *arguments), input, *arguments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=name_of)
def test_small_terms_of_a_long_sum_are_not_lost(
    cuda_emulator: Emulator, dtype: torch.dtype
) -> None:
    """A 1 that each of four lanes begins with, and terms of which a 1 takes none up by itself."""
    u = roundoff(dtype)
    for depth in (1056, 4096):
        input = torch.full((3, depth), 0.98 * u, dtype=dtype)
        input[:, [0, 2, 4, 6]] = 1
        ones = references.pack_tensor_core_tiled_layout(torch.full((8, depth), 9).int(), 2)
        pairs = torch.tensor([1.0, 0.0]).bfloat16().expand(depth // 32, 8, 2).contiguous()
        result = emulated(cuda_emulator, input, ones, pairs, 32, 2)
        small = (depth - 4) * 0.98 * u
        error = ((result - 4).double() - small).abs()
        assert (error <= roundings(input) * u * (4 + small)).all()


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=name_of)
def test_long_sums_are_as_exact_as_the_rule(
    cuda_emulator: Emulator, dtype: torch.dtype, rows: int
) -> None:
    """That of all operators, with a product by the dequantized weight beside it."""
    input, packed = normal(rows, 4096).to(dtype), words(256, 4096, 2)
    sample = Sample((input, packed, scales_and_zeros(256, 4096, 32), 32, 2))
    (expected,) = expect(lambda each: [references.int4_linear(*each.args)], sample)
    expected.compare(emulated(cuda_emulator, *sample.args), "output")


@pytest.mark.parametrize("blocks", [1, 2, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name_of)
def test_batches_and_strides(cuda_emulator: Emulator, dtype: torch.dtype, blocks: int) -> None:
    for rows in (3, 18, 35):
        input = make(64, rows, 2, 5, dtype=dtype).permute(2, 3, 1, 0)
        bias = make(80, dtype=dtype)[::2]
        arguments = (words(40, 64, 4), scales_and_zeros(40, 64, 64), 64, 4, bias)
        assert_right(emulated(cuda_emulator, input, *arguments, blocks=blocks), input, *arguments)


def misaligned(tensor: Tensor) -> Tensor:
    """The same numbers, an element behind where an aligned tensor begins."""
    memory = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)
    memory[1:] = tensor.flatten()
    return memory[1:].view(tensor.shape)


@pytest.mark.parametrize("dtype", FLOATING, ids=name_of)
@pytest.mark.parametrize("rows", [5, 21, 37])
def test_operands_of_any_address(cuda_emulator: Emulator, dtype: torch.dtype, rows: int) -> None:
    dense = make(rows, 192, dtype=dtype)
    packed, pairs = words(40, 192, 4), scales_and_zeros(40, 192, 64)
    inputs = [
        misaligned(dense),
        make(rows, 200, dtype=dtype)[:, 8:],
        make(rows, 199, dtype=dtype)[:, 7:],
        make(rows, 1, dtype=dtype).expand(rows, 192),
        make(1, 192, dtype=dtype).expand(rows, 192),
        make(192, rows, dtype=dtype).mT,
        make(2 * rows, 3 * 192, dtype=dtype)[::2, ::3],
    ]
    for input in inputs:
        assert_right(
            emulated(cuda_emulator, input, packed, pairs, 64, 4), input, packed, pairs, 64, 4
        )
    for operands in ((misaligned(packed), pairs), (packed, misaligned(pairs))):
        assert_right(emulated(cuda_emulator, dense, *operands, 64, 4), dense, packed, pairs, 64, 4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=name_of)
@pytest.mark.parametrize("rows", [3, 30, 66])
def test_parts_of_a_divided_product_are_added_up(
    cuda_emulator: Emulator, dtype: torch.dtype, rows: int
) -> None:
    """Last parts that are whole, that are shorter, and of one block; parts within a group."""
    for depth, group_size, turns in ((1024, 256, 1), (800, 32, 1), (1312, 32, 2), (1536, 128, 3)):
        input, bias = make(2, rows, depth, dtype=dtype), make(40, dtype=dtype)
        packed, pairs = words(40, depth, 2), scales_and_zeros(40, depth, group_size)
        arguments = (packed, pairs, group_size, 2, bias)
        result = emulated(cuda_emulator, input, *arguments, split_turns=turns)
        assert_right(result, input, *arguments)


@pytest.mark.parametrize("split_turns", [0, 1])
@pytest.mark.parametrize("rows", [3, 27, 130])
def test_the_grid_changes_no_bit(cuda_emulator: Emulator, rows: int, split_turns: int) -> None:
    input = make(rows, 544, dtype=torch.float16)
    arguments = (words(136, 544, 2), scales_and_zeros(136, 544, 32), 32, 2)
    first, *others = (
        emulated(cuda_emulator, input, *arguments, blocks=blocks, split_turns=split_turns)
        for blocks in (1, 2, 100)
    )
    assert_right(first, input, *arguments)
    assert all(same_bits(first, other) for other in others)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=name_of)
def test_nan_stays_in_its_row(cuda_emulator: Emulator, dtype: torch.dtype) -> None:
    for rows in (13, 18, 35):
        input = make(rows, 64, dtype=dtype)
        input[3, 5] = torch.nan
        arguments = (words(16, 64, 4), scales_and_zeros(16, 64, 32), 32, 4)
        result = emulated(cuda_emulator, input, *arguments)
        expected = torch.zeros(rows, 16, dtype=torch.bool)
        expected[3] = True
        assert torch.equal(result.isnan(), expected)


@pytest.mark.parametrize(("rows", "depth"), [(2, 1024), (17, 2048), (33, 2048)])
def test_a_long_product_of_few_tiles_is_divided(
    emulated_operators: torch._ops._OpNamespace, rows: int, depth: int
) -> None:
    """In two: else the first terms of either half, added before the last, would overflow."""
    packed = references.pack_tensor_core_tiled_layout(torch.full((40, depth), 9).int(), 4)
    pairs = torch.tensor([3e38, 0.0]).bfloat16().expand(depth // 128, 40, 2).contiguous()
    input = torch.zeros(rows, depth, dtype=torch.bfloat16)
    half = depth // 2
    input[1, [0, half, half + 128]] = torch.tensor([1.0, 1.0, -1.0]).bfloat16()
    result = emulated_operators.int4_linear(input, packed, pairs, 128, 4, None)
    expected = torch.zeros(rows, 40, dtype=torch.bfloat16)
    expected[1] = 3e38
    assert torch.equal(result, expected)


HALVES = [torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
@pytest.mark.parametrize("inner_k_tiles", INNER_K_TILES)
@pytest.mark.parametrize("group_size", GROUP_SIZES)
def test_warpgroups_on_every_layout(
    cuda_emulator: Emulator, dtype: torch.dtype, inner_k_tiles: int, group_size: int
) -> None:
    """Slices of 128 steps that are whole, and a last one as short as the layout allows."""
    least = max(group_size, 16 * inner_k_tiles)
    for depth in (768, 512 + least):
        input, bias = make(2, 70, depth, dtype=dtype), make(40, dtype=dtype)
        packed, pairs = words(40, depth, inner_k_tiles), scales_and_zeros(40, depth, group_size)
        arguments = (packed, pairs, group_size, inner_k_tiles, bias)
        result = emulated(cuda_emulator, input, *arguments, by_warpgroups=True)
        assert_right(result, input, *arguments)


@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
def test_sizes_around_every_tile_of_warpgroups(cuda_emulator: Emulator, dtype: torch.dtype) -> None:
    """Of rows and columns, of eight columns and 16, and of stages; more than 16 row tiles."""
    sizes = [(rows, 32, 16) for rows in (1, 8, 63, 64, 65, 127, 128, 129, 257)]
    sizes += [(9, 32, columns) for columns in (8, 24, 64, 72, 120, 128, 136, 264)]
    sizes += [(3, depth, 8) for depth in (64, 96, 128, 160, 192, 224, 480, 512, 544, 1056)]
    sizes += [(17 * 128 + 1, 32, 136)]
    for rows, depth, columns in sizes:
        input = make(rows, depth, dtype=dtype)
        arguments = (words(columns, depth, 2), scales_and_zeros(columns, depth, 32), 32, 2)
        result = emulated(cuda_emulator, input, *arguments, blocks=2, by_warpgroups=True)
        assert_right(result, input, *arguments)


@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
@pytest.mark.parametrize(("depth", "group_size"), [(1280, 256), (1184, 32), (1088, 64)])
def test_warpgroups_and_a_divided_product(
    cuda_emulator: Emulator, dtype: torch.dtype, depth: int, group_size: int
) -> None:
    """Parts of three slices, the last shorter; the blocks change no bit."""
    input, bias = make(2, 67, depth, dtype=dtype), make(80, dtype=dtype)[::2]
    packed, pairs = words(40, depth, 2), scales_and_zeros(40, depth, group_size)
    arguments = (packed, pairs, group_size, 2, bias)
    for split_turns in (0, 3):
        first, second = (
            emulated(
                cuda_emulator,
                input,
                *arguments,
                blocks,
                split_turns=split_turns,
                by_warpgroups=True,
            )
            for blocks in (1, 100)
        )
        assert_right(first, input, *arguments)
        assert same_bits(first, second)


@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
def test_batches_and_strides_of_warpgroups(cuda_emulator: Emulator, dtype: torch.dtype) -> None:
    """One matrix for all, one step from each to the next, and rows that lie apart."""
    arguments = (words(24, 96, 2), scales_and_zeros(24, 96, 32), 32, 2)
    for input in (
        make(70, 96, dtype=dtype).expand(3, 70, 96),
        make(3, 2, 66, 96, dtype=dtype)[:, 1],
        make(66, 5, 96, dtype=dtype).transpose(0, 1),
        make(66, 104, dtype=dtype)[:, 8:],
    ):
        result = emulated(cuda_emulator, input, *arguments, by_warpgroups=True)
        assert_right(result, input, *arguments)


def test_nan_stays_in_its_row_of_warpgroups(cuda_emulator: Emulator) -> None:
    input = make(70, 96, dtype=torch.bfloat16)
    input[3, 95] = torch.nan
    arguments = (words(16, 96, 2), scales_and_zeros(16, 96, 32), 32, 2)
    result = emulated(cuda_emulator, input, *arguments, by_warpgroups=True)
    expected = torch.zeros(70, 16, dtype=torch.bool)
    expected[3] = True
    assert torch.equal(result.isnan(), expected)


def test_infinity_reaches_what_it_reaches_without_warpgroups(cuda_emulator: Emulator) -> None:
    input = make(70, 96, dtype=torch.float16)
    input[3, 95], input[5, 2] = torch.inf, -torch.inf
    # No weight is 0, and the zeros have the sign of the others, or not.
    pairs = scales_and_zeros(16, 96, 32).abs()
    pairs[..., ::2, 1] *= -1
    arguments = (torch.zeros_like(words(16, 96, 2)), pairs, 32, 2)
    result = emulated(cuda_emulator, input, *arguments, by_warpgroups=True)
    expected = emulated(cuda_emulator, input, *arguments)
    assert result.isinf().any()
    assert result.isnan().any()
    assert torch.equal(result.isnan(), expected.isnan())
    assert torch.equal(result.isinf(), expected.isinf())


WARPGROUP_THREADS = 384


def threads_of(
    operators: torch._ops._OpNamespace,
    launched_threads: Callable[[], int],
    input: Tensor,
    depth: int = 96,
) -> int:
    """Of the last launch of a product, which is checked."""
    arguments = (
        words(24, depth, 2),
        scales_and_zeros(24, depth, 32),
        32,
        2,
        make(24, dtype=input.dtype),
    )
    assert_right(operators.int4_linear(input, *arguments), input, *arguments)
    return launched_threads()


@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
def test_which_products_warpgroups_make(
    emulated_operators: torch._ops._OpNamespace,
    launched_threads: Callable[[], int],
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
) -> None:
    """Those of more than 64 rows that can be copied in bulk, where the device has warpgroups'."""

    def threads(input: Tensor) -> int:
        return threads_of(emulated_operators, launched_threads, input)

    many = make(65, 96, dtype=dtype)
    assert threads(many) != WARPGROUP_THREADS
    monkeypatch.setenv("PKG_EMULATED_CAPABILITY", "90")
    assert threads(many) == WARPGROUP_THREADS
    assert threads(make(2, 65, 96, dtype=dtype)) == WARPGROUP_THREADS
    assert threads(make(3, 96, 65, dtype=dtype)[1].mT.contiguous()) == WARPGROUP_THREADS
    assert threads(many[:64]) != WARPGROUP_THREADS
    assert threads(make(96, 65, dtype=dtype).mT) != WARPGROUP_THREADS
    assert threads(make(65, 97, dtype=dtype)[:, 1:]) != WARPGROUP_THREADS
    assert threads(many.float()) != WARPGROUP_THREADS
    monkeypatch.setenv("PKG_CUDA_WARPGROUPS", "0")
    assert threads(many) != WARPGROUP_THREADS


def test_a_product_divided_among_warpgroups(
    emulated_operators: torch._ops._OpNamespace,
    launched_threads: Callable[[], int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The emulated device has 3 multiprocessors; the last kernel adds the parts up."""
    monkeypatch.setenv("PKG_EMULATED_CAPABILITY", "90")
    input = make(65, 2080, dtype=torch.bfloat16)
    assert threads_of(emulated_operators, launched_threads, input, 2080) == 128


WIDE = [torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", WIDE, ids=name_of)
@pytest.mark.parametrize("inner_k_tiles", INNER_K_TILES)
def test_a_weight_written_out(
    cuda_emulator: Emulator, dtype: torch.dtype, inner_k_tiles: int
) -> None:
    """Rounded once, which float64 is not where the reference computes in it."""
    for rows, columns, group_size in ((8, 256, 32), (40, 512, 128), (16, 0, 32), (0, 256, 32)):
        packed = words(rows, columns, inner_k_tiles)
        pairs = scales_and_zeros(rows, columns, group_size)
        weight = torch.full((rows, columns), 77, dtype=dtype)
        cuda_emulator.run(
            "dequantize_tiled",
            ["values"],
            type=name_of(dtype),
            words=packed,
            scales_and_zeros=pairs,
            values=weight,
            group_size=group_size,
            rows=rows,
            columns=columns,
            inner_k_tiles=inner_k_tiles,
        )
        exact = references.dequantized(packed, pairs.double(), group_size, inner_k_tiles)
        assert torch.equal(weight, exact.to(dtype))


def thirds(*shape: int, dtype: torch.dtype) -> Tensor:
    """Numbers of which the sums of products are rounded, in float64 too."""
    return make(*shape, dtype=dtype) / 3


def is_written_out(
    operators: torch._ops._OpNamespace, input: Tensor, columns: int, bias: Tensor | None = None
) -> bool:
    """Whether the result, which is checked, is that of ``linear`` and not of the packed weight."""
    depth = input.shape[-1]
    packed, pairs = words(columns, depth, 2), scales_and_zeros(columns, depth, 32)
    arguments = (packed, pairs, 32, 2, bias)
    result = operators.int4_linear(input, *arguments)
    sample = Sample((input, *arguments))
    (expected,) = expect(lambda each: [references.int4_linear(*each.args)], sample)
    expected.compare(result, "output")
    weight = references.dequantized(packed, pairs.double(), 32, 2).to(input.dtype)
    return same_bits(result, operators.linear(input, weight, bias, None))


@pytest.mark.parametrize("dtype", WIDE, ids=name_of)
def test_which_weights_are_written_out(
    emulated_operators: torch._ops._OpNamespace,
    choose_float32_products: Callable[[int], None],
    dtype: torch.dtype,
) -> None:
    """Those of more than eight rows, where that takes less time on 3 multiprocessors."""

    def written(rows: int, depth: int, columns: int) -> bool:
        return is_written_out(emulated_operators, thirds(rows, depth, dtype=dtype), columns)

    assert written(9, 512, 8)
    assert written(16, 512, 24)
    assert not written(8, 512, 8)
    assert not written(16, 128, 8)  # over before another kernel has begun
    assert not written(9, 512, 264)  # of the tiles of the result most would be nothing
    assert written(130, 256, 136)
    batch = thirds(512, 12, 2, dtype=dtype).permute(2, 1, 0)
    assert is_written_out(emulated_operators, batch, 24, thirds(48, dtype=dtype)[::2])
    assert is_written_out(emulated_operators, misaligned(thirds(16, 512, dtype=dtype)), 8)
    choose_float32_products(1)  # in TF32, of which linear is made then
    assert written(16, 512, 24) == (dtype == torch.float64)


@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
def test_no_half_is_written_out(
    emulated_operators: torch._ops._OpNamespace, dtype: torch.dtype
) -> None:
    """It would be rounded."""
    assert not is_written_out(emulated_operators, thirds(130, 512, dtype=dtype), 24)


def test_nan_stays_in_its_row_by_a_weight_written_out(
    emulated_operators: torch._ops._OpNamespace,
) -> None:
    input = make(16, 512, dtype=torch.float32)
    input[3, 5], input[4, 6] = torch.nan, torch.inf
    arguments = (words(8, 512, 2), scales_and_zeros(8, 512, 32), 32, 2)
    result = emulated_operators.int4_linear(input, *arguments, None)
    assert result[3].isnan().all()
    assert not result[4].isfinite().any()
    assert result[[0, 1, 2, *range(5, 16)]].isfinite().all()


def emulated_packing(emulator: Emulator, w: Tensor, inner_k_tiles: int) -> Tensor:
    columns = w.shape[1] * (2 if w.dtype == torch.uint8 else 1)
    tiles = (w.shape[0] + 7) // 8
    words = torch.full((tiles, columns // (16 * inner_k_tiles), 32, inner_k_tiles // 2), 77).int()
    emulator.run(
        "pack_tiled",
        ["words"],
        type=name_of(w.dtype),
        values=w,
        words=words,
        rows=8 * tiles,
        columns=columns,
        inner_k_tiles=inner_k_tiles,
        rows_of_values=w.shape[0],
        strides=w.stride(),
    )
    return words


@pytest.mark.parametrize("inner_k_tiles", INNER_K_TILES)
def test_bytes_and_rows_that_fill_up_a_tile(cuda_emulator: Emulator, inner_k_tiles: int) -> None:
    for rows in (1, 7, 8, 9, 20):
        w = values(rows, 128)
        both = (w[:, ::2] << 4 | w[:, 1::2]).to(torch.uint8)
        expected = references.pack_tensor_core_tiled_layout(w, inner_k_tiles)
        turned = both.mT.contiguous().mT
        for each in (w, both, turned):
            assert torch.equal(emulated_packing(cuda_emulator, each, inner_k_tiles), expected)


def test_the_weight_is_rounded_once(cuda_emulator: Emulator) -> None:
    """Bits of every kind, to the bit, and products between two numbers of bfloat16."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**15), 2**15, (1, 2048, 2), generator=generator).short()
    pairs = bits.view(torch.bfloat16)
    pairs[0, :128, 0] = 1 + torch.arange(128) / 128
    pairs[0, :64, 1], pairs[0, 64:128, 1] = 2.0**-24, -(2.0**-24)
    pairs[0, 128] = torch.tensor([2.0**125, 2.0**120])
    packed = references.pack_tensor_core_tiled_layout(
        (torch.arange(32) % 16).int().expand(2048, 32), 2
    )
    weight = torch.full((2048, 32), 77, dtype=torch.bfloat16)
    cuda_emulator.run(
        "dequantize_tiled",
        ["values"],
        type="bfloat16",
        words=packed,
        scales_and_zeros=pairs,
        values=weight,
        rows=2048,
        columns=32,
        inner_k_tiles=2,
        group_size=32,
    )
    expected = references.dequantize_tensor_core_tiled_layout(packed, pairs, 32, 2)
    assert torch.equal(weight.isnan(), expected.isnan())
    assert same_bits(weight.nan_to_num(), expected.nan_to_num())
    assert weight[3, 11] == references.fused(3, 1 + 3 / 128, 2.0**-24)


@pytest.mark.parametrize("inner_k_tiles", INNER_K_TILES)
def test_the_layout(cuda_emulator: Emulator, inner_k_tiles: int) -> None:
    for rows, columns in ((8, 128), (40, 256), (0, 128), (8, 0)):
        w = values(columns, rows).mT if rows != 40 else values(rows, 2 * columns)[:, ::2]
        expected = references.pack_tensor_core_tiled_layout(w, inner_k_tiles)
        sizes = {"rows": rows, "columns": columns, "inner_k_tiles": inner_k_tiles}
        packed = emulated_packing(cuda_emulator, w, inner_k_tiles)
        assert torch.equal(packed, expected)
        unpacked = torch.full((rows, columns), 77, dtype=torch.int32)
        cuda_emulator.run("unpack_tiled", ["values"], words=packed, values=unpacked, **sizes)
        assert torch.equal(unpacked, w)
        pairs = scales_and_zeros(rows, columns, 128)
        weight = torch.full((rows, columns), 77, dtype=torch.bfloat16)
        cuda_emulator.run(
            "dequantize_tiled",
            ["values"],
            type="bfloat16",
            words=packed,
            scales_and_zeros=pairs,
            values=weight,
            group_size=128,
            **sizes,
        )
        assert torch.equal(
            weight,
            references.dequantize_tensor_core_tiled_layout(packed, pairs, 128, inner_k_tiles),
        )


@pytest.mark.parametrize("dtype", FLOATING, ids=name_of)
@pytest.mark.parametrize("shape", [(64,), (3, 64), (2, 17, 64), (0, 64)])
def test_the_operators_whole(
    emulated_operators: torch._ops._OpNamespace, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    """The host code, on operands of any strides."""
    w = values(64, 40).mT
    packed = emulated_operators.pack_tensor_core_tiled_layout(w, 4)
    assert torch.equal(packed, references.pack_tensor_core_tiled_layout(w, 4))
    both = (w[:37, ::2] << 4 | w[:37, 1::2]).to(torch.uint8)
    assert torch.equal(
        emulated_operators.pack_tensor_core_tiled_layout(both, 4),
        references.pack_tensor_core_tiled_layout(w[:37], 4),
    )
    spread = packed.repeat_interleave(2, 1)[:, ::2]
    assert torch.equal(emulated_operators.unpack_tensor_core_tiled_layout(spread, 4), w)
    pairs = scales_and_zeros(40, 64, 32).repeat_interleave(2, 0)[::2]
    weight = emulated_operators.dequantize_tensor_core_tiled_layout(spread, pairs, 32, 4)
    assert torch.equal(weight, references.dequantize_tensor_core_tiled_layout(packed, pairs, 32, 4))
    rows = make(*shape, dtype=dtype)
    bias = make(80, dtype=dtype)[::2]
    for input in (rows, rows.transpose(0, -1).contiguous().transpose(0, -1)):
        for added in (None, bias):
            result = emulated_operators.int4_linear(input, spread, pairs, 32, 4, added)
            assert result.shape == (*shape[:-1], 40)
            assert_right(result, input, packed, pairs, 32, 4, added)
