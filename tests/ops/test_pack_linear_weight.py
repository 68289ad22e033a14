from __future__ import annotations

from types import MappingProxyType

import pytest
import torch
from operator_tests import OperatorTests
from samples import around, normal
from torch import Tensor

import pkg
from pkg.testing import ErrorSample, Sample


def unpacked(weight: Tensor) -> Tensor:
    """The packed weight times one row of the identity after the other: exactly its transpose."""
    out_features, in_features = weight.shape
    identity = torch.eye(in_features, dtype=weight.dtype, device=weight.device)
    packed = pkg.ops.pack_linear_weight(weight)
    return pkg.ops.packed_linear(identity, packed, out_features)


class TestPackLinearWeight(OperatorTests):
    op = torch.ops.pkg.pack_linear_weight.default
    function = staticmethod(unpacked)
    options = MappingProxyType({"function_is_operator": False, "without": {"gradients"}})

    @staticmethod
    def reference(weight: Tensor) -> Tensor:
        return weight.mT.clone(memory_format=torch.contiguous_format)

    def samples(self) -> list[Sample]:
        samples = [
            Sample((normal(3, 4),), family="matrix"),
            Sample((normal(7, 5),), family="matrix"),
            Sample((normal(40, 33),), family="matrix"),
            Sample((normal(0, 3),)),
            Sample((normal(3, 0),)),
            Sample((normal(1, 1),)),
        ]
        for size in around(8, 12, 16, 32, 48, 64, 256):
            samples.append(Sample((normal(size, 3),), values_only=True))
            samples.append(Sample((normal(3, size),), values_only=True))
        return samples

    def errors(self) -> list[ErrorSample]:
        return [
            ErrorSample((torch.ones(3),), match=r"weight has shape \(3,\)"),
            ErrorSample((torch.ones(2, 3, 4),), match=r"weight has shape \(2, 3, 4\)"),
            ErrorSample((torch.ones(2, 3).int(),), match="weight is torch.int32"),
        ]

    def test_a_gradient_is_refused(self, device: torch.device) -> None:
        weight = torch.ones(4, 3, device=device, requires_grad=True)
        with pytest.raises(RuntimeError, match=r"requires grad.*pack weight\.detach"):
            pkg.ops.pack_linear_weight(weight)
        assert not pkg.ops.pack_linear_weight(weight.detach()).requires_grad
