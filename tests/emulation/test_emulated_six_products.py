"""Products of float32 by six of bfloat16 parts, on the emulator, against PyTorch in float64."""

from __future__ import annotations

import pytest
import torch
from emulator import Emulator
from test_emulated_matmul import around, product_fields, shape_of_product
from torch import Tensor

PANEL = 64
LARGEST_BFLOAT16 = torch.finfo(torch.bfloat16).max


def six_products(
    emulator: Emulator, a: Tensor, b: Tensor, blocks: int = 3, split_depth: int = 0
) -> tuple[Tensor, bool]:
    """``a @ b``, and whether something was left of a number: then all of it is still 77."""
    c = torch.full(shape_of_product(a, b), 77.0)
    inexact = torch.zeros(1, dtype=torch.int32)
    emulator.run(
        "matmul_six_products",
        ["c", "inexact"],
        blocks,
        c=c,
        inexact=inexact,
        split_depth=split_depth,
        **product_fields(a, b),
    )
    return c, bool(inexact)


def assert_as_exact_as_float32(result: Tensor, a: Tensor, b: Tensor) -> None:
    """What the parts leave out, and the roundings of sums over panels and within one.

    m l, l m and l l are at most 2^-26 of the product of two numbers, since m is 2^-9 of x and l
    2^-18. A panel has 4 sums of 16 products for each of six parts, in any order (1.01 n u of
    the magnitudes, as in ``assert_product``; those of the smaller parts are 2^-7 of h h), and the
    panels are added in a row.
    """
    unit = torch.finfo(torch.float32).eps / 2
    magnitude = a.double().abs() @ b.double().abs()
    panels = -(-a.shape[-1] // PANEL)
    bound = (2.0**-25 + 1.01 * unit * (min(a.shape[-1], PANEL) * 1.05 + panels)) * magnitude
    bound += torch.finfo(torch.float32).smallest_normal
    assert ((result.double() - a.double() @ b.double()).abs() <= bound).all()


def check(emulator: Emulator, a: Tensor, b: Tensor, **options: int) -> None:
    result, is_inexact = six_products(emulator, a, b, **options)
    assert not is_inexact
    assert_as_exact_as_float32(result, a, b)


def test_sizes_around_every_boundary(cuda_emulator: Emulator) -> None:
    """Of boxes, of tiles, of vectors of a line of parts, of panels and of all stages."""
    sizes = [(rows, 8, 3) for rows in (1, *around(64), *around(128))]
    sizes += [(2, 8, columns) for columns in (*around(64), *around(128))]
    sizes += [(3, depth, 6) for depth in (1, 7, 9, *around(PANEL), *around(2 * PANEL))]
    for rows, depth, columns in sizes:
        check(cuda_emulator, torch.randn(rows, depth), torch.randn(depth, columns))


@pytest.mark.parametrize("a_by_columns", [False, True])
@pytest.mark.parametrize("b_by_columns", [False, True])
def test_majors(cuda_emulator: Emulator, a_by_columns: bool, b_by_columns: bool) -> None:
    """Every part of a tile; one block goes on with its stages from tile to tile."""
    depth = 3 * PANEL + 5
    a = torch.randn(depth, 130).mT if a_by_columns else torch.randn(130, depth)
    b = torch.randn(137, depth).mT if b_by_columns else torch.randn(depth, 137)
    check(cuda_emulator, a, b, blocks=1)


def test_operands_of_any_strides(cuda_emulator: Emulator) -> None:
    """Which the copy engine would not take: they are split first."""
    for a in (
        torch.randn(9, 41)[:, 1:],
        torch.randn(9 * 40 + 1)[1:].view(9, 40),
        torch.randn(18, 80)[::2, ::2],
        torch.randn(1, 40).expand(9, 40),
        torch.randn(9, 1).expand(9, 40),
        torch.randn(40, 10)[:, 1:].mT,
    ):
        check(cuda_emulator, a, torch.randn(40, 5))
        check(cuda_emulator, torch.randn(5, 9), a)


def test_batches(cuda_emulator: Emulator) -> None:
    """A matrix for each index, the same for all, and batches of two dimensions; few blocks."""
    for a, b in [
        (torch.randn(5, 66, 70), torch.randn(5, 20, 70).mT),
        (torch.randn(5, 70, 66).mT, torch.randn(70, 20)),
        (torch.randn(66, 70), torch.randn(2, 3, 70, 20)),
    ]:
        check(cuda_emulator, a, b, blocks=2)


def test_divided_products(cuda_emulator: Emulator) -> None:
    """A last part that is whole, one of a panel less, and one of a step."""
    for depth in (4 * PANEL, 3 * PANEL, 2 * PANEL + 1):
        a, b = torch.randn(2, 66, depth), torch.randn(2, depth, 137)
        check(cuda_emulator, a, b, split_depth=2 * PANEL)


def test_exponents_far_apart_and_cancellation(cuda_emulator: Emulator) -> None:
    powers = torch.randint(-30, 31, (40, 1)).double()
    a = (torch.randn(40, 200) * 2**powers).float()
    check(cuda_emulator, a, torch.randn(200, 30))
    check(cuda_emulator, a.mT, torch.randn(40, 30))
    a, b = torch.randn(20, 200), torch.randn(200, 10)
    check(cuda_emulator, torch.cat([a, -a], 1), torch.cat([b, b * (1 + 2**-20)]))


@pytest.mark.parametrize(
    "value",
    [torch.nan, torch.inf, -torch.inf, 3.4e38, 1.2345e-34, 1.2345e-40],
    ids=str,
)
@pytest.mark.parametrize("place", [0, 1])
def test_numbers_of_which_something_is_left(
    cuda_emulator: Emulator, value: float, place: int
) -> None:
    """Nothing is made then, whichever operand has it and wherever."""
    for row, step in ((0, 0), (4, 8), (2, 3)):
        operands = [torch.randn(5, 9), torch.randn(9, 5)]
        operands[place][(row, step) if place == 0 else (step, row)] = value
        result, is_inexact = six_products(cuda_emulator, *operands)
        assert is_inexact
        assert (result == 77).all()


def test_numbers_that_are_sums_of_three(cuda_emulator: Emulator) -> None:
    """The largest bfloat16, and tiny numbers of few bits, among them denormal ones."""
    a = torch.tensor([[LARGEST_BFLOAT16, 2.0**-126, 2.0**-133, -0.0, 3 * 2.0**-130, 1.2346e-33]])
    result, is_inexact = six_products(cuda_emulator, a.mT, torch.ones(1, 1))
    assert not is_inexact
    assert torch.equal(result, a.mT)


def test_plans(cuda_emulator: Emulator) -> None:
    """Parts where that takes fewer cycles, none of them empty."""

    def plan(*sizes: int) -> tuple[int, int]:
        result = torch.zeros(2, dtype=torch.int64)
        cuda_emulator.run("plan_of_six_products", ["plan"], plan=result, sizes=sizes)
        each, cycles = result.tolist()
        return each, cycles

    each, cycles = plan(1, 4096, 4096, 64, 132)  # 1024 tiles: 8 rounds
    assert (each, cycles) == (64, 8 * 64 * 3500)
    assert plan(1, 512, 512, 64, 132)[0] == 8  # 16 tiles in 8 parts
    assert plan(1, 512, 512, 8, 132)[0] == 8
    assert plan(3, 128, 128, 1, 132) == (1, 3500)
