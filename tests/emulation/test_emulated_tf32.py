"""Products of float32 that the tensor cores make in TF32, run on the CPU by the emulator.

The emulated instruction reads the upper 19 bits of an operand and cuts sums as the device does, so
that results are held to exact products of operands that were rounded to TF32.
"""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from emulator import Emulator
from test_emulated_linear import emulated_linear
from test_emulated_matmul import around, emulated_matmul, make
from torch import Tensor

from pkg.testing.exact import power_of_two

TILE = 128
DEPTH = 32  # of a slice
LARGEST = (2 - 2.0**-10) * 2.0**127


def rounded(matrix: Tensor) -> Tensor:
    """The nearest TF32 of each element, ties away from zero, in float64; none becomes infinite."""
    wide = matrix.double()
    _, exponent = torch.frexp(wide)
    unit = power_of_two(exponent.clamp(min=-125) - 11)
    nearest = ((wide / unit).abs() + 0.5).floor() * unit
    nearest = nearest.clamp(max=LARGEST).copysign(wide)
    return torch.where(wide.isfinite(), nearest, wide)


def product(emulator: Emulator, a: Tensor, b: Tensor, blocks: int = 3, split: int = 0) -> Tensor:
    return emulated_matmul(emulator, a, b, blocks=blocks, split_depth=split, multiplied_as="tf32")


def assert_product(result: Tensor, a: Tensor, b: Tensor, slope: float = 1.0) -> None:
    """Each instruction cuts nine terms, and then their sum, by a unit at most.

    Args:
        result: of the kernel.
        a: as the kernel got it.
        b: likewise.
        slope: of what became of the product.
    """
    a, b = rounded(a), rounded(b)
    cuts = 10 * (a.shape[-1] / 8 + 4)
    bound = 1.01 * slope * cuts * torch.finfo(torch.float32).eps * (a.abs() @ b.abs())
    error = (result.double() - a @ b).abs()
    assert (error <= bound + torch.finfo(torch.float32).smallest_normal).all()


def test_sizes_around_every_tile_boundary(cuda_emulator: Emulator) -> None:
    sizes = [(rows, 5, 3) for rows in around(TILE)]
    sizes += [(2, 5, columns) for columns in around(TILE)]
    sizes += [(3, depth, 6) for depth in (0, 1, *around(DEPTH), *around(2 * DEPTH), 3 * DEPTH)]
    for rows, depth, columns in sizes:
        for width in (columns, (columns + 3) // 4 * 4):  # copied by elements, and by vectors
            a, b = make(rows, depth, dtype=torch.float32), make(depth, width, dtype=torch.float32)
            assert_product(product(cuda_emulator, a, b), a, b)


@pytest.mark.parametrize("layout", ["rows", "columns", "step", "misaligned", "expanded", "padded"])
def test_layouts(cuda_emulator: Emulator, layout: str) -> None:
    def arrange(matrix: Tensor) -> Tensor:
        rows, columns = matrix.shape
        if layout == "columns":
            return matrix.mT.contiguous().mT
        if layout == "step":
            return torch.randn(2 * rows, 3 * columns)[::2, ::3]
        if layout == "misaligned":
            return torch.randn(rows * columns + 1)[1:].view(rows, columns)
        if layout == "expanded":
            return torch.randn(rows, 1).expand(rows, columns)
        if layout == "padded":
            return torch.randn(rows, columns + 8)[:, 4:-4]
        return matrix

    a, b = arrange(torch.randn(140, 72)), arrange(torch.randn(72, 136))
    for first, second in ((a, b), (a, b.contiguous()), (a.contiguous(), b)):
        assert_product(product(cuda_emulator, first, second), first, second)


@pytest.mark.parametrize("blocks", [1, 100])
def test_batches_broadcast(cuda_emulator: Emulator, blocks: int) -> None:
    a, b = torch.randn(3, 1, 7, 12), torch.randn(2, 12, 132)
    assert_product(product(cuda_emulator, a, b, blocks), a, b)
    b = torch.randn(2, 132, 12).mT
    assert_product(product(cuda_emulator, a, b, blocks), a, b)


def test_parts_of_a_divided_product_are_added_up(cuda_emulator: Emulator) -> None:
    for depth, columns in ((3 * DEPTH, 136), (2 * DEPTH + 3, 7), (2 * DEPTH + 1, 129)):
        a, b = torch.randn(2, 5, depth), torch.randn(2, depth, columns)
        assert_product(product(cuda_emulator, a, b, split=DEPTH), a, b)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_special_values_stay_in_their_row(cuda_emulator: Emulator, value: float) -> None:
    for depth in (9, 12):
        a, b = torch.ones(5, depth), torch.ones(depth, 6)
        a[2, 8] = value
        result = product(cuda_emulator, a, b)
        assert torch.equal(result.isnan(), (a @ b).isnan())
        torch.testing.assert_close(result, a @ b, rtol=0, atol=0, equal_nan=True)


def test_the_largest_numbers_stay_finite(cuda_emulator: Emulator) -> None:
    a, b = torch.full((3, 1), torch.finfo(torch.float32).max), torch.tensor([[1.0, -1.0, 0.5]])
    result = product(cuda_emulator, a, b)
    assert_product(result, a, b)
    assert result.isfinite().all()


def test_subnormal_numbers_count(cuda_emulator: Emulator) -> None:
    """Of their 23 bits the upper ten."""
    a = torch.tensor([[2.0**-127, 2.0**-130, 3 * 2.0**-136, 2.0**-149]])
    b = 2.0**60 * torch.eye(4)
    assert torch.equal(product(cuda_emulator, a, b).double(), rounded(a) @ b.double())


@pytest.mark.parametrize("keep", [False, True])
def test_linear(cuda_emulator: Emulator, keep: bool) -> None:
    for rows, inner, columns in ((9, 36, 130), (130, 33, 7)):
        input, weight, bias = torch.randn(rows, inner), torch.randn(columns, inner), torch.ones(1)
        result, kept = emulated_linear(
            cuda_emulator, input, weight, bias.expand(columns), "gelu", keep, multiplied_as="tf32"
        )
        exact = rounded(input) @ rounded(weight).mT + 1
        torch.testing.assert_close(
            result.double(), torch.nn.functional.gelu(exact), rtol=2e-5, atol=2e-5
        )
        if kept is not None:
            assert_product(kept - 1, input, weight.mT, slope=2)


@pytest.mark.parametrize("transposed", [(False, False), (True, False), (False, True), (True, True)])
def test_accesses(cuda_emulator: Emulator, transposed: tuple[bool, bool]) -> None:
    """As cuda/gemm/block_product.cuh says, and no two of a load in the same banks."""
    a = torch.randn(256, 128) if not transposed[0] else torch.randn(128, 256).mT
    b = torch.randn(128, 256) if not transposed[1] else torch.randn(256, 128).mT
    assert_product(product(cuda_emulator, a, b), a, b)
    counted = cuda_emulator.counters
    assert counted.matrix_load_cycles == 4 * counted.matrix_loads
    assert counted.word_load_cycles == counted.word_loads
    loads = counted.matrix_loads + Fraction(counted.word_loads, 4)
    assert counted.products == 4 * loads
    assert counted.copy_cycles == 4 * counted.copies
    assert counted.copied_bytes == 2 * (a.numel() + b.numel()) * a.element_size()
    assert counted.copied_sectors * 32 == counted.copied_bytes
