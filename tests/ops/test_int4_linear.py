from __future__ import annotations

from types import MappingProxyType

import pytest
import references
import torch
from operator_tests import OperatorTests
from quantised_samples import (
    GROUP_SIZES,
    INNER_K_TILES,
    error_bound,
    fixed_point_bound,
    scales_and_zeros,
    terms,
    words,
)
from samples import FLOATING, around, normal
from torch import Tensor

import pkg
from pkg.testing import ErrorSample, Sample

ROWS = (1, 2, 4, 5, 8, 9, 13, 129)
"""All ways of the CPU kernel, strips of every height, and two blocks of rows."""


def weight(
    rows: int, columns: int, group_size: int, inner_k_tiles: int
) -> tuple[Tensor, Tensor, int, int]:
    packed = words(rows, columns, inner_k_tiles)
    return packed, scales_and_zeros(rows, columns, group_size), group_size, inner_k_tiles


def call(
    input: tuple[int, ...],
    outputs: int,
    group_size: int = 32,
    inner_k_tiles: int = 2,
    with_bias: bool = True,
    **options: object,
) -> Sample:
    bias = normal(outputs, seed=2) if with_bias else None
    of_weight = weight(outputs, input[-1], group_size, inner_k_tiles)
    return Sample((normal(*input), *of_weight, bias), **options)


