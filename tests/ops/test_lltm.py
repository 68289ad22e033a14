from __future__ import annotations

from collections.abc import Callable
from itertools import product
from types import MappingProxyType

import pytest
import references
import torch
from lltm_samples import (
    EMPTY,
    SMALL,
    TILES,
    Shape,
    call,
    many_rows,
    sizes_around_tiles,
    tensors,
    with_special_values,
    wrong_calls,
)
from operator_tests import OperatorTests
from samples import FLOATING, normal

import pkg
from pkg.testing import ErrorSample, Sample, ulp


class TestLltm(OperatorTests):
    op = torch.ops.pkg.lltm.default
    reference = staticmethod(references.lltm)
    function = staticmethod(pkg.ops.lltm)
    options = MappingProxyType({"autocast": "lower"})

    def samples(self) -> list[Sample]:
        return [
            *(call(shape) for shape in SMALL),
            *(call(shape, row=False) for shape in EMPTY),
            *(call(shape, family="sizes") for shape in ((3, 4, 5), (7, 6, 2), (20, 17, 33))),
            *sizes_around_tiles(),
            *with_special_values(),
            *many_rows(),
        ]

    def errors(self) -> list[ErrorSample]:
        return wrong_calls("lltm")

    def test_what_is_recorded_is_what_is_not(self, device: torch.device) -> None:
        for dtype in FLOATING:
            arguments = [t.to(device, dtype) for t in tensors((9, 20, 33))]
            plain = pkg.ops.lltm(*arguments)
            for position in range(5):
                recorded = [
                    t.clone().requires_grad_(i == position) for i, t in enumerate(arguments)
                ]
                results = pkg.ops.lltm(*recorded)
                assert all(result.requires_grad for result in results)
                assert all(map(torch.equal, results, plain))

    def test_gates_are_never_rounded(self, device: torch.device) -> None:
        # In half precision the gates and what becomes of them are float32: what is left of their
        # errors is far below the half of a unit that the last rounding costs.
        for dtype, rows in product((torch.bfloat16, torch.float16), (40, 140)):
            arguments = [t.to(device, dtype) for t in tensors((rows, 64, 50))]
            wide = [t.double() for t in arguments]
            exact = references.lltm(*wide)
            magnitude = torch.cat([wide[3], wide[0]], 1).abs() @ wide[1].abs().mT + wide[2].abs()
            slack = 120 * torch.finfo(torch.float32).eps * (magnitude.amax() + 4)
            for result, wanted in zip(pkg.ops.lltm(*arguments), exact, strict=True):
                error = (result.double() - wanted).abs()
                assert (error <= 0.5 * ulp(wanted, dtype) + slack).all()

    def test_only_what_is_needed_is_computed(self, device: torch.device) -> None:
        arguments = [t.float().to(device) for t in tensors((4, 3, 5))]
        outputs = torch.ops.pkg.lltm_forward(*arguments)
        grad = torch.ones_like(outputs[0])
        input, weights, _, old_h, _ = arguments
        parts = (grad, None, None, outputs[2], *outputs[:2], input, weights, old_h)
        all_needed = torch.ops.pkg.lltm_backward(*parts, True, True, True)
        for needs in ((False, True, True), (True, False, True), (True, True, False)):
            gradients = torch.ops.pkg.lltm_backward(*parts, *needs)
            flags = (*needs[:2], True, needs[2], True)
            for gradient, whole, needed in zip(gradients, all_needed, flags, strict=True):
                assert torch.equal(gradient, whole) if needed else gradient.shape == (0,)

    def test_gradients_of_a_sum(self, device: torch.device) -> None:
        # They are one number, expanded.
        arguments = [t.to(device).requires_grad_() for t in tensors((9, 20, 33))]
        gradients = []
        for function in (pkg.ops.lltm, references.lltm):
            new_h, new_cell = function(*arguments)
            gradients.append(torch.autograd.grad(new_h.sum() + 2 * new_cell.sum(), arguments))
        for ours, plain in zip(*gradients, strict=True):
            torch.testing.assert_close(ours, plain)

    def test_the_third_derivative(self, device: torch.device) -> None:
        arguments = [t.to(device).requires_grad_() for t in tensors((3, 2, 2))]
        results = []
        for function in (pkg.ops.lltm, references.lltm):
            value = function(*arguments)[0].sum()
            for _ in range(2):
                gradients = torch.autograd.grad(value, arguments, create_graph=True)
                value = sum(gradient.square().sum() for gradient in gradients)
            results.append(torch.autograd.grad(value, arguments))
        for ours, plain in zip(*results, strict=True):
            torch.testing.assert_close(ours, plain)

    @pytest.mark.long
    def test_more_than_two_billion_elements(
        self, device: torch.device, require_memory: Callable[[int], None]
    ) -> None:
        require_memory(6 * 2**31 * 2)
        batch = 2**30 + 5
        input = torch.arange(batch, device=device).remainder(97).half().unsqueeze(1) / 97
        state = torch.zeros(1, 2, device=device, dtype=torch.float16).expand(batch, 2)
        weights = torch.tensor([[0.0, 0, 1]] * 6, device=device, dtype=torch.float16)
        bias = torch.zeros(6, device=device, dtype=torch.float16)
        new_h, new_cell = pkg.ops.lltm(input, weights, bias, state, state)
        assert new_h.numel() > 2**31
        for rows in (slice(0, 100), slice(2**30 - 50, batch)):
            part = (input[rows], weights, bias, state[rows], state[rows])
            alone = pkg.ops.lltm(*part)
            assert torch.equal(new_h[rows], alone[0])
            assert torch.equal(new_cell[rows], alone[1])


