from __future__ import annotations

from types import MappingProxyType

import pytest
import references
import torch
from operator_tests import OperatorTests
from pointwise_samples import (
    RANGE,
    SPECIAL_VALUES,
    refused_dtypes,
    unary_errors,
    unary_samples,
    unary_shapes,
)
from samples import normal

import pkg
from pkg.testing import ErrorSample, Sample, ulp


class TestDSigmoid(OperatorTests):
    op = torch.ops.pkg.d_sigmoid.default
    reference = staticmethod(references.d_sigmoid)
    function = staticmethod(pkg.ops.d_sigmoid)

    def samples(self) -> list[Sample]:
        return unary_samples()

    def errors(self) -> list[ErrorSample]:
        return unary_errors("d_sigmoid", names=("z",))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_no_digits_cancel(self, device: torch.device, dtype: torch.dtype) -> None:
        # With e = exp(-|z|) within 1 ulp: 1 + e and e / (1 + e)**2 add half an ulp for each of
        # three roundings, of which that of 1 + e counts twice; an ulp is up to twice as large,
        # relatively, at the result as where the error was made.
        z = RANGE.to(device, dtype)
        exact = references.d_sigmoid(z.double())
        error = (pkg.ops.d_sigmoid(z).double() - exact).abs() / ulp(exact, dtype)
        assert error.max() <= 2 * (1 + 0.5 * 4)

    def test_is_even(self, device: torch.device) -> None:
        z = RANGE.to(device)
        assert torch.equal(pkg.ops.d_sigmoid(z), pkg.ops.d_sigmoid(-z))


class TestDSigmoidBackward(OperatorTests):
    op = torch.ops.pkg.d_sigmoid_backward.default
    reference = staticmethod(references.d_sigmoid_backward)
    options = MappingProxyType({})

    def samples(self) -> list[Sample]:
        def sample(z: torch.Tensor, name: str = "", **options: object) -> Sample:
            return Sample((normal(*z.shape, seed=1), z), name=name, **options)

        return [
            sample(normal(3, 4), family="matrix"),
            sample(normal(6, 35) * 4, family="matrix"),
            sample(normal(2, 3, 4, 5)),
            sample(normal(), name="no dimension"),
            sample(normal(3, 0, 2), name="empty"),
            sample(RANGE, name="whole range", values_only=True),
            sample(SPECIAL_VALUES, name="special", values_only=True),
            *(sample(normal(*shape), values_only=True) for shape in unary_shapes()),
        ]

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_the_second_derivative_is_rounded_once(
        self, device: torch.device, dtype: torch.dtype
    ) -> None:
        def second_derivative(z: torch.Tensor) -> torch.Tensor:
            z = z.detach().requires_grad_()
            (first,) = torch.autograd.grad(pkg.ops.d_sigmoid(z).sum(), z, create_graph=True)
            return torch.autograd.grad(first.sum(), z)[0]

        z = torch.linspace(-8, 8, 1001, device=device).to(dtype)
        exact = second_derivative(z.double())
        error = (second_derivative(z).double() - exact).abs() / ulp(exact, dtype)
        # Half an ulp, and a tenth for what the next wider type loses: its roundings are of 2**-13
        # ulps at most, and the roots, where the difference cancels, are no numbers of these dtypes.
        assert error.max() <= 0.6

    def errors(self) -> list[ErrorSample]:
        one = torch.ones(3)
        return [
            *refused_dtypes("d_sigmoid_backward", "z", one),
            ErrorSample((one.long(), one), match="d_sigmoid_backward: grad is torch.int64"),
            ErrorSample((one.half(), one), match="grad is torch.float16 but z is torch.float32"),
            ErrorSample(
                (one, torch.ones(4)), match=r"grad has shape \(3,\) but z has shape \(4,\)"
            ),
        ]
