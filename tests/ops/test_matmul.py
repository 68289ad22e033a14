from __future__ import annotations

from collections.abc import Callable
from itertools import product
from types import MappingProxyType

import pytest
import references
import torch
from operator_tests import OperatorTests
from samples import FLOATING, around, normal, of_dtype, whole_numbers
from torch import Tensor

import pkg
from pkg.testing import ErrorSample, Sample

# Every way in which two operands can meet.
SHAPES: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
    ((5,), (5,)),
    ((3, 5), (5,)),
    ((5,), (5, 4)),
    ((2, 3, 5), (5,)),
    ((5,), (2, 5, 4)),
    ((2, 3, 5), (5, 4)),
    ((3, 5), (2, 5, 4)),
    ((2, 3, 5), (2, 5, 4)),
    ((2, 1, 3, 5), (4, 5, 2)),
    ((1, 3, 5), (6, 5, 2)),
    ((1, 1), (1, 1)),
]
EMPTY: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
    ((0,), (0,)),
    ((3, 0), (0, 4)),
    ((0, 5), (5, 4)),
    ((3, 5), (5, 0)),
    ((0, 3, 5), (0, 5, 4)),
    ((2, 0, 5), (5, 4)),
    ((0, 1, 3, 0), (2, 0, 4)),
    ((3, 0), (0,)),
]
# Around the register tiles and cache blocks of the kernels.
TILES = around(4, 6, 8, 12, 16, 32, 48, 64)
BLOCKS = around(96, 128, 192, 256, 384)


def sample(a: tuple[int, ...], b: tuple[int, ...], **options: object) -> Sample:
    return Sample((normal(*a), normal(*b, seed=1)), **options)


def sizes_around_tiles() -> list[Sample]:
    samples = []
    for size in TILES:
        for rows, inner, columns in ((size, 7, 5), (5, size, 7), (7, 5, size), (size,) * 3):
            samples.append(sample((rows, inner), (inner, columns), values_only=True))
    for size in BLOCKS:
        for rows, inner, columns in ((size, 3, 2), (3, size, 2), (2, 3, size)):
            samples.append(sample((rows, inner), (inner, columns), values_only=True))
    samples.append(sample((2, 1, 65, 33), (3, 33, 70), values_only=True))
    samples.append(sample((257,), (257, 300), values_only=True))
    samples.append(sample((300, 257), (257,), values_only=True))
    return samples


def with_special_values() -> list[Sample]:
    samples = []
    for value in (torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1e-40, 1e-300):
        a = normal(9, 20)
        a[3, 7] = value
        samples.append(Sample((a, normal(20, 33)), name=str(value), values_only=True))
    # A product that overflows float16 in the middle of a sum that does not.
    large = torch.full((4, 2), 300.0, dtype=torch.float64) * torch.tensor([1, -1]).double()
    samples.append(Sample((large, torch.full((2, 3), 300.0).double()), values_only=True))
    return samples


