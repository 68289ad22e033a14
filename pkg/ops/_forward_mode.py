"""Forward mode: what registers the tangents of an operator's results, and what makes them.

PyTorch calls them after the forward of an autograd function (``_registration.register_gradients``).
Their formulas are made of differentiable operators, so that there are tangents of any order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

from pkg import _C

from ._call import in_order

# See register_gradients() in _registration.py.
Tangent = Callable[[Any, Any, Any], Any]

# The value and the tangent of a tensor, None where it has none. PyTorch has one level of tangents.
_unpack_dual = torch._VF._unpack_dual


def may_be_forward_mode() -> bool:
    """Whether there may be tangents at some level."""
    if is_dynamo_compiling():  # which traces no function of the binding
        is_forward_mode = forward_ad._current_level >= 0
    else:
        is_forward_mode = _C._is_forward_mode()
    return is_forward_mode or torch._C._are_functorch_transforms_active()


def have_tangents(values: Iterable[object]) -> bool:
    """Whether some of these have a tangent of forward mode, at the level that computes."""
    return may_be_forward_mode() and any(
        isinstance(value, Tensor) and _unpack_dual(value, level=0)[1] is not None
        for value in values
    )


def keeping_for_tangents(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of an autograd function that keeps arguments and results for :func:`jvp_of`."""

    def keeping(ctx: Any, *values: Any) -> Any:
        output = forward(ctx, *values)
        outputs = output if isinstance(output, tuple) else (output,)
        ctx.others = [None if isinstance(value, Tensor) else (value,) for value in values]
        ctx.save_for_forward(*(v for v in values if isinstance(v, Tensor)), *outputs)
        return output

    return keeping


def jvp_of(tangent: Tangent) -> Callable[..., Any]:
    """What PyTorch calls for the tangents of the results, straight after the forward."""

    def jvp(ctx: Any, *_: Any) -> Any:
        # PyTorch turns forward mode off here, at the levels below too, which have tangents of
        # their own. With it on, those of this level have to be taken off. Those that PyTorch gives
        # are zeros where there are none.
        with forward_ad._set_fwd_grad_enabled(True):
            saved = iter([_unpack_dual(each, level=0) for each in ctx.saved_tensors])
            arguments = [next(saved) if other is None else (*other, None) for other in ctx.others]
            values, tangents = zip(*arguments, strict=True)
            return tangent(values, tuple(primal for primal, _ in saved), tangents)

    return jvp


def linear_in(name: str, *groups: tuple[int, ...]) -> Tangent:
    """The tangents of an operator with one result that is linear in some of its arguments.

    Args:
        name: The operator.
        groups: Places of tensors in which it is linear together, as in an input and a bias. Of
            several groups it is a product.

    Returns:
        The sum over the groups of the operator itself, with the group's tangents in their places.
    """
    operator = in_order(name)

    def tangent(values: Any, outputs: Any, tangents: Any) -> Tensor:
        terms = []
        for group in groups:
            if all(tangents[place] is None for place in group):
                continue
            moved = list(values)
            for place in group:
                if values[place] is not None:
                    moved[place] = or_zeros(tangents[place], values[place])
            terms.append(operator(*moved))
        return added(terms)

    return tangent


def tangent_by(function: Callable[..., tuple[Tensor, ...]]) -> Tangent:
    """The tangents that PyTorch has of a function which computes the same by its operators."""

    def tangent(values: Any, outputs: Any, tangents: Any) -> tuple[Tensor, ...]:
        dual = (
            value if of_value is None else torch._VF._make_dual(value, of_value, level=0)
            for value, of_value in zip(values, tangents, strict=True)
        )
        pushed = (_unpack_dual(result, level=0) for result in function(*dual))
        return tuple(or_zeros(of_result, result) for result, of_result in pushed)

    return tangent


def or_zeros(tangent: Tensor | None, value: Tensor) -> Tensor:
    """The tangent of a value, zeros where it has none."""
    return torch.zeros_like(value) if tangent is None else tangent


def added(terms: Sequence[Tensor]) -> Tensor:
    """The sum of at least one tensor."""
    return functools.reduce(torch.add, terms)
