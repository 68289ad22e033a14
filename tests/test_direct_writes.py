"""An operator that writes to an argument is entered without the dispatcher too.

What autograd has to know of a write, that a tensor has changed, this way tells it itself.
"""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from samples import normal
from torch import Tensor

import pkg
from pkg.testing import same_bits


@pytest.fixture
def without_dispatcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what passes it by succeeds."""
    monkeypatch.setattr(torch._ops.OpOverload, "__call__", None)


def operands() -> tuple[Tensor, Tensor, Tensor]:
    a, b = normal(3, 4).float(), normal(4).float()
    return a, b, torch.full((3, 4), torch.nan)


@pytest.mark.parametrize(
    "state",
    [nullcontext, torch.no_grad, torch.inference_mode],
    ids=["plain", "no_grad", "inference"],
)
def test_a_plain_call_writes_and_counts(without_dispatcher: None, state: type) -> None:
    a, b, out = operands()
    with state():
        assert pkg.ops.add_out(a, b, out) is None
        assert pkg._C.add_out(a, b, out=out) is None
    assert same_bits(out, a + b)
    assert (a._version, b._version, out._version) == (0, 0, 2)


def test_a_view_counts_for_its_base(without_dispatcher: None) -> None:
    base = torch.zeros(5, 6)
    a = normal(3, 2).float()
    pkg.ops.add_out(a, a, base[1:4, ::3])
    assert same_bits(base[1:4, ::3].contiguous(), a + a)
    assert base.count_nonzero() == 6
    assert base._version == 1


def test_out_of_another_dtype_and_an_operand_itself(without_dispatcher: None) -> None:
    a = normal(70).float()
    out = torch.empty(70, dtype=torch.bfloat16)
    pkg.ops.add_out(a, a, out)
    assert same_bits(out, (a + a).bfloat16())
    expected = a + a
    pkg.ops.add_out(a, a, a)
    assert same_bits(a, expected)


def test_inference_mode_writes_to_its_own_tensors(without_dispatcher: None) -> None:
    a = normal(4).float()
    with torch.inference_mode():
        out = torch.zeros(4)
        pkg.ops.add_out(a, a, out)
    assert same_bits(out.clone(), a + a)


def test_an_inference_tensor_is_written_to_in_inference_mode_alone() -> None:
    a = normal(4).float()
    with torch.inference_mode():
        out = torch.zeros(4)
        pkg.ops.add_out(a, a, out)
    for call in (pkg.ops.add_out, pkg._C.add_out):
        with pytest.raises(RuntimeError, match="out is an inference tensor"):
            call(a, out, out=out)
    assert same_bits(out.clone(), a + a)


def test_autograd_notices_that_a_saved_tensor_was_overwritten(without_dispatcher: None) -> None:
    leaf, saved = torch.ones(3, requires_grad=True), torch.ones(3)
    product = leaf * saved
    pkg.ops.add_out(torch.ones(3), torch.ones(3), saved)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


def test_what_shares_its_memory_until_it_is_written_to(without_dispatcher: None) -> None:
    # One that is both read and written moves to memory of its own before it is read.
    original = normal(8).float()
    values, clone = original.clone(), torch._lazy_clone(original)
    pkg.ops.add_out(clone, clone, clone)
    assert same_bits(clone, values + values)
    assert same_bits(original, values)
    assert clone.data_ptr() != original.data_ptr()


def test_what_is_refused_is_neither_written_nor_counted() -> None:
    a, b, out = operands()
    memory = torch.zeros(5)
    for wrong, match in (
        ((a, b, out[0]), "add_out: out has shape"),
        ((a, b, out.int()), "add_out: the sum is"),
        ((memory[:4], b, memory[1:]), "share memory without being the same elements"),
        ((a.clone().requires_grad_(), b, out), "a requires a gradient"),
        ((a, b, out.clone().requires_grad_()), "out requires a gradient"),
    ):
        version, values = wrong[2]._version, wrong[2].detach().clone()
        with pytest.raises(RuntimeError, match=match):
            pkg.ops.add_out(*wrong)
        assert same_bits(wrong[2].detach(), values)
        assert wrong[2]._version == version


def test_in_a_level_of_forward_mode_the_dispatcher_writes() -> None:
    a, b, out = operands()
    with torch.autograd.forward_ad.dual_level():
        pkg.ops.add_out(a, b, out)
    assert same_bits(out, a + b)
    assert out._version == 1