class TestMatmul(OperatorTests):
    op = torch.ops.pkg.matmul.default
    reference = staticmethod(references.matmul)
    function = staticmethod(pkg.ops.matmul)
    options = MappingProxyType({"autocast": "lower"})

    def samples(self) -> list[Sample]:
        samples = [sample(a, b) for a, b in SHAPES + EMPTY]
        for size in ((3, 4, 5), (7, 6, 2), (20, 17, 33)):
            rows, inner, columns = size
            samples += [
                sample((rows, inner), (inner, columns), family="matrices"),
                sample((9, rows, inner), (inner, columns), family="batch times matrix"),
                sample((rows, inner), (inner,), family="vector"),
            ]
        wide = {"out_dtype": torch.float32}
        half = (torch.bfloat16, torch.float16)
        samples += [
            Sample((normal(5, 40), normal(40, 9)), wide, dtypes=(*half, torch.float32)),
            Sample((normal(2, 5, 40).half(), normal(40).half()), wide),
        ]
        return samples + sizes_around_tiles() + with_special_values()

    def errors(self) -> list[ErrorSample]:
        one = torch.ones(2, 3)
        integers = {"out_dtype": torch.int32}
        return [
            ErrorSample((one, one), match=r"\(2, 3\) and b of shape \(2, 3\).*3 columns.*2 rows"),
            ErrorSample((one, torch.ones(2)), match="3 columns but b has 2 rows"),
            ErrorSample((torch.ones(()), one), match="a has no dimensions"),
            ErrorSample((one, torch.ones(())), match="b has no dimensions"),
            ErrorSample(
                (torch.ones(2, 2, 3), torch.ones(4, 3, 2)), match="do not broadcast: 2 and 4"
            ),
            ErrorSample((one, one.mT.double()), match="a is torch.float32 but b is torch.float64"),
            ErrorSample((one.int(), one.mT.int()), match="a is torch.int32; supported are"),
            ErrorSample((one.cfloat(), one.mT.cfloat()), match="a is torch.complex64"),
            ErrorSample((one.bool(), one.mT.bool()), match="a is torch.bool"),
            ErrorSample((one.char(), one.mT.char()), match="pass out_dtype=torch.int32"),
            ErrorSample((one, one.mT), integers, match="out_dtype is torch.int32"),
            ErrorSample(
                (one, one.mT), {"out_dtype": torch.float64}, match="out_dtype is torch.flo"
            ),
            ErrorSample(
                (one.half(), one.mT.half()), {"out_dtype": torch.bfloat16}, match="out_dtype"
            ),
        ]

    def test_int8(self, device: torch.device) -> None:
        shapes = SHAPES + EMPTY + [((m, k), (k, n)) for m, k, n in product((1, 5, 70), repeat=3)]
        samples = [
            Sample(
                (of_dtype(torch.int8, *a), of_dtype(torch.int8, *b, seed=1)),
                {"out_dtype": torch.int32},
                values_only=index >= len(SHAPES),
            )
            for index, (a, b) in enumerate(shapes)
        ]
        checks = ["values", "layouts", "fake", "meta", "compile", "export", "vmap", "determinism"]
        report = self.run(device, checks, samples=samples)
        assert report.runs["values"] == len(samples)

    def test_int8_at_its_ends(self, device: torch.device) -> None:
        for value in (-128, 127):
            a = torch.full((3, 1000), -128, dtype=torch.int8, device=device)
            b = torch.full((1000, 70), value, dtype=torch.int8, device=device)
            product = pkg.ops.matmul(a, b, out_dtype=torch.int32)
            assert (product == -128 * value * 1000).all()

    @pytest.mark.parametrize("dtype", FLOATING)
    def test_products_beyond_the_cache_blocks(
        self, device: torch.device, dtype: torch.dtype
    ) -> None:
        samples = [
            sample((m, k), (k, n), values_only=True)
            for m, k, n in ((515, 1030, 389), (37, 4100, 65), (1030, 70, 40), (1, 2050, 513))
        ]
        self.run(device, ["values"], samples=samples, dtypes=(dtype,))

    def test_an_overflow_in_half_precision_is_infinite(self, device: torch.device) -> None:
        a = torch.full((2, 64), 200.0, dtype=torch.float16, device=device)
        assert (pkg.ops.matmul(a, a.mT) == torch.inf).all()
        exact = pkg.ops.matmul(a, a.mT, out_dtype=torch.float32)
        assert (exact == 64 * 200.0 * 200.0).all()

    def test_an_empty_sum_is_zero(self, device: torch.device) -> None:
        for dtype in FLOATING:
            a = torch.empty(3, 0, dtype=dtype, device=device)
            assert torch.equal(pkg.ops.matmul(a, a.mT), torch.zeros(3, 3, dtype=dtype).to(device))

    @pytest.mark.parametrize("dtype", [*FLOATING, torch.int8])
    def test_any_number_of_threads(self, device: torch.device, dtype: torch.dtype) -> None:
        options = {"out_dtype": torch.int32} if dtype == torch.int8 else {}
        threads = torch.get_num_threads()
        shapes = ((1, 700, 900), (900, 700, 1), (13, 300, 2100), (130, 1100, 70), (2000, 40, 90))
        try:
            for rows, inner, columns in shapes:
                a = of_dtype(dtype, rows, inner).to(device)
                b = of_dtype(dtype, inner, columns, seed=1).to(device)
                torch.set_num_threads(1)
                expected = pkg.ops.matmul(a, b, **options)
                for count in (2, 3, 7, 16, 64):
                    torch.set_num_threads(count)
                    product = pkg.ops.matmul(a, b, **options)
                    assert torch.equal(product, pkg.ops.matmul(a, b, **options))
                    torch.testing.assert_close(product, expected)
        finally:
            torch.set_num_threads(threads)

    @pytest.mark.parametrize("dtype", FLOATING)
    def test_a_vector_rounds_alike_with_any_number_of_threads(
        self, device: torch.device, dtype: torch.dtype
    ) -> None:
        """Whichever rows a thread's share has, and how many are left over of groups of them."""
        threads = torch.get_num_threads()
        try:
            for rows, inner in product((2, 7, 9, 15, 36, 900), (333, 700, 5000)):
                a = of_dtype(dtype, rows, inner).to(device)
                b = of_dtype(dtype, inner, 1, seed=1).to(device)
                torch.set_num_threads(1)
                expected = pkg.ops.matmul(a, b)
                for count in (2, 3, 7, 16):
                    torch.set_num_threads(count)
                    assert torch.equal(pkg.ops.matmul(a, b), expected)
        finally:
            torch.set_num_threads(threads)

    @pytest.mark.parametrize("dtype", FLOATING)
    def test_tall_products_of_columns_side_by_side(
        self, device: torch.device, dtype: torch.dtype
    ) -> None:
        """As a weight's gradient of few columns is; sums of integers are exact but for rounding."""
        threads = torch.get_num_threads()
        try:
            for rows, inner, columns in product((64, 515, 1100), (128, 333), (2, 16, 24)):
                a = whole_numbers(dtype, inner, rows, seed=0).to(device).mT
                b = whole_numbers(dtype, inner, columns + 3, seed=1).to(device)[:, 1:-2]
                expected = a.double() @ b.double()
                for count in (1, 2, 3):
                    torch.set_num_threads(count)
                    assert torch.equal(pkg.ops.matmul(a, b), expected.to(dtype))
                    if dtype.itemsize == 2:
                        wide = pkg.ops.matmul(a, b, out_dtype=torch.float32)
                        assert torch.equal(wide, expected.float())
        finally:
            torch.set_num_threads(threads)

    def test_operands_may_share_memory(self, device: torch.device) -> None:
        a = normal(40, 40).to(device)
        torch.testing.assert_close(pkg.ops.matmul(a, a), a @ a)
        torch.testing.assert_close(pkg.ops.matmul(a, a.mT), a @ a.mT)

    @pytest.mark.long
    def test_more_than_two_billion_elements(
        self, device: torch.device, require_memory: Callable[[int], None]
    ) -> None:
        require_memory(2**32)
        a = torch.arange(2**16 + 1, device=device).remainder(97).half().unsqueeze(1)
        b = torch.arange(2**15, device=device).remainder(11).half().unsqueeze(0)
        product = pkg.ops.matmul(a, b)
        assert product.numel() > 2**31
        for row in (0, 2**15, 2**16 - 1, 2**16):
            assert torch.equal(product[row], a[row] * b[0])


