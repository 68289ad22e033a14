from __future__ import annotations

from types import MappingProxyType

import pytest
import references
import torch
from operator_tests import OperatorTests
from samples import FLOATING, around, normal, whole_numbers
from torch import Tensor

import pkg
from pkg.testing import ErrorSample, Sample


def packed_linear(
    input: Tensor, weight: Tensor, out_features: int, *rest: Tensor | str | None
) -> Tensor:
    """The operator on the weight in the corner of a tensor as large as a packed one."""
    corner = weight[:out_features, : input.shape[-1]]
    return pkg.ops.packed_linear(input, pkg.ops.pack_linear_weight(corner), out_features, *rest)


def call(
    input: tuple[int, ...],
    columns: int,
    activation: str | None = None,
    with_bias: bool = True,
    **options: object,
) -> Sample:
    weight = normal(columns + 64, input[-1] + 4, seed=1)
    bias = normal(columns, seed=2) if with_bias else None
    return Sample((normal(*input), weight, columns, bias, activation), **options)


class TestPackedLinear(OperatorTests):
    op = torch.ops.pkg.packed_linear.default
    reference = staticmethod(references.packed_linear)
    function = staticmethod(packed_linear)
    options = MappingProxyType({"function_is_operator": False, "without": {"gradients"}})

    def samples(self) -> list[Sample]:
        samples = [
            call((3, 5), 4, with_bias=False),
            call((5,), 4, "relu"),
            call((2, 3, 5), 4, "gelu"),
            call((3, 5), 1, "silu"),
            call((0, 5), 4),
            call((3, 0), 4, "gelu_tanh"),
            call((3, 5), 0),
        ]
        for rows, inner in ((3, 4), (7, 6), (20, 17)):
            samples.append(call((rows, inner), 33, "gelu", family="rows"))
        for size in around(4, 6, 8, 12, 16, 32, 48, 64, 128, 256):
            for rows, inner, columns in ((size, 7, 5), (5, size, 7), (7, 5, size), (1, size, size)):
                samples.append(call((rows, inner), columns, "relu", values_only=True))
        samples.append(call((70, 1030), 389, values_only=True))
        return samples

    def errors(self) -> list[ErrorSample]:
        input, packed = torch.ones(2, 3), torch.ones(68, 7)
        strided = torch.ones(68, 14)[:, ::2]
        return [
            ErrorSample((input, torch.ones(4, 3), 4), match=r"\(4, 3\).*of shape \(68, 7\)"),
            ErrorSample((input, packed, 5), match=r"\(68, 7\).*of shape \(69, 7\)"),
            ErrorSample((torch.ones(2, 4), packed, 4), match=r"\(68, 7\).*of shape \(68, 8\)"),
            ErrorSample((input, strided, 4), match="must be a contiguous tensor"),
            ErrorSample((input, packed.flatten(), 4), match=r"\(476,\).*of shape \(68, 7\)"),
            ErrorSample((input.double(), packed, 4), match="packed_weight is torch.float32 but"),
            ErrorSample((input, packed.int(), 4), match="packed_weight is torch.int32"),
            ErrorSample((input, packed, -1), match="out_features is -1"),
            ErrorSample((input, packed, 4, torch.ones(3)), match=r"bias has shape \(3,\)"),
            ErrorSample((input, packed, 4, None, "tanh"), match="activation is 'tanh'"),
            ErrorSample((torch.ones(()), packed, 4), match="input has no dimensions"),
        ]

    def test_a_gradient_is_refused(self, device: torch.device) -> None:
        packed = pkg.ops.pack_linear_weight(torch.ones(4, 3, device=device))
        input = torch.ones(2, 3, device=device, requires_grad=True)
        with pytest.raises(RuntimeError, match="packed_linear: an argument requires grad"):
            pkg.ops.packed_linear(input, packed, 4)
        with torch.no_grad():
            assert torch.equal(
                pkg.ops.packed_linear(input, packed, 4).cpu(), torch.full((2, 4), 3.0)
            )

    def test_a_part_of_another_tensor_is_refused(self) -> None:
        packed = pkg.ops.pack_linear_weight(torch.ones(4, 3))
        moved = torch.empty(packed.numel() + 1)[1:].view_as(packed).copy_(packed)
        with pytest.raises(RuntimeError, match="does not begin at a multiple of 64 bytes"):
            pkg.ops.packed_linear(torch.ones(2, 3), moved, 4)
        assert (pkg.ops.packed_linear(torch.ones(2, 3), moved.clone(), 4) == 3).all()

    def test_special_values_stay_in_their_column(self, device: torch.device) -> None:
        for dtype in FLOATING:
            weight = torch.ones(40, 9, dtype=dtype, device=device)
            weight[7, 3] = torch.nan
            weight[39, 8] = torch.inf
            input = torch.ones(5, 9, dtype=dtype, device=device)
            result = pkg.ops.packed_linear(input, pkg.ops.pack_linear_weight(weight), 40)
            expected = torch.full((5, 40), 9.0, dtype=dtype)
            expected[:, 7], expected[:, 39] = torch.nan, torch.inf
            assert torch.equal(result.cpu().nan_to_num(), expected.nan_to_num())

    @pytest.mark.parametrize("threads", [1, 2])
    @pytest.mark.parametrize("dtype", FLOATING)
    def test_a_few_rows_by_every_number_of_panels(self, dtype: torch.dtype, threads: int) -> None:
        """Panels side by side and those left over, sums of every part of the inner dimension."""
        torch.set_num_threads(threads)
        for columns in (1, 31, 33, 64, 97, 128, 130, 192, 257, 390):
            for inner in (1, 2, 63, 64, 65, 129, 515):
                weight = whole_numbers(dtype, columns, inner, seed=columns)
                packed = pkg.ops.pack_linear_weight(weight)
                bias = whole_numbers(dtype, columns, seed=3)
                for rows in (1, 2, 3, 4, 5, 6, 7, 9):
                    x = whole_numbers(dtype, rows, inner, seed=rows)
                    expected = (x.double() @ weight.double().mT + bias.double()).relu().to(dtype)
                    for each in (x, x.mT.contiguous().mT):
                        result = pkg.ops.packed_linear(each, packed, columns, bias, "relu")
                        assert torch.equal(result, expected)
