"""Reading a copy-on-write tensor leaves it one: no operator copies what it does not write to.

Held to what PyTorch holds its own operators to (``test_cow_input`` in its ``test_ops.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from operator_collection import operator_classes, public_operators, registered_operators
from operator_tests import EVERY
from torch import Tensor

import pkg
from pkg.testing import Sample

OPERATORS = sorted(registered_operators())
DTYPES = (torch.float32, torch.bfloat16)


def samples_of(operator: str, device: torch.device) -> list[Sample]:
    """The samples that are traced, and a part of the many that are not."""
    samples = operator_classes()[operator]().samples()[::EVERY]
    # Operators that are parts of others may have samples of their own for other dtypes.
    dtypes = operator_classes()[operator].options.get("dtypes", DTYPES)
    chosen = [s for s in samples if not s.values_only] + [s for s in samples if s.values_only][::8]
    return [
        sample.converted(dtype).map_tensors(lambda t: t.to(device))
        for sample in chosen
        for dtype in (dtypes if sample.dtypes is None else sample.dtypes[:1] or (None,))
    ]


def ways_of(operator: str) -> list[Callable[..., Any]]:
    dispatched = getattr(torch.ops.pkg, operator).default
    if operator not in public_operators():
        function = operator_classes()[operator].function
        return [dispatched] if function is None else [dispatched, function]
    return [getattr(pkg.ops, operator), dispatched, getattr(pkg._C, operator)]


def mutated_by(operator: str) -> tuple[str, ...]:
    return tuple(operator_classes()[operator].options.get("mutates", ()))


def names_of(operator: str, sample: Sample) -> list[str]:
    """The name of the argument that each tensor is."""
    schema = getattr(torch.ops.pkg, operator).default._schema.arguments
    named = [*zip((a.name for a in schema), sample.args, strict=False), *sample.kwargs.items()]
    return [name for name, value in named if isinstance(value, Tensor)]


class Watched:
    """Tensors that are lazy clones, and their originals, which must not change."""

    def __init__(self, originals: Iterable[Tensor]) -> None:
        self.originals = [original.detach() for original in originals]
        self.copies = [original.clone() for original in self.originals]
        self.clones = [torch._lazy_clone(original) for original in self.originals]
        assert all(torch._C._is_cow_tensor(clone) for clone in self.clones)

    def assert_only_read(self, names: list[str], where: str) -> None:
        for name, clone, original, copy in zip(
            names, self.clones, self.originals, self.copies, strict=True
        ):
            assert torch._C._is_cow_tensor(clone), f"{name} is copied by {where}"
            assert torch.equal(original.nan_to_num(), copy.nan_to_num()), f"{name}: {where}"


def tensors_among(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result or ())


@pytest.mark.parametrize("operator", OPERATORS)
def test_a_call_copies_nothing_that_it_only_reads(operator: str, device: torch.device) -> None:
    written = mutated_by(operator)
    for sample in samples_of(operator, device):
        names = names_of(operator, sample)
        for function in ways_of(operator):
            watched = Watched(sample.tensors)
            # What an operator writes to becomes a tensor of its own, and that is right.
            given = [
                tensor.clone() if name in written else clone
                for name, tensor, clone in zip(names, sample.tensors, watched.clones, strict=True)
            ]
            called = sample.with_tensors(given)
            with torch.no_grad():
                function(*called.args, **called.kwargs)
            watched.assert_only_read(names, f"{function} of {sample}")


@pytest.mark.parametrize("operator", OPERATORS)
def test_recording_and_going_back_copy_nothing(operator: str, device: torch.device) -> None:
    options = operator_classes()[operator].options
    fixed = (*mutated_by(operator), *options.get("nondifferentiable_inputs", ()))
    if "gradients" in options.get("without", ()):
        pytest.skip(f"{operator} has no gradients")
    ran = 0
    for sample in samples_of(operator, device):
        names = names_of(operator, sample)
        if sample.values_only or not sample.differentiable:
            continue
        for function in ways_of(operator):
            watched = Watched(sample.tensors)
            leaves = [
                clone.requires_grad_()
                for name, clone in zip(names, watched.clones, strict=True)
                if clone.is_floating_point() and name not in fixed
            ]
            called = sample.with_tensors(watched.clones)
            results = tensors_among(function(*called.args, **called.kwargs))
            results = [each for each in results if each.requires_grad]
            gradients = Watched(torch.ones_like(each) for each in results)
            torch.autograd.grad(results, leaves, gradients.clones, allow_unused=True)
            where = f"the gradient of {function} of {sample}"
            watched.assert_only_read(names, where)
            gradients.assert_only_read(["a gradient"] * len(results), where)
            ran += 1
    assert ran > 0


def test_reading_a_copy_would_be_seen() -> None:
    # A tensor that is written to stops being a lazy clone, and so the tests above can fail.
    original = torch.ones(3)
    clone = torch._lazy_clone(original)
    pkg.ops.add_out(original, original, clone)
    assert not torch._C._is_cow_tensor(clone)
    assert original.tolist() == [1, 1, 1]
    assert clone.tolist() == [2, 2, 2]


def test_the_output_and_its_lazy_clone_do_not_overlap() -> None:
    # They have one address until one of them is written to.
    memory = torch.arange(8.0)
    out = torch._lazy_clone(memory)
    pkg.ops.add_out(memory[:4], memory[4:], out[2:6])
    assert out.tolist() == [0, 1, 4, 6, 8, 10, 6, 7]
    assert memory.tolist() == list(range(8))
