from __future__ import annotations

import itertools
import random
from types import MappingProxyType

import pytest
import references
import torch
from operator_tests import OperatorTests
from pointwise_samples import binary_errors, binary_samples
from samples import FLOATING, INTEGRAL, normal, of_dtype, pairs
from torch import Tensor
from torch.autograd import forward_ad

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


def random_layout(choose: random.Random, largest: int) -> tuple[list[int], list[int]]:
    """Sizes and strides that overlap about as often as not."""
    dims = choose.randint(1, 4)
    sizes = [choose.choice([1, 2, 2, 3, 4, 5]) for _ in range(dims)]
    strides = [choose.randint(1, largest) for _ in range(dims)]
    return sizes, strides


def offsets(sizes: list[int], strides: list[int]) -> list[int]:
    """Of every element: the definition that overlaps are held to."""
    indices = itertools.product(*(range(size) for size in sizes))
    return [sum(i * s for i, s in zip(index, strides, strict=True)) for index in indices]


def distinct_subset_sums(count: int) -> list[int]:
    """Conway and Guy's numbers, no two subsets of which have one sum, and few are far apart."""
    u = [0, 1]
    for n in range(1, count):
        u.append(2 * u[n] - u[n - round((2 * n) ** 0.5)])
    return [u[count] - u[i] for i in range(count)]


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

    def test_out_by_position(self, device: torch.device) -> None:
        a, b = (normal(3, 4, seed=seed).to(device) for seed in (0, 1))
        for function in (
            pkg.ops.add_out,
            torch.ops.pkg.add_out,
            torch.ops.pkg.add_out.default,
            pkg._C.add_out,
        ):
            out = torch.full_like(a, torch.nan)
            assert function(a, b, out) is None
            assert torch.equal(out, a + b)

    def test_an_interleaved_out_is_written(self, device: torch.device) -> None:
        memory = torch.full((20,), -1.0, device=device)
        out = memory.as_strided((2, 7), (7, 2))
        a = torch.arange(14.0, device=device).reshape(2, 7)
        pkg.ops.add_out(a, a, out)
        assert torch.equal(out, a + a)
        assert memory.tolist().count(-1) == 20 - 14

    def test_an_out_is_refused_where_its_elements_overlap_and_nowhere_else(
        self, device: torch.device
    ) -> None:
        choose = random.Random(0)
        counts = {True: 0, False: 0}
        for case in range(4000):
            sizes, strides = random_layout(choose, 5 + case // 200)
            reached = offsets(sizes, strides)
            overlaps = len(set(reached)) < len(reached)
            out = torch.zeros(max(reached) + 1, device=device).as_strided(sizes, strides)
            counts[overlaps] += 1
            a = torch.arange(1.0, len(reached) + 1, device=device).reshape(sizes)
            if overlaps:
                with pytest.raises(RuntimeError, match="of out share one memory location"):
                    pkg.ops.add_out(a, a, out)
            else:
                pkg.ops.add_out(a, a, out)
                assert torch.equal(out, a + a)
        assert min(counts.values()) > 1000

    def test_an_input_is_refused_where_it_shares_elements_and_nowhere_else(
        self, device: torch.device
    ) -> None:
        choose = random.Random(0)
        counts = {True: 0, False: 0}
        while sum(counts.values()) < 3000:
            sizes, strides = random_layout(choose, 12)
            reached = offsets(sizes, strides)
            if len(set(reached)) < len(reached):
                continue
            memory = torch.zeros(128, device=device).to(torch.int32)
            start, input_start = choose.randint(0, 9), choose.randint(0, 9)
            input_strides = [choose.randint(0, 12) for _ in sizes]
            out = memory.as_strided(sizes, strides, start)
            wide = choose.random() < 0.3
            elements = memory.view(torch.int16) if wide else memory
            given = elements.as_strided(sizes, input_strides, input_start)
            size = given.element_size()
            read = {
                (input_start + offset) * size + byte
                for offset in offsets(sizes, input_strides)
                for byte in range(size)
            }
            written = {(start + offset) * 4 + byte for offset in reached for byte in range(4)}
            same = not wide and start == input_start
            same = same and all(
                size == 1 or own == other
                for size, own, other in zip(sizes, strides, input_strides, strict=True)
            )
            shares = bool(read & written) and not same
            counts[shares] += 1
            ones = torch.ones(sizes, device=device, dtype=torch.int32)
            if shares:
                with pytest.raises(RuntimeError, match="b and out share memory"):
                    pkg.ops.add_out(ones, given, out)
            else:
                expected = given + ones
                pkg.ops.add_out(ones, given, out)
                assert torch.equal(out, expected)
        assert min(counts.values()) > 500

    def test_what_is_too_hard_to_decide_is_refused_in_words(self, device: torch.device) -> None:
        def write(count: int) -> Tensor:
            strides = distinct_subset_sums(count)
            memory = torch.zeros(1 + sum(strides), device=device)
            out = memory.as_strided((2,) * count, strides)
            one = torch.ones(1, device=device).expand_as(out)
            pkg.ops.add_out(one, one, out)
            return memory

        # No two elements are one, and few others lie between: each case is a search.
        assert write(10).count_nonzero() == 2**10
        with pytest.raises(RuntimeError, match=r"out has strides \(.*too long to find out"):
            write(20)

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

    def test_a_saved_tensor_that_a_refused_call_left_alone_is_as_saved(
        self, device: torch.device
    ) -> None:
        leaf = torch.ones(3, device=device, requires_grad=True)
        saved, four = torch.ones(3, device=device), torch.ones(4, device=device)
        product = leaf * saved
        with torch.no_grad(), pytest.raises(RuntimeError, match="out has shape"):
            pkg.ops.add_out(four, four, out=saved)
        product.sum().backward()
        assert leaf.grad is not None
        assert torch.equal(leaf.grad, saved)

    def test_the_dispatcher_refuses_an_inference_tensor_outside_inference_mode(
        self, device: torch.device
    ) -> None:
        with torch.inference_mode():
            ones, out = torch.ones(3, device=device), torch.zeros(3, device=device)
            torch.ops.pkg.add_out(ones, ones, out)
        for a in (ones, torch.ones(3, device=device)):
            with torch.no_grad(), pytest.raises(RuntimeError, match="out is an inference tensor"):
                torch.ops.pkg.add_out(a, a, out)
        assert out.tolist() == [2, 2, 2]

    def test_an_out_that_is_negated_where_it_is_read(self, device: torch.device) -> None:
        complex_numbers = torch.zeros(2, 3, dtype=torch.complex64, device=device)
        out = complex_numbers.conj().imag
        assert out.is_neg()
        version = out._version
        a, b = torch.rand(2, 3, device=device), torch.ones(2, 3, device=device)
        pkg.ops.add_out(a, b, out)
        assert torch.equal(out, a + b)
        assert torch.equal(complex_numbers.imag, -(a + b))
        assert out._version > version
        pkg.ops.add_out(out, b, out)
        assert torch.equal(out, a + b + b)
        pkg.ops.add_out(a.neg(), out, b)
        assert torch.equal(b, out - a)

    def test_the_shape_of_a_slice_is_checked_under_vmap(self, device: torch.device) -> None:
        a, out = torch.ones(2, 3, device=device), torch.zeros(2, 4, 3, device=device)
        with pytest.raises(RuntimeError, match=r"out has shape \(4, 3\) but a and b broadcast to"):
            torch.vmap(pkg.ops.add_out, out_dims=None)(a, a, out)
        assert not out.any()

    def test_gradients_are_allowed_where_none_are_recorded(self, device: torch.device) -> None:
        a, out = torch.ones(3, device=device, requires_grad=True), torch.ones(3, device=device)
        with torch.no_grad():
            pkg.ops.add_out(a, a, out=out)
        assert out.tolist() == [2, 2, 2]

    def test_tangents_are_refused(self, device: torch.device) -> None:
        ones, out = torch.ones(3, device=device), torch.zeros(3, device=device)
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(ones, ones)
            calls = {"a": (dual, ones, out), "b": (ones, dual, out)}
            calls["out"] = (ones, ones, forward_ad.make_dual(out, ones))
            for name, call in calls.items():
                with torch.no_grad(), pytest.raises(RuntimeError, match=f"{name} has a tangent"):
                    pkg.ops.add_out(*call)
        with pytest.raises(RuntimeError, match="a has a tangent of forward mode"):
            torch.func.jvp(lambda a: pkg.ops.add_out(a, a, out), (ones,), (ones,))
        assert not out.any()