class TestInt4Linear(OperatorTests):
    op = torch.ops.pkg.int4_linear.default
    reference = staticmethod(references.int4_linear)
    function = staticmethod(pkg.ops.int4_linear)
    options = MappingProxyType({"nondifferentiable_inputs": ("scales_and_zeros",)})

    def samples(self) -> list[Sample]:
        samples = [
            call((7, 96), 24, family="rows"),
            call((6, 160), 40, family="rows"),
            call((64,), 8, with_bias=False),
            call((2, 10, 128), 24, 64, 4),
            call((0, 64), 8),
            call((3, 0), 8),
            call((3, 64), 0),
        ]
        for rows in ROWS:
            samples.append(call((rows, 384), 40, 128, 8, values_only=True))
        for tiles in INNER_K_TILES:
            for group_size in GROUP_SIZES:
                for rows in (1, 9):
                    sample = call((rows, 768), 24, group_size, tiles, values_only=True)
                    samples.append(sample)
        for outputs in (8, 24, 32, 40, 56, 64, 72):
            samples.append(call((9, 32), outputs, values_only=True))
        for inner in (32, 96, 160, 544, 1056):
            samples.append(call((1, inner), 8, values_only=True))
            samples.append(call((10, inner), 8, values_only=True))
        return samples

    def errors(self) -> list[ErrorSample]:
        input = torch.ones(3, 64)
        packed, pairs, group_size, tiles = of_weight = weight(16, 64, 32, 2)
        return [
            ErrorSample((torch.ones(3, 32), *of_weight), match=r"\(3, 32\).*has 32 elements.* 64"),
            ErrorSample((torch.ones(()), *of_weight), match="input has no dimensions"),
            ErrorSample((input.int(), *of_weight), match="input is torch.int32"),
            ErrorSample((input, packed, pairs, 48, tiles), match="group_size is 48"),
            ErrorSample((input, packed, pairs, 0, tiles), match="group_size is 0"),
            ErrorSample((input, packed, pairs, 128, tiles), match="not a multiple of group_size"),
            ErrorSample((input, packed, pairs, group_size, 6), match="inner_k_tiles is 6"),
            ErrorSample((input, packed, pairs, group_size, 4), match="with inner_k_tiles 4"),
            ErrorSample((input, packed, pairs[1:], group_size, tiles), match=r"\(1, 16, 2\)"),
            ErrorSample((input, packed, pairs.half(), group_size, tiles), match="torch.float16"),
            ErrorSample(
                (input, packed.float(), pairs, group_size, tiles), match="packed_w is torch.float32"
            ),
            ErrorSample((input, packed[..., 0], pairs, group_size, tiles), match=r"\(2, 2, 32\)"),
            ErrorSample((input, *of_weight, torch.ones(8)), match=r"bias has shape \(8,\)"),
            ErrorSample((input, *of_weight, torch.ones(16).half()), match="bias is torch.float16"),
        ]

    @pytest.mark.parametrize("dtype", FLOATING, ids=str)
    @pytest.mark.parametrize("rows", ROWS)
    def test_within_the_bound(self, device: torch.device, dtype: torch.dtype, rows: int) -> None:
        for group_size, tiles in ((128, 8), (32, 8), (64, 4), (256, 2)):
            input = normal(rows, 1024).to(dtype)
            input[:, ::77] *= 50  # some channels are much larger, as those of language models
            bias = normal(48).to(dtype)
            packed, pairs, *rest = weight(48, 1024, group_size, tiles)
            matrix = references.dequantized(packed, pairs.double(), group_size, tiles)
            exact = input.double() @ matrix.mT + bias.double()
            arguments = (each.to(device) for each in (input, packed, pairs))
            result = pkg.ops.int4_linear(*arguments, *rest, bias.to(device)).cpu()
            bound = error_bound(input, matrix, terms(pairs, group_size), bias, exact)
            assert ((result.double() - exact).abs() <= bound).all()

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("rows", [1, 2, 3, 6, 12, 24, 240, 241])
    def test_what_integers_leave_out(
        self, device: torch.device, dtype: torch.dtype, rows: int
    ) -> None:
        """Elements of just under half a unit beside a 1 that meets a weight of zero.

        In integers nothing is left of them, which is what the documented bound allows, and hardly
        less. On a GPU they are summed in float32.
        """
        half_a_unit = 2.0 ** (-23 if dtype == torch.float32 else -15)
        input = torch.full((rows, 128), 0.98 * half_a_unit).to(dtype)
        input[:, 0] = 1
        values = torch.full((8, 128), 9, dtype=torch.int32)
        values[:, 0] = 8
        packed = pkg.ops.pack_tensor_core_tiled_layout(values, 8).to(device)
        pairs = torch.tensor([1.0, 0.0]).bfloat16().to(device).expand(1, 8, 2)
        result = pkg.ops.int4_linear(input.to(device), packed, pairs, 128, 8).double().cpu()
        matrix = (values - 8).double()
        exact = input.double() @ matrix.mT
        allowed = fixed_point_bound(input, matrix)
        error = (result - exact).abs()
        if device.type != "cpu":
            assert (error <= (132 * 2.0**-24 + torch.finfo(dtype).eps / 2) * exact).all()
        assert (error <= allowed).all()
        if rows == 1 and device.type == "cpu":
            assert (error >= 0.96 * allowed).all()

    @pytest.mark.parametrize("dtype", FLOATING, ids=str)
    @pytest.mark.parametrize("rows", [1, 4, 16])
    def test_whole_numbers_are_exact(
        self, device: torch.device, dtype: torch.dtype, rows: int
    ) -> None:
        """Of which every sum fits in the dtype's significant bits, as its terms do."""
        generator = torch.Generator().manual_seed(0)
        packed = words(64, 256, 8)
        pairs = torch.tensor([1.0, 2.0]).bfloat16().expand(2, 64, 2)
        input = torch.zeros(rows, 256)
        columns = torch.randint(0, 256, (rows, 4), generator=generator)
        input.scatter_(1, columns, 3.0)
        matrix = references.dequantized(packed, pairs.double(), 128, 8)
        arguments = (input.to(dtype), packed, pairs)
        result = pkg.ops.int4_linear(*(each.to(device) for each in arguments), 128, 8)
        assert torch.equal(result.double().cpu(), input.double() @ matrix.mT)

    @pytest.mark.parametrize("dtype", FLOATING, ids=str)
    @pytest.mark.parametrize("rows", [1, 3, 20])
    @pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 1e38, 1e-38])
    def test_special_values(
        self, device: torch.device, dtype: torch.dtype, rows: int, value: float
    ) -> None:
        """They stay in their row, and are what the weights themselves make of them."""
        is_half = dtype in (torch.float16, torch.bfloat16)
        if device.type == "cuda" and is_half and abs(value) > 2.0**125:
            pytest.skip("an infinity may become NaN there, and what is so large an infinity")
        input = normal(rows, 64).to(dtype)
        input[-1, 5] = value
        packed, pairs, *rest = weight(16, 64, 32, 2)
        matrix = references.dequantized(packed, pairs.double(), 32, 2)
        exact = input.double() @ matrix.mT
        given = (each.to(device) for each in (input, packed, pairs))
        result = pkg.ops.int4_linear(*given, *rest).cpu()
        rounded = exact.to(dtype)
        assert torch.equal(result.isnan(), rounded.isnan())
        infinite = rounded.isinf()
        assert torch.equal(result[infinite], rounded[infinite])
        others = ~(infinite | rounded.isnan())
        bound = error_bound(input, matrix, terms(pairs, 32), None, exact)
        assert ((result.double() - exact).abs() <= bound)[others].all()

    @pytest.mark.parametrize("special", [torch.nan, torch.inf])
    def test_a_scale_that_is_no_number_stays_in_its_row(
        self, device: torch.device, special: float
    ) -> None:
        packed, pairs, *rest = weight(16, 64, 32, 2)
        pairs[1, 3, 0] = special
        for dtype in FLOATING:
            for rows in (1, 20):
                input = normal(rows, 64).to(dtype).to(device)
                result = pkg.ops.int4_linear(input, packed.to(device), pairs.to(device), *rest)
                finite = torch.ones(16, dtype=torch.bool)
                finite[3] = False
                assert torch.equal(result.cpu().isfinite(), finite.expand(rows, 16))

    def test_a_gradient_of_the_scales_is_refused(self, device: torch.device) -> None:
        packed, pairs, *rest = weight(16, 64, 32, 2)
        pairs = pairs.to(device).requires_grad_()
        input = torch.ones(2, 64, device=device)
        with pytest.raises(RuntimeError, match=r"requires grad.*scales_and_zeros\.detach"):
            pkg.ops.int4_linear(input, packed.to(device), pairs, *rest)
        with torch.no_grad():
            assert pkg.ops.int4_linear(input, packed.to(device), pairs, *rest).shape == (2, 16)

    def test_a_thread_count_changes_nothing(self) -> None:
        threads = torch.get_num_threads()
        results = []
        for dtype in FLOATING:
            for rows in (1, 40):
                input = normal(rows, 256).to(dtype)
                try:
                    for count in (1, 2, 3):
                        torch.set_num_threads(count)
                        results.append(pkg.ops.int4_linear(input, *weight(520, 256, 128, 8)))
                finally:
                    torch.set_num_threads(threads)
                assert torch.equal(results[-1], results[-3])
                assert torch.equal(results[-2], results[-3])

    @pytest.mark.parametrize("dtype", FLOATING, ids=str)
    @pytest.mark.parametrize("rows", [5, 17, 48, 530])
    def test_several_blocks_of_many_rows(self, dtype: torch.dtype, rows: int) -> None:
        """Of rows, of columns where there are many, and of the inner dimension; any strides."""
        for outputs, inner, group_size, tiles in ((1000, 96, 32, 2), (72, 1088, 64, 4)):
            input = normal(rows, inner).to(dtype)
            scattered = torch.full((2 * rows, 2 * inner), torch.nan).to(dtype)[::2, ::2]
            of_weight = packed, pairs, *_ = weight(outputs, inner, group_size, tiles)
            matrix = references.dequantized(packed, pairs.double(), group_size, tiles)
            exact = input.double() @ matrix.mT
            result = pkg.ops.int4_linear(input, *of_weight)
            bound = error_bound(input, matrix, terms(pairs, group_size), None, exact)
            assert ((result.double() - exact).abs() <= bound).all()
            for other in (input.mT.contiguous().mT, scattered.copy_(input)):
                assert torch.equal(pkg.ops.int4_linear(other, *of_weight), result)

    @pytest.mark.parametrize("dtype", FLOATING, ids=str)
    @pytest.mark.parametrize("value", [torch.nan, torch.inf, 1e38, 1e-38])
    def test_a_special_value_at_the_end_of_many_rows(
        self, dtype: torch.dtype, value: float
    ) -> None:
        """It shows when most of the result is there."""
        input = normal(600, 1088).to(dtype)
        of_weight = packed, pairs, *_ = weight(72, 1088, 64, 4)
        matrix = references.dequantized(packed, pairs.double(), 64, 4)
        input[-1, -1] = value
        exact = input.double() @ matrix.mT
        result = pkg.ops.int4_linear(input, *of_weight)
        assert torch.equal(result.isfinite(), exact.to(dtype).isfinite())
        bound = error_bound(input[:-1], matrix, terms(pairs, 64), None, exact[:-1])
        assert ((result.double() - exact)[:-1].abs() <= bound).all()

    def test_every_size_of_a_block(self) -> None:
        for outputs in around(2, 3, 6):
            sample = call((7, 64), 8 * outputs).converted(torch.float32)
            input, packed, pairs, *rest, bias = sample.args
            matrix = references.dequantized(packed, pairs.double(), *rest)
            exact = input.double() @ matrix.mT + bias.double()
            result = pkg.ops.int4_linear(input, packed, pairs, *rest, bias)
            bound = error_bound(input, matrix, terms(pairs, rest[0]), bias, exact)
            assert ((result.double() - exact).abs() <= bound).all()