@pytest.mark.parametrize("shape", [(5, 4), (2, 5, 4)])
def test_gradients_are_laid_out_as_the_operands(
    device: torch.device, shape: tuple[int, ...]
) -> None:
    a = torch.randn(shape, device=device, requires_grad=True)
    weight = torch.randn(3, 4, device=device, requires_grad=True)
    product = pkg.ops.matmul(a, weight.mT)
    gradient = torch.randn_like(product)
    inputs, transposed = a.mT.detach().contiguous().mT, weight.mT
    of_a, of_b = torch.autograd.grad(product, [a, weight], gradient)
    assert of_a.is_contiguous()
    assert of_b.is_contiguous()
    expected = torch.autograd.grad(torch.matmul(a, transposed), [a, weight], gradient)
    for ours, plain in zip((of_a, of_b), expected, strict=True):
        torch.testing.assert_close(ours, plain)
    inputs.requires_grad_()
    (of_inputs,) = torch.autograd.grad(pkg.ops.matmul(inputs, transposed), inputs, gradient)
    assert of_inputs.stride() == inputs.stride()
    torch.testing.assert_close(of_inputs, expected[0])


def amid_nans(matrix: torch.Tensor, margin: int) -> torch.Tensor:
    """The matrix as a part of another, whose other elements are NaN."""
    rows, columns = matrix.shape
    around_it = torch.full((rows + 2, columns + 2 * margin), torch.nan, dtype=matrix.dtype)
    around_it[1:-1, margin:-margin] = matrix
    return around_it.to(matrix.device)[1:-1, margin:-margin]


