from __future__ import annotations

from types import MappingProxyType

import pytest
import references
import torch
from operator_tests import OperatorTests
from pointwise_samples import binary_errors, binary_samples
from samples import FLOATING, INTEGRAL, normal, of_dtype, pairs
from torch import Tensor

import pkg
from pkg.testing import ErrorSample, Sample


def with_out(sample: Sample) -> Sample:
    """The call with an ``out`` whose old values must not matter."""
    a, b = sample.args
    out = torch.full(torch.broadcast_shapes(a.shape, b.shape), torch.nan, dtype=torch.float64)
    return Sample(
        sample.args,
        {"out": out},
        name=sample.name,
        family=sample.family,
        values_only=sample.values_only,
    )


class TestAddOut(OperatorTests):
    op = torch.ops.pkg.add_out.default
    reference = staticmethod(references.add_out)
    function = staticmethod(pkg.ops.add_out)
    options = MappingProxyType({"mutates": ("out",), "without": ("gradients",)})

    def samples(self) -> list[Sample]:
        return [with_out(sample) for sample in binary_samples()]

    def errors(self) -> list[ErrorSample]:
        two, out = torch.ones(2, 3), torch.ones(2, 3)
        memory = torch.ones(20)
        expanded = torch.ones(3).expand(2, 3)
        needs_grad = torch.ones(2, 3, requires_grad=True)

        def refused(match: str, a: Tensor, b: Tensor, out: Tensor) -> ErrorSample:
            return ErrorSample((a, b), {"out": out}, match=match)

        one = torch.ones(3)
        shared = [
            ErrorSample(wrong.args, {"out": one}, wrong.error, wrong.match, move=wrong.move)
            for wrong in binary_errors("add_out")
        ]
        return [
            *shared,
            refused(r"out has shape \(3,\) but a and b broadcast to \(2, 3\)", two, two, one),
            refused(r"out has shape \(1, 2, 3\)", two, two, torch.ones(1, 2, 3)),
            refused("torch.float32.*cannot be cast to .*torch.int64", two, two, out.long()),
            refused("int64.*cannot be cast to .*torch.bool", two.long(), two.long(), out.bool()),
            refused("out is torch.complex64", two, two, out.cfloat()),
            refused("share one memory location", two, two, expanded),
            refused("a and out share memory", memory[:6], one.new_ones(6), memory[1:7]),
            refused("b and out share memory", one.new_ones(6), memory[1:12:2], memory[:6]),
            refused("a requires a gradient", needs_grad, two, out),
            refused("out requires a gradient", two, two, needs_grad),
        ]

    def test_every_dtype_that_can_be_cast(self, device: torch.device) -> None:
        samples = []
        for first, second in pairs(FLOATING + INTEGRAL):
            for target in FLOATING + INTEGRAL:
                if torch.can_cast(torch.promote_types(first, second), target):
                    a, b = of_dtype(first, 3, 17), of_dtype(second, 17, seed=1)
                    out = torch.ones(3, 17).to(target)
                    samples.append(Sample((a, b), {"out": out}, values_only=True, dtypes=()))
        report = self.run(device, ["values"], samples=samples)
        assert report.runs["values"] == len(samples) > 10 * 10

    def test_out_may_be_an_input(self, device: torch.device) -> None:
        a, b = (normal(5, 7, seed=seed).to(device) for seed in (0, 1))
        expected = a + b
        pkg.ops.add_out(a, b, out=b)
        assert torch.equal(b, expected)
        transposed = a.clone().T
        expected = transposed + transposed
        pkg.ops.add_out(transposed, transposed, out=transposed)
        assert torch.equal(transposed, expected)

    def test_neighbours_in_one_buffer_do_not_overlap(self, device: torch.device) -> None:
        memory = torch.arange(12.0, device=device)
        pkg.ops.add_out(memory[:4], memory[4:8], out=memory[8:])
        assert memory.tolist() == [*range(8), 4, 6, 8, 10]
        rows = torch.arange(12.0, device=device).reshape(4, 3)
        pkg.ops.add_out(rows[:2, :2], rows[:2, :2], out=rows[2:, 1:])
        assert rows[2:].tolist() == [[6, 0, 2], [9, 6, 8]]

    def test_a_saved_tensor_that_is_overwritten_is_noticed(self, device: torch.device) -> None:
        leaf = torch.ones(3, device=device, requires_grad=True)
        saved = torch.ones(3, device=device)
        product = leaf * saved
        pkg.ops.add_out(saved, saved, out=saved)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.sum().backward()

    def test_gradients_are_allowed_where_none_are_recorded(self, device: torch.device) -> None:
        a, out = torch.ones(3, device=device, requires_grad=True), torch.ones(3, device=device)
        with torch.no_grad():
            pkg.ops.add_out(a, a, out=out)
        assert out.tolist() == [2, 2, 2]
