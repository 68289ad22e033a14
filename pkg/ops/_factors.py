"""What a product of two arguments saves for its gradients: of each factor's the other factor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class Unsaved:
    """Of a tensor that a backward formula does not read: what its gradient is to be like."""

    def __init__(self, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> None:
        self.shape, self._strides, self.dtype = torch.Size(shape), strides, dtype

    def dim(self) -> int:
        return len(self.shape)

    def stride(self, dim: int) -> int:
        return self._strides[dim]

    def unsqueeze(self, dim: int) -> Unsaved:
        shape, strides = [*self.shape], [*self._strides]
        shape.insert(dim, 1)
        strides.insert(dim, 0)
        return Unsaved(shape, strides, self.dtype)


def save_factors(ctx: Any, inputs: tuple[Any, ...], output: Tensor, *_: Any) -> None:
    """A ``setup_context`` of ``register_gradients``."""
    a, b = inputs[:2]
    of_a, of_b = ctx.needs_input_grad[:2]
    ctx.save_for_backward(a if of_b else None, b if of_a else None)
    ctx.unsaved = [
        None if is_saved else Unsaved(each.shape, each.stride(), each.dtype)
        for each, is_saved in ((a, of_b), (b, of_a))
    ]


def factors(ctx: Any) -> tuple[Any, Any]:
    """The first two arguments of a product, in its backward formula.

    That which no gradient is made of is an :class:`Unsaved`.
    """
    a, b = ctx.saved_tensors
    return (
        ctx.unsaved[0] if a is None else a,
        ctx.unsaved[1] if b is None else b,
    )
