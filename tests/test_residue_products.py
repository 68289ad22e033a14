"""Large float64 products by residues: as exact as fused multiply-adds promise, also if hostile.

The bound of every element is that of a sum that is rounded after each of its terms,
K 2^-53 times the sum of magnitudes: by residues half of it is allowed (csrc/cpu/residues/scheme.h),
and where an element's magnitudes do not allow that, fused multiply-adds make it.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from samples import around, normal, powers
from torch import Tensor

import pkg
from pkg import _float32_matmul, _float64_matmul

without_tiles = pytest.mark.skipif(
    not _float32_matmul.has_tiles(),
    reason="this processor, or the CPU library in use, has no tile registers (Intel AMX)",
)

UNIT = 2.0**-53
ROWS, INNER, COLUMNS = 520, 500, 530  # of no tile's size
WAYS = """
import pkg
print(pkg.get_float64_matmul())
"""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    pkg.set_float64_matmul("residues")


@contextlib.contextmanager
def fused_multiply_adds() -> Iterator[None]:
    pkg.set_float64_matmul("fma")
    try:
        yield
    finally:
        pkg.set_float64_matmul("residues")


def by_fused_multiply_adds(a: Tensor, b: Tensor) -> Tensor:
    with fused_multiply_adds():
        return pkg.ops.matmul(a, b)


def some_rows(count: int) -> Tensor:
    """The first, the last, and some between: the exact product takes long."""
    return torch.cat([torch.arange(8), torch.linspace(8, count - 1, 32).long()])


def exact_product(a: Tensor, b: Tensor) -> np.ndarray:
    """In the 64 bits of the processor's long double, whose error is 2^-11 of float64's."""
    assert np.finfo(np.longdouble).nmant >= 63
    return a.numpy().astype(np.longdouble) @ b.numpy().astype(np.longdouble)


def errors(product: Tensor, a: Tensor, b: Tensor) -> np.ndarray:
    return np.abs(product.numpy().astype(np.longdouble) - exact_product(a, b))


def check(a: Tensor, b: Tensor) -> Tensor:
    """The product, some of whose rows are as close to the exact ones as they have to be."""
    product = pkg.ops.matmul(a, b)
    rows = some_rows(a.shape[0])
    magnitudes = exact_product(a[rows].abs(), b.abs())
    # Half, and the rounding of the result.
    bound = (a.shape[1] / 2 + 1) * UNIT * magnitudes * (1 + 2.0**-30)
    error = errors(product[rows], a[rows], b)
    plain = errors(by_fused_multiply_adds(a, b)[rows], a[rows], b)
    assert (error <= np.maximum(bound, plain)).all()
    return product


def parts_made_by_fused_multiply_adds(product: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Of 32 x 32 elements, whether they have the same bits."""
    same = product.eq(by_fused_multiply_adds(a, b)).double()
    rows, columns = (-(-size // 32) * 32 for size in same.shape)
    padded = torch.ones(rows, columns, dtype=torch.float64)
    padded[: same.shape[0], : same.shape[1]] = same
    return padded.unfold(0, 32, 32).unfold(1, 32, 32).amin((2, 3)).bool()


def normal_operands(rows: int = ROWS, inner: int = INNER, columns: int = COLUMNS) -> list[Tensor]:
    return [normal(rows, inner), normal(inner, columns, seed=1)]


# How exact


@without_tiles
@pytest.mark.parametrize(
    ("rows", "inner", "columns"),
    [(512, 512, 512), (ROWS, INNER, COLUMNS), (640, 1024, 1100), (400, 2500, 2000)],
)
def test_a_tenth_of_the_error_of_multiply_adds(rows: int, inner: int, columns: int) -> None:
    a, b = normal_operands(rows, inner, columns)
    product = check(a, b)
    assert not parts_made_by_fused_multiply_adds(product, a, b).any()
    some = some_rows(rows)
    ours, plain = (errors(each[some], a[some], b) for each in (product, a @ b))
    assert np.linalg.norm(ours) <= 0.25 * np.linalg.norm(plain)


@without_tiles
@pytest.mark.parametrize(("bits", "inner"), [(21, 500), (20, 3000)])
def test_products_of_integers_are_exact(bits: int, inner: int) -> None:
    """Every remainder, weight and range of the Chinese remainder theorem is right for that."""
    generator = torch.Generator().manual_seed(bits)
    a, b = (
        torch.randint(-(2**bits), 2**bits + 1, shape, generator=generator)
        for shape in ((ROWS, inner), (inner, COLUMNS))
    )
    product = pkg.ops.matmul(a.double(), b.double())
    assert torch.equal(product, (a @ b).double())
    # Scaled lines have as many bits as they may, whatever the power of two.
    scaled = pkg.ops.matmul(a.double() * 2.0**-200, b.double() * 2.0**90)
    assert torch.equal(scaled, product * 2.0**-110)


@without_tiles
@pytest.mark.parametrize("sign", [1, -1])
def test_sums_of_one_sign_reach_the_ends_of_the_range(sign: int) -> None:
    a = torch.ones(ROWS, INNER, dtype=torch.float64)
    b = torch.full((INNER, COLUMNS), float(sign), dtype=torch.float64)
    assert torch.equal(pkg.ops.matmul(a, b), (a @ b))
    for value in (1 + 2.0**-52, 2 - 2.0**-52, 1 / 3, 1.5 - 2.0**-52):
        check(a * value, b * value)


@without_tiles
@pytest.mark.parametrize("transposed", [(False, True), (True, False), (True, True)])
def test_operands_of_any_strides(transposed: tuple[bool, bool]) -> None:
    a, b = normal_operands()
    expected = pkg.ops.matmul(a, b)
    strided = [
        each.mT.contiguous().mT if turned else each
        for each, turned in zip((a, b), transposed, strict=True)
    ]
    # By residues the order of a sum does not matter: the same bits.
    assert torch.equal(pkg.ops.matmul(*strided), expected)
    apart = [
        torch.zeros(2 * each.shape[0], 3 * each.shape[1], dtype=torch.float64)[::2, ::3]
        for each in strided
    ]
    for to, each in zip(apart, strided, strict=True):
        to.copy_(each)
    assert torch.equal(pkg.ops.matmul(*apart), expected)


@without_tiles
def test_the_same_bits_for_any_division_of_the_work() -> None:
    a, b = normal_operands(1100, 1300, 1600)
    expected = pkg.ops.matmul(a, b)
    torch.set_num_threads(2)
    assert torch.equal(pkg.ops.matmul(a, b), expected)
    torch.set_num_threads(1)
    assert torch.equal(pkg.ops.matmul(a[300:900], b), expected[300:900])
    assert torch.equal(pkg.ops.matmul(a, b[:, 77:]), expected[:, 77:])
    batch = pkg.ops.matmul(a.expand(2, -1, -1), b)
    assert torch.equal(batch[0], expected)
    assert torch.equal(batch[1], expected)


@without_tiles
@pytest.mark.parametrize("rows", around(544))
@pytest.mark.parametrize("columns", around(512))
def test_tails_of_rows_and_columns(rows: int, columns: int) -> None:
    a, b = normal_operands(rows, 512, columns)
    inside = pkg.ops.matmul(a, b)
    assert not parts_made_by_fused_multiply_adds(inside, a, b).any()
    expected = by_fused_multiply_adds(a, b)
    assert (inside - expected).abs().max() <= 512 * UNIT * (a.abs() @ b.abs()).max()


@without_tiles
@pytest.mark.parametrize("inner", around(448, 512, 1024))
def test_tails_of_the_inner_dimension(inner: int) -> None:
    a, b = normal_operands(700, inner, 720)
    product = check(a, b)
    assert not parts_made_by_fused_multiply_adds(product, a, b).any()


# Values that remainders do not suit


@without_tiles
def test_rows_and_columns_of_any_size() -> None:
    """Each has a scale of its own."""
    a, b = normal_operands()
    a, b = a * powers(-300, 300, ROWS)[:, None], b * powers(90, -90, COLUMNS)
    assert not parts_made_by_fused_multiply_adds(check(a, b), a, b).any()


@without_tiles
def test_terms_of_any_size() -> None:
    """Where large values meet small ones rounding them to integers would lose too much."""
    a, b = normal_operands()
    sizes = powers(-30, 30, INNER)
    shuffled = sizes[torch.randperm(INNER, generator=torch.Generator().manual_seed(0))]
    for left, right in ((sizes, 1 / sizes), (sizes, shuffled), (shuffled, sizes)):
        check(a * left, b * right[:, None])
    against = a * sizes, b / sizes[:, None]
    assert parts_made_by_fused_multiply_adds(pkg.ops.matmul(*against), *against).all()
    # Those of one size have large sums of magnitudes.
    together = a * sizes, b * sizes[:, None]
    check(*together)


@without_tiles
def test_cancellation() -> None:
    a, b = normal_operands(ROWS, INNER // 2)
    nearly = torch.nextafter(a, torch.full_like(a, torch.inf))
    product = check(torch.cat([a, -nearly], 1), torch.cat([b, b]))
    assert not torch.equal(product, torch.zeros_like(product))
    check(torch.stack([a, -nearly], 2).reshape(ROWS, INNER), b.repeat_interleave(2, 0))


@without_tiles
def test_some_rows_and_columns_that_do_not_suit_leave_the_others_alone() -> None:
    a, b = normal_operands()
    a[:, 9] = 0
    b[3] = 0
    plain = pkg.ops.matmul(a, b)
    for row in (70, -1):
        a[row, 3] = 2.0**60  # which meets zeros, and has the others lose their bits
    b[9, 200] = 2.0**60
    product = check(a, b)
    tiles = parts_made_by_fused_multiply_adds(product, a, b)
    expected = torch.zeros_like(tiles)
    expected[70 // 32] = expected[-1] = True
    expected[:, 200 // 32] = True
    assert torch.equal(tiles, expected)
    untouched = ~expected.repeat_interleave(32, 0).repeat_interleave(32, 1)[:ROWS, :COLUMNS]
    assert torch.equal(product[untouched], plain[untouched])


@without_tiles
def test_zeros() -> None:
    a, b = normal_operands()
    a[100:200] = 0
    b[:, 64:96] = 0
    product = check(a, b)
    assert not parts_made_by_fused_multiply_adds(product, a, b)[7:, 4:].any()
    assert torch.equal(product[100:200], torch.zeros_like(product[100:200]))
    assert torch.equal(product[:, 64:96], torch.zeros_like(product[:, 64:96]))
    check(torch.zeros_like(a), b)


@without_tiles
def test_sparse_operands() -> None:
    a, b = normal_operands(1024, 1024, 700)
    for each in (
        torch.eye(1024, dtype=torch.float64),
        a.tril(),
        a * (a.abs() > 2.5),
        torch.block_diag(*a.reshape(8, 128, 1024)[:, :, :128]),
    ):
        check(each, b)
    # What is zero before is not read as such where the rest suffices.
    late = a.clone()
    late[:, :500] = 0
    product = check(late, b)
    assert not parts_made_by_fused_multiply_adds(product, late, b).any()


@without_tiles
def test_a_later_block_of_the_inner_dimension_may_suffice() -> None:
    a, b = normal_operands(512, 2600, 512)
    a[40:200, :1100] = 0
    product = check(a, b)
    assert not parts_made_by_fused_multiply_adds(product, a, b).any()


@without_tiles
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("side", [0, 1])
def test_what_is_not_a_number(value: float, side: int) -> None:
    operands = normal_operands()
    operands[side][300, 400] = value
    product = pkg.ops.matmul(*operands)
    expected = by_fused_multiply_adds(*operands)
    assert torch.equal(product.nan_to_num(), expected.nan_to_num())
    assert torch.equal(product.isnan(), expected.isnan())
    assert not product.isfinite().all()


@without_tiles
@pytest.mark.parametrize("exponent", [-1070, -1022, -600, -401, -399, 399, 401, 480, 1000])
def test_very_large_and_very_small_values(exponent: int) -> None:
    a, b = normal_operands()
    a = a.clamp(-3, 3) * 2.0 ** (exponent / 2) * 2.0 ** (exponent - exponent / 2)
    for each in (b, b * 2.0**-300):
        product, expected = pkg.ops.matmul(a, each), by_fused_multiply_adds(a, each)
        assert torch.equal(product.isfinite(), expected.isfinite())
        finite = expected.isfinite()
        magnitudes = a.abs() @ each.abs()
        limit = INNER * UNIT * magnitudes + 2.0**-1074 * INNER
        assert ((product - expected).abs() <= 2 * limit)[finite].all()
    one = normal(ROWS, INNER)
    one[17, 23] = 2.0**500  # one line decides
    assert torch.equal(pkg.ops.matmul(one, b), by_fused_multiply_adds(one, b))


# linear, and the setting


@without_tiles
@pytest.mark.parametrize("activation", [None, "relu", "gelu", "silu"])
def test_linear_with_bias_and_activation(activation: str | None) -> None:
    weight, bias = normal(COLUMNS, INNER, seed=2), normal(COLUMNS, seed=3)
    a = normal(ROWS, INNER)
    weight[:, 3] = 0
    a[5, 3] = 2.0**60  # made by fused multiply-adds, with the same bias
    result = pkg.ops.linear(a, weight, bias, activation=activation)
    with fused_multiply_adds():
        expected = pkg.ops.linear(a, weight, bias, activation=activation)
    assert not torch.equal(result, expected)
    assert (result - expected).abs().max() < 1e-11
    assert torch.equal(result[5], expected[5])


@without_tiles
def test_small_products_are_made_by_fused_multiply_adds() -> None:
    for rows, inner, columns in ((256, 512, 512), (512, 256, 512), (512, 512, 300)):
        a, b = normal_operands(rows, inner, columns)
        assert torch.equal(pkg.ops.matmul(a, b), by_fused_multiply_adds(a, b))


def test_the_setting() -> None:
    assert pkg.get_float64_matmul() == "residues"
    pkg.set_float64_matmul("fma")
    assert pkg.get_float64_matmul() == "fma"
    expected = "fma" if _float32_matmul.has_tiles() else "fma (no tile registers)"
    assert _float64_matmul.description() == expected
    with pytest.raises(ValueError, match="way is 'exact'; it must be one of residues, fma"):
        pkg.set_float64_matmul("exact")
    assert pkg.get_float64_matmul() == "fma"


def test_no_switch_inside_a_compiled_region() -> None:
    @torch.compile(backend="eager", fullgraph=True)
    def switch(x: Tensor) -> Tensor:
        pkg.set_float64_matmul("fma")
        return x

    with pytest.raises(Exception, match=r"pkg\.set_float64_matmul is called in a region"):
        switch(torch.zeros(1))


@pytest.mark.parametrize(
    ("value", "says"), [("fma", "fma"), (" Residues ", "residues"), ("", "residues")]
)
def test_the_environment_chooses(value: str, says: str) -> None:
    result = run(PKG_FLOAT64_MATMUL=value)
    assert result.stdout.split() == [says], result.stderr


def test_the_environment_is_refused_in_words() -> None:
    result = run(PKG_FLOAT64_MATMUL="double")
    assert result.returncode != 0
    assert "PKG_FLOAT64_MATMUL is 'double'; it must be one of residues, fma" in result.stderr


def run(**variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", WAYS],
        cwd=Path(pkg.__file__).parents[1],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=False,
    )
