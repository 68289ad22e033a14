from __future__ import annotations

from itertools import product
from types import MappingProxyType

import pytest
import rowwise_scaled_samples as shared
import torch
from operator_tests import OperatorTests

import pkg
from pkg.testing import ErrorSample, Sample


class TestRowwiseScaledLinearS8S4(OperatorTests):
    op = torch.ops.pkg.rowwise_scaled_linear_s8s4.default
    function = staticmethod(pkg.ops.rowwise_scaled_linear_s8s4)
    options = MappingProxyType({"without": {"gradients"}})

    reference = staticmethod(shared.reference)

    def samples(self) -> list[Sample]:
        return shared.samples(is_packed=False)

    def errors(self) -> list[ErrorSample]:
        row, column, weight = torch.ones(2), torch.ones(3), torch.ones(3, 2).char()
        return [
            *shared.errors(is_packed=False),
            ErrorSample(
                (torch.ones(2, 5).char(), row, torch.ones(3, 2).char(), column),
                match=r"has 5 elements in a row; there must be an even number",
            ),
            ErrorSample(
                (torch.ones(2, 4).byte(), row, weight, column), match="input is torch.uint8"
            ),
        ]

    def test_sums_are_exact_at_the_ends_of_the_range(self, device: torch.device) -> None:
        """Every sign and the largest magnitudes, in each kernel: float64 holds all of int32."""
        for left, right in product(*((-128, 127), (-8, 7))):
            for rows, inner, columns in ((1, 70000, 9), (5, 300, 40), (40, 70000, 33)):
                values = torch.full((rows, inner), left, dtype=torch.int8, device=device)
                weight = torch.full((columns, inner), right, dtype=torch.int8, device=device)
                result = pkg.ops.rowwise_scaled_linear_s8s4(
                    values,
                    torch.ones(rows, device=device),
                    pkg.ops.pack_int4(weight),
                    torch.ones(columns, device=device),
                    out_dtype=torch.float64,
                )
                assert (result == left * right * inner).all()

    def test_the_longest_rows_are_exact(self, device: torch.device) -> None:
        inner = 2097150
        values = torch.full((1, inner), -128, dtype=torch.int8, device=device)
        weight = torch.full((1, inner), -8, dtype=torch.int8, device=device)
        one = torch.ones(1, device=device)
        result = pkg.ops.rowwise_scaled_linear_s8s4(
            values, one, pkg.ops.pack_int4(weight), one, None, torch.float64
        )
        assert result.item() == 1024 * inner

    def test_halves_do_not_overflow_on_the_way(self, device: torch.device) -> None:
        values = torch.full((2, 4096), 127, dtype=torch.int8, device=device)
        weight = pkg.ops.pack_int4(torch.full((3, 4096), 7, device=device))
        small = torch.full((3,), 2.0**-10, dtype=torch.float16, device=device)
        result = pkg.ops.rowwise_scaled_linear_s8s4(values, small[:2], weight, small)
        assert (result == 127 * 7 * 4096 * 2.0**-20).all()

    def test_weights_of_unsigned_bytes_are_the_same(self, device: torch.device) -> None:
        sample = self.samples()[0].converted(torch.float32).map_tensors(lambda t: t.to(device))
        expected = self.op(*sample.args)
        args = list(sample.args)
        args[2] = args[2].view(torch.uint8)
        assert torch.equal(self.op(*args), expected)

    def test_special_scales_stay_in_their_row_and_column(self, device: torch.device) -> None:
        for rows in (3, 20):
            values = torch.ones(rows, 10, dtype=torch.int8, device=device)
            weight = pkg.ops.pack_int4(torch.ones(4, 10, dtype=torch.int8, device=device))
            row, column = torch.ones(rows, device=device), torch.ones(4, device=device)
            row[2], column[1] = torch.nan, torch.inf
            result = pkg.ops.rowwise_scaled_linear_s8s4(values, row, weight, column)
            expected = 10 * row[:, None] * column
            torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)

    def test_mixed_dtypes(self, device: torch.device) -> None:
        dtypes = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
        for first, second, third, out in product(dtypes, repeat=4):
            arguments = list(shared.call((5,), 8, 7, False).args)
            for position, dtype in ((1, first), (3, second), (4, third)):
                arguments[position] = arguments[position].to(dtype)
            arguments = [a.to(device) if isinstance(a, torch.Tensor) else a for a in arguments]
            assert self.op(*arguments).dtype == first
            result = self.op(*arguments[:5], out)
            assert result.dtype == out
            # Five roundings on the way, of at most the terms' magnitude, and that to the output;
            # as many in the reference, where both are in float64.
            wide = torch.float64 if torch.float64 in (first, second, third, out) else torch.float32
            scaled = type(self).reference(*arguments[:4], None, torch.float64).abs()
            magnitude = scaled + arguments[4].double().abs()
            bound = (5 * torch.finfo(wide).eps + torch.finfo(out).eps / 2) * magnitude
            bound += torch.finfo(out).smallest_normal * torch.finfo(out).eps
            exact = type(self).reference(*arguments[:5], torch.float64)
            assert ((result.double() - exact).abs() <= bound).all()

    def test_a_gradient_is_refused(self, device: torch.device) -> None:
        sample = self.samples()[0].converted(torch.float32).map_tensors(lambda t: t.to(device))
        args = list(sample.args)
        args[1] = args[1].requires_grad_()
        with pytest.raises(RuntimeError, match="rowwise_scaled_linear_s8s4: an argument requires"):
            pkg.ops.rowwise_scaled_linear_s8s4(*args)
        with torch.no_grad():
            pkg.ops.rowwise_scaled_linear_s8s4(*args)

    def test_zeros_have_the_signs_of_their_scales(self, device: torch.device) -> None:
        shared.assert_zeros_have_the_signs_of_their_scales(self.op, False, device)
