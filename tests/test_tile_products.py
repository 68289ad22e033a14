"""Products by tile registers: as exact as fused multiply-adds, on hostile values and sizes.

A float32 is the sum of its three parts in bfloat16, but for what is denormal, and the range of the
values is seen to leave nothing of that out (csrc/cpu/tiles/range.h). So the bound of every test is
the one of a sum that is rounded after each of its terms, whatever the processor adds them by.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import struct
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import references
import torch
from samples import FLOATING, around, normal, of_dtype, powers
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import pkg
from pkg import _float32_matmul
from pkg.testing import Sample, check_op, same_bits

pytestmark = pytest.mark.skipif(
    not _float32_matmul.has_tiles(),
    reason="this processor, or the CPU library in use, has no tile registers (Intel AMX)",
)

UNIT = 2.0**-24  # half a unit in the last place of 1, in float32
LARGEST = torch.finfo(torch.float32).max
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int8)
# Of operands and of results.
RESULTS = (
    (torch.float32, torch.float32),
    (torch.float16, torch.float16),
    (torch.float16, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.int8, torch.int32),
)
EDGES = around(16, 32, 48, 64)
# Every bit pattern's kind: quiet and signalling, of either sign, with bits that rounding to
# bfloat16 would carry into the exponent, or cut off.
NANS = (0x7FC00000, 0xFFC00000, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0xFF800001, 0x7F808000)


@pytest.fixture(autouse=True)
def one_thread_and_pytorchs_precision() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    pkg.set_float32_matmul("highest")
    yield
    pkg.set_float32_matmul("pytorch")
    torch.set_num_threads(threads)


def multiply(a: Tensor, b: Tensor, result: torch.dtype | None = None) -> Tensor:
    if a.dtype == torch.int8:
        result = torch.int32
    return pkg.ops.matmul(a, b, out_dtype=None if result == a.dtype else result)


@contextlib.contextmanager
def fused_multiply_adds() -> Iterator[None]:
    """Of float32; float16 goes its way."""
    pkg.set_float32_matmul("fma")
    try:
        yield
    finally:
        pkg.set_float32_matmul("highest")


def by_fused_multiply_adds(a: Tensor, b: Tensor) -> Tensor:
    with fused_multiply_adds():
        return pkg.ops.matmul(a, b)


def bound(a: Tensor, b: Tensor, result: torch.dtype) -> Tensor:
    """Of the error of each element.

    Each rounding of a sum is off by a unit of at most the sum of magnitudes; one more for the
    products of parts that are left out, and one for a sum of small parts. Results may be denormal.
    """
    inner = a.shape[-1]
    magnitudes = a.double().abs() @ b.double().abs()
    error = (inner + 2) * UNIT * magnitudes + inner * 2.0**-149
    if result != torch.float32:
        limits = torch.finfo(result)
        rounding = limits.eps / 2 * (a.double() @ b.double()).abs()
        error += rounding + error * limits.eps + limits.smallest_normal * limits.eps
    return error


def check(a: Tensor, b: Tensor, result: torch.dtype = torch.float32) -> Tensor:
    """The product, which is as close to float64 as it has to be."""
    product = multiply(a, b, result)
    assert product.dtype == (torch.int32 if a.dtype == torch.int8 else result)
    exact = a.double() @ b.double()
    if a.dtype == torch.int8:
        assert torch.equal(product.double(), exact)
    else:
        assert ((product.double() - exact).abs() <= bound(a, b, result)).all()
    if a.dtype == torch.float32:
        # Errors of many terms are far below that bound, and that of a missing part may be too.
        ours, plain = (relative_error(each, a, b) for each in (product, a @ b))
        assert ours <= 2 * plain + UNIT / 8
    return product


def relative_error(product: Tensor, a: Tensor, b: Tensor) -> float:
    """Root of the mean square, relative to the magnitudes that are added up."""
    error = (product.double() - a.double() @ b.double()).abs()
    magnitudes = (a.double().abs() @ b.double().abs()).clamp(min=2.0**-100)
    return float((error / magnitudes).square().mean().sqrt())


def same_places(product: Tensor, expected: Tensor) -> None:
    """The same NaNs and infinities."""
    assert torch.equal(product.isnan(), expected.isnan())
    assert torch.equal(product.isposinf(), expected.isposinf())
    assert torch.equal(product.isneginf(), expected.isneginf())


def check_special(a: Tensor, b: Tensor) -> Tensor:
    """As fused multiply-adds and PyTorch have it, and finite elements within the bound."""
    product, expected = pkg.ops.matmul(a, b), by_fused_multiply_adds(a, b)
    same_places(product, expected)
    same_places(product, a @ b)
    finite = product.isfinite()
    exact = a.double() @ b.double()
    error = (product.double() - exact).abs()
    assert (error <= bound(a, b, torch.float32))[finite].all()
    return product


def from_bits(bits: int) -> Tensor:
    return torch.frombuffer(bytearray(struct.pack("<I", bits)), dtype=torch.float32)[0]


# float32: how exact


# Small ones, and those of which tiles would be filled by less than a half, are made by vectors.
@pytest.mark.parametrize(
    ("size", "by_tiles"),
    [
        *((size, False) for size in (33, 48, 64, 79, 100)),
        *((size, True) for size in (80, 96, 128, 255, 512, 1000, 2048)),
    ],
)
def test_six_products_are_more_exact_than_pytorch(size: int, by_tiles: bool) -> None:
    a, b = normal(size, size).float(), normal(size, size, seed=1).float()
    exact = a.double() @ b.double()
    ours = (pkg.ops.matmul(a, b).double() - exact).norm()
    assert ours <= (0.6 if by_tiles else 1.2) * ((a @ b).double() - exact).norm()
    same = torch.equal(pkg.ops.matmul(a, b), by_fused_multiply_adds(a, b))
    assert same != by_tiles


@pytest.mark.parametrize(("rows", "inner", "columns"), [(96, 16384, 96), (70, 20000, 95)])
def test_a_long_inner_dimension(rows: int, inner: int, columns: int) -> None:
    a, b = normal(rows, inner).float(), normal(inner, columns, seed=1).float()
    product = check(a, b)
    exact = a.double() @ b.double()
    error = (product.double() - exact).norm()
    assert error <= 1.2 * (by_fused_multiply_adds(a, b).double() - exact).norm()
    check(a.abs(), b.abs())  # every sum grows all the way


def test_rows_and_columns_of_any_size() -> None:
    a = (normal(70, 200) * powers(-30, 30, 70)[:, None]).float()
    b = (normal(200, 90, seed=1) * powers(30, -30, 90)).float()
    assert not torch.equal(check(a, b), by_fused_multiply_adds(a, b))


def test_terms_of_any_size() -> None:
    sizes = powers(-30, 30, 200)
    shuffled = sizes[torch.randperm(200)]
    a, b = normal(70, 200), normal(200, 90, seed=1)
    for left, right in ((sizes, 1 / sizes), (sizes, shuffled), (shuffled, sizes)):
        product = check((a * left).float(), (b * right[:, None]).float())
        assert product.isfinite().all()


def test_cancellation() -> None:
    a, b = normal(70, 150).float(), normal(150, 90, seed=1).float()
    nearly = torch.nextafter(a, torch.full_like(a, torch.inf))
    twice = torch.cat([a, -nearly], 1)
    product = check(twice, torch.cat([b, b]))
    assert not torch.equal(product, torch.zeros_like(product))
    # Between terms of one tile's row, of one block, of several blocks.
    check(torch.stack([a, -nearly], 2).reshape(70, 300), b.repeat_interleave(2, 0))
    check(torch.cat([a, a, -nearly, -a], 1), torch.cat([b, b, b, b]))
    check(torch.cat([a * 2**20, a, -a * 2**20], 1), torch.cat([b, b, b]))


@pytest.mark.parametrize("bits", range(25))
def test_every_bit_counts(bits: int) -> None:
    """Values whose last bit is set, each bit with others or alone, of both signs."""
    value = 1 + 2.0 ** -min(bits, 23) if bits < 24 else 2 - 2.0**-23
    a = torch.eye(96) * value
    b = (normal(96, 96).sign() * (1 + normal(96, 96, seed=1).abs())).float()
    # One term that is not zero: what is left out, and one rounding.
    for left, right in ((a, b), (b, a)):
        exact = left.double() @ right.double()
        error = (pkg.ops.matmul(left, right).double() - exact).abs()
        assert (error <= 2 * UNIT * exact.abs()).all()
    ones = torch.eye(96)
    assert torch.equal(pkg.ops.matmul(ones, b), b)
    assert torch.equal(pkg.ops.matmul(b * value, -ones), -b * value)


# float32: special values


@pytest.mark.parametrize("way", ["highest", "high", "medium"])
@pytest.mark.parametrize("bits", [*NANS, 0x7F800000, 0xFF800000])
@pytest.mark.parametrize("side", [0, 1])
def test_nan_and_infinity_stay_where_they_belong(way: str, bits: int, side: int) -> None:
    pkg.set_float32_matmul(way)
    for row, column in ((0, 0), (69, 149), (33, 31), (16, 128)):
        a, b = normal(90, 150).float(), normal(150, 90, seed=1).float()
        (b.mT if side else a)[row, column] = from_bits(bits)
        product = pkg.ops.matmul(a, b)
        same_places(product, by_fused_multiply_adds(a, b))
        pkg.set_float32_matmul(way)
        special = (product.mT if side else product)[row]
        assert (special.isnan() if bits in NANS else special.isinf()).all()
        assert (~product.isfinite()).sum() == 90


def test_infinities_that_meet() -> None:
    a, b = normal(70, 150).float(), normal(150, 90, seed=1).float()
    a[3, 5], a[3, 80], a[4, 6], a[5, 7] = torch.inf, -torch.inf, torch.inf, torch.inf
    b[6, 8], b[7] = 0, torch.inf
    check_special(a, b)


@pytest.mark.parametrize("scale", [0.5, 0.99, 1.0])
def test_values_near_the_largest(scale: float) -> None:
    """They become infinite where they are rounded to bfloat16, and their sums nowhere."""
    a, b = normal(70, 150).float(), torch.zeros(150, 90)
    a[:, 7] = scale * LARGEST
    a[11, 3] = -scale * LARGEST
    b[torch.randint(0, 150, (90,)), torch.arange(90)] = 1
    assert check_special(a, b).isfinite().all()
    check_special(b.mT.contiguous(), a.mT.contiguous())
    b[7] = 2
    b[3] = 0
    assert check_special(a, b).isinf().any() == (scale > 0.5)


def test_sums_near_the_largest() -> None:
    """Terms and sums that are finite, though the bound of the range leaves no room for them."""
    a = torch.full((96, 64), 2.0**60)
    b = torch.full((64, 96), 2.0**61)
    assert (check_special(a, b) == 2.0**127).all()
    b[:, ::2] *= 2
    assert check_special(a, b).isposinf().sum() == 96 * 48


@pytest.mark.parametrize("way", ["highest", "high", "medium"])
def test_no_way_loses_a_value_at_the_ends_of_the_range(way: str) -> None:
    pkg.set_float32_matmul(way)
    ones = torch.eye(96)
    for value in (LARGEST, -LARGEST, 1e-38, 1e-40, 2.0**-149, 2.0**-126):
        a = torch.full((96, 96), value)
        for product in (pkg.ops.matmul(a, ones), pkg.ops.matmul(ones, a)):
            assert torch.equal(product, a)


@pytest.mark.parametrize("exponent", range(-149, -90, 3))
def test_denormals_and_what_is_near_them(exponent: int) -> None:
    a, b = normal(70, 150).float(), normal(150, 90, seed=1).float()
    check_special((a.double() * 2.0**exponent).float(), b)
    check_special(a, (b.double() * 2.0**exponent).float())
    check_special((a.double() * 2.0**exponent).float(), b * 2.0**100)
    one = a.clone()
    one[69, 149] *= 2.0**exponent
    check_special(one, b)
    # Parts of it are denormal, though it is not.
    one[69] = 0
    one[69, 149] = (1 + 2.0**-23) * 2.0 ** max(exponent, -126)
    check_special(one, b)


@pytest.mark.parametrize("exponent", range(-80, -40, 4))
def test_products_that_underflow(exponent: int) -> None:
    a, b = normal(70, 150).float() * 2.0**exponent, normal(150, 90, seed=1).float()
    check_special(a, b * 2.0**exponent)
    check_special(a, b * 2.0 ** (-120 - exponent))


def test_zeros() -> None:
    a, b = normal(70, 150).float(), normal(150, 90, seed=1).float()
    zeros = torch.zeros_like(a)
    for zero in (zeros, -zeros):
        assert (pkg.ops.matmul(zero, b) == 0).all()
    some = a.where(normal(70, 150, seed=2) > 0, 0.0)
    assert not torch.equal(check(some, b), by_fused_multiply_adds(some, b))
    check_special(zeros, b * torch.inf)


# Other dtypes


@pytest.mark.parametrize("result", [torch.float16, torch.float32])
def test_float16_over_all_of_its_range(result: torch.dtype) -> None:
    a = (normal(70, 150) * powers(-24, 2, 70)[:, None]).half()
    b = (normal(150, 90, seed=1) * powers(-24, 2, 90)).half()
    check(a, b, result)
    check(a, normal(150, 90, seed=1).half(), result)
    check(torch.full((64, 64), 2.0**-24).half(), torch.eye(64).half(), result)
    check(torch.full((64, 64), 65504.0).half(), torch.eye(64).half(), result)


@pytest.mark.parametrize("scale", [1, 4, 16])
def test_float16_cancellation(scale: int) -> None:
    """Results that are small beside their terms show what the parts leave out."""
    a, b = normal(64, 64).half() * scale, normal(64, 64, seed=1).half() * scale
    nearly = (b.float() + normal(64, 64, seed=2).float() * 1e-3 * scale).half()
    sample = Sample((torch.cat([a, -a], 1).double(), torch.cat([b, nearly]).double()))
    check_op(
        torch.ops.pkg.matmul.default,
        [sample],
        reference=references.matmul,
        function=pkg.ops.matmul,
        dtypes=(torch.float16,),
        autocast="lower",
        checks=["values"],
    )


@pytest.mark.parametrize("result", [torch.float16, torch.float32])
def test_float16_nan_and_infinity(result: torch.dtype) -> None:
    for value in (torch.nan, torch.inf, -torch.inf):
        a, b = normal(70, 150).half(), normal(150, 90, seed=1).half()
        a[69, 149] = value
        b[140, 89] = -value
        same_places(multiply(a, b, result), (a.float() @ b.float()).to(result))
    large = torch.full((64, 64), 300.0).half()
    assert (multiply(large, large, torch.float16) == torch.inf).all()
    assert (multiply(large, large, torch.float32) == 64 * 300.0**2).all()


def test_float16_signalling_nan() -> None:
    a, b = normal(70, 150).half(), normal(150, 90, seed=1).half()
    a.view(torch.int16)[5, 7] = 0x7C01
    assert multiply(a, b, torch.float16).isnan().sum() == 90


@pytest.mark.parametrize("result", [torch.bfloat16, torch.float32])
def test_bfloat16(result: torch.dtype) -> None:
    a = (normal(70, 300) * powers(-30, 30, 70)[:, None]).bfloat16()
    b = (normal(300, 90, seed=1) * powers(-30, 30, 90)).bfloat16()
    check(a, b, result)
    a[69, 299], a[0, 0], b[7, 89] = torch.nan, torch.inf, -torch.inf
    same_places(multiply(a, b, result), (a.float() @ b.float()).to(result))


def test_int8_at_its_ends() -> None:
    for left, right in itertools.product((-128, 127), repeat=2):
        a = torch.full((70, 1000), left, dtype=torch.int8)
        b = torch.full((1000, 90), right, dtype=torch.int8)
        assert (multiply(a, b) == 1000 * left * right).all()


# Sizes and strides, of every dtype


@pytest.mark.parametrize(("dtype", "result"), RESULTS)
def test_every_edge(dtype: torch.dtype, result: torch.dtype) -> None:
    many = 160  # float32 goes by tiles where a value is used often
    for first, second in itertools.product(EDGES, repeat=2):
        for rows, columns in ((first, many + second), (many + first, second)):
            inner = max(64**3 // (rows * columns) + 1, 33)  # smaller ones go by vectors
            check(of_dtype(dtype, rows, inner), of_dtype(dtype, inner, columns, seed=1), result)


@pytest.mark.parametrize(("dtype", "result"), RESULTS)
def test_every_small_size(dtype: torch.dtype, result: torch.dtype) -> None:
    for size in range(1, 71):
        check(of_dtype(dtype, size, 130), of_dtype(dtype, 130, 160, seed=1), result)
        check(of_dtype(dtype, 160, 65), of_dtype(dtype, 65, size, seed=1), result)


@pytest.mark.parametrize(("dtype", "result"), RESULTS)
def test_every_inner_size(dtype: torch.dtype, result: torch.dtype) -> None:
    for inner in range(1, 131):
        check(of_dtype(dtype, 97, inner), of_dtype(dtype, inner, 81, seed=1), result)


@pytest.mark.parametrize("sizes", [(600, 1200, 700), (1030, 70, 1060), (40, 900, 2000)])
@pytest.mark.parametrize(("dtype", "result"), RESULTS)
def test_several_blocks(
    dtype: torch.dtype, result: torch.dtype, sizes: tuple[int, int, int]
) -> None:
    rows, inner, columns = sizes
    a, b = of_dtype(dtype, rows, inner), of_dtype(dtype, inner, columns, seed=1)
    expected = check(a, b, result)
    turned = multiply(b.mT, a.mT, result).mT
    if dtype == torch.int8:
        assert torch.equal(turned, expected)
    torch.set_num_threads(2)
    product = check(a, b, result)
    assert torch.equal(product, multiply(a, b, result))


def transposed(t: Tensor) -> Tensor:
    return t.mT.contiguous().mT


def scattered(t: Tensor) -> Tensor:
    """Every other element of every other row, among NaNs."""
    rows, columns = t.shape
    around_it = torch.full((2 * rows, 2 * columns), math.nan if t.is_floating_point() else 99)
    around_it = around_it.to(t.dtype)
    around_it[::2, ::2] = t
    return around_it[::2, ::2]


def misaligned(t: Tensor) -> Tensor:
    """One element off every alignment, with nothing before it or after it but NaNs."""
    around_it = torch.full((t.numel() + 2,), math.nan if t.is_floating_point() else 99)
    view = around_it.to(t.dtype)[1:-1].view(t.shape)
    return view.copy_(t)


def misaligned_and_transposed(t: Tensor) -> Tensor:
    return misaligned(t.mT.contiguous()).mT


def lines_within_a_matrix(t: Tensor) -> Tensor:
    """Rows at cache lines, with NaNs behind each and behind the last."""
    around_it = torch.full(
        (t.shape[0] + 16, t.shape[1] + 64), math.nan if t.is_floating_point() else 99
    )
    around_it = around_it.to(t.dtype)
    around_it[: t.shape[0], : t.shape[1]] = t
    return around_it[: t.shape[0], : t.shape[1]]


LAYOUTS = (torch.clone, transposed, scattered, misaligned, misaligned_and_transposed)


def is_one_way(product: Tensor, a: Tensor, b: Tensor, result: torch.dtype) -> bool:
    """It is, bit for bit, what contiguous operands give, or what their transposes do, whose
    products of parts are added in the other order."""
    turned = check(b.mT.contiguous(), a.mT.contiguous(), result).mT
    return any(torch.equal(product, each) for each in (check(a, b, result), turned))


@pytest.mark.parametrize("layouts", [*itertools.product(LAYOUTS, repeat=2)])
@pytest.mark.parametrize(("dtype", "result"), RESULTS)
def test_every_stride(
    dtype: torch.dtype, result: torch.dtype, layouts: tuple[Callable[[Tensor], Tensor], ...]
) -> None:
    for rows, inner, columns in ((90, 131, 98), (80, 300, 125)):
        a, b = of_dtype(dtype, rows, inner), of_dtype(dtype, inner, columns, seed=1)
        product = multiply(layouts[0](a), layouts[1](b), result)
        assert is_one_way(product, a, b, result)


def rows_a_power_of_two_apart(t: Tensor) -> Tensor:
    """At cache lines, all of them in one set of the L1 cache, with NaNs behind each."""
    around_it = torch.full((t.shape[0], 4096), math.nan if t.is_floating_point() else 99)
    view = around_it.to(t.dtype)[:, : t.shape[1]]
    return view.copy_(t)


@pytest.mark.parametrize(
    "sizes",
    [
        (70, 1100, 1300),  # B's columns stay for the whole inner dimension
        (130, 1024, 600),
        (550, 2720, 850),  # sums of many rows do
        (97, 2700, 40),
        (33, 4096, 1100),
    ],
)
@pytest.mark.parametrize(("dtype", "result"), RESULTS[-3:])
def test_several_blocks_of_every_stride(
    dtype: torch.dtype, result: torch.dtype, sizes: tuple[int, int, int]
) -> None:
    rows, inner, columns = sizes
    a, b = of_dtype(dtype, rows, inner), of_dtype(dtype, inner, columns, seed=1)
    expected = check(a, b, result)
    for left in (*LAYOUTS, lines_within_a_matrix, rows_a_power_of_two_apart):
        for right in (torch.clone, transposed):
            assert torch.equal(multiply(left(a), right(b), result), expected)
    for right in LAYOUTS:
        assert torch.equal(multiply(a, right(b), result), expected)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_stays_in_its_row_and_column(value: float) -> None:
    for row, inner, column in ((0, 0, 0), (69, 1099, 1299), (40, 600, 700)):
        a, b = normal(70, 1100).bfloat16(), normal(1100, 1300, seed=1).bfloat16()
        a[row, inner], b[inner, column] = value, value
        spoilt = multiply(a, b).isfinite().logical_not()
        assert spoilt[row].all()
        assert spoilt[:, column].all()
        assert spoilt.sum() == 70 + 1300 - 1


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("inner", [64, 512, 576, 1088, 2560])
@pytest.mark.parametrize(("dtype", "result"), RESULTS)
def test_rows_that_are_tiles_as_they_lie(
    dtype: torch.dtype, result: torch.dtype, inner: int, threads: int
) -> None:
    """Rows of whole tiles at cache lines are read in place, others are packed."""
    torch.set_num_threads(threads)
    for rows, columns in ((32, 64), (47, 290), (129, 33), (600, 70)):
        a, b = of_dtype(dtype, rows, inner), of_dtype(dtype, inner, columns, seed=1)
        in_place = multiply(lines_within_a_matrix(a), b, result)
        check(lines_within_a_matrix(a), b, result)
        assert torch.equal(in_place, multiply(misaligned(a), b, result))


@pytest.mark.parametrize("inner", [64, 500, 512, 576, 1088])
@pytest.mark.parametrize(("dtype", "result"), RESULTS)
def test_rows_that_are_columns_in_memory(
    dtype: torch.dtype, result: torch.dtype, inner: int
) -> None:
    """Several strips of both operands are packed together, for wide blocks of columns."""
    for rows, columns in ((64, 96), (79, 290), (1096, 82), (70, 2090)):
        a, b = of_dtype(dtype, rows, inner), of_dtype(dtype, inner, columns, seed=1)
        check(lines_within_a_matrix(a.mT).mT, lines_within_a_matrix(b), result)
        turned = multiply(lines_within_a_matrix(a.mT).mT, lines_within_a_matrix(b), result)
        assert is_one_way(turned, a, b, result)
        assert is_one_way(multiply(misaligned(a), misaligned(b.mT).mT, result), a, b, result)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("inner", [64, 100, 512, 1088])
@pytest.mark.parametrize(("dtype", "result"), RESULTS)
def test_a_weight_whose_rows_are_tiles_as_they_lie(
    dtype: torch.dtype, result: torch.dtype, inner: int, threads: int
) -> None:
    """Few rows times columns that are contiguous are made as the transpose of their product."""
    torch.set_num_threads(threads)
    # Fewer rows of some layouts are multiplied by vectors, whose sums round otherwise.
    least = 16 if dtype in {torch.bfloat16, torch.int8} else 40
    for rows, columns in ((2, 400), (3, 1000), (15, 130), (16, 96), (17, 33), (40, 290), (80, 700)):
        a, b = of_dtype(dtype, rows, inner), of_dtype(dtype, inner, columns, seed=1)
        for weight in (
            transposed,
            misaligned_and_transposed,
            lambda t: lines_within_a_matrix(t.mT).mT,
        ):
            for left in (torch.clone, transposed, misaligned):
                product = check(left(a), weight(b), result)
                assert rows < least or is_one_way(product, a, b, result)


@pytest.mark.parametrize("activation", [None, "relu", "gelu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_what_follows_a_turned_product(dtype: torch.dtype, activation: str | None) -> None:
    """Bias and activation are told of rows and columns of the result, not of its transpose."""
    for rows, inner, columns in ((3, 512, 333), (50, 768, 400), (100, 1100, 900)):
        x, weight = of_dtype(dtype, rows, inner), of_dtype(dtype, columns, inner, seed=1)
        bias = of_dtype(dtype, columns, seed=2)
        ours = pkg.ops.linear(x, weight, bias, activation=activation)
        plain = pkg.ops.linear(x, misaligned(weight.mT).mT, bias, activation=activation)
        scale = plain.double().abs().max()
        assert (ours.double() - plain.double()).abs().max() <= 2 * torch.finfo(dtype).eps * scale


@pytest.mark.parametrize(("dtype", "result"), RESULTS)
def test_batches(dtype: torch.dtype, result: torch.dtype) -> None:
    a, b = of_dtype(dtype, 3, 70, 100), of_dtype(dtype, 3, 100, 90, seed=1)
    each = torch.stack([check(x, y, result) for x, y in zip(a, b, strict=True)])
    assert torch.equal(multiply(a, b, result), each)
    shared = torch.stack([multiply(x, b[0], result) for x in a])
    for threads in (1, 2):
        torch.set_num_threads(threads)
        assert torch.equal(multiply(a, b, result), each)
        check(a, b[:1], result)
        check(a[0], b, result)
        if dtype == torch.int8:
            assert torch.equal(multiply(a, b[0], result), shared)


# What is made of the sums, and what was there before


@pytest.mark.parametrize("dtype", FLOATING[1:])
@pytest.mark.parametrize("activation", [None, "relu", "gelu", "gelu_tanh", "silu"])
def test_linear_and_its_gradients(dtype: torch.dtype, activation: str | None) -> None:
    shapes = [((70, 100), (66, 100)), ((2, 33, 64), (95, 64))]
    samples = [
        Sample((normal(*of), normal(*weight, seed=1), bias, activation))
        for of, weight in shapes
        for bias in (None, normal(weight[0], seed=2))
    ]
    check_op(
        torch.ops.pkg.linear.default,
        samples,
        reference=references.linear,
        function=pkg.ops.linear,
        dtypes=(dtype,),
        autocast="lower",
        checks=["values", "gradients"],
    )


def test_an_epilogue_of_several_blocks_and_threads() -> None:
    x, weight, bias = normal(600, 700), normal(650, 700, seed=1), normal(650, seed=2)
    x, weight, bias = x.float(), weight.float(), bias.float()
    exact = torch.relu(x.double() @ weight.double().mT + bias)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        error = (pkg.ops.linear(x, weight, bias, "relu").double() - exact).abs()
        # One rounding more, of the sum and the bias.
        allowed = bound(x, weight.mT, torch.float32) + UNIT * (exact.abs() + 1)
        assert (error <= allowed).all()


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e-40])
def test_an_epilogue_after_a_product_that_tiles_left(value: float) -> None:
    """Half of the result is written when a value shows that it is not for tiles."""
    x, weight, bias = normal(600, 700), normal(650, 700, seed=1), normal(650, seed=2)
    x, weight, bias = x.float(), weight.float(), bias.float()
    x[599, 699] = value
    product = pkg.ops.linear(x, weight, bias, "silu")
    pkg.set_float32_matmul("fma")
    expected = pkg.ops.linear(x, weight, bias, "silu")
    pkg.set_float32_matmul("highest")
    same_places(product, expected)
    assert product[:599].isfinite().all()
    torch.testing.assert_close(product, expected, equal_nan=True, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("dtype", "result"), RESULTS)
def test_nothing_of_another_product_is_left(dtype: torch.dtype, result: torch.dtype) -> None:
    """Packed blocks and sums stay in memory from call to call."""
    sizes = ((70, 131, 66), (17, 600, 33), (600, 300, 560))
    operands = [(of_dtype(dtype, m, k), of_dtype(dtype, k, n, seed=1)) for m, k, n in sizes]
    first = [check(a, b, result) for a, b in operands]
    for poison in (torch.float32, torch.float16, torch.bfloat16):
        nan = torch.full((640, 640), math.nan, dtype=poison)
        for expected, (a, b) in zip(first, operands, strict=True):
            assert pkg.ops.matmul(nan, nan).isnan().all()
            assert same_bits(multiply(a, b, result), expected)
    ends = torch.full((640, 640), -128, dtype=torch.int8)
    for expected, (a, b) in zip(first, operands, strict=True):
        multiply(ends, ends)
        assert same_bits(multiply(a, b, result), expected)


@pytest.mark.parametrize("way", ["highest", "high", "medium"])
def test_a_refused_product_leaves_the_registers_as_they_were(way: str) -> None:
    """It ends in the middle of a product, and the next begins anew."""
    pkg.set_float32_matmul(way)
    a, b = normal(100, 900).float(), normal(900, 100, seed=1).float()
    expected = pkg.ops.matmul(a, b)
    late = a.clone()
    late[99, 899] = math.inf
    for _ in range(3):
        assert pkg.ops.matmul(late, b)[99].isinf().all()
        assert same_bits(pkg.ops.matmul(a, b), expected)


# attention


@pytest.mark.parametrize("operand", [1, 2])
@pytest.mark.parametrize(
    ("bits", "integer", "dtype"),
    [
        (0x7FFFFFFF, torch.int32, torch.float32),
        (0x7FFF, torch.int16, torch.float16),
        (0x7FFF, torch.int16, torch.bfloat16),
    ],
)
def test_a_hidden_nan_that_rounds_to_zero_stays(
    bits: int, integer: torch.dtype, dtype: torch.dtype, operand: int
) -> None:
    # Keys out of every window are left out only where all that they hold is finite.
    inputs = [normal(1, 1, 400, 64, seed=seed).to(dtype) for seed in range(3)]
    inputs[operand][0, 0, 399, 5] = torch.tensor(bits, dtype=integer).view(dtype)
    window = {"window_left": 50, "window_right": 0}
    by_tiles = pkg.ops.scaled_dot_product_attention(*inputs, **window)
    with fused_multiply_adds():
        by_vectors = pkg.ops.scaled_dot_product_attention(*inputs, **window)
    assert torch.equal(by_tiles.isnan(), by_vectors.isnan())
    assert by_tiles.isnan().sum() == (by_tiles.numel() if operand == 1 else 400)


ATTENTION = [torch.float32, torch.float16, torch.bfloat16]


def attention_inputs(
    rows: int,
    keys: int,
    size: int,
    heads: tuple[int, int] = (2, 2),
    value_size: int | None = None,
    mean: float = 0.0,
) -> list[Tensor]:
    """Query, key, value and the gradient of the output."""
    value_size = value_size or size
    return [
        normal(1, heads[0], rows, size, seed=10),
        normal(1, heads[1], keys, size, seed=11) + mean,
        normal(1, heads[1], keys, value_size, seed=12) + mean,
        normal(1, heads[0], rows, value_size, seed=13),
    ]


def gradients(
    attention: Callable[..., Tensor], inputs: list[Tensor], **options: Any
) -> tuple[Tensor, ...]:
    """The output and the gradients, that of a mask too."""
    leaves = [each.detach().requires_grad_() for each in inputs[:3]]
    wanted = list(leaves)
    mask = options.get("attn_mask")
    if mask is not None and mask.is_floating_point():
        options["attn_mask"] = mask.detach().requires_grad_()
        wanted.append(options["attn_mask"])
    output = attention(*leaves, **options)
    return output.detach(), *torch.autograd.grad(output, wanted, inputs[3])


def attention_by_definition(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    scores = references.attention_scores(query, key, options.pop("attn_mask", None), **options)
    # A query without keys has no output.
    return torch.softmax(scores, -1).nan_to_num() @ value


def check_gradients(inputs: list[Tensor], dtype: torch.dtype, **options: Any) -> None:
    """At most twice the error of the definition in the same type, by the norm of all elements."""
    inputs = [each.to(dtype) for each in inputs]
    mask = options.get("attn_mask")
    if mask is not None and mask.is_floating_point():
        options["attn_mask"] = mask.to(dtype)
    wide = {
        name: each.double() if isinstance(each, Tensor) and each.is_floating_point() else each
        for name, each in options.items()
    }
    ours = gradients(pkg.ops.scaled_dot_product_attention, inputs, **options)
    plain = gradients(attention_by_definition, inputs, **options)
    exact = gradients(attention_by_definition, [each.double() for each in inputs], **wide)
    for result, expected, limit in zip(ours, exact, plain, strict=True):
        error = (result.double() - expected).norm()
        assert error <= 2 * (limit.double() - expected).norm()


def check_attention(inputs: list[Tensor]) -> None:
    """As check_gradients, of the output alone and of each strip of 32 rows."""
    query, key, value = inputs[:3]
    output = pkg.ops.scaled_dot_product_attention(query, key, value)
    plain, exact = (
        torch.softmax(references.attention_scores(query, key, None), -1) @ value
        for query, key, value in ((query, key, value), (each.double() for each in inputs[:3]))
    )
    for ours, limit, expected in zip(
        *(each[0].split(32, 1) for each in (output, plain, exact)), strict=True
    ):
        kept = expected.isfinite() & limit.isfinite()
        error = (ours.double() - expected)[kept].norm()
        assert error <= 2 * (limit.double() - expected)[kept].norm()
        assert torch.equal(ours.isnan(), expected.isnan())


@pytest.mark.parametrize("dtype", ATTENTION)
@pytest.mark.parametrize("row", [0, 31, 32, 45, 290])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_row_that_is_not_finite_spoils_no_other(
    dtype: torch.dtype, row: int, value: float
) -> None:
    """Its strip has no maxima to compare with, in any of three blocks of keys."""
    inputs = [each.to(dtype) for each in attention_inputs(300, 500, 64)]
    inputs[0][0, 1, row, 5] = value
    check_attention(inputs)


@pytest.mark.parametrize("dtype", ATTENTION)
@pytest.mark.parametrize("first", [0, 32, 200, 400])
@pytest.mark.parametrize("scale", [-40.0, 3.0, 20.0, 400.0])
def test_scores_far_above_or_below_those_before(
    dtype: torch.dtype, first: int, scale: float
) -> None:
    """Maxima are those of the first keys until probabilities become too large for them."""
    inputs = [each.to(dtype) for each in attention_inputs(300, 500, 64)]
    inputs[0][..., 7] = 2
    inputs[1][:, :, first:, 7] += scale
    check_attention(inputs)


@pytest.mark.parametrize("dtype", ATTENTION)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True},
        {"window_left": 40, "window_right": 9},
        {"softcap": 20.0},
        {"attn_mask": normal(300, 420, seed=14).abs() < 0.5},
        {"attn_mask": normal(2, 300, 420, seed=14)},
        {"attn_mask": normal(420, seed=14)},
    ],
    ids=["none", "causal", "window", "cap", "boolean", "added", "added to keys"],
)
def test_attention_gradients(dtype: torch.dtype, options: dict[str, Any]) -> None:
    check_gradients(attention_inputs(300, 420, 64), dtype, **options)


@pytest.mark.parametrize("dtype", ATTENTION)
@pytest.mark.parametrize(
    "sizes",
    [
        {"rows": 257, "keys": 257, "size": 33, "value_size": 47},
        {"rows": 273, "keys": 304, "size": 128},
        {"rows": 300, "keys": 256, "size": 256, "value_size": 32},
        {"rows": 320, "keys": 401, "size": 48, "mean": 4.0},
    ],
)
@pytest.mark.parametrize("threads", [1, 2])
def test_attention_gradients_of_sizes(
    dtype: torch.dtype, sizes: dict[str, Any], threads: int
) -> None:
    torch.set_num_threads(threads)
    check_gradients(attention_inputs(**sizes), dtype)


@pytest.mark.parametrize("dtype", ATTENTION)
def test_attention_gradients_of_shared_heads(dtype: torch.dtype) -> None:
    inputs = attention_inputs(290, 300, 64, heads=(4, 2))
    inputs = [each.to(dtype) for each in inputs]
    ours = gradients(pkg.ops.scaled_dot_product_attention, inputs, enable_gqa=True)

    def repeated(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attention_by_definition(
            query, key.repeat_interleave(2, 1), value.repeat_interleave(2, 1)
        )

    plain = gradients(repeated, inputs)
    exact = gradients(repeated, [each.double() for each in inputs])
    for result, expected, limit in zip(ours, exact, plain, strict=True):
        error = (result.double() - expected).norm()
        assert error <= 2 * (limit.double() - expected).norm()


@pytest.mark.parametrize("dtype", ATTENTION[:2])  # whose backward pass goes by tiles
@pytest.mark.parametrize("size", [64, 50])
def test_no_gradient_of_scores_where_one_key_is_seen(dtype: torch.dtype, size: int) -> None:
    # Its probability is 1 whatever the score, to the last bit where the scale is a power of two:
    # the backward pass makes the score of the forward pass, and D as dO V^T is made.
    inputs = [each.to(dtype) for each in attention_inputs(320, 320, size)]
    window = {"window_left": 0, "window_right": 0, "scale": 0.125}
    output, query, key, value = gradients(pkg.ops.scaled_dot_product_attention, inputs, **window)
    assert torch.equal(output, inputs[2])
    assert torch.equal(value, inputs[3])
    assert query.count_nonzero() == key.count_nonzero() == 0


@pytest.mark.parametrize("operand", range(4))
@pytest.mark.parametrize(
    "special", [math.inf, math.nan, 3e6, 1e-33, 1e-42, LARGEST, from_bits(0x7FFFFFFF)]
)
@pytest.mark.parametrize("options", [{}, {"is_causal": True}], ids=["all", "causal"])
def test_gradients_of_what_tiles_are_not_right_for(
    operand: int, special: float, options: dict[str, bool]
) -> None:
    """They are made of a forward pass by vectors, whether that went by tiles or not."""
    inputs = attention_inputs(300, 300, 64)
    inputs[operand][0, 1, 270, 5] = special
    by_tiles = gradients(pkg.ops.scaled_dot_product_attention, inputs, **options)
    with fused_multiply_adds():
        by_vectors = gradients(pkg.ops.scaled_dot_product_attention, inputs, **options)
    for ours, expected in zip(by_tiles[1:], by_vectors[1:], strict=True):
        assert torch.equal(ours.isnan(), expected.isnan())
        assert torch.equal(ours.nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize("operand", range(4))
@pytest.mark.parametrize("special", [math.inf, math.nan])
def test_float16_gradients_of_infinities_and_nan(operand: int, special: float) -> None:
    inputs = attention_inputs(200, 200, 64)
    inputs[operand][0, 1, 150, 5] = special
    halves = [each.half() for each in inputs]
    ours = gradients(pkg.ops.scaled_dot_product_attention, halves, is_causal=True)
    with sdpa_kernel(SDPBackend.MATH):
        plain = gradients(torch.nn.functional.scaled_dot_product_attention, halves, is_causal=True)
    # The other head has none.
    for result, expected in zip(ours, plain, strict=True):
        assert result[:, 0].isfinite().all()
        assert expected[:, 0].isfinite().all()
        assert result[:, 1].isfinite().all() == expected[:, 1].isfinite().all()


@pytest.mark.parametrize("dtype", ATTENTION)
def test_attention_gradients_do_not_depend_on_the_run(dtype: torch.dtype) -> None:
    torch.set_num_threads(2)
    inputs = [each.to(dtype) for each in attention_inputs(400, 500, 64, heads=(3, 3))]
    first = gradients(pkg.ops.scaled_dot_product_attention, inputs)
    for _ in range(3):
        again = gradients(pkg.ops.scaled_dot_product_attention, inputs)
        assert all(same_bits(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("dtype", ATTENTION)
def test_gradients_of_packed_sequences(dtype: torch.dtype) -> None:
    lengths = [300, 17, 401]
    starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    tokens = [normal(sum(lengths), 2, 64, seed=seed).to(dtype) for seed in range(4)]

    def packed(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return pkg.ops.scaled_dot_product_attention_varlen(
            query, key, value, starts, starts, 401, 401, causal=True
        )

    def one_by_one(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        parts = (each.split(lengths) for each in (query, key, value))
        outputs = (
            attention_by_definition(*(each.transpose(0, 1) for each in part), is_causal=True)
            for part in zip(*parts, strict=True)
        )
        return torch.cat([each.transpose(0, 1) for each in outputs])

    ours = gradients(packed, tokens)
    plain = gradients(one_by_one, tokens)
    exact = gradients(one_by_one, [each.double() for each in tokens])
    for result, expected, limit in zip(ours, exact, plain, strict=True):
        error = (result.double() - expected).norm()
        assert error <= 2 * (limit.double() - expected).norm()


@pytest.mark.parametrize(
    ("bits", "integer", "dtype"),
    [
        (0x7FFFFFFF, torch.int32, torch.float32),
        (0x7FFF, torch.int16, torch.float16),
        (0x7FFF, torch.int16, torch.bfloat16),
    ],
)
def test_gradients_of_a_nan_in_the_mask(
    bits: int, integer: torch.dtype, dtype: torch.dtype
) -> None:
    # Rounding it to bfloat16 gives zero.
    inputs = [each.to(dtype) for each in attention_inputs(300, 300, 64)]
    mask = torch.zeros(300, 300, dtype=dtype)
    mask[70, 9] = torch.tensor(bits, dtype=integer).view(dtype)
    output, query, key, value, _ = gradients(
        pkg.ops.scaled_dot_product_attention, inputs, attn_mask=mask
    )
    assert key.isnan().all()
    assert value.isnan().all()
    for result in (output, query):
        rows = result.isnan()
        assert rows[:, :, 70].all()
        assert rows.sum() == 2 * 64
