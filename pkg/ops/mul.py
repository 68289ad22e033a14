"""``mul``: the elementwise product."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._call import operator
from ._factors import factors
from ._forward_mode import linear_in
from ._registration import fake_pointwise, reduce_to, register_fake, register_gradients
from ._sharding import register_sharding
from ._vmap import register_pointwise_vmap

TABLE = ("`a * b`", "floating, integers, bool", "yes")
"""What README's table says of it: what it computes, dtypes, gradients."""


@operator
def mul(a: Tensor, b: Tensor) -> Tensor:
    """Multiplies two tensors elementwise: ``a * b``.

    Args:
        a: Any shape; bool, an integer dtype, float16, bfloat16, float32 or float64.
        b: A shape that broadcasts with ``a``'s, on the same device.

    Returns:
        The product, of the broadcast shape and the promoted dtype, as
        ``torch.mul`` gives them. Half precision is rounded once, from float32.

    Raises:
        RuntimeError: The shapes do not broadcast, a dtype is not supported, or
            the devices differ.

    Example:
        >>> mul(torch.tensor([1.0, 2.0]), torch.tensor([[3.0], [4.0]]))
        tensor([[3., 6.],
                [4., 8.]])
    """
    return torch.ops.pkg.mul.default(a, b)


@register_fake("mul")
def _fake(a: Tensor, b: Tensor) -> Tensor:
    return fake_pointwise("mul", a, b, torch.result_type(a, b))


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
    a, b = factors(ctx)
    return (
        reduce_to(mul(grad, b), a) if ctx.needs_input_grad[0] else None,
        reduce_to(mul(grad, a), b) if ctx.needs_input_grad[1] else None,
    )


register_gradients("mul", _backward, is_product=True, tangent=linear_in("mul", (0,), (1,)))
register_pointwise_vmap("mul")
register_sharding("mul", "a ..., b ... -> ...")