FEW = (*around(2, 4, 8, 12, 16, 24, 32, 48), 64, 65)
LAYOUTS = ("rows", "columns", "rows amid others", "columns amid others")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", FLOATING)
def test_few_rows_or_columns_in_place(
    device: torch.device, dtype: torch.dtype, layout: str
) -> None:
    """Operands that are not packed: rows of B, whose last registers overlap, and its columns."""
    for rows in FEW:
        for columns, inner in ((rows, 70), (5, 130), (17, 131), (31, 300), (65, 1030), (100, 33)):
            a = whole_numbers(dtype, rows, inner, seed=rows).to(device)
            b = whole_numbers(dtype, inner, columns, seed=columns).to(device)
            expected = (a.double() @ b.double()).to(dtype)
            for x, y, result in ((a, b, expected), (b.mT, a.mT, expected.mT)):
                if layout.startswith("columns"):
                    y = y.mT.contiguous().mT
                if layout.endswith("others"):
                    x = amid_nans(x, 3)
                    y = amid_nans(y.mT, 5).mT if layout.startswith("columns") else amid_nans(y, 5)
                assert torch.equal(pkg.ops.matmul(x, y), result)


@pytest.mark.parametrize("left", LAYOUTS)
@pytest.mark.parametrize("right", LAYOUTS)
@pytest.mark.parametrize("dtype", FLOATING)
def test_few_rows_and_few_columns_of_long_sums(
    device: torch.device, dtype: torch.dtype, left: str, right: str
) -> None:
    """Parts of both operands are turned, where they lie the other way, and shared by threads."""
    threads = torch.get_num_threads()

    def laid_out(tensor: Tensor, layout: str) -> Tensor:
        tensor = tensor.mT.contiguous().mT if layout.startswith("columns") else tensor
        if not layout.endswith("others"):
            return tensor
        return amid_nans(tensor.mT, 5).mT if layout.startswith("columns") else amid_nans(tensor, 3)

    try:
        for rows, columns in ((1, 1), (1, 2), (1, 7), (2, 1), (2, 2), (3, 3), (5, 8), (8, 3)):
            for inner in (64, 131, 513, 1000, 4099, 9001):
                a = whole_numbers(dtype, rows, inner, seed=rows).to(device)
                b = whole_numbers(dtype, inner, columns, seed=columns).to(device)
                expected = (a.double() @ b.double()).to(dtype)
                x, y = laid_out(a, left), laid_out(b, right)
                for count in (1, 2, 3):
                    torch.set_num_threads(count)
                    assert torch.equal(pkg.ops.matmul(x, y), expected)
                if inner == 1000:  # neither rows nor columns side by side
                    halved = (a[:, ::2].double() @ b[::2].double()).to(dtype)
                    assert torch.equal(pkg.ops.matmul(a[:, ::2], b[::2]), halved)
                    bias = pkg.ops.linear(x, y.mT, torch.ones(columns, dtype=dtype, device=device))
                    assert torch.equal(bias, (a.double() @ b.double() + 1).to(dtype))
    finally:
        torch.set_num_threads(threads)


