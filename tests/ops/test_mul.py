from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType

import pytest
import references
import torch
from operator_tests import OperatorTests
from pointwise_samples import binary_errors, binary_samples, mixed_samples
from samples import FLOATING, SPECIAL, every_pair, normal

import pkg
from pkg.testing import ErrorSample, Sample, same_bits


class TestMul(OperatorTests):
    op = torch.ops.pkg.mul.default
    reference = staticmethod(references.mul)
    function = staticmethod(pkg.ops.mul)
    # One rounding, and the product of two float32 is exact in float64.
    options = MappingProxyType({"max_ulps": 0.5})

    def samples(self) -> list[Sample]:
        return binary_samples()

    def errors(self) -> list[ErrorSample]:
        return binary_errors("mul")

    def test_mixed_dtypes(self, device: torch.device) -> None:
        # An operand is rounded before the product where its dtype is wider than the result's.
        checks = ["values", "layouts", "gradients"]
        report = self.run(device, checks, samples=mixed_samples(), max_ulps=None)
        assert report.runs["values"] == 3 * 10 * 10

    @pytest.mark.parametrize("dtype", FLOATING)
    def test_has_the_bits_of_torch_mul(self, device: torch.device, dtype: torch.dtype) -> None:
        a, b = (tensor.to(device, dtype) for tensor in every_pair(SPECIAL))
        numbers = ~(a * b).isnan()
        assert same_bits(pkg.ops.mul(a, b)[numbers], (a * b)[numbers])
        a, b = (normal(1000, seed=seed).to(device, dtype) for seed in (1, 2))
        assert same_bits(pkg.ops.mul(a, b), a * b)

    @pytest.mark.long
    def test_more_than_two_billion_elements(
        self, device: torch.device, require_memory: Callable[[int], None]
    ) -> None:
        require_memory(2**31)
        row = torch.arange(256, device=device).to(torch.uint8)
        product = pkg.ops.mul(row.expand(2**23 + 1, 256), torch.tensor(3).to(device))
        assert product.dtype == torch.uint8
        for index in (0, 2**22, 2**23 - 1, 2**23):
            assert torch.equal(product[index], row * 3)