class TestLltmForward(OperatorTests):
    op = torch.ops.pkg.lltm_forward.default
    reference = staticmethod(references.lltm_forward)

    def samples(self) -> list[Sample]:
        return [
            *(call(shape) for shape in SMALL[:2]),
            call(SMALL[0], steps=2),
            *(call(shape, row=False) for shape in EMPTY),
            *(call(shape, family="sizes") for shape in ((3, 4, 5), (7, 6, 2), (20, 17, 33))),
            *sizes_around_tiles()[::7],
            *with_special_values()[:6],
        ]

    def errors(self) -> list[ErrorSample]:
        return [
            sample
            for sample in wrong_calls("lltm_forward", steps=1)
            # A matrix is a step here.
            if "unsqueeze" not in str(sample)
        ]


def backward_call(
    shape: Shape,
    steps: int | None = None,
    given: tuple[bool, bool, bool] = (True, True, True),
    needs: tuple[bool, bool, bool] = (True, True, True),
    **options: object,
) -> Sample:
    """Gradients of what a call gave."""
    input, weights, bias, old_h, old_cell = tensors(shape, steps)
    hidden, cells, gates = references.lltm_forward(input, weights, bias, old_h, old_cell)
    gradients = [
        normal(*like.shape, seed=5 + index) if wanted else None
        for index, (like, wanted) in enumerate(zip((hidden, cells, gates), given, strict=True))
    ]
    saved = (gates, hidden, cells, input, weights, old_h)
    return Sample((*gradients, *saved, *needs), **options)


class TestLltmBackward(OperatorTests):
    op = torch.ops.pkg.lltm_backward.default
    reference = staticmethod(references.lltm_backward)
    # Half of the samples are sizes around the tiles of the product, whose values are compared.
    one_of = MappingProxyType(
        dict.fromkeys(("gradients", "layouts", "vmap", "compile", "fake", "registration"), 3)
    )

    def samples(self) -> list[Sample]:
        tiles = [
            backward_call(shape, steps, values_only=True, gradcheck=False, differentiable=False)
            for size in TILES[::3]
            for steps in (None, 3)
            for shape in ((size, 7, 5), (5, size, 7), (7, 5, size), (size,) * 3)
        ]
        return [
            backward_call((3, 5, 4)),
            backward_call((3, 5, 4), 2),
            backward_call((3, 5, 4), None, (True, False, False)),
            backward_call((3, 5, 4), 2, (False, True, False), (False, True, True)),
            backward_call((3, 5, 4), None, (False, False, True), (True, False, False)),
            *(backward_call(shape) for shape in EMPTY),
            # gradcheck mixes up empty gradients and the weights', which are not.
            backward_call((3, 5, 4), 0, gradcheck=False),
            *(
                backward_call(shape, None, family="sizes")
                for shape in ((3, 4, 5), (7, 6, 2), (20, 17, 33))
            ),
            *tiles,
        ]

    def errors(self) -> list[ErrorSample]:
        good = backward_call((2, 3, 4)).converted(torch.float32)

        def wrong(match: str, position: int, value: object) -> ErrorSample:
            arguments = list(good.args)
            arguments[position] = value
            return ErrorSample(tuple(arguments), match=match)

        return [
            wrong(
                r"grad_hidden has shape \(2, 3\) but must have shape \(2, 4\)", 0, torch.ones(2, 3)
            ),
            wrong(r"grad_cells has shape \(8,\) but must", 1, torch.ones(8)),
            wrong(
                r"grad_gates has shape \(2, 4\) but must have shape \(2, 12\)", 2, torch.ones(2, 4)
            ),
            wrong(r"gates has shape \(1, 12\) but must", 3, torch.ones(1, 12)),
            wrong(r"hidden is torch.float64 but input is torch.float32", 4, good.args[4].double()),
            wrong(r"cells has shape \(2, 5\) but must", 5, torch.ones(2, 5)),
            wrong(r"input has shape \(3,\) but must have two dimensions", 6, torch.ones(3)),
            wrong(r"weights has shape \(12, 8\) but must", 7, torch.ones(12, 8)),
            wrong(r"old_h has shape \(4,\) but must", 8, torch.ones(4)),
        ]
