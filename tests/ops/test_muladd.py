from __future__ import annotations

import pytest
import references
import torch
from operator_tests import OperatorTests
from pointwise_samples import binary_errors, binary_samples, mixed_samples
from samples import normal, of_dtype

import pkg
from pkg.testing import ErrorSample, Sample


class TestMuladd(OperatorTests):
    op = torch.ops.pkg.muladd.default
    reference = staticmethod(references.muladd)
    function = staticmethod(pkg.ops.muladd)

    def samples(self) -> list[Sample]:
        return binary_samples(0.75)

    def errors(self) -> list[ErrorSample]:
        return binary_errors("muladd", 0.75)

    def test_mixed_dtypes(self, device: torch.device) -> None:
        samples = mixed_samples(0.75)
        report = self.run(device, ["values", "layouts", "gradients"], samples=samples)
        assert report.runs["values"] == 3 * 10 * 10

    @pytest.mark.parametrize("c", [0.0, -0.0, 1e-40, 3e38, 1e300, float("inf"), float("nan")])
    def test_special_numbers_added(self, device: torch.device, c: float) -> None:
        samples = [Sample((normal(40), normal(40, seed=1), c), values_only=True)]
        self.run(device, ["values", "layouts", "gradients"], samples=samples)

    def test_half_precision_is_rounded_once(self, device: torch.device) -> None:
        # The product is exact in float32, whose own rounding is at most 2**-13 of float16's.
        dtypes = (torch.bfloat16, torch.float16)
        self.run(device, ["values"], dtypes=dtypes, max_ulps=0.5 + 2**-13)

    @pytest.mark.parametrize("default", [torch.float64, torch.float32, torch.bfloat16])
    def test_integers_give_the_default_dtype(
        self, device: torch.device, default: torch.dtype
    ) -> None:
        a = of_dtype(torch.int16, 5).to(device)
        previous = torch.get_default_dtype()
        torch.set_default_dtype(default)
        try:
            assert pkg.ops.muladd(a, a, 0.5).dtype == default
            assert pkg.ops.muladd(a.to("meta"), a.to("meta"), 0.5).dtype == default
        finally:
            torch.set_default_dtype(previous)
