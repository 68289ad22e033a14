"""What a product of two arguments saves for its gradients: of each factor's the other factor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


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


def saving_constant(run: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of an autograd function, of a product with a constant: it saves that alone.

    Args:
        run: What computes the product of its first two arguments, of which at most one needs a
            gradient. (Where both do, ``_C._saving_forward`` saves both.)
    """

    def forward(ctx: Any, *values: Any) -> Any:
        output = run(*values)
        a, b, *_ = values
        ctx.of_first = ctx.needs_input_grad[0]
        varied, constant = (a, b) if ctx.of_first else (b, a)
        ctx.save_for_backward(constant)
        ctx.like = varied.shape, varied.stride(), varied.dtype
        return output

    return forward


def factors(ctx: Any) -> tuple[Any, Any]:
    """The first two arguments of a product, in its backward formula.

    That which no gradient is made of is an :class:`Unsaved`.
    """
    saved = ctx.saved_tensors
    if len(saved) == 2:
        return saved[0], saved[1]
    varied = Unsaved(*ctx.like)
    return (varied, saved[0]) if ctx.of_first else (saved[0], varied)
