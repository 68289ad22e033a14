from __future__ import annotations

from types import MappingProxyType

import pytest
import references
import torch
from lltm_samples import (
    EMPTY,
    call,
    sizes_around_tiles,
    tensors,
    with_special_values,
    wrong_calls,
)
from operator_tests import OperatorTests
from samples import FLOATING

import pkg
from pkg.testing import ErrorSample, Sample


class TestLltmSequence(OperatorTests):
    op = torch.ops.pkg.lltm_sequence.default
    reference = staticmethod(references.lltm_sequence)
    function = staticmethod(pkg.ops.lltm_sequence)
    options = MappingProxyType({"autocast": "lower"})

    def samples(self) -> list[Sample]:
        return [
            call((3, 5, 4), 2),
            call((1, 3, 2), 1),
            call((1, 3, 2), 5, row=False),
            *(call(shape, 2, row=False) for shape in EMPTY),
            call((3, 5, 4), 0),
            # Steps that are not as many as anything else.
            call((3, 4, 5), 11, family="sizes"),
            call((7, 6, 2), 9, family="sizes"),
            *sizes_around_tiles(3)[::5],
            *with_special_values(2)[::5],
            # More rows than are multiplied at once, in steps that divide them or not.
            call((1, 3, 4), 300, values_only=True, gradcheck=False),
            call((130, 3, 4), 5, values_only=True, gradcheck=False),
        ]

    def errors(self) -> list[ErrorSample]:
        return wrong_calls("lltm_sequence", steps=3)

    @pytest.mark.parametrize("steps", [1, 2, 7])
    def test_is_one_cell_after_the_other(self, device: torch.device, steps: int) -> None:
        for dtype in FLOATING:
            arguments = [t.to(device, dtype) for t in tensors((6, 40, 34), steps)]
            hidden, cells = pkg.ops.lltm_sequence(*arguments)
            inputs, weights, bias, h, cell = (t.double() for t in arguments)
            exact, wanted = references.lltm_sequence(inputs, weights, bias, h, cell)
            plain, plain_cells = references.lltm_sequence(*arguments)
            for ours, theirs, right in ((hidden, plain, exact), (cells, plain_cells, wanted)):
                if dtype == torch.float64:
                    torch.testing.assert_close(ours, right)
                    continue
                error = (theirs.double() - right).abs().amax()
                assert (ours.double() - right).abs().amax() <= 2 * error

    def test_layouts_of_steps(self, device: torch.device) -> None:
        # Steps that are not rows of one matrix, forward and backward.
        arguments = [t.to(device) for t in tensors((6, 8, 5), 4)]
        layouts = (
            arguments[0].transpose(0, 1).contiguous().transpose(0, 1),
            arguments[0].permute(2, 1, 0).contiguous().permute(2, 1, 0),
            arguments[0].flip(0).clone().flip(0),
        )
        plain = pkg.ops.lltm_sequence(*arguments)
        leaves = [t.clone().requires_grad_() for t in arguments]
        wanted = torch.autograd.grad(pkg.ops.lltm_sequence(*leaves)[0].sum(), leaves)
        for layout in layouts:
            for ours, right in zip(
                pkg.ops.lltm_sequence(layout, *arguments[1:]), plain, strict=True
            ):
                torch.testing.assert_close(ours, right)
            leaves[0] = layout.detach().requires_grad_()
            gradients = torch.autograd.grad(pkg.ops.lltm_sequence(*leaves)[0].sum(), leaves)
            for ours, right in zip(gradients, wanted, strict=True):
                torch.testing.assert_close(ours, right)