def test_long_sums_keep_counting() -> None:
    """Beyond 2^24 terms of one size float32 would have no digit for the next."""
    ones = torch.ones(1).expand(2**28)
    assert pkg.ops.matmul(ones, ones) == 2**28
    pairs = torch.ones(1, 2).expand(2**27, 2)
    assert torch.equal(pkg.ops.matmul(ones[: 2**27], pairs), torch.full((2,), 2.0**27))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_small_products_in_every_tile(
    device: torch.device, dtype: torch.dtype, transposed: bool
) -> None:
    """Each number of registers of columns and height of a strip, amid values not to be read."""
    for columns in around(8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128):
        for rows, inner in ((2, 1), (3, 64), (4, 9), (6, 2), (7, 31), (9, 200), (13, 33), (64, 3)):
            a = whole_numbers(dtype, rows, inner, seed=rows).to(device)
            b = whole_numbers(dtype, inner, columns, seed=columns).to(device)
            x = amid_nans(a.mT, 3).mT if transposed else amid_nans(a, 3)
            expected = (a.double() @ b.double()).to(dtype)
            assert torch.equal(pkg.ops.matmul(x, amid_nans(b, 5)), expected)
            # B's columns, which are turned where A has many rows or no contiguous ones.
            assert torch.equal(pkg.ops.matmul(x, amid_nans(b.mT, 5).mT), expected)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", FLOATING)
def test_few_rows_times_a_large_matrix(
    device: torch.device, dtype: torch.dtype, transposed: bool
) -> None:
    """B from beyond the caches, a few of its rows at a time, and its columns in blocks."""
    for inner, columns in ((300, 2093), (1100, 4019), (70, 8200)):
        b = whole_numbers(dtype, inner, columns, seed=columns).to(device)
        if transposed:
            b = b.mT.contiguous().mT
        for rows in (1, 2, 7, 16, 21, 47):
            a = whole_numbers(dtype, rows, inner, seed=rows).to(device)
            expected = a.double() @ b.double()
            assert torch.equal(pkg.ops.matmul(a, b), expected.to(dtype))
            bias = whole_numbers(dtype, columns, seed=3).to(device)
            with_bias = pkg.ops.linear(a, b.mT, bias, activation="relu")
            assert torch.equal(with_bias, (expected + bias).relu().to(dtype))


@pytest.mark.parametrize("transposed", [False, True])
def test_few_rows_of_int8(device: torch.device, transposed: bool) -> None:
    """Of all values, amid others: whole registers of K and a rest, blocks of K, many columns."""
    generator = torch.Generator().manual_seed(5)

    def operand(lines: int, inner: int) -> torch.Tensor:
        bytes_ = torch.randint(-128, 128, (lines + 2, inner + 7), generator=generator)
        return bytes_.to(torch.int8).to(device)[1:-1, 3:-4]

    for inner, columns in ((512, 37), (577, 1), (1024, 66), (2111, 41), (600, 4019), (64, 9000)):
        b = operand(columns, inner).mT if transposed else operand(inner, columns)
        for rows in (1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 33):
            a = operand(rows, inner)
            # Sums of so few products of int8 are exact in float64.
            expected = (a.double() @ b.double()).int()
            assert torch.equal(pkg.ops.matmul(a, b, out_dtype=torch.int32), expected)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", FLOATING)
def test_few_rows_with_values_that_are_not_finite(
    device: torch.device, dtype: torch.dtype, transposed: bool
) -> None:
    """They reach the sums that they are terms of, and no others."""
    for rows, inner, columns in ((3, 300, 50), (16, 200, 37), (40, 129, 79)):
        a = whole_numbers(dtype, rows, inner, seed=1).to(device).abs() + 1
        b = whole_numbers(dtype, inner, columns, seed=2).to(device).abs() + 1
        a[1, 7] = torch.nan
        b[inner - 1, columns - 2] = -torch.inf
        if transposed:
            b = b.mT.contiguous().mT
        product = pkg.ops.matmul(a, b)
        expected = (a.double() @ b.double()).to(dtype)
        torch.testing.assert_close(product, expected, rtol=0, atol=0, equal_nan=True)
        assert product[1].isnan().all()
        assert (product[2:, columns - 2] == -torch.inf).all()
        assert product[2:, : columns - 2].isfinite().all()
